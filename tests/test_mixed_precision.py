"""`--fp16`: float16 math, float32 variables, and a loss scale that adapts."""

import numpy as np
import pytest

import mixed_precision
import model
import train
import train_multi_gpu
import training
import updates
import utils
from tests.conftest import (
    THREADS,
    assert_same_bits,
    make_flags,
    read_checkpoint,
    read_metrics,
    start,
)
from tf1 import tf


@pytest.mark.parametrize('network', sorted(model.NETWORKS))
def test_the_math_is_float16_and_all_variables_are_float32(network):
    images = tf.zeros([4, 28, 28, 1], tf.uint8)
    spec = model.model_fn(
        images,
        tf.zeros([4], tf.int64),
        model.NETWORKS[network],
        10,
        training=True,
        dropout=model.dropout_layers(0.4, 0, 0, tf.train.get_or_create_global_step()),
        dtype=tf.float16,
    )
    assert {v.dtype.base_dtype for v in tf.trainable_variables()} == {tf.float32}
    assert spec.losses.dtype == spec.logits.dtype == tf.float32
    math = ('Conv2D', 'MatMul', 'Relu', 'MaxPool', 'BiasAdd')
    operations = tf.get_default_graph().get_operations()
    used = {op.outputs[0].dtype for op in operations if op.type in math}
    assert used == {tf.float16}
    gradients = tf.gradients(spec.loss, tf.trainable_variables())
    assert {g.dtype for g in gradients} == {tf.float32}


def make_step(optimizer='adam', rate=0.1):
    """A step whose gradients and loss scale can be set: (train_op, state, ...)."""
    state = training.create_state()
    w = tf.get_variable('w', [2], initializer=tf.constant_initializer(1))
    loss_scale = mixed_precision.create_loss_scale(True)
    fed = tf.placeholder(tf.float32, [2])
    grads = mixed_precision.scale_down([(fed * loss_scale.scale, w)], loss_scale)
    rate = tf.constant(rate)
    sums = updates.Sums(tf.constant(0.5, tf.float64), tf.constant(1.0), 4, None)
    optimizer = updates.create_optimizer(optimizer, rate)
    rule = updates.Rule(rate, optimizer, loss_scale)
    train_op = updates.apply_gradients(rule, grads, sums, state)
    return fed, train_op, state, w, loss_scale


@pytest.mark.parametrize('wrong', [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize('optimizer', ['sgd', 'momentum', 'adam', 'rmsprop'])
def test_a_step_that_overflows_updates_nothing_and_halves_the_scale(optimizer, wrong):
    fed, train_op, state, w, loss_scale = make_step(optimizer)
    others = [v for v in tf.global_variables() if v not in [*state, *loss_scale]]
    assert w in others
    with utils.open_session(utils.CPU, THREADS) as session:
        session.run(tf.global_variables_initializer())
        session.run(train_op, {fed: [0.5, -2]})
        before = session.run(others)
        assert before[others.index(w)].tolist() != [1, 1]
        session.run(train_op, {fed: [1, wrong]})
        for one, other in zip(before, session.run(others)):
            assert one.tobytes() == other.tobytes()
        assert session.run(list(loss_scale)) == [2**14, 0, 1]
        # The images are consumed, and the step is one.
        assert session.run([state.global_step, state.epoch_images]) == [2, 8]
        session.run(train_op, {fed: [1, 1]})
        assert session.run(list(loss_scale)) == [2**14, 1, 1]
        assert (session.run(w) != before[others.index(w)]).any()


def test_the_scale_doubles_after_enough_good_steps_up_to_a_bound():
    fed, train_op, _, _, loss_scale = make_step('sgd', 0.0)
    with utils.open_session(utils.CPU, THREADS) as session:
        session.run(tf.global_variables_initializer())
        loss_scale.good_steps.load(mixed_precision.GROW_STEPS - 2, session)
        found = []
        for _ in range(3):
            session.run(train_op, {fed: [1, 1]})
            found.append(session.run(list(loss_scale)))
        assert found == [[2**15, 1999, 0], [2**16, 0, 0], [2**16, 1, 0]]
        loss_scale.scale.load(mixed_precision.LARGEST, session)
        loss_scale.good_steps.load(mixed_precision.GROW_STEPS - 1, session)
        session.run(train_op, {fed: [1, 1]})
        assert session.run(list(loss_scale)) == [2**24, 0, 0]


def test_what_no_scale_can_help_is_an_error():
    fed, train_op, state, _, loss_scale = make_step()
    with utils.open_session(utils.CPU, THREADS) as session:
        session.run(tf.global_variables_initializer())
        loss_scale.scale.load(1, session)
        with pytest.raises(
            tf.errors.InvalidArgumentError, match='at a loss scale of 1'
        ):
            session.run(train_op, {fed: [1, np.nan]})
        assert session.run(state.global_step) == 0


def net(images, training, num_classes, dropout):
    """A layer of 64 units: on a CPU half math takes a hundred times as long."""
    x = tf.nn.relu(model.dense(model.flatten(images), 64, 'dense1'))
    return model.dense(dropout(x), num_classes, 'dense2')


@pytest.mark.parametrize('towers', ['1', '2'])
def test_it_learns_as_float32_does(part_dir, main, flags, towers, monkeypatch):
    monkeypatch.setitem(model.NETWORKS, 'net', net)
    flags += ['--num_gpus', towers, '--epochs', '2', '--batch_size', '20']
    flags += ['--learning_rate', '0.002', '--model', 'net', '--data_dir', part_dir]
    done = main('train_multi_gpu.py', '--model_dir', 'plain', *flags)
    assert done.status == 0 and 'fp16' not in done.out
    done = main('train_multi_gpu.py', '--model_dir', 'half', '--fp16', *flags)
    assert done.status == 0 and done.err == '', done.err
    assert 'fp16: loss scale 32768; 0 steps skipped so far\n' in done.out
    (_, plain), (first, half) = read_metrics('plain'), read_metrics('half')
    assert half['train_loss'] < first['train_loss'] < 1.8  # from 2.3
    assert abs(half['valid_acc'] - plain['valid_acc']) <= 0.02
    assert half['valid_loss'] != plain['valid_loss']
    # Evaluated is in float32, so evaluate.py says the same.
    done = main('evaluate.py', '--device', 'cpu', '--model_dir', 'half')
    assert 'valid/acc: {valid_acc:.4f}, valid/loss: {valid_loss:.4f}'.format(
        **half
    ) in (done.out)


def test_a_scale_that_is_too_large_is_found_and_saved(small, main, flags, monkeypatch):
    monkeypatch.setattr(mixed_precision, 'FIRST', 2.0**40)
    monkeypatch.setitem(model.NETWORKS, 'net', net)
    flags += ['--fp16', '--batch_size', '50', '--model_dir', 'm', '--epochs', '1']
    flags += ['--model', 'net']
    assert main('train.py', '--max_steps', '10', *flags).status == 0
    part = read_checkpoint('m/model.ckpt-0-10')
    assert part['loss_scale/scale'] == 2.0 ** (40 - part['loss_scale/skipped'])
    assert part['loss_scale/skipped'] == 10
    done = main('train.py', *flags)
    saved = read_checkpoint('m/model.ckpt-1-40')
    assert 10 < saved['loss_scale/skipped'] < 35
    assert saved['loss_scale/scale'] == 2.0 ** (40 - saved['loss_scale/skipped'])
    assert '%d steps skipped so far' % saved['loss_scale/skipped'] in done.out
    done = main('train.py', *[flag for flag in flags if flag != '--fp16'])
    assert done.status == 2 and 'm was trained with --fp16' in done.err


def test_copies_of_the_variables_go_on_bit_for_bit_too(main, flags):
    flags += ['--fp16', '--batch_size', '5', '--epochs', '1', '--model', 'mlp']
    flags += ['--variables', 'replicated']
    argv = ['train_multi_gpu.py', '--num_gpus', '2', *flags, '--model_dir']
    assert main(*argv, 'whole', '--max_steps', '6').status == 0
    assert main(*argv, 'm', '--max_steps', '3').status == 0
    done = main(*argv, 'm', '--max_steps', '6')
    assert done.status == 0 and done.err == '', done.err
    whole, parts = (read_checkpoint(d + '/model.ckpt-0-6') for d in ('whole', 'm'))
    assert_same_bits(whole, parts)
    assert {'beta1_power', 'dense1/kernel/Adam'} <= set(whole)


def test_train_py_is_one_tower_and_a_run_goes_on_bit_for_bit(run_steps, main, flags):
    argv = ['--fp16', '--batch_size', '2']
    assert_same_bits(
        run_steps(3, *argv, script=train), run_steps(3, *argv, '--num_gpus', '1')
    )
    flags += ['--fp16', '--batch_size', '10', '--epochs', '1', '--model', 'mlp']
    argv = ['train_multi_gpu.py', '--num_gpus', '2', *flags, '--model_dir']
    assert main(*argv, 'whole', '--max_steps', '9').status == 0
    assert main(*argv, 'm', '--max_steps', '4').status == 0
    assert main(*argv, 'm', '--max_steps', '9').status == 0
    whole, parts = (read_checkpoint(d + '/model.ckpt-0-9') for d in ('whole', 'm'))
    assert_same_bits(whole, parts)


def test_a_network_of_ones_own_needs_to_know_nothing_of_it(main, flags, part_dir):
    with open('net.py', 'w') as file:
        file.write(
            'import tensorflow.compat.v1 as tf\n'
            'from batch_norm import batch_norm\n'
            'def net(images, training, num_classes):\n'
            '    x = tf.reshape(images, [-1, 784])\n'
            '    start = tf.glorot_uniform_initializer(seed=1)\n'
            '    w = tf.get_variable("w", [784, 32], initializer=start)\n'
            '    x = tf.nn.relu(batch_norm(tf.matmul(x, w), training))\n'
            '    zeros = tf.zeros_initializer()\n'
            '    b = tf.get_variable("b", num_classes, initializer=zeros)\n'
            '    v = tf.get_variable("v", [32, num_classes], initializer=start)\n'
            '    return tf.matmul(x, v) + b\n'
        )
    argv = ['train_multi_gpu.py', '--num_gpus', '2', '--model', 'net.py:net', *flags]
    argv += ['--data_dir', part_dir, '--epochs', '2', '--model_dir']
    assert main(*argv, 'plain').status == 0
    done = main(*argv, 'm', '--fp16')
    assert done.status == 0, done.err
    plain, half = (read_metrics(d)[-1]['valid_acc'] for d in ('plain', 'm'))
    assert plain > 0.5 and abs(half - plain) <= 0.02
    saved = read_checkpoint('m/model.ckpt-2-62')
    assert {
        v.dtype for n, v in saved.items() if '/' not in n and n != 'global_step'
    } == {np.dtype(np.float32)}


def test_without_it_there_is_no_scale(small):
    with tf.Graph().as_default(), tf.device('/cpu:0'):
        devices = utils.choose_devices('cpu', 1)
        job = train_multi_gpu.build_job(
            make_flags('--device', 'cpu'), ['/cpu:0'], small
        )
        operations = tf.get_default_graph().get_operations()
        assert not [op.name for op in operations if 'loss_scale' in op.name]
        assert not [op.name for op in operations if op.type == 'Switch']
        with start(job, devices) as session:
            assert training.make_read_loss_scale(session, job.rule.loss_scale)() is None
