"""A step of several micro-steps is one of their batches together."""

import itertools

import numpy as np
import pytest

import accumulation
import input_pipeline
import model
import train
import train_multi_gpu
import training
import utils
from tests.conftest import (
    THREADS,
    assert_same_bits,
    make_flags,
    read_checkpoint,
    start,
)
from tests.test_input_pipeline import read_steps, tagged
from tests.test_train_multi_gpu import SGD, largest_difference
from tf1 import tf
from utils import UserError


@pytest.mark.parametrize('micro_steps, towers', [(2, 1), (4, 1), (3, 2), (2, 4)])
@pytest.mark.parametrize('optimizer', ['sgd', 'adam'])
def test_micro_steps_make_the_update_of_their_images(
    run_steps, monkeypatch, micro_steps, towers, optimizer
):
    def cnn_float64(images, *settings):
        with tf.variable_scope(tf.get_variable_scope(), dtype=tf.float64):
            return model.cnn(tf.cast(images, tf.float64), *settings)

    monkeypatch.setitem(model.NETWORKS, 'cnn', cnn_float64)
    flags = SGD + ['--optimizer', optimizer, '--learning_rate', '0.01']
    one = run_steps(10, '--batch_size', '24', *flags)
    batch = str(24 // micro_steps // towers)
    flags += ['--batch_size', batch, '--accumulate', str(micro_steps)]
    flags += ['--num_gpus', str(towers)]
    # With the epoch's sums of loss and correct, and its images.
    assert largest_difference(one, run_steps(10, *flags)) <= 1e-9


def test_train_py_accumulates_too_and_staging_changes_no_bit(run_steps):
    flags = ['--batch_size', '8', '--accumulate', '3']
    one = run_steps(5, *flags, '--num_gpus', '1')
    assert_same_bits(one, run_steps(5, *flags, script=train))
    assert_same_bits(one, run_steps(5, *flags, '--staging'))


def test_each_micro_step_has_dropout_masks_of_its_own():
    step = tf.train.get_or_create_global_step()
    number = accumulation.number_runs(step, 3)
    w = tf.get_variable('w', [], initializer=tf.zeros_initializer())
    sums = train_multi_gpu.updates.Sums(
        tf.constant(0.5, tf.float64), tf.constant(1.0), 4, None
    )
    grads = [(tf.cast(number, tf.float32), w)]
    means, sums, puts, micro_steps = accumulation.accumulate(grads, sums, [], 3)
    with tf.control_dependencies(puts):
        advance = step.assign_add(1)
    assert sums.images == 12
    found = []
    with utils.open_session(utils.CPU, THREADS) as session:
        session.run(
            [tf.global_variables_initializer(), tf.local_variables_initializer()]
        )
        for _ in range(3):
            for op in micro_steps:
                found.append(session.run([number, op])[0])
            last = [number, means[0][0], sums.loss, sums.correct, advance]
            run, mean, loss, correct, _ = session.run(last)
            found.append(run)
            assert mean == np.float32(np.mean(found[-3:]))
            assert (loss, correct) == (1.5, 3)
    assert found == list(range(9))


@pytest.mark.parametrize('machines', [1, 2])
def test_an_epoch_begins_no_step_that_it_cannot_end(machines):
    addresses = ['a:1', 'b:1'][:machines]
    for index in range(machines):
        read = read_steps(
            50,
            4 // machines,
            1,
            13,
            machines=input_pipeline.ONE._replace(addresses=addresses, index=index)
            if machines > 1
            else input_pipeline.ONE,
            micro_steps=3,
        )
        whole = read_steps(50, 12, 1, 5).reshape([15, machines, 1, 4 // machines])
        assert (read == whole[:13, index]).all()


def test_a_data_set_smaller_than_a_step_names_the_micro_steps():
    with pytest.raises(UserError, match=r'2 towers x 4 micro-steps = 160\).* is 12$'):
        input_pipeline.build(
            tagged(100), 20, 2, 0, training.create_state(), micro_steps=4
        )


def test_a_step_cut_short_leaves_nothing_in_a_checkpoint(small):
    flags = make_flags('--device', 'cpu', '--batch_size', '4', '--accumulate', '3')
    devices = utils.choose_devices('cpu', 1)
    job = train_multi_gpu.build_job(flags, devices.towers, small)
    with start(job, devices) as session:

        def read():
            return {v.op.name: session.run(v) for v in tf.global_variables()}

        training.make_step(session, job)()
        before = read()
        for op in job.step.micro_steps:
            session.run(op)
        assert_same_bits(before, read())
    held = [
        v for v in tf.global_variables() if 'accumul' in v.name or 'micro' in v.name
    ]
    assert not held


def test_a_run_that_accumulates_goes_on_bit_for_bit(main, flags):
    flags += ['--batch_size', '8', '--accumulate', '4', '--summary_steps', '1']
    argv = ['train_multi_gpu.py', '--num_gpus', '2', '--epochs', '2', '--histograms']
    whole = main(*argv, '--model_dir', 'whole', *flags)
    assert whole.status == 0, whole.err
    line = 'batch 8 per tower x 2 towers x 4 micro-steps = 64; 31 steps per epoch of '
    assert line + '2000 images (16 wait for another shuffle)' in whole.out
    part = main(*argv, '--model_dir', 'm', '--max_steps', '37', '--trace', '5', *flags)
    assert part.status == 0, part.err
    done = main(*argv, '--model_dir', 'm', *flags)
    assert done.status == 0 and 'continues from m/model.ckpt-1-37' in done.out
    whole, parts = (read_checkpoint(d + '/model.ckpt-2-62') for d in ('whole', 'm'))
    assert_same_bits(whole, parts)


def test_without_it_the_graph_is_what_it_was(small):
    ops = []
    for more in ([], ['--accumulate', '1']):
        with tf.Graph().as_default() as graph, tf.device('/cpu:0'):
            train_multi_gpu.build_job(make_flags(*more), ['/cpu:0'], small)
            ops.append([op.name for op in graph.get_operations()])
    assert ops[0] == ops[1]
    assert not [name for name in itertools.chain(*ops) if 'accumul' in name]
