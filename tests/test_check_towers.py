"""`--check`: one step of N towers against one of a single tower."""

import re

import numpy as np
import pytest

import batch_norm
import check_towers
import train_multi_gpu
from tests.conftest import files
from tf1 import tf

RUN = ['--max_steps', '1', '--summary_steps', '0', '--model_dir', 'm', '--check']


def check(main, flags, *argv):
    """Returns (finished, the difference that was printed)."""
    done = main('train_multi_gpu.py', *flags, *RUN, *argv)
    found = re.findall(r'check: .* differs by (\S+) of its largest change', done.out)
    found += re.findall(r'ERROR: check: .* differs by (\S+) of its l', done.err)
    assert len(found) == 1, done
    return done, float(found[0])


@pytest.mark.parametrize('towers', ['1', '2', '4'])
@pytest.mark.parametrize(
    'more',
    [
        [],
        ['--gradient_packs', '2'],
        ['--xla', 'on'],
        ['--variables', 'replicated'],
    ],
)
def test_towers_that_are_one_go_on_to_train(main, flags, towers, more):
    argv = ['--num_gpus', towers, '--batch_size', '8', *more]
    done, difference = check(main, flags, *argv)
    assert done.status == 0 and done.err == '' and 'they are one\n' in done.out
    assert difference <= 1e-5 and (difference > 0) == (towers != '1')
    line = 'check: %s of 8 and one of %d, a' % (
        {'1': '1 tower'}.get(towers, towers + ' towers'),
        8 * int(towers),
    )
    assert line in done.out


@pytest.mark.parametrize('factor', [2, 1.001])
def test_towers_that_are_not_one_end_with_status_1(main, flags, monkeypatch, factor):
    average = train_multi_gpu.average_gradients

    def spoil(tower_grads):
        means = average(tower_grads)
        if len(tower_grads) == 1:
            return means
        return [(g * factor if v.op.name == 'dense1/bias' else g, v) for g, v in means]

    monkeypatch.setattr(train_multi_gpu, 'average_gradients', spoil)
    done, difference = check(main, flags, '--num_gpus', '2')
    assert done.status == 1 and not files('m')
    assert difference == pytest.approx(factor - 1, rel=0.05)
    assert 'dense1/bias differs' in done.err
    assert done.err.endswith('the towers are not one\n') and done.err.count('\n') == 1


@pytest.mark.parametrize('variables', ['shared', 'replicated'])
def test_a_gradient_that_is_not_finite_is_told_by_tower(main, flags, variables):
    with open('net.py', 'w') as file:
        file.write(OVERFLOWS)
    argv = ['--num_gpus', '2', '--variables', variables, '--model', 'net.py:overflow']
    done = main('train_multi_gpu.py', *flags, *RUN, *argv)
    assert done.status == 1 and not files('m')
    told = r'ERROR: check: tower [01]: the gradient of w has (NaN|Inf) values\n'
    assert re.fullmatch(told, done.err), done.err


OVERFLOWS = """
import tensorflow.compat.v1 as tf

def overflow(images, training, num_classes):
    x = tf.reshape(images, [images.shape[0], -1])
    start = tf.constant_initializer(1e30)
    w = tf.get_variable('w', [x.shape[1], num_classes], initializer=start)
    return 1e30 * tf.matmul(x, w)
"""


def test_each_towers_own_batch_norm_is_explained_and_a_common_one_is_one(main, flags):
    argv = ['--num_gpus', '2', '--model', 'article', '--batch_size', '16']
    done, difference = check(main, flags, *argv)
    assert done.status == 0 and difference > 1e-2
    assert '; --sync_batch_norm makes them one\n' in done.out
    done, difference = check(main, flags, *argv, '--sync_batch_norm')
    assert done.status == 0 and difference <= 5e-5
    assert 'they are one\n' in done.out


def test_a_synchronisation_that_fails_is_not_explained_away(main, flags, monkeypatch):
    monkeypatch.setattr(batch_norm, '_average', lambda tensor, *_: tensor)
    argv = ['--num_gpus', '2', '--model', 'article', '--batch_size', '16']
    done, difference = check(main, flags, *argv, '--sync_batch_norm')
    assert done.status == 1 and difference > 1e-2


def test_what_training_does_is_the_same_with_it(main, flags):
    flags += ['--num_gpus', '2', '--max_steps', '3', '--summary_steps', '0']
    saved = []
    for more in ([], ['--check']):
        model_dir = 'm%d' % len(more)
        assert (
            main('train_multi_gpu.py', *flags, *more, '--model_dir', model_dir).status
            == 0
        )
        reader = tf.train.NewCheckpointReader(model_dir + '/model.ckpt-0-3')
        saved.append(reader.get_tensor('conv1/kernel').tobytes())
    assert saved[0] == saved[1]


def test_the_difference_is_measured_by_value():
    one = {'a': np.array([1.0, -2.0]), 'b': np.array([0.5]), 'c': np.array([1e-9])}
    many = {'a': np.array([1.0, -1.0]), 'b': np.array([0.6]), 'c': np.array([3e-9])}
    assert check_towers.find_largest_difference(one, many) == (0.5, 'a')
    many['a'] = one['a']
    difference, name = check_towers.find_largest_difference(one, many)
    assert (round(difference, 9), name) == (0.2, 'b')
    many['b'] = one['b']
    difference, name = check_towers.find_largest_difference(one, many)
    assert (round(difference, 12), name) == (1e-7, 'c')
    many['c'] = np.array([np.nan])
    assert check_towers.find_largest_difference(one, many)[1] == 'c'


def test_several_machines_have_no_check(main, flags, monkeypatch):
    monkeypatch.setenv(
        'TF_CONFIG',
        '{"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]},'
        ' "task": {"type": "worker", "index": 0}}',
    )
    done = main('train_multi_gpu.py', *flags, *RUN)
    assert done.status == 2 and '--check compares the towers of one machine' in done.err
