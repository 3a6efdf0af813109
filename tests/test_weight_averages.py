"""`--ema`: the moving average of the weights is what is evaluated and kept."""

import json

import numpy as np
import pytest

import model
import train
import train_multi_gpu
import training
import utils
from tests.conftest import (
    assert_same_bits,
    make_flags,
    read_checkpoint,
    read_metrics,
    start,
)
from tf1 import tf

SUFFIX = '/ExponentialMovingAverage'


@pytest.mark.parametrize('towers', [1, 2])
def test_the_average_follows_numpy_step_by_step(small, towers):
    flags = make_flags('--ema', '0.6', '--batch_size', '8', '--learning_rate', '0.01')
    devices = utils.choose_devices('cpu', towers)
    job = train_multi_gpu.build_job(flags, devices.towers, small)
    variables = {v.op.name: v for v in tf.trainable_variables()}
    averages = {n: v for n, v in _globals().items() if n.endswith(SUFFIX)}
    assert sorted(averages) == sorted(name + SUFFIX for name in variables)
    with start(job, devices) as session:
        expected = session.run(variables)
        for step in range(1, 11):
            session.run(job.step.train_op)
            decay = min(0.6, (1 + step) / (10 + step))
            weights, found = session.run([variables, averages])
            for name, weight in weights.items():
                expected[name] = decay * expected[name] + (1 - decay) * weight
                np.testing.assert_allclose(
                    found[name + SUFFIX], expected[name], rtol=2e-6, atol=2e-7
                )
        assert np.abs(found['dense1/kernel' + SUFFIX] - weights['dense1/kernel']).max()


def _globals():
    return {v.op.name: v for v in tf.global_variables()}


def test_training_itself_is_the_same_with_it_and_train_py_has_it(run_steps):
    plain = run_steps(5)
    averaged = run_steps(5, '--ema', '0.9')
    assert_same_bits(averaged, run_steps(5, '--ema', '0.9', script=train))
    assert_same_bits(
        plain, {k: v for k, v in averaged.items() if not k.endswith(SUFFIX)}
    )


def evaluate_by_hand(values, small):
    """(loss, accuracy) of the default network with {variable name: value}."""
    with tf.Graph().as_default(), tf.Session() as session:
        spec = model.model_fn(
            tf.constant(small.valid.images),
            tf.constant(small.valid.labels),
            model.cnn,
            10,
        )
        for variable in tf.trainable_variables():
            variable.load(values[variable.op.name], session)
        return session.run([spec.loss, tf.reduce_mean(spec.correct)])


def test_all_that_use_a_run_use_the_average(main, flags, small):
    flags += ['--model_dir', 'm', '--epochs', '2', '--ema', '0.9']
    assert main('train_multi_gpu.py', '--num_gpus', '2', *flags).status == 0
    saved = read_checkpoint('m/model.ckpt-2-62')
    averages = {n[: -len(SUFFIX)]: v for n, v in saved.items() if n.endswith(SUFFIX)}
    loss, accuracy = evaluate_by_hand(averages, small)
    other, _ = evaluate_by_hand(saved, small)
    assert abs(loss - other) > 1e-3
    row = read_metrics('m')[-1]
    assert row['valid_loss'] == pytest.approx(loss, rel=1e-5)
    assert row['valid_acc'] == pytest.approx(accuracy, abs=1e-6)
    done = main('evaluate.py', '--device', 'cpu', '--model_dir', 'm')
    assert done.status == 0 and ', the average of its weights' in done.out
    assert 'valid/acc: %.4f, valid/loss: %.4f' % (accuracy, loss) in done.out
    assert main('export.py', '--model_dir', 'm', '--frozen', 'm.pb').status == 0
    graph = tf.GraphDef()
    with open('m.pb', 'rb') as file:
        graph.ParseFromString(file.read())
    kernels = [n for n in graph.node if n.name == 'conv1/kernel']
    found = tf.make_ndarray(kernels[0].attr['value'].tensor)
    assert found.tobytes() == averages['conv1/kernel'].tobytes()


def test_a_run_with_an_average_goes_on_bit_for_bit(main, flags):
    flags += ['--ema', '0.99', '--epochs', '2']
    assert main('train.py', '--model_dir', 'whole', *flags).status == 0
    flags += ['--model_dir', 'm']
    assert main('train.py', '--max_steps', '70', *flags).status == 0
    assert main('train.py', *flags).status == 0
    whole, parts = (read_checkpoint(d + '/model.ckpt-2-124') for d in ('whole', 'm'))
    assert_same_bits(whole, parts)
    before = flags.index('--ema')
    done = main('train.py', *flags[:before], *flags[before + 2 :])
    assert done.status == 2
    assert 'ERROR: m was trained with --ema 0.99, not 0' in done.err
    with open('m/config.json') as file:
        assert json.load(file)['flags']['ema'] == 0.99


def test_without_it_no_variable_and_no_op_is_more(small):
    with tf.Graph().as_default() as graph, tf.device('/cpu:0'):
        job = train_multi_gpu.build_job(make_flags(), ['/cpu:0'], small)
        names = [op.name for op in graph.get_operations()]
    assert not [name for name in names if 'Exponential' in name]
    assert isinstance(job, training.Job)
