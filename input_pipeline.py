"""Queue runners that read a data set in order; one dequeue per tower.

    epoch permutation --> index queue --> gather images --> batch queue --> towers
          thread 1                           thread 2

Images that are encoded on disk have a thread more, and their batches are decoded:

    index queue --> read files --> read queue --> decode, augment --> batch queue
                     thread 3                         thread 2

The order of the images is a function of (seed, epoch) alone. Each stage has one
thread, so nothing races, and whole batches of bytes travel: the towers make floats
of them on their own devices.
"""

import collections
import functools
import sys

import numpy as np

import augmentation
import decoding
from cluster import ONE
from tf1 import tf
from utils import UserError

# How many steps' batches one run of the gathering thread moves: each run costs Python
# time that is taken from the step. Large batches move one by one.
STEPS_PER_ENQUEUE = 8
IMAGES_PER_ENQUEUE = 2048
IMAGES_PER_DECODE = 256
PIXELS_PER_DECODE = 2**23

# How many images a run shows in TensorBoard.
NUM_SAMPLES = 8

# batches: per tower, images uint8 [batch, height, width, channels] and labels int64
# [batch]. start: op that sets the producers to where training stands, to be run
# before the queue runners start. prefill: op to be run once, after they started.
# puts: ops that each step runs too, done before it updates anything. samples: a
# few images of epoch 0, uint8 [n, height, width, channels], not from the queue.
Pipeline = collections.namedtuple(
    'Pipeline', 'batches start prefill puts samples num_images global_batch'
)


def count_steps(pipeline, images_consumed):
    """Returns (steps done, steps left) of an epoch; its ragged rest makes no step."""
    left = max(0, pipeline.num_images - images_consumed)
    return images_consumed // pipeline.global_batch, left // pipeline.global_batch


def epoch_order(num_images, seed, epoch):
    """Returns the permutation of the images that is epoch `epoch`, int32 [n].

    Stateless, so the same on every machine, at every start and on both lines. Equal
    random numbers (24 bits each) keep their order: the sort is stable.
    """
    return tf.argsort(tf.random.stateless_uniform([num_images], [seed, epoch]))


def build(
    examples,
    batch_size,
    num_towers,
    seed,
    state,
    machines=ONE,
    augment=(),
    micro_steps=1,
):
    """Builds the queues that feed the towers, one element per tower and micro-step.

    Step s of an epoch takes images s*N*B to (s+1)*N*B of the epoch's permutation,
    and tower t rows t*B to (t+1)*B of these: N towers see what one tower with a
    batch of N*B sees. Of several machines the first has the first towers. With
    micro-steps a step has their number times as many images; one takes a part after
    the other.

    Args:
      examples: `Examples` to train on.
      batch_size: images per tower and micro-step, B.
      num_towers: of this machine.
      seed: of the order.
      state: where training stands: `epoch` and `epoch_images`, int64 variables.
      machines: `cluster.Machines`, with as many towers each.
      augment: what of `augmentation.KINDS` is done to the images.
      micro_steps: how many make a step.

    Returns:
      (pipeline, feeds): a `Pipeline`, and the dict for the initialisers' run.

    Raises:
      UserError: the data set is smaller than one step's images.
    """
    num_images = len(examples.labels)
    own_batch = batch_size * num_towers  # of this machine
    all_batch = own_batch * len(machines.addresses)
    _check_size(
        num_images, batch_size, num_towers * len(machines.addresses), micro_steps
    )
    with tf.device('/cpu:0'), tf.name_scope('input'):
        reader = decoding.build_reader(examples)
        mine = slice(machines.index * own_batch, (machines.index + 1) * own_batch)
        index_queue, start = _build_index_queue(
            num_images, all_batch, micro_steps, mine, seed, state, bool(augment)
        )
        steps = steps_per_enqueue(own_batch, examples.images)
        index = index_queue.dequeue_many(steps)  # [steps, N*B, ...] each
        rows, draws = index if augment else (index, None)
        element = Element(rows, draws, None)
        if reader.read_bytes is not None:
            element = _read_ahead(reader.read_bytes, element)
        shape = (batch_size,) + examples.images.shape[1:]
        batch_queue = _build_batch_queue(
            reader, element, steps * num_towers, shape, augment
        )
        batches = _dequeue_in_order(batch_queue, num_towers)
        samples = _build_samples(reader, num_images, seed, augment)
    pipeline = Pipeline(
        batches, start, tf.no_op(), [], samples, num_images, all_batch * micro_steps
    )
    return pipeline, reader.feeds


def steps_per_enqueue(own_batch, images):
    """Returns how many steps' batches one run of the gathering thread moves.

    Args:
      own_batch: of all towers of this machine.
      images: of the data set. Encoded ones are decoded, an op per image, for so short a
        time that a stop needs not wait for it.
    """
    most = IMAGES_PER_ENQUEUE
    if decoding.is_stream(images):
        pixels = images.size.astype(float).prod(axis=1).mean()
        most = min(IMAGES_PER_DECODE, PIXELS_PER_DECODE / pixels)
    return min(STEPS_PER_ENQUEUE, max(1, int(most / own_batch)))


# What a step's images are made of. rows: int32. draws: see `augmentation.draw`, None
# without any. encoded: strings, None where images are in memory.
Element = collections.namedtuple('Element', 'rows draws encoded')


def _read_ahead(read_bytes, index):
    """Reads encoded images in a thread of their own: `index` -> `index` and encoded."""
    shape = index.rows.shape
    encoded = tf.placeholder(tf.string, shape)
    taken = [t for t in index if t is not None]
    fed = [tf.placeholder(t.dtype, t.shape) for t in taken] + [encoded]
    queue = tf.FIFOQueue(2, [t.dtype for t in fed], [t.shape for t in fed], name='read')

    def make_put(session, put):
        take = session.make_callable(taken)
        put = session.make_callable(put, fed)

        def read_and_put():
            rows, *draws = take()
            put(rows, *draws, decoding.read_all(read_bytes, rows))

        return read_and_put

    runner = PythonQueueRunner(queue, [queue.enqueue(fed)])
    runner.make_put = make_put
    tf.train.add_queue_runner(runner)
    rows, *draws, encoded = queue.dequeue()
    return Element(rows, draws[0] if draws else None, encoded)


class PythonQueueRunner(tf.train.QueueRunner):
    """A queue runner that does in Python what comes before its enqueue op.

    make_put: (session, enqueue op) -> the function that its thread calls all the time.
    """

    make_put = None

    def create_threads(self, sess, *args, **kwargs):
        session = PythonSession(sess, self.make_put)
        return super().create_threads(session, *args, **kwargs)


class PythonSession:
    """What a queue runner calls of a session, with a callable of one's own."""

    def __init__(self, session, make_put):
        self.run = session.run
        self.make_callable = functools.partial(make_put, session)


def _split(element, parts):
    """Splits an element of [s, n, ...] each into `parts` of [s * n / parts, ...]."""

    def split(tensor):
        if tensor is None:
            return [None] * parts
        shape = [parts, -1] + tensor.shape.as_list()[2:]
        return tf.unstack(tf.reshape(tensor, shape))

    return [Element(*part) for part in zip(*map(split, element))]


def _build_samples(reader, num_images, seed, augment):
    """Builds a few images as the towers get them in epoch 0, not from the queue.

    The first of its order; of encoded images some from all over the data set, since
    which they are must be known now.

    Returns:
      uint8 [k, height, width, channels].
    """
    number = min(NUM_SAMPLES, num_images)
    if reader.read_bytes is None:
        rows, encoded = epoch_order(num_images, seed, 0)[:number], None
        rows.set_shape([number])
    else:
        spread = np.linspace(0, num_images - 1, number).astype(np.int32)
        contents = decoding.read_all(reader.read_bytes, spread)
        encoded, feed = decoding.hold(contents, 'samples')
        reader.feeds.update(feed)
        rows = tf.constant(spread)
    images, _ = reader.decode(rows, encoded)
    if augment:
        draws = augmentation.draw(num_images, seed, tf.constant(0, tf.int64))
        images = augmentation.augment(images, tf.gather(draws, rows), augment)
    return images


def _check_size(num_images, batch_size, num_towers, micro_steps):
    """Refuses a data set smaller than one step's images."""
    least = num_towers * micro_steps
    more = ' x %d micro-steps' % micro_steps if micro_steps > 1 else ''
    if num_images < least:
        raise UserError(
            '%d training images for %d towers%s: give fewer'
            % (num_images, num_towers, more)
        )
    if num_images < batch_size * least:
        raise UserError(
            '%d training images are less than one step takes (%d per tower x %d '
            'towers%s = %d): the largest --batch_size that fits is %d'
            % (
                num_images,
                batch_size,
                num_towers,
                more,
                batch_size * least,
                num_images // least,
            )
        )


def _build_index_queue(
    num_images, all_batch, micro_steps, mine, seed, state, with_draws
):
    """A queue of rows, int32 [N*B]; one run of its thread enqueues one epoch.

    `all_batch` is how many images a micro-step has on all machines, `mine` the slice of
    them that is this machine's. With draws each row comes with its random numbers of
    the epoch, float32 [N*B, NUM_DRAWS].
    """

    def local(name):
        return tf.Variable(
            tf.zeros([], tf.int64),
            trainable=False,
            collections=[tf.GraphKeys.LOCAL_VARIABLES],
            name=name,
        )

    next_epoch, next_image = local('next_epoch'), local('next_image')
    start = tf.group(
        next_epoch.assign(state.epoch), next_image.assign(state.epoch_images)
    )

    order = epoch_order(num_images, seed, next_epoch + 0)[next_image + 0 :]
    # A step that an epoch has too few images for is not begun.
    steps = tf.size(order) // (all_batch * micro_steps) * micro_steps
    rows = tf.reshape(order[: steps * all_batch], [steps, all_batch])[:, mine]
    own_batch = mine.stop - mine.start
    components, dtypes, shapes = [rows], [tf.int32], [[own_batch]]
    if with_draws:
        draws = augmentation.draw(num_images, seed, next_epoch + 0)
        components.append(tf.gather(draws, rows))
        dtypes.append(tf.float32)
        shapes.append([own_batch, augmentation.NUM_DRAWS])
    queue = tf.FIFOQueue(256, dtypes, shapes, name='index_queue')
    with tf.control_dependencies([queue.enqueue_many(components)]):
        advance = tf.group(next_epoch.assign_add(1), next_image.assign(0))
    tf.train.add_queue_runner(tf.train.QueueRunner(queue, [advance]))
    return queue, start


def _build_batch_queue(reader, element, number, shape, augment):
    """A queue of batches of images and labels; one run of its thread enqueues `number`.

    `element` has the rows of them all, `shape` is that of a batch's images.
    """
    queue = tf.FIFOQueue(
        2 * number, [tf.uint8, tf.int64], [shape, shape[:1]], name='batch_queue'
    )
    enqueue = None
    for batch in _split(element, number):  # [B, ...] each
        images, labels = reader.decode(batch.rows, batch.encoded)
        if augment:
            images = augmentation.augment(images, batch.draws, augment)
        # In their order; the batches after it are decoded meanwhile.
        with tf.control_dependencies([enqueue] if enqueue is not None else []):
            enqueue = queue.enqueue([images, labels])
    tf.train.add_queue_runner(tf.train.QueueRunner(queue, [enqueue]))
    return queue


def _dequeue_in_order(queue, num_towers):
    """One dequeue per tower; each waits for the one before, so that rows don't mix."""
    batches = []
    for _ in range(num_towers):
        with tf.control_dependencies(batches[-1][:1] if batches else []):
            batches.append(queue.dequeue())
    return batches


def stage(pipeline, devices):
    """Puts a staging area on each tower's device between its queue and the tower.

    A step takes the batch that is there and puts the next one, so that the copy of a
    batch to a device overlaps the step before its own. The images of a step are the
    same as without.

    Args:
      pipeline: a `Pipeline` without staging.
      devices: a device string per tower.

    Returns:
      The `Pipeline` with staging.

    Source: the staging areas of TensorFlow's benchmarks ("high-performance models").
    """
    batches, puts = [], []
    for tower, (device, batch) in enumerate(zip(devices, pipeline.batches)):
        # Put and get run in one step in any order: with room for one they can wait
        # for each other for ever.
        area = {'capacity': 2, 'shared_name': 'staging_%d' % tower}
        with tf.device(device), tf.name_scope('staging_%d' % tower):
            puts.append(tf.raw_ops.Stage(values=batch, **area))
            staged = tf.raw_ops.Unstage(dtypes=[t.dtype for t in batch], **area)
        for tensor, like in zip(staged, batch):
            tensor.set_shape(like.shape)
        batches.append(staged)
    return pipeline._replace(batches=batches, prefill=tf.group(*puts), puts=puts)


if __name__ == '__main__':
    import data_description

    sys.exit(data_description.utils.run_main(data_description.main, must_show=True))
