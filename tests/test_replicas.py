"""Replicated variables: the numbers and checkpoints of shared ones, in equal copies."""

import itertools
import json

import numpy as np
import pytest

import checkpoints
import cluster
import model
import replicas
import train
import train_multi_gpu
import training
import utils
from command_line import OPTIMIZERS
from tests.conftest import (
    THREADS,
    assert_mistake,
    assert_same_bits,
    command,
    files,
    make_flags,
    read_checkpoint,
    read_metrics,
    start,
    without_times,
)
from tf1 import tf
from utils import RunFailed

REPLICATED = ['--variables', 'replicated']


def largest_difference(one, other):
    """Of any variable, relative to its largest value."""
    assert sorted(one) == sorted(other)
    return max(
        np.abs(one[name] - other[name]).max() / max(np.abs(one[name]).max(), 1e-30)
        for name in one
    )


# The same as shared


@pytest.mark.parametrize('optimizer', OPTIMIZERS)
def test_two_towers_train_the_bits_of_shared_variables(run_steps, optimizer):
    # A sum of two has one order only.
    flags = ['--num_gpus', '2', '--batch_size', '8', '--optimizer', optimizer]
    assert_same_bits(run_steps(10, *flags), run_steps(10, *flags, *REPLICATED))


@pytest.mark.parametrize(
    'optimizer, num_towers', [('sgd', '4'), ('sgd', '3'), ('momentum', '4')]
)
def test_more_towers_train_the_numbers_of_shared_variables(
    run_steps, optimizer, num_towers
):
    flags = ['--num_gpus', num_towers, '--batch_size', '4', '--optimizer', optimizer]
    flags += ['--learning_rate', '0.05']
    shared, replicated = run_steps(10, *flags), run_steps(10, *flags, *REPLICATED)
    assert shared['global_step'] == replicated['global_step'] == 10
    assert largest_difference(shared, replicated) <= 1e-5


def test_four_towers_with_adam_differ_from_shared_variables_by_rounding_only(
    run_steps, monkeypatch
):
    # Adam makes a large step of a small gradient, and of its rounding error.
    def cnn_float64(images, *settings):
        with tf.variable_scope(tf.get_variable_scope(), dtype=tf.float64):
            return model.cnn(tf.cast(images, tf.float64), *settings)

    monkeypatch.setitem(model.NETWORKS, 'cnn', cnn_float64)
    flags = ['--num_gpus', '4', '--batch_size', '4', '--optimizer', 'adam']
    shared, replicated = run_steps(10, *flags), run_steps(10, *flags, *REPLICATED)
    assert replicated['conv1/kernel'].dtype == np.float64
    assert largest_difference(shared, replicated) <= 1e-12


def test_resource_variables_train_the_same_bits(run_steps, monkeypatch):
    def cnn_of_resources(*settings):
        with tf.variable_scope(tf.get_variable_scope(), use_resource=True):
            return model.cnn(*settings)

    monkeypatch.setitem(model.NETWORKS, 'cnn', cnn_of_resources)
    flags = ['--num_gpus', '2', '--batch_size', '8']
    assert_same_bits(run_steps(5, *flags), run_steps(5, *flags, *REPLICATED))


def test_one_tower_has_nothing_to_copy(run_steps, small):
    flags = ['--num_gpus', '1']
    assert_same_bits(run_steps(5, *flags), run_steps(5, *flags, *REPLICATED))
    job = train_multi_gpu.build_job(make_flags(*REPLICATED), ['/cpu:0'], small)
    assert job.replicas == replicas.NONE


def test_staging_changes_no_bit(run_steps):
    flags = ['--num_gpus', '3', '--batch_size', '8', *REPLICATED]
    assert_same_bits(run_steps(9, *flags), run_steps(9, *flags, '--staging'))


def build(small, num_towers, *argv):
    devices = utils.choose_devices('cpu', num_towers)
    flags = make_flags('--xla', 'off', '--batch_size', '8', *REPLICATED, *argv)
    return devices, train_multi_gpu.build_job(flags, devices.towers, small)


@pytest.mark.parametrize('optimizer', ['adam', 'sgd'])
def test_the_copies_and_their_slots_have_tower_0s_bits_after_each_step(
    small, optimizer
):
    devices, job = build(small, 4, '--optimizer', optimizer)
    # Adam has two slots for each variable, and two powers.
    assert len(job.replicas.names) == {'sgd': 10, 'adam': 32}[optimizer]
    own = {v.op.name: v for v in tf.global_variables()}
    copies = {
        v.op.name: v for v in tf.local_variables() if v.op.name.startswith('replica_')
    }
    assert sorted(copies) == sorted(
        'replica_%d/%s' % (tower, name)
        for tower in (1, 2, 3)
        for name in job.replicas.names
    )
    assert not set(copies) & set(own)
    with start(job, devices) as session:
        for _ in range(3):
            session.run(job.step.train_op)
            assert session.run(job.replicas.equal).all()
            values = session.run([own, copies])
            for name, value in values[1].items():
                of_tower_0 = values[0][replicas.plain_name(name)]
                assert value.tobytes() == of_tower_0.tobytes(), name


def test_a_step_that_fails_in_one_tower_leaves_all_as_it_was(small):
    devices, job = build(small, 3, '--optimizer', 'momentum')
    (bias,) = [v for v in tf.local_variables() if v.op.name == 'replica_2/dense2/bias']
    spoil = bias.assign(bias * np.nan).op
    everything = {v.op.name: v for v in tf.global_variables() + tf.local_variables()}
    left = [n for n in everything if n.startswith(('replica_', 'conv', 'dense', 'tr'))]
    kept = {name: everything[name] for name in left}
    with start(job, devices) as session:
        session.run(job.step.train_op)
        session.run(spoil)
        before = session.run(kept)
        told = 'tower 2: .* : Tensor had NaN values'
        with pytest.raises(tf.errors.InvalidArgumentError, match=told):
            session.run(job.step.train_op)
        assert_same_bits(before, session.run(kept))
        session.run(job.replicas.copy)
        session.run(job.step.train_op)


# Gradients


def average(tower_grads):
    """What each tower gets, a list of values."""
    devices = utils.choose_devices('cpu', len(tower_grads))
    averaged = replicas.average_gradients(
        train_multi_gpu.leave_out_untrained(tower_grads), devices.towers
    )
    with utils.open_session(devices, THREADS) as session:
        session.run(tf.global_variables_initializer())
        return session.run([[gradient for gradient, _ in grads] for grads in averaged])


def variable(name, shape, dtype=tf.float32):
    return tf.get_variable(name, shape, dtype, initializer=tf.zeros_initializer())


def test_gradients_of_any_kind_are_averaged(caplog, monkeypatch):
    monkeypatch.setattr(utils.log, 'propagate', True)
    a, b, c = variable('a', [2]), variable('b', [3, 1]), variable('c', [2], tf.float64)
    d, e = variable('d', [2, 1], tf.float16), variable('e', [1])
    rows = tf.IndexedSlices(
        tf.constant([[1.0], [2.0], [3.0]]), tf.constant([0, 2, 2]), tf.constant([3, 1])
    )
    third = tf.constant([1.0, 2.0], tf.float64) / 3
    half = tf.constant([[0.5], [1024.0]], tf.float16)
    towers = [
        [(tf.constant([1.0, 2.0]), a), (rows, b), (third, c), (half, d), (None, e)],
        [(None, a), (tf.ones([3, 1]), b), (third, c), (half * 3, d), (None, e)],
    ]
    found = average(towers)
    assert 'e:0 has no gradient in any tower: not trained' in caplog.text
    for own in found:
        for value, expected in zip(
            own,
            [
                np.array([0.5, 1.0], np.float32),
                np.array([[1.0], [0.5], [3.0]], np.float32),
                np.array([1.0, 2.0]) / 3,
                np.array([[1.0], [2048.0]], np.float16),
            ],
        ):
            assert value.dtype == expected.dtype
            np.testing.assert_array_equal(value, expected)
        assert len(own) == 4


def test_towers_of_other_variables_are_named_by_tower_0s_names():
    a, b, c = (variable(name, [1]) for name in ('a', 'replica_1/a', 'replica_2/b'))
    one = tf.ones([1])
    with pytest.raises(ValueError, match='tower 2 has b:0 where tower 0 has a:0'):
        train_multi_gpu.leave_out_untrained([[(one, a)], [(one, b)], [(one, c)]])


def test_only_what_is_trained_is_copied():
    def build_tower():
        weight = tf.get_variable('layer/weight', [2], initializer=tf.ones_initializer())
        return weight, tf.get_variable('layer/mean', [2], trainable=False)

    with replicas.own_variables(0) as variables:
        assert variables is None
        weight, mean = build_tower()
    with utils.on_tower('/cpu:0', reuse=True), replicas.own_variables(2) as variables:
        own_weight, own_mean = build_tower()
        with pytest.raises(ValueError, match='layer/other'):
            tf.get_variable('layer/other', [2])
    assert variables == [own_weight] and own_mean is mean
    assert own_weight.op.name == 'replica_2/layer/weight'
    assert tf.trainable_variables() == [weight]
    assert tf.global_variables() == [weight, mean]


def test_partitioned_variables_are_refused():
    def build_tower():
        partitioner = tf.fixed_size_partitioner(2)
        return tf.get_variable('weight', [4, 2], partitioner=partitioner)

    build_tower()
    refused = pytest.raises(utils.UserError, match='partitioned variables, as weight')
    with utils.on_tower('/cpu:0', reuse=True), replicas.own_variables(1), refused:
        build_tower()


# Checkpoints


@pytest.fixture
def run(main, flags):
    """Trains in 'm' to a step; returns the checkpoint."""

    def run(step, *argv, script='train_multi_gpu.py', model_dir='m'):
        argv = ['--model_dir', model_dir, '--max_steps', str(step), *argv]
        done = main(script, *flags, *argv)
        assert done.status == 0, done.err
        return read_checkpoint(checkpoints.find(model_dir)[0])

    return run


def test_a_checkpoint_has_the_names_of_one_tower(run, run_steps):
    own = run_steps(1, script=train)
    saved = run(1, '--num_gpus', '3', *REPLICATED)
    assert {n: v.shape for n, v in saved.items()} == {
        n: np.shape(v) for n, v in own.items()
    }


def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(run):
    # From one epoch into the next.
    flags = ['--num_gpus', '3', '--batch_size', '50', '--epochs', '3', *REPLICATED]
    whole = run(19, *flags, model_dir='whole')
    for step in (4, 13):
        run(step, *flags)
    assert_same_bits(whole, run(19, *flags))
    assert without_times(read_metrics('m')) == without_times(read_metrics('whole'))


def test_a_checkpoint_moves_freely_between_the_modes(run, main, flags):
    two = ['--num_gpus', '2', '--batch_size', '8']
    shared = run(9, *two, model_dir='shared')
    run(3, *two)
    run(6, *two, *REPLICATED)
    assert_same_bits(shared, run(9, *two))
    # With other numbers of towers, and by the other scripts.
    run(11, *REPLICATED, '--num_gpus', '4')
    run(12, script='train.py')
    last = run(14, *REPLICATED, '--num_gpus', '2')
    assert last['global_step'] == 14
    done = main('evaluate.py', '--model_dir', 'm', '--device', 'cpu')
    assert done.status == 0, done.err


def test_a_changed_mode_is_told(main, flags):
    flags += ['--num_gpus', '2', '--model_dir', 'm', '--max_steps']
    assert main('train_multi_gpu.py', *flags, '1').err == ''
    done = main('train_multi_gpu.py', *flags, '2', *REPLICATED)
    told = 'WARNING: m was trained with --variables shared, not replicated so far\n'
    assert done.err == told


# Equality


@pytest.mark.parametrize('step, changed', [(0, 1), (0, 2), (5, 2)])
def test_a_copy_that_differs_ends_the_run(
    main, flags, monkeypatch, caplog, step, changed
):
    build_replicas, make_calls = replicas.build, training.make_calls

    def build_with_spoil(num_towers):
        name = 'replica_%d/dense1/kernel' % changed
        (copy,) = [v for v in tf.local_variables() if v.op.name == name]
        # The last bit of one number.
        tf.group(copy[3, 5].assign(copy[3, 5] * (1 + 2.0**-23)), name='spoil')
        return build_replicas(num_towers)

    def make_spoiling_calls(session, *rest):
        calls = make_calls(session, *rest)
        steps = itertools.count()

        def take_step():
            if next(steps) == step:
                session.run('spoil')
            return calls.step()

        return calls._replace(step=take_step)

    monkeypatch.setattr(replicas, 'build', build_with_spoil)
    monkeypatch.setattr(training, 'make_calls', make_spoiling_calls)
    flags += ['--num_gpus', '3', '--epochs', '1', '--optimizer', 'sgd', *REPLICATED]
    done = main('train_multi_gpu.py', *flags, '--model_dir', 'm', '--batch_size', '20')
    assert done.status == 1
    assert done.err == (
        'ERROR: tower %d holds other values than tower 0 of dense1/kernel\n' % changed
    )
    # After the first step, or at the end of the epoch, before it is saved.
    assert ('train/acc' in done.out) == (step > 0)
    assert not [name for name in files('m') if 'ckpt' in name]


def test_towers_are_compared_after_the_first_step_and_at_an_epochs_end(small):
    devices, job = build(small, 2)
    compared = []
    nothing = training.Calls(*[None] * len(training.Calls._fields))
    calls = nothing._replace(hear=lambda wishes=(): 'heard')
    equal = tf.py_func(
        lambda equal: (compared.append(1), equal)[1], [job.replicas.equal], tf.bool
    )
    name = 'replica_1/conv1/kernel'
    (copy,) = [v for v in tf.local_variables() if v.op.name == name]
    spoil = copy.assign(-copy).op
    with start(job, devices) as session:
        calls = training.add_replicas(
            calls, session, job.replicas._replace(equal=equal)
        )
        assert calls.hear() == 'heard' and not compared
        assert calls.hear([]) == 'heard' and len(compared) == 1
        assert calls.hear([]) == calls.hear() == 'heard' and len(compared) == 1
        calls.check_equality()
        assert len(compared) == 2
        session.run(spoil)
        with pytest.raises(RunFailed, match='tower 1 .* of conv1/kernel$'):
            calls.check_equality()


def test_a_difference_names_a_tower_and_few_variables():
    names = ['a', 'b', 'c', 'd', 'e']
    equal = np.ones([2, 5], bool)
    assert replicas.find_difference(equal, names) is None
    equal[1, 3] = False
    told = 'tower 2 holds other values than tower 0 of '
    assert replicas.find_difference(equal, names) == told + 'd'
    equal[1] = False
    assert replicas.find_difference(equal, names) == told + 'a, b, c and 2 more'


# The script


def test_a_run_of_its_own_is_resumed(flags):
    # Compiled on TensorFlow 1.15, as by default.
    flags += ['--num_gpus', '2', '--model_dir', 'm', '--xla', 'auto', *REPLICATED]
    flags += ['--batch_size', '50', '--epochs', '1', '--staging', '--histograms']
    for trace, steps in (('3', '6'), ('8', '20')):
        more = ['--trace', trace, '--max_steps', steps]
        done = command('train_multi_gpu.py', *flags, *more)
        assert done.status == 0 and done.err == '', done.err
    assert [row['step'] for row in read_metrics('m')] == [20]
    assert read_metrics('m')[0]['valid_acc'] > 0.2
    assert {'m/model.ckpt-0-6.index', 'm/model.ckpt-1-20.index'} <= set(files())


@pytest.mark.parametrize(
    'more', [['--variable_device', 'gpu'], ['--gradient_packs', '2']]
)
def test_flags_that_mean_nothing_with_copies_are_refused(main, flags, more):
    done = main('train_multi_gpu.py', *flags, *REPLICATED, *more)
    assert_mistake(done, 'drop ' + more[0])
    assert files() == []


def test_several_machines_are_refused(main, flags, monkeypatch, addresses):
    task = {'type': 'worker', 'index': 0}
    config = {'cluster': {'worker': addresses}, 'task': task}
    monkeypatch.setenv('TF_CONFIG', json.dumps(config))
    assert cluster.read_machines(json.dumps(config)) != cluster.ONE
    done = main('train_multi_gpu.py', *flags, *REPLICATED)
    assert_mistake(done, '--variables replicated is not yet built for several machines')
    assert files() == []
