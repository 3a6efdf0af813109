"""The loop: its speed, its steps, how its threads end; and the baseline's devices."""

import contextlib
import itertools
import threading
import time
import types

import numpy as np
import pytest

import train
import training
import utils
from command_line import OPTIMIZERS
from tests.conftest import make_flags, start
from tf1 import tf


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until `clock.now` is set."""
    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(training.time, 'perf_counter', lambda: clock.now)
    return clock


def test_speed_leaves_out_warm_up_and_what_is_no_training(clock):
    taken = []

    def step():
        taken.append(1)
        clock.now += 100 if len(taken) <= 10 else 2
        return len(taken)

    shown = []

    def between(done, metrics, speed):
        assert done == metrics == len(taken)
        shown.append(speed())
        clock.now += 1
        return 1.0

    assert training.take_steps(step, 30, 10, between, 64) == pytest.approx(64 / 2)
    assert len(taken) == 30
    assert shown == [None] * 10 + [pytest.approx(64 / 2)] * 20


def test_speed_of_a_short_epoch_leaves_out_all_but_its_last_step(clock):
    def step():
        clock.now += 4

    def nothing(*_):
        return 0.0

    assert training.take_steps(step, 3, 10, nothing, 8) == pytest.approx(8 / 4)
    assert training.take_steps(step, 0, 10, nothing, 8) is None


def test_special_steps_are_run_in_place_of_the_usual_ones():
    taken = []
    special = {2: lambda step: 'not ' + step(), 5: lambda _: 'other', -3: 0, 9: 0}
    training.take_steps(
        lambda: 'usual', 5, 0, lambda done, gave, _: taken.append(gave) or 0, 1, special
    )
    assert taken == ['usual', 'not usual', 'usual', 'usual', 'other']


def test_special_steps_count_for_no_speed(clock):
    def take(seconds):
        clock.now += seconds

    special = {number: lambda step: take(1000) for number in (3, 20, 30)}
    speed = training.take_steps(lambda: take(2), 30, 10, lambda *_: 0.0, 64, special)
    assert speed == pytest.approx(64 / 2)
    only = {1: lambda step: take(9)}
    nothing = training.take_steps(lambda: take(2), 1, 0, lambda *_: 0.0, 64, only)
    assert nothing is None


def test_images_per_second_count_all_towers(main, small_dir, monkeypatch):
    monkeypatch.setattr(training, 'take_steps', fake_speed(training.take_steps))
    flags = ['--data_dir', small_dir, '--device', 'cpu', '--epochs', '1']
    flags += ['--xla', 'off', '--batch_size', '50']
    for towers, speed in ((1, 500), (4, 2000)):
        done = main('train_multi_gpu.py', '--num_gpus', str(towers), *flags)
        assert 'speed: %d images/s' % speed in done.out


def fake_speed(take_steps):
    def fake(*args):
        take_steps(*args)
        _, _, _, _, global_batch, _ = args
        return 10.0 * global_batch

    return fake


def test_the_baseline_runs_with_its_model_on_another_device(small):
    # As on a GPU: the queues, the state and the saver stay where the model is not.
    for optimizer in OPTIMIZERS:
        with tf.Graph().as_default(), tf.device('/cpu:0'):
            flags = make_flags('--optimizer', optimizer, '--xla', 'off')
            job = train.build_job(flags, '/cpu:1', small)
            end_of_epoch = training.build_end_of_epoch(job.state)
            saver = tf.train.Saver()
            with start(job, utils.choose_devices('cpu', 2)) as session:
                session.run(job.step.train_op)
                session.run(job.evaluation.predictions, {job.evaluation.start: 0})
                session.run(end_of_epoch.op, {end_of_epoch.accuracy: 0.4})
                session.run(end_of_epoch.set_best, {end_of_epoch.accuracy: 0.5})
                saver.restore(session, saver.save(session, './here'))
                assert session.run(job.state.best_acc) == 0.5


def slow_queue(wait):
    """A queue whose producer calls `wait` for each element but the first."""
    made = itertools.count(1)

    def produce():
        number = next(made)
        if number > 1:
            wait()
        return np.float32(number)

    queue = tf.FIFOQueue(1, [tf.float32], [[]])
    value = tf.py_func(produce, [], tf.float32)
    value.set_shape([])
    tf.train.add_queue_runner(tf.train.QueueRunner(queue, [queue.enqueue(value)]))
    return queue.dequeue()


def test_a_run_that_is_done_waits_for_what_is_still_being_decoded(monkeypatch):
    monkeypatch.setattr(training, 'GRACE_SECONDS', 0.2)
    begun = threading.Event()
    element, left = slow_queue(lambda: begun.set() or time.sleep(1.5)), []
    with tf.Session() as session:
        with training.queue_runners(session, leave=left.append):
            assert session.run(element) == 1
            assert begun.wait(30)
        assert left == [], 'it ended as a failure'


@pytest.mark.filterwarnings('ignore::pytest.PytestUnhandledThreadExceptionWarning')
@pytest.mark.parametrize('cause', [None, utils.RunStopped('stopped', 130)], ids=str)
def test_what_never_ends_is_left_with_what_ended_the_run(monkeypatch, cause):
    monkeypatch.setattr(training, 'GRACE_SECONDS', 0.2)
    monkeypatch.setattr(training, 'END_SECONDS', 0.4)
    begun, end = threading.Event(), threading.Event()
    element, left = slow_queue(lambda: begun.set() or end.wait(30)), []

    def leave(error):
        left.append(error)
        end.set()
        for thread in threading.enumerate():
            if thread.name.startswith('QueueRunnerThread'):
                thread.join(30)

    with tf.Session() as session, contextlib.suppress(utils.RunStopped):  # noqa: SIM117
        with training.queue_runners(session, leave=leave):
            assert session.run(element) == 1
            assert begun.wait(30)
            if cause:
                raise cause
    assert left == [cause]
