"""One step, by value: learning rate, optimizers, and the update."""

import types

import numpy as np
import pytest

import cluster
import model
import screen
import train
import train_multi_gpu
import training
import updates
from tests.conftest import assert_same_bits, make_flags
from tests.test_train_multi_gpu import SGD, largest_difference
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
    assert describe('--epochs', '1').startswith(
        'learning rate 0.001, falling as a cosine to 0 over 1 epoch: with'
    )
    assert ', rising over the first epoch, ' in describe('--warmup_epochs', '1')
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


# Weight decay


def follow(optimizer, resource, weight_decay, steps=4):
    """Takes steps from w [2, 2] and b [2] on, whose gradients are their own values.

    Returns:
      {name: value}, and the loss that each step says.
    """
    start = {'w': [[1.0, -2.0], [3.0, 0.5]], 'b': [1.0, -1.0]}
    variables = [
        tf.get_variable(
            name, initializer=tf.constant(start[name]), use_resource=resource
        )
        for name in ('w', 'b')
    ]
    losses = tf.reshape(tf.add_n([tf.nn.l2_loss(v) for v in variables]), [1])
    correct = tf.zeros([1])
    spec = model.ModelSpec(tf.reduce_mean(losses), losses, correct, None, None)
    rate = tf.constant(0.1)
    optimizer = updates.create_optimizer(optimizer, rate)
    train_op = updates.apply_gradients(
        updates.Rule(rate, optimizer, None),
        optimizer.compute_gradients(spec.loss, variables),
        updates.sum_up([spec]),
        training.create_state(),
        weight_decay=weight_decay,
    )
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        losses = [session.run(train_op)[0] for _ in range(steps)]
        return dict(zip(start, session.run(variables))), losses


def simulate(optimizer, weight_decay, steps=4):
    """What `follow` returns, in NumPy."""
    values = {'w': np.array([[1, -2], [3, 0.5]]), 'b': np.array([1.0, -1])}
    rate, losses = 0.1, []
    m, v = ({name: np.zeros_like(a) for name, a in values.items()} for _ in range(2))
    for step in range(1, steps + 1):
        losses.append(sum((a**2).sum() / 2 for a in values.values()))
        for name, before in values.items():
            taken = rate * before
            if optimizer == 'adam':
                m[name] = 0.9 * m[name] + 0.1 * before
                v[name] = 0.999 * v[name] + 0.001 * before**2
                root = np.sqrt(v[name] / (1 - 0.999**step))
                taken = rate * m[name] / (1 - 0.9**step) / (root + 1e-8)
            decay = weight_decay if name == 'w' else 0
            values[name] = before - taken - rate * decay * before
    return values, losses


@pytest.mark.parametrize('resource', [False, True], ids=['ref', 'resource'])
@pytest.mark.parametrize('optimizer', ['sgd', 'adam'])
def test_weight_decay_takes_its_share_of_kernels_whatever_the_optimizer(
    optimizer, resource
):
    values, losses = follow(optimizer, resource, 0.5)
    expected, their_losses = simulate(optimizer, 0.5)
    for name, value in values.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-4)
    np.testing.assert_allclose(losses, their_losses, rtol=1e-5)


def test_weight_decay_leaves_biases_and_the_loss_as_they_are(run_steps):
    argv = ['--optimizer', 'sgd', '--num_gpus', '2']
    start, plain = run_steps(0, *argv), run_steps(1, *argv)
    decayed = run_steps(1, *argv, '--weight_decay', '2')
    rate = 0.001
    for name, value in plain.items():
        if name.endswith('kernel'):
            expected = value - rate * 2 * start[name]
            np.testing.assert_allclose(decayed[name], expected, rtol=1e-4, atol=1e-7)
            assert (decayed[name] != value).any()
        else:
            assert (decayed[name] == value).all(), name


# Clipping


def clip(clip_norm, *gradients):
    """The gradients of as many variables, clipped."""
    variables = [tf.Variable([0.0]) for _ in gradients]
    clipped = updates.clip(list(zip(gradients, variables)), clip_norm)
    assert [variable for _, variable in clipped] == variables
    with tf.Session() as session:
        return session.run([gradient for gradient, _ in clipped])


def sparse(rows, values):
    return tf.IndexedSlices(
        tf.constant(values), tf.constant(rows, tf.int64), tf.constant([4, 2])
    )


def test_gradients_are_scaled_down_to_their_global_norm():
    a, b = np.float32([3, -4]), np.float32([[12]])  # of norm 13
    for found, value in zip(clip(6.5, tf.constant(a), tf.constant(b)), (a, b)):
        np.testing.assert_allclose(found, value / 2, rtol=1e-6)


def test_gradients_within_the_norm_keep_their_bits():
    a, b = np.float32([1 / 3, -4]), np.float32([[1e-30]])
    for found, value in zip(clip(5, tf.constant(a), tf.constant(b)), (a, b)):
        assert found.tobytes() == value.tobytes()
    zero = clip(1, tf.zeros([3]))
    assert zero[0].tolist() == [0, 0, 0]


def test_sparse_gradients_stay_sparse_and_count_as_their_sum():
    # Rows 0 and 2, the second from two towers: 3 + 1 and -2 + 2, of norm 4, beside 3.
    values = [[0.0, 0.0], [3.0, -2.0], [1.0, 2.0]]
    found, dense = clip(2.5, sparse([0, 2, 2], values), tf.constant([3.0]))
    assert found.indices.tolist() == [0, 2, 2]
    np.testing.assert_allclose(found.values, np.array(values) / 2, rtol=1e-6)
    np.testing.assert_allclose(dense, [1.5], rtol=1e-6)


def test_a_norm_that_overflows_ends_the_run_and_trains_no_zeros(main, flags, tmp_path):
    (tmp_path / 'huge.py').write_text(
        'import model\n'
        'def net(images, training, num_classes, dropout):\n'
        "    x = model.dense(model.flatten(images), num_classes, 'd')\n"
        '    return x * 1e22\n'
    )
    flags += ['--model', 'huge.py:net']
    done = main('train.py', '--clip_norm', '1', *flags)
    assert done.status == 1
    told = "step 1, all towers: the gradients' norm has Inf values; the checkpoints are"
    assert told in done.err and 'Traceback' not in done.err


# All together


RECIPE = ['--weight_decay', '0.5', '--clip_norm', '0.5', '--label_smoothing', '0.2']
RECIPE += ['--warmup_epochs', '0.02']


def test_the_recipe_is_the_same_for_any_number_of_towers(run_steps, monkeypatch):
    def cnn_float64(images, *settings):
        with tf.variable_scope(tf.get_variable_scope(), dtype=tf.float64):
            return model.cnn(tf.cast(images, tf.float64), *settings)

    monkeypatch.setitem(model.NETWORKS, 'cnn', cnn_float64)
    argv = SGD + RECIPE
    one = run_steps(10, '--num_gpus', '1', '--batch_size', '12', *argv)
    two = run_steps(10, '--num_gpus', '2', '--batch_size', '6', *argv)
    assert largest_difference(one, two) <= 1e-12
    for flag in range(0, len(RECIPE), 2):
        less = SGD + RECIPE[:flag] + RECIPE[flag + 2 :]
        other = run_steps(10, '--num_gpus', '1', '--batch_size', '12', *less)
        assert largest_difference(one, other) > 1e-4, RECIPE[flag]


def test_the_recipe_gives_both_scripts_the_same_bits(run_steps):
    assert_same_bits(
        run_steps(5, *RECIPE, script=train),
        run_steps(5, *RECIPE, '--num_gpus', '1'),
    )


def test_what_is_off_is_not_in_the_graph(small):
    def build(*argv, machines=cluster.ONE):
        with tf.Graph().as_default() as graph, tf.device('/cpu:0'):
            devices = ['/cpu:0', '/cpu:1']
            flags = make_flags(*argv)
            train_multi_gpu.build_job(flags, devices, small, machines=machines)
            return graph

    off = ['--weight_decay', '0', '--label_smoothing', '0', '--warmup_epochs', '0']
    two = cluster.Machines(['a:1', 'b:1'], 0)
    for machines in (cluster.ONE, two):
        graphs = [build(machines=machines), build(*off, machines=machines)]
        plain, zeros = (graph.as_graph_def() for graph in graphs)
        assert plain == zeros
        names = {op.name for op in graphs[0].get_operations()}
        types = {op.type for op in graphs[0].get_operations()}
        assert not [n for n in names if 'clip_norm' in n or 'weight_decay' in n]
        assert not types & {'L2Loss', 'SoftmaxCrossEntropyWithLogits', 'OneHot'}


def test_a_variable_without_a_gradient_is_named_and_left_as_it_is(
    main, flags, tmp_path
):
    (tmp_path / 'own.py').write_text(
        'import model\n'
        'def net(images, training, num_classes, dropout):\n'
        "    model.weight('unused', [3, 3])\n"
        "    return model.dense(model.flatten(images), num_classes, 'd')\n"
    )
    flags += ['--model', 'own.py:net', '--weight_decay', '1', '--clip_norm', '1']
    values = []
    for script, told in (
        ('train.py', 'unused:0 has no gradient: not trained'),
        ('train_multi_gpu.py', 'unused:0 has no gradient in any tower: not trained'),
    ):
        model_dir = ['--model_dir', script[:-3], '--histograms']
        done = main(script, '--max_steps', '2', *model_dir, *flags)
        assert done.status == 0 and done.err == 'WARNING: %s\n' % told
        prefix = '%s/model.ckpt-0-2' % script[:-3]
        values.append(tf.train.load_variable(prefix, 'unused'))
    assert (values[0] == values[1]).all() and (values[0] != 0).all()
