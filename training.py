"""What both scripts share: where training stands, and the loop over epochs."""

import collections
import contextlib
import functools
import math
import time

import all_reduce
import checkpoints
import cluster
import decoding
import evaluation
import input_pipeline
import records
import replicas
import screen
import stopping
import summaries
import updates
import utils
from keeper import NOTHING, open_keeper
from sessions import open_session
from tf1 import tf
from utils import RunFailed, RunStopped, log
from watch import AllFailed, is_echo

# Steps at the start of a process that images per second leave out.
WARM_UP_STEPS = 10
# Seconds between two refreshes of the bar; each reads the running sums.
REFRESH_SECONDS = 0.5
# How long the queue runners may take to end where a run is stopped. They need
# milliseconds, but for one that reads or decodes many images at once: where all is done
# that is waited for.
GRACE_SECONDS = 2
END_SECONDS = 60

# Where training stands, as variables, so that a checkpoint holds it:
# global_step: updates so far. epoch: epochs done. epoch_images: images of this epoch
# consumed. loss_sum, correct: over these images. best_acc: of what is in best/.
# top_acc: of the epochs done, saved in best/ or not. stale_epochs: how many came since.
State = collections.namedtuple(
    'State',
    'global_step epoch epoch_images loss_sum correct best_acc top_acc stale_epochs',
)

# What a script builds and `run` runs: a `State`, `updates.Rule`, `Pipeline`,
# `updates.Step`, `Evaluation`. feeds: for the initialisers. replicas: `Replicas`, where
# towers have variables of their own.
Job = collections.namedtuple(
    'Job', 'state rule pipeline step evaluation feeds replicas'
)
Job.__new__.__defaults__ = (replicas.NONE,)

# op: moves the state to the start of the next epoch. set_best: sets `best_acc`. Both
# take what is fed to `accuracy`, that of the validation images.
EndOfEpoch = collections.namedtuple('EndOfEpoch', 'op accuracy set_best')

# What the loop calls: functions of a session, each made once; and the `Keeper`.
# hear: (wishes of a step) -> a `RunStopped` or None.
Calls = collections.namedtuple(
    'Calls',
    'prefill step hear read_state read_score evaluate check_equality finish_epoch '
    'set_best read_learning_rate read_loss_scale find_stop keeper',
)


# Building


def create_state():
    """Creates the variables of `State`."""
    global_step = tf.train.get_or_create_global_step()
    with tf.variable_scope('training'):
        return State(
            global_step,
            utils.create_scalar('epoch', tf.int64),
            utils.create_scalar('epoch_images', tf.int64),
            utils.create_scalar('loss_sum', tf.float64),
            utils.create_scalar('correct', tf.int64),
            utils.create_scalar('best_acc', tf.float64, -1),
            utils.create_scalar('top_acc', tf.float64, -1),
            utils.create_scalar('stale_epochs', tf.int64),
        )


def build_end_of_epoch(state):
    """Builds what an epoch ends with: an `EndOfEpoch`."""
    accuracy = tf.placeholder(tf.float64, [], 'accuracy')
    top_acc = tf.maximum(accuracy, state.top_acc)
    stale = tf.cast(accuracy <= state.top_acc, tf.int64)
    stale_epochs = stale * (state.stale_epochs + 1)
    with tf.control_dependencies([top_acc, stale_epochs]):  # read before it is written
        op = tf.group(
            state.epoch.assign_add(1),
            state.epoch_images.assign(0),
            state.loss_sum.assign(0),
            state.correct.assign(0),
            state.top_acc.assign(top_acc),
            state.stale_epochs.assign(stale_epochs),
        )
    return EndOfEpoch(op, accuracy, state.best_acc.assign(accuracy).op)


# Running


def run(flags, devices, data, job, model_dir, machines=cluster.ONE):
    """Trains to the end of `--epochs` or `--max_steps`, from wherever it stands.

    Args:
      flags: what `command_line.parse` returned.
      devices: the `utils.Devices` the graph was built for.
      data: the `DataSet`.
      job: the `Job`, in the default graph.
      model_dir: what `records.claim_model_dir` yields.
      machines: the `cluster.Machines` the graph was built for.

    Raises:
      UserError: no checkpoint in `model_dir` can be read, or they don't fit; or the
        machines are not equal.
      RunStopped: by a signal or `--max_minutes`; everything is saved.
      RunFailed: a number is not finite, or the last save failed.
    """
    saver = checkpoints.create_saver()
    end_of_epoch = build_end_of_epoch(job.state)
    samples = job.pipeline.samples if flags.summary_steps else None
    summary = summaries.build(samples, job.step.gradients, flags.histograms)
    equality = all_reduce.build_equality(
        tf.global_variables(), [job.state.best_acc], machines
    )
    initialise = [tf.global_variables_initializer(), tf.local_variables_initializer()]
    runners = tf.get_collection(tf.GraphKeys.QUEUE_RUNNERS)
    close_queues = [runner.cancel_op for runner in runners]
    tf.get_default_graph().finalize()

    deadline = stopping.find_deadline(flags.max_minutes)
    find_stop = functools.partial(stopping.find_stop, deadline)
    with contextlib.ExitStack() as stack:
        session, threads, watch = stack.enter_context(
            open_session(flags, devices, data, model_dir, machines, find_stop)
        )

        def unblock():
            # The others would wait for a step that fails here; they have their limit.
            if watch is None:
                session.run(close_queues)

        stack.enter_context(stopping.signals(unblock, deadline))
        session.run(initialise, job.feeds)
        restored = model_dir and checkpoints.restore(saver, session, model_dir)
        if equality:
            session.run(equality.broadcast)
        session.run(job.replicas.copy)
        session.run(job.pipeline.start)
        config = records.describe(flags, devices, data, threads, machines)
        step = session.run(job.state.global_step)
        keeper = NOTHING
        if model_dir:
            records.begin(model_dir, config)
            screen.introduce(flags, config, restored, model_dir)
            keeper = stack.enter_context(
                open_keeper(flags, session, saver, job, summary, model_dir, step)
            )
        calls = make_calls(session, job, end_of_epoch, find_stop, keeper)
        if job.replicas.names:
            calls = add_replicas(calls, session, job.replicas)
        if watch:
            calls = add_machines(calls, session, job, equality, machines, watch)
        leave = watch.leave if watch else utils.leave
        stack.enter_context(queue_runners(session, find_stop, leave))
        train(flags, job, calls, model_dir)


def make_calls(session, job, end_of_epoch, find_stop, keeper):
    """Returns the `Calls` of a run on one machine."""
    read = session.make_callable(list(job.state))
    sums = ('epoch_images', 'loss_sum', 'correct')
    read_sums = session.make_callable([getattr(job.state, name) for name in sums])
    return Calls(
        prefill=session.make_callable(job.pipeline.prefill),
        step=make_step(session, job),
        hear=lambda wishes=(): find_stop(),
        read_state=lambda: State(*read()),
        read_score=lambda: score(*read_sums()),
        evaluate=evaluation.make_evaluate(session, job.evaluation, find_stop),
        check_equality=lambda: None,
        finish_epoch=session.make_callable(end_of_epoch.op, [end_of_epoch.accuracy]),
        set_best=session.make_callable(end_of_epoch.set_best, [end_of_epoch.accuracy]),
        read_learning_rate=session.make_callable(job.rule.learning_rate),
        read_loss_scale=make_read_loss_scale(session, job.rule.loss_scale),
        find_stop=find_stop,
        keeper=keeper,
    )


def make_step(session, job):
    """Returns the function that runs a step and returns what its train op gives."""
    train_op = session.make_callable(job.step.train_op)
    if not job.step.micro_steps:
        return train_op
    micro_steps = [session.make_callable(op) for op in job.step.micro_steps]

    def step():
        for run in micro_steps:
            run()
        return train_op()

    return step


def make_read_loss_scale(session, loss_scale):
    """Returns the function that returns a `LossScale` of numbers, None without one."""
    if loss_scale is None:
        return lambda: None
    read = session.make_callable(list(loss_scale))
    return lambda: loss_scale._make(read())


def add_replicas(calls, session, copies):
    """Returns the `Calls` of a run in which towers have variables of their own.

    That they are equal is checked after the first step of a process and when an epoch
    ends.

    Args:
      calls: the `Calls` of one machine.
      session: where the variables are.
      copies: the `Replicas`.
    """
    checked = False
    read_equal = session.make_callable(copies.equal)

    def hear(*wishes):
        nonlocal checked
        if wishes and not checked:  # after a step, not before an epoch
            checked = True
            check_equality()
        return calls.hear(*wishes)

    def check_equality():
        difference = replicas.find_difference(read_equal(), copies.names)
        if difference:
            raise RunFailed(difference)

    return calls._replace(hear=hear, check_equality=check_equality)


def add_machines(calls, session, job, equality, machines, watch):
    """Returns the `Calls` of a run on several machines.

    They stop together: each says with every step whether it wishes to, and hears the
    others' wishes with its result. That they are equal is checked after the first step
    too: where they can't be, nobody waits for an epoch to learn it.
    """
    checked = False
    wish = all_reduce.get_wish()
    watch.make_wish = session.make_callable(wish.put, [wish.value])
    read_fingerprints = session.make_callable(equality.fingerprints)

    def step():
        watch.wish()
        return calls.step()

    def special_steps(*args):
        special = calls.keeper.special_steps(*args)
        return {n: functools.partial(run_special, f) for n, f in special.items()}

    def run_special(function, step):
        watch.wish()
        return function(step)

    def hear(wishes=()):
        nonlocal checked
        stop = watch.hear(wishes)
        if len(wishes) and not checked:
            checked = True
            check_equality()
        return stop

    def check_equality():
        difference = all_reduce.find_difference(
            read_fingerprints(), equality.names, machines
        )
        watch.hear()
        if difference:
            raise AllFailed(difference)

    return calls._replace(
        step=step,
        hear=hear,
        evaluate=evaluation.make_evaluate(session, job.evaluation, watch=watch),
        check_equality=check_equality,
        keeper=calls.keeper._replace(special_steps=special_steps),
    )


def train(flags, job, calls, model_dir):
    """Runs the epochs that are left; what ends them early is saved and told."""
    try:
        calls.prefill()
        rows, saved = run_epochs(flags, job, calls)
    except tf.errors.InvalidArgumentError as error:
        found = updates.find_not_finite(error)
        if not found or is_echo(error):
            raise
        raise RunFailed(
            'step %d, %s; the checkpoints are from before it'
            % (calls.read_state().global_step + 1, found)
        ) from None
    except (RunStopped, tf.errors.OutOfRangeError) as error:
        # Queues that were closed to let a stop through make the step fail.
        stopped = error if isinstance(error, RunStopped) else calls.find_stop()
        if stopped is None:
            raise
        save_stopped(stopped, calls, model_dir)
        raise stopped from None
    if not saved:
        raise RunFailed('the last save in %s failed' % model_dir)
    if model_dir:
        screen.conclude(rows, calls.read_state(), model_dir)


def run_epochs(flags, job, calls):
    """Trains, evaluates, records and saves.

    Returns:
      (rows, saved): the rows of metrics.jsonl, and whether the last save worked.
    """
    now = calls.read_state()
    rows = calls.keeper.read_rows(now.epoch)
    calls.keeper.write_rows(rows)
    last_step = flags.max_steps or math.inf
    saved = True
    goal = find_goal(flags, now)
    if now.epoch >= flags.epochs or now.global_step >= last_step or goal:
        log.info(
            'nothing left to train: %s, %s are done; %s',
            utils.count(now.epoch, 'epoch'),
            utils.count(now.global_step, 'step'),
            goal or '--epochs and --max_steps count from the start',
        )
        screen.log_score('valid', *calls.evaluate())
    warm_up = WARM_UP_STEPS
    while now.epoch < flags.epochs and now.global_step < last_step and not goal:
        utils.raise_if(calls.hear())
        began = time.time()
        log.info('Epoch %d/%d', now.epoch + 1, flags.epochs)
        speed, ended = train_epoch(flags, job, calls, now, last_step, warm_up)
        warm_up = 0
        now = calls.read_state()
        train, valid = score_epoch(calls, now, speed)
        if not ended:
            log.info('--max_steps %d ends the run inside this epoch', last_step)
            saved = calls.keeper.save(now)
            break
        calls.check_equality()
        rate = float(calls.read_learning_rate())
        rows.append(make_row(now, train, valid, rate, speed, time.time() - began))
        saved = finish_epoch(calls, rows, now.best_acc)
        now = calls.read_state()
        goal = find_goal(flags, now)
        if goal:
            log.info('%s: the run ends after this epoch', goal)
    return rows, saved


def train_epoch(flags, job, calls, now, last_step, warm_up):
    """Takes the steps that are left of an epoch, up to `last_step`, under a bar.

    Returns:
      (images per second, whether the epoch is over).
    """
    done, left = input_pipeline.count_steps(job.pipeline, now.epoch_images)
    steps = min(left, last_step - now.global_step)
    ends = steps == left
    with screen.open_bar(flags, done, left) as bar:
        speed = take_steps(
            calls.step,
            steps,
            warm_up,
            make_between(flags, calls, bar, now.global_step, steps),
            job.pipeline.global_batch,
            calls.keeper.special_steps(now.global_step, steps, ends),
        )
    return speed, ends


def score_epoch(calls, now, speed):
    """Evaluates and shows how the epoch went.

    Returns:
      (mean loss, accuracy) of the epoch's training images, and of the validation's.
    """
    train = calls.read_score()
    screen.log_score('train', *train)
    valid = calls.evaluate()
    screen.log_score('valid', *valid)
    calls.keeper.events.valid(
        now.global_step, summaries.scalars(loss=valid[0], accuracy=valid[1])
    )
    loss_scale = calls.read_loss_scale()
    if loss_scale:
        log.info(
            'fp16: loss scale %g; %s skipped so far',
            loss_scale.scale,
            utils.count(loss_scale.skipped, 'step'),
        )
    if speed:
        log.info('speed: %.0f images/s', speed)
    return train, valid


def find_goal(flags, state):
    """Returns why training is over, whatever `--epochs` says, or None.

    A function of what a checkpoint holds: the same on all machines, and after a resume.
    """
    if flags.stop_at is not None and state.top_acc >= flags.stop_at:
        return 'valid/acc %.4f has reached --stop_at %g' % (
            state.top_acc,
            flags.stop_at,
        )
    if flags.early_stopping and state.stale_epochs >= flags.early_stopping:
        return 'valid/acc has not been above %.4f for %s, see --early_stopping' % (
            state.top_acc,
            utils.count(state.stale_epochs, 'epoch'),
        )
    return None


def score(epoch_images, loss_sum, correct):
    """Returns (mean loss, accuracy) of the epoch's images so far, over all towers."""
    return float(loss_sum / epoch_images), float(correct / epoch_images)


def make_row(state, train, valid, learning_rate, images_per_second, seconds):
    """Returns a finished epoch's row for metrics.jsonl."""
    train_loss, train_acc = train
    valid_loss, valid_acc = valid
    return collections.OrderedDict(
        epoch=int(state.epoch) + 1,
        step=int(state.global_step),
        train_loss=train_loss,
        train_acc=train_acc,
        valid_loss=valid_loss,
        valid_acc=valid_acc,
        learning_rate=learning_rate,
        images_per_second=images_per_second,
        seconds=seconds,
    )


def finish_epoch(calls, rows, best_acc):
    """Records and saves an epoch; returns whether that worked.

    `best_acc` is the score of what is in `best/`: if the new best can't be saved
    there, it stays, and the next epoch that beats it is tried.

    The model_dir's own checkpoint comes last. After a kill before it, the epoch is
    trained again, and its row and its best checkpoint are written anew; the best one
    before it is there till then.
    """
    valid_acc = rows[-1]['valid_acc']
    calls.finish_epoch(valid_acc)
    saved = calls.keeper.write_rows(rows)
    if valid_acc > best_acc:
        calls.set_best(valid_acc)
        if not calls.keeper.save_best(calls.read_state()):
            calls.set_best(best_acc)
            saved = False
    if not calls.keeper.save(calls.read_state()):
        return False
    calls.keeper.forget_best()
    return saved


def save_stopped(stopped, calls, model_dir):
    """Saves where the run was stopped and says how to go on."""
    now = calls.read_state()
    if not calls.keeper.save(now):
        raise RunFailed('%s, and the last save failed' % stopped) from None
    log.info('%s: saved in epoch %d, step %d', stopped, now.epoch + 1, now.global_step)
    log.info('to go on: %s', records.continuing_command(model_dir))


def take_steps(step, steps, warm_up, between, global_batch, special_steps=()):
    """Runs `steps` steps.

    Args:
      step: () runs one and returns what `train_op` gives.
      steps: how many.
      warm_up: how many of the first ones don't count for the speed.
      between: (steps done, what the last gave, speed) -> seconds, called after each
        step: how long it took for what is no training. speed: () -> images per
        second so far, None during warm-up.
      global_batch: images per step.
      special_steps: {number from 1 on: what to call instead, with `step`}. These
        count for no speed.

    Returns:
      Images per second, None if no step was run.
    """
    special_steps = dict(special_steps)
    warm_up = min(warm_up, steps - 1)
    began, away, done, left_out = time.perf_counter(), 0.0, 0, warm_up

    def speed():
        images = (done - left_out) * global_batch
        return images / (time.perf_counter() - began - away) if images > 0 else None

    for done in range(1, steps + 1):
        if done in special_steps:
            before = time.perf_counter()
            metrics = special_steps[done](step)
            away += time.perf_counter() - before
            left_out += done > warm_up
        else:
            metrics = step()
        away += between(done, metrics, speed)
        if done == warm_up:
            began, away = time.perf_counter(), 0.0
    return speed() if steps else None


def make_between(flags, calls, bar, first_step, steps):
    """Returns what is done after each of `steps` steps: signals, events, bar, saves."""
    refresh_at = math.inf if bar.disable else 0
    save_at = time.perf_counter() + flags.save_every_seconds

    def between(done, metrics, speed):
        nonlocal refresh_at, save_at
        utils.raise_if(calls.hear(metrics[updates.NUM_METRICS :]))
        step = first_step + done
        if step % (flags.summary_steps or math.inf) == 0:
            loss, accuracy, rate = metrics[: updates.NUM_METRICS].tolist()
            summary = summaries.scalars(
                loss=loss,
                accuracy=accuracy,
                learning_rate=rate,
                images_per_second=speed(),
            )
            calls.keeper.events.train(step, summary)
        now = time.perf_counter()
        if now >= refresh_at or (done == steps and not bar.disable):
            screen.refresh(bar, done, speed(), *calls.read_score())
            refresh_at = now + REFRESH_SECONDS
        if now < save_at:
            return 0.0
        calls.keeper.save(calls.read_state())
        saved_at = time.perf_counter()
        save_at = saved_at + flags.save_every_seconds
        return saved_at - now

    return between


@contextlib.contextmanager
def queue_runners(session, find_stop=lambda: None, leave=utils.leave):
    """Feeds the queues inside the block; no thread outlives it.

    A dead producer closes its queue, and the step only learns of that: the
    producer's own error is what is raised, unless `find_stop` says that the queues
    were closed to stop the run. Where a thread would outlive it, `leave` is called
    with the error and ends the process.
    """
    coordinator = tf.train.Coordinator()
    threads = tf.train.start_queue_runners(session, coordinator)
    cause = None
    try:
        yield
    except (Exception, RunStopped) as error:
        cause = error
    coordinator.request_stop()
    grace = END_SECONDS if cause is None else GRACE_SECONDS
    try:
        coordinator.join(threads, grace, ignore_live_threads=True)
    except Exception as producers_own:
        masked = cause is None or isinstance(cause, tf.errors.OutOfRangeError)
        if masked and not find_stop():
            cause = producers_own
    if any(thread.is_alive() for thread in threads):
        # A thread stuck in a kernel: closing the session would wait for it for ever.
        leave(cause)
    if isinstance(cause, tf.errors.OutOfRangeError):
        raise RunFailed('the input ended before the epoch did') from None
    if isinstance(cause, tf.errors.InvalidArgumentError):
        # Of the towers' own nothing is found.
        culprit = decoding.find_culprit(session)
        if culprit:
            raise RunFailed(culprit) from None
    if cause is not None:
        raise cause from None
