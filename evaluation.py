"""The towers that evaluate, and the score over a whole data set."""

import collections

import numpy as np

import all_reduce
import decoding
import utils
from cluster import ONE
from tf1 import tf

BATCH = 250  # images per tower and run

# start: int32 scalar placeholder, the first row. losses: float32, predictions: int64,
# both [towers * batch], for the rows from `start` on (the last row repeats), over the
# towers of all machines. wishes: float32 [machines], see `Watch.hear`; None on one.
# encoded: string placeholder [this machine's towers * batch], None where images are in
# memory; read_encoded: (start) -> what is fed to it.
Evaluation = collections.namedtuple(
    'Evaluation', 'start losses predictions labels wishes encoded read_encoded'
)


def build(examples, devices, build_model, batch_size=BATCH, reuse=True, machines=ONE):
    """Builds the towers that evaluate.

    Args:
      examples: `Examples` to evaluate on.
      devices: a device string per tower.
      build_model: (images, labels) -> `ModelSpec`, without dropout.
      batch_size: images per tower and run.
      reuse: whether the model's variables exist; else the first tower creates them.
      machines: `cluster.Machines`, with as many towers each.

    Returns:
      (evaluation, feeds): an `Evaluation`, and the dict for the initialisers' run.
    """
    with tf.name_scope('evaluation'):
        with tf.device('/cpu:0'):
            reader = decoding.build_reader(examples)
            start = tf.placeholder(tf.int32, [], 'start')
            encoded = [None] * len(devices)
            if reader.read_bytes is not None:
                fed = tf.placeholder(tf.string, [len(devices), batch_size], 'encoded')
                encoded = tf.unstack(fed)
        specs = []
        for own, device in enumerate(devices):
            tower = machines.index * len(devices) + own
            with tf.device('/cpu:0'):
                rows = tf.range(batch_size) + (start + tower * batch_size)
                rows = tf.minimum(rows, len(examples.labels) - 1)
                batch = reader.decode(rows, encoded[own])
            with utils.on_tower(device, reuse or own > 0):
                specs.append(build_model(*batch))
        with tf.device('/cpu:0'):
            losses = tf.concat([spec.losses for spec in specs], axis=0)
            predictions = tf.concat([spec.predictions for spec in specs], axis=0)
        wishes = None
        if machines != ONE:
            losses, predictions, wishes = _gather(losses, predictions, machines)
    read_encoded = None
    if reader.read_bytes is not None:
        places = np.arange(len(devices) * batch_size).reshape(len(devices), batch_size)
        places += machines.index * places.size

        def read_encoded(start):
            rows = np.minimum(start + places, len(examples.labels) - 1)
            return decoding.read_all(reader.read_bytes, rows)

    evaluation = Evaluation(
        start,
        losses,
        predictions,
        examples.labels,
        wishes,
        None if read_encoded is None else fed,
        read_encoded,
    )
    return evaluation, reader.feeds


def _gather(losses, predictions, machines):
    """Returns (losses, predictions, wishes), those of all machines in their order."""
    own = [losses, tf.cast(predictions, tf.float32), all_reduce.get_wish().own]
    losses, predictions, wishes = all_reduce.gather(
        own, machines, all_reduce.EVALUATION_KEY
    )
    predictions = tf.cast(tf.reshape(predictions, [-1]), tf.int64)
    return tf.reshape(losses, [-1]), predictions, wishes


def make_predict(session, evaluation, find_stop=lambda: None, watch=None):
    """Returns a function () -> (losses, predictions) of all examples, in their order.

    Args:
      session: where the variables are.
      evaluation: an `Evaluation`.
      find_stop: () -> a `RunStopped` that ends the evaluation, or None.
      watch: of several machines, the `watch.Watch`.
    """
    labels = evaluation.labels
    read = _make_read(session, evaluation, watch)
    rows = evaluation.losses.shape.as_list()[0]

    def predict():
        parts = []
        for start in range(0, len(labels), rows):
            utils.raise_if(find_stop())
            parts.append(read(start))
        return tuple(np.concatenate(part)[: len(labels)] for part in zip(*parts))

    return predict


def _make_read(session, evaluation, watch):
    """Returns a function (start) -> (losses, predictions) of one run."""
    found = [evaluation.losses, evaluation.predictions]
    run = _make_run(session, evaluation, found + [evaluation.wishes] * bool(watch))
    if watch is None:
        return run

    def read(start):
        watch.wish()
        *found, wishes = run(start)
        utils.raise_if(watch.hear(wishes))
        return found

    return read


def _make_run(session, evaluation, found):
    """Returns a function (start) -> the values of `found`."""
    if evaluation.encoded is None:
        return session.make_callable(found, [evaluation.start])
    decode_and_run = session.make_callable(
        found, [evaluation.start, evaluation.encoded]
    )

    def run(start):
        try:
            return decode_and_run(start, evaluation.read_encoded(start))
        except tf.errors.InvalidArgumentError:
            culprit = decoding.find_culprit(session)
            if culprit:
                raise utils.RunFailed(culprit) from None
            raise

    return run


def make_evaluate(session, evaluation, find_stop=lambda: None, watch=None):
    """Returns a function () -> (mean loss, accuracy) over all examples, floats.

    The arguments are `make_predict`'s.
    """
    predict = make_predict(session, evaluation, find_stop, watch)

    def evaluate():
        losses, predictions = predict()
        return score(losses, predictions, evaluation.labels)

    return evaluate


def score(losses, predictions, labels):
    """Returns (mean loss, accuracy), floats.

    All losses are added up here in the examples' order, not batch by batch: the same
    score for any number of towers.
    """
    loss = losses.mean(dtype=np.float64)
    return float(loss), float((predictions == labels).mean())
