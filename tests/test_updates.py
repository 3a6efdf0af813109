"""One step, by value: learning rate, optimizers, and the update."""

import types

import numpy as np
import pytest

import screen
import training
import updates
from tests.conftest import make_flags
from tf1 import tf
from utils import UserError

# The learning rate


def find_rate(epoch, images, *argv, num_images=100, global_batch=10):
    """The learning rate where training stands, of 4 epochs from 0.1 on."""
    flags = make_flags('--epochs', '4', '--learning_rate', '0.1', *argv)
    state = training.create_state()
    pipeline = types.SimpleNamespace(num_images=num_images, global_batch=global_batch)
    learning_rate = updates.learning_rate(flags, state, pipeline)
    assert learning_rate.dtype == tf.float32
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run([state.epoch.assign(epoch), state.epoch_images.assign(images)])
        return session.run(learning_rate)


@pytest.mark.parametrize(
    'schedule, epoch, images, rate',
    [
        ('cosine', 0, 0, 0.1),
        ('cosine', 0, 50, 0.1 * (1 + np.cos(np.pi / 8)) / 2),
        ('cosine', 2, 0, 0.05),
        ('cosine', 3, 50, 0.1 * (1 + np.cos(np.pi * 7 / 8)) / 2),
        ('cosine', 4, 0, 0.0),
        ('constant', 0, 0, 0.1),
        ('constant', 3, 50, 0.1),
        ('step', 0, 0, 0.1),
        ('step', 1, 99, 0.1),
        ('step', 2, 0, 0.01),
        ('step', 2, 99, 0.01),
        ('step', 3, 0, 0.001),
        ('step', 4, 0, 0.001),
        ('exponential', 0, 0, 0.1),
        ('exponential', 1, 0, 0.1 * 0.01 ** (1 / 4)),
        ('exponential', 2, 0, 0.01),
        ('exponential', 3, 50, 0.1 * 0.01 ** (7 / 8)),
        ('exponential', 4, 0, 0.001),
    ],
)
def test_the_learning_rate_is_a_function_of_images_seen(schedule, epoch, images, rate):
    found = find_rate(epoch, images, '--schedule', schedule)
    assert found == pytest.approx(rate, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize('schedule', ['constant', 'cosine'])
def test_the_warm_up_rises_to_what_the_schedule_says(schedule):
    argv = ['--schedule', schedule]
    for epoch, images, factor in (
        (0, 0, 10 / 150),  # not 0: the first step trains, too
        (0, 10, 20 / 150),
        (0, 90, 100 / 150),
        (1, 0, 110 / 150),
        (1, 40, 1),
        (1, 50, 1),
        (3, 0, 1),
    ):
        with tf.Graph().as_default():
            plain = find_rate(epoch, images, *argv)
        with tf.Graph().as_default():
            found = find_rate(epoch, images, '--warmup_epochs', '1.5', *argv)
        assert found == pytest.approx(plain * factor, rel=1e-6), (epoch, images)


@pytest.mark.parametrize('global_batch, rate', [(32, 0.1), (64, 0.2), (32 * 12, 1.2)])
def test_scale_lr_multiplies_by_towers_and_machines(global_batch, rate):
    argv = ['--scale_lr', '--schedule', 'constant']
    found = find_rate(0, 0, *argv, num_images=10000, global_batch=global_batch)
    assert found == pytest.approx(rate, rel=1e-6)


def test_the_start_says_what_the_learning_rate_will_be():
    def describe(*argv):
        return screen.describe_rate(make_flags(*argv), 64)

    assert describe() == (
        'learning rate 0.001, falling as a cosine to 0 over 10 epochs: with another '
        '--epochs it is another'
    )
    assert describe('--schedule', 'constant') == 'learning rate 0.001, constant'
    argv = ['--scale_lr', '--warmup_epochs', '0.5', '--schedule', 'constant']
    assert describe(*argv) == (
        'learning rate 0.002 = 0.001 x 2, as --scale_lr says, rising over the first '
        '0.5 epochs, constant'
    )
    assert ', falling to a tenth at 50 % and again at 75 % of 10 epochs: with' in (
        describe('--schedule', 'step')
    )
    assert ', falling evenly to 1 % over 10 epochs: with another --epochs' in (
        describe('--schedule', 'exponential')
    )


def test_the_warm_up_is_shorter_than_the_run():
    make_flags('--warmup_epochs', '9.9')
    told = '--warmup_epochs 3: give fewer than --epochs 3'
    with pytest.raises(UserError, match=told):
        make_flags('--warmup_epochs', '3', '--epochs', '3')


# The optimizers


@pytest.mark.parametrize(
    'name, values',
    [
        # From 1, gradient 2, rate 0.1. Momentum makes the second step 1.9 times 0.2.
        ('sgd', [0.8, 0.6]),
        ('momentum', [0.8, 0.42]),
        ('adam', [0.9, 0.8]),
    ],
)
def test_optimizers_by_value(name, values):
    w = tf.get_variable('w', [], initializer=tf.ones_initializer())
    update = updates.create_optimizer(name, tf.constant(0.1)).minimize(2 * w)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        found = []
        for _ in values:
            session.run(update)
            found.append(session.run(w))
    np.testing.assert_allclose(found, values, rtol=1e-5)
