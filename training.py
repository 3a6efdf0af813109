"""What both scripts share: state, one update, evaluation, and the loop over epochs."""

import collections
import contextlib
import math
import os
import sys
import time

import numpy as np
from tqdm import tqdm

import checkpoints
import input_pipeline
import records
import utils
from tf1 import quiet_stderr, tf
from utils import log

# Steps at the start of a process that images per second leave out.
WARM_UP_STEPS = 10
# Seconds between two refreshes of the bar; each reads the running sums.
REFRESH_SECONDS = 0.25
EVALUATION_BATCH = 250

# Where training stands, as variables, so that a checkpoint holds it:
# global_step: updates so far. epoch: epochs done. epoch_images: images of this epoch
# consumed. loss_sum, correct: over these images.
State = collections.namedtuple(
    'State', 'global_step epoch epoch_images loss_sum correct'
)

# start: scalar placeholder, first row. losses: float32, predictions: int64, both
# [towers * EVALUATION_BATCH], for the rows from `start` on (the last row repeats).
Evaluation = collections.namedtuple('Evaluation', 'start losses predictions examples')

# What a script builds and `run` runs. feeds: for the initialisers.
Job = collections.namedtuple(
    'Job', 'state learning_rate train_op pipeline evaluation feeds'
)


# Building


def create_state():
    """Creates the variables of `State`."""

    def variable(name, dtype):
        return tf.get_variable(
            'training/' + name,
            [],
            dtype,
            initializer=tf.zeros_initializer(),
            trainable=False,
        )

    return State(
        tf.train.get_or_create_global_step(),
        variable('epoch', tf.int64),
        variable('epoch_images', tf.int64),
        variable('loss_sum', tf.float64),
        variable('correct', tf.int64),
    )


def cosine_learning_rate(base, state, epochs, num_images):
    """Returns the learning rate, float32 scalar: a function of images seen only.

    Source: Loshchilov and Hutter 2016, "SGDR", equation 5, without restarts.
    """
    images_seen = state.epoch * num_images + state.epoch_images
    progress = tf.cast(images_seen, tf.float64) / (epochs * num_images)
    return tf.cast(base * 0.5 * (1 + tf.cos(math.pi * progress)), tf.float32)


def create_optimizer(name, learning_rate):
    """Returns the `tf.train.Optimizer` that `--optimizer name` stands for."""
    return {
        'adam': lambda: tf.train.AdamOptimizer(learning_rate),
        'sgd': lambda: tf.train.GradientDescentOptimizer(learning_rate),
        'momentum': lambda: tf.train.MomentumOptimizer(learning_rate, 0.9),
        'rmsprop': lambda: tf.train.RMSPropOptimizer(learning_rate),
    }[name]()


def apply_gradients(optimizer, grads_and_vars, learning_rate, specs, state):
    """Returns the op of one step: one update, and the epoch's running sums.

    Call it outside every variable scope: slots take the scope as a prefix.

    Args:
      optimizer: a `tf.train.Optimizer`.
      grads_and_vars: list of (gradient, variable), averaged over the towers.
      learning_rate: what the optimizer uses.
      specs: the `ModelSpec` of each tower.
      state: the `State` to advance.
    """
    losses = tf.concat([spec.losses for spec in specs], axis=0)  # [towers * batch]
    correct = tf.concat([spec.correct for spec in specs], axis=0)
    loss_sum = tf.reduce_sum(tf.cast(losses, tf.float64))
    num_correct = tf.cast(tf.reduce_sum(correct), tf.int64)
    gradients = [gradient for gradient, _ in grads_and_vars]
    # All that is read comes before anything is written: no tower sees a weight of
    # the next step, and a step that fails leaves nothing half-applied.
    with tf.control_dependencies(gradients + [learning_rate, loss_sum, num_correct]):
        return tf.group(
            optimizer.apply_gradients(grads_and_vars, global_step=state.global_step),
            state.epoch_images.assign_add(losses.shape.as_list()[0]),
            state.loss_sum.assign_add(loss_sum),
            state.correct.assign_add(num_correct),
        )


def build_evaluation(examples, devices, build_model):
    """Builds the towers that evaluate; the model's variables must exist.

    Args:
      examples: `Examples` to evaluate on, n of them.
      devices: a device string per tower.
      build_model: (images, labels) -> `ModelSpec`, without dropout.

    Returns:
      (evaluation, feeds): an `Evaluation`, and the dict for the initialisers' run.
    """
    with tf.name_scope('evaluation'):
        with tf.device('/cpu:0'):
            images, feed_images = input_pipeline.hold(examples.images, 'images')
            labels, feed_labels = input_pipeline.hold(examples.labels, 'labels')
            start = tf.placeholder(tf.int32, [], 'start')
        specs = []
        for tower, device in enumerate(devices):
            with tf.device('/cpu:0'):
                first = start + tower * EVALUATION_BATCH
                rows = tf.range(EVALUATION_BATCH) + first
                rows = tf.minimum(rows, len(examples.labels) - 1)
                batch = tf.gather(images, rows), tf.gather(labels, rows)
            with utils.on_tower(device, reuse=True):
                specs.append(build_model(*batch))
        with tf.device('/cpu:0'):
            losses = tf.concat([spec.losses for spec in specs], axis=0)
            predictions = tf.concat([spec.predictions for spec in specs], axis=0)
    evaluation = Evaluation(start, losses, predictions, examples)
    return evaluation, {**feed_images, **feed_labels}


def build_end_of_epoch(state):
    """Returns the op that moves the state to the start of the next epoch."""
    return tf.group(
        state.epoch.assign_add(1),
        state.epoch_images.assign(0),
        state.loss_sum.assign(0),
        state.correct.assign(0),
    )


# Running


def run(flags, devices, data, job, model_dir):
    """Trains to the end of `--epochs` or `--max_steps`, from wherever it stands.

    Args:
      flags: what `utils.parse_flags` returned.
      devices: the `utils.Devices` the graph was built for.
      data: the `DataSet`.
      job: the `Job`, in the default graph.
      model_dir: what `records.choose_model_dir` returned.

    Raises:
      UserError: all checkpoints in `model_dir` are damaged.
    """
    saver = checkpoints.create_saver()
    end_epoch = build_end_of_epoch(job.state)
    initialise = [tf.global_variables_initializer(), tf.local_variables_initializer()]
    tf.get_default_graph().finalize()

    threads = records.read_config(model_dir).get('threads')
    threads = threads or utils.choose_threads(devices.towers)
    with open_session(devices, threads) as session:
        session.run(initialise, job.feeds)
        restored = checkpoints.restore(saver, session, model_dir)
        session.run(job.pipeline.start)
        config = records.describe(flags, devices, data, threads)
        records.open_model_dir(model_dir, config)
        introduce(flags, config, restored, model_dir)
        with queue_runners(session):
            train(session, flags, job, saver, end_epoch, model_dir)
    log.info('results: %s', model_dir)


def train(session, flags, job, saver, end_epoch, model_dir):
    """Runs the epochs that are left; each is evaluated, recorded and saved."""
    step = session.make_callable(job.train_op)
    read_state = session.make_callable(list(job.state))
    evaluate = make_evaluate(session, job.evaluation)
    last_step = flags.max_steps or math.inf

    now = State(*read_state())
    records.drop_metrics_after(model_dir, now.epoch)
    if now.epoch >= flags.epochs or now.global_step >= last_step:
        log.info(
            'nothing left to train: %d epochs, %d steps are done; --epochs and '
            '--max_steps count from the start',
            now.epoch,
            now.global_step,
        )
        log_valid(*evaluate())
    warm_up = WARM_UP_STEPS
    while now.epoch < flags.epochs and now.global_step < last_step:
        began = time.time()
        log.info('Epoch %d/%d', now.epoch + 1, flags.epochs)
        steps_done, steps_left = input_pipeline.count_steps(
            job.pipeline, now.epoch_images
        )
        steps = min(steps_left, last_step - now.global_step)
        with open_bar(flags, steps_done, steps_left) as bar:
            steps_per_second = take_steps(step, steps, warm_up, bar, read_state)
        warm_up = 0

        now = State(*read_state())
        train_loss = now.loss_sum / now.epoch_images
        train_acc = now.correct / now.epoch_images
        log.info('train/acc: %.4f, train/loss: %.4f', train_acc, train_loss)
        valid_loss, valid_acc = evaluate()
        log_valid(valid_loss, valid_acc)
        speed = steps_per_second and steps_per_second * job.pipeline.global_batch
        if speed:
            log.info('speed: %.0f images/s', speed)
        if steps < steps_left:
            log.info('--max_steps %d ends the run inside this epoch', last_step)
        else:
            row = collections.OrderedDict(
                epoch=int(now.epoch) + 1,
                step=int(now.global_step),
                train_loss=float(train_loss),
                train_acc=float(train_acc),
                valid_loss=valid_loss,
                valid_acc=valid_acc,
                learning_rate=float(session.run(job.learning_rate)),
                images_per_second=speed,
                seconds=time.time() - began,
            )
            records.append_metrics(model_dir, row)
            session.run(end_epoch)
            now = State(*read_state())
        checkpoints.save(saver, session, model_dir, now.epoch, now.global_step)


def take_steps(step, steps, warm_up, bar, read_state):
    """Runs `steps` steps and keeps the bar up to date.

    Returns:
      Steps per second of those after the first `warm_up`, None if no step was run.
    """
    if not steps:
        return None
    warm_up = min(warm_up, steps - 1)
    refresh_at = math.inf if bar.disable else 0
    began = time.perf_counter()
    for done in range(1, steps + 1):
        step()
        now = time.perf_counter()
        if done == warm_up:
            began = now
        if now >= refresh_at:
            refresh(bar, done, State(*read_state()))
            refresh_at = now + REFRESH_SECONDS
    steps_per_second = (steps - warm_up) / (now - began)
    if not bar.disable:
        refresh(bar, steps, State(*read_state()))
    return steps_per_second


def open_bar(flags, steps_done, steps_left):
    """Returns a tqdm bar of one epoch: on a terminal only, a log file gets none."""
    tqdm.monitor_interval = 0  # its thread has nothing to do: we refresh by time
    shown = sys.stderr.isatty() and not flags.no_progress
    width = shown and os.get_terminal_size(sys.stderr.fileno()).columns
    return tqdm(
        total=steps_done + steps_left,
        initial=steps_done,
        disable=not shown,
        file=sys.stderr,
        ascii=True,
        dynamic_ncols=width > 0,
        ncols=None if width else 80,  # some terminals do not say how large they are
        nrows=None if width else 24,
        miniters=1,
        mininterval=0,
    )


def refresh(bar, done, state):
    """Shows the epoch's means over all towers after `done` steps of this run."""
    bar.set_postfix(
        train_acc='%.3f' % (state.correct / state.epoch_images),
        train_loss='%.3f' % (state.loss_sum / state.epoch_images),
        refresh=False,
    )
    bar.update(bar.initial + done - bar.n)


def log_valid(loss, accuracy):
    log.info('valid/acc: %.4f, valid/loss: %.4f', accuracy, loss)


def make_evaluate(session, evaluation):
    """Returns a function () -> (mean loss, accuracy) over all examples, floats.

    Losses and predictions are reduced here in the examples' order: the same score
    for any number of towers.
    """
    labels = evaluation.examples.labels
    read = session.make_callable(
        [evaluation.losses, evaluation.predictions], feed_list=[evaluation.start]
    )
    rows = evaluation.losses.shape.as_list()[0]

    def evaluate():
        parts = [read(start) for start in range(0, len(labels), rows)]
        losses, predictions = (
            np.concatenate(part)[: len(labels)] for part in zip(*parts)
        )
        loss = losses.mean(dtype=np.float64)
        return float(loss), float((predictions == labels).mean())

    return evaluate


def introduce(flags, config, restored, model_dir):
    """Says in a few lines what will be trained, on what, and where results go."""
    towers, gpus = config['devices']['towers'], config['devices']['gpus']
    data = config['data']
    global_batch = flags.batch_size * len(towers)
    steps, rest = divmod(data['train_images'], global_batch)
    if flags.device == 'auto' and not gpus:
        log.warning(
            'TensorFlow sees no GPU: training on the CPU, %s on %s',
            utils.count(len(towers), 'tower'),
            utils.count(utils.count_cores(), 'core'),
        )
    log.info(
        'model %s: %d parameters, %d classes; %d training and %d validation images '
        'of %s from %s',
        flags.model,
        sum(v.shape.num_elements() for v in tf.trainable_variables()),
        data['num_classes'],
        data['train_images'],
        data['valid_images'],
        'x'.join(map(str, data['image_shape'])),
        os.path.relpath(flags.data_dir),
    )
    log.info('TensorFlow %s on %s', config['versions']['tensorflow'], ' '.join(towers))
    log.info(
        'batch %d per tower x %s = %d; %d steps per epoch of %d images%s',
        flags.batch_size,
        utils.count(len(towers), 'tower'),
        global_batch,
        steps,
        data['train_images'],
        ' (%d wait for another shuffle)' % rest if rest else '',
    )
    log.info('results go to %s', model_dir)
    if restored:
        log.info('continues from %s', restored)


@contextlib.contextmanager
def open_session(devices, threads):
    """A session on the given devices and no other; its start is silent."""
    with quiet_stderr():
        session = tf.Session(config=utils.session_config(devices, threads))
    with session:
        yield session


@contextlib.contextmanager
def queue_runners(session):
    """Feeds the queues inside the block; no thread outlives it.

    A dead producer closes its queue, and the step only learns of that: the
    producer's own error is what is raised.
    """
    coordinator = tf.train.Coordinator()
    threads = tf.train.start_queue_runners(session, coordinator)
    cause = None
    try:
        yield
    except tf.errors.OutOfRangeError:
        cause = RuntimeError('the input ended before the epoch did')
    finally:
        coordinator.request_stop()
        try:
            coordinator.join(threads)
        except Exception as producers_own:
            cause = producers_own
    if cause:
        raise cause from None
