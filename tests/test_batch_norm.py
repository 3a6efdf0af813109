"""Batch norm: by value in one tower, right over several, one batch with the flag."""

import os

import numpy as np
import pytest

import batch_norm
import checkpoints
import model
import train
import train_multi_gpu
import training
import updates
import utils
from cluster import Machines
from data_sets import Examples
from tests.conftest import (
    THREADS,
    assert_mistake,
    assert_same_bits,
    files,
    make_flags,
    read_checkpoint,
    read_metrics,
)
from tests.processes import run_python
from tests.test_train_multi_gpu import SGD, largest_difference
from tf1 import tf
from utils import UserError

GAMMA, BETA = np.float32([2, 0.5, 1]), np.float32([-1, 0, 3])


def run(fetches):
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        return session.run(fetches)


def set_variables(**values):
    """Gives the variables of these names, that will be made, other first values."""

    def get_variable(getter, name, *args, **kwargs):
        short = name.rpartition('/')[2]
        if short in values:
            kwargs['initializer'] = tf.constant_initializer(values[short])
        return getter(name, *args, **kwargs)

    return tf.variable_scope('', custom_getter=get_variable)


# One tower


@pytest.mark.parametrize('shape', [(5, 3), (4, 6, 5, 3), (4, 7, 3), (2, 3, 2, 2, 3)])
def test_training_normalises_with_the_batch_and_evaluation_with_the_averages(shape):
    x = np.random.RandomState(0).randn(*shape).astype(np.float32) * 3 + 1
    mean, variance = np.float32([0.5, 0, 2]), np.float32([4, 1, 0.25])
    start = dict(gamma=GAMMA, beta=BETA, moving_mean=mean, moving_variance=variance)
    with set_variables(**start):
        trained = batch_norm.batch_norm(tf.constant(x), True)
    with tf.variable_scope('', reuse=True):
        evaluated = batch_norm.batch_norm(tf.constant(x), False)
    assert trained.shape.as_list() == evaluated.shape.as_list() == list(shape)
    averaged = batch_norm.average_statistics(1)
    trained, evaluated, statistics = run([trained, evaluated, averaged])
    rows = x.reshape(-1, 3).astype(np.float64)
    own_mean, own_variance = rows.mean(0), rows.var(0)
    for found, m, v in (
        (trained, own_mean, own_variance),
        (evaluated, mean, variance),
    ):
        wanted = (x - m) / np.sqrt(v + 1e-3) * GAMMA + BETA
        np.testing.assert_allclose(found, wanted, atol=2e-5)
    np.testing.assert_allclose(statistics[0][0], own_mean, atol=1e-5)
    np.testing.assert_allclose(statistics[1][0], rows.var(0, ddof=1), rtol=1e-5)


def test_variables_are_float32_and_two_of_four_are_trained():
    x = tf.constant(np.random.RandomState(0).randn(8, 2, 2, 3), tf.float16)
    for trains in (True, False):
        with tf.variable_scope('', reuse=not trains):
            y = batch_norm.batch_norm(x, trains, 'norm')
        assert y.dtype == tf.float16
    kinds = {
        v.op.name: (v.shape.as_list(), v.dtype.base_dtype)
        for v in tf.global_variables()
    }
    assert kinds == {
        'norm/' + name: ([3], tf.float32)
        for name in ('gamma', 'beta', 'moving_mean', 'moving_variance')
    }
    trained = [v.op.name for v in tf.trainable_variables()]
    assert trained == ['norm/gamma', 'norm/beta']
    statistics = batch_norm.average_statistics(1)
    assert [s.dtype for s, _ in statistics] == [tf.float32] * 2
    y, x, (mean, _) = run([y, x, statistics])
    np.testing.assert_allclose(y, x / np.sqrt(1.001), atol=4e-3)
    np.testing.assert_allclose(mean[0], x.astype(float).mean((0, 1, 2)), atol=1e-3)


def test_an_evaluation_notes_nothing():
    batch_norm.batch_norm(tf.zeros([2, 3]), False)
    assert batch_norm.average_statistics(1) == []
    assert tf.get_collection(tf.GraphKeys.UPDATE_OPS) == []


def test_train_py_is_one_tower_bit_for_bit(run_steps):
    flags = ['--model', 'article', '--batch_size', '8']
    one = run_steps(5, *flags, script=train)
    assert_same_bits(one, run_steps(5, '--num_gpus', '1', *flags))
    assert (one['conv4/batch_norm/moving_variance'] != 1).all()


# Several towers


def build_towers(batches, build, group_size=1):
    """Returns what `build` returns for each tower's batch."""
    found = []
    for tower, batch in enumerate(batches):
        place = utils.on_tower('/cpu:%d' % tower, tower > 0)
        with place, batch_norm.in_tower(tower, group_size):
            found.append(build(tf.constant(batch, tf.float32)))
    return found


def take_steps(statistics, own_updates=(), steps=2):
    """Runs steps that train nothing else; returns all variables after each."""
    state = training.create_state()
    sums = updates.Sums(tf.constant(0.0, tf.float64), tf.constant(0.0), 1, None)
    weight = tf.get_variable('weight', [])
    train_op = updates.apply_gradients(
        updates.create_sgd(0.1),
        [(tf.constant(0.0), weight)],
        sums,
        state,
        (),
        statistics,
        own_updates,
    )
    values = []
    with utils.open_session(utils.choose_devices('cpu', 4), THREADS) as session:
        session.run(tf.global_variables_initializer())
        for _ in range(steps):
            session.run(train_op)
            values.append({v.op.name: session.run(v) for v in tf.global_variables()})
    return values


def test_moving_averages_move_once_per_step_to_the_mean_over_the_towers():
    batches = [[[0.0], [1], [2]], [[-2], [2], [6]]]  # means 1, 2; variances 1, 16
    build_towers(batches, lambda x: batch_norm.batch_norm(x, True, 'norm'))
    statistics = batch_norm.average_statistics(2)
    assert [variable.op.name for _, variable in statistics] == [
        'norm/moving_mean',
        'norm/moving_variance',
    ]
    first, second = take_steps(statistics)
    assert first['norm/moving_mean'] == pytest.approx([0.15])
    assert first['norm/moving_variance'] == pytest.approx([0.9 + 0.85])
    assert second['norm/moving_mean'] == pytest.approx([0.9 * 0.15 + 0.15])
    assert second['norm/moving_variance'] == pytest.approx([0.9 * 1.75 + 0.85])


def test_a_tower_that_lacks_statistics_is_named():
    def build(x):
        number = len(tf.get_collection(batch_norm.STATISTICS))
        batch_norm.batch_norm(x, True, 'a')
        if number == 0:
            batch_norm.batch_norm(x, True, 'b')

    build_towers([[[1.0]], [[2.0]]], build)
    told = 'tower 1 has nothing where tower 0 has b/moving_mean:0'
    with pytest.raises(ValueError, match=told):
        batch_norm.average_statistics(2)


def test_a_layer_that_is_used_twice_moves_once():
    def build(x):
        batch_norm.batch_norm(x, True, 'norm')
        with tf.variable_scope('', reuse=True):
            batch_norm.batch_norm(x + 2, True, 'norm')

    build_towers([[[0.0], [2]], [[2], [4]]], build)  # means 1, 3, 3, 5
    (values,) = take_steps(batch_norm.average_statistics(2), steps=1)
    assert values['norm/moving_mean'] == pytest.approx([0.3])


def test_checkpoints_of_any_number_of_towers_have_the_same_names(run_steps):
    flags = ['--model', 'article', '--batch_size', '4']
    one, two = (run_steps(1, *flags, '--num_gpus', n) for n in '12')
    assert sorted(one) == sorted(two)
    assert not [name for name in one if 'tower' in name]
    assert len([name for name in one if 'moving' in name]) == 8


def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(main, flags):
    flags += ['--model', 'article', '--num_gpus', '2', '--batch_size', '8']
    for model_dir, steps in (('a', '5'), ('a', '10'), ('b', '10')):
        done = main(
            *('train_multi_gpu.py', '--model_dir', model_dir, '--max_steps', steps),
            *flags,
        )
        assert done.status == 0 and done.err == ''
    a, b = (read_checkpoint(checkpoints.find(directory)[0]) for directory in 'ab')
    assert_same_bits(a, b)
    assert np.abs(a['conv1/batch_norm/moving_mean']).min() > 0


# --sync_batch_norm


@pytest.fixture
def noise(small):
    """8 x 8 pixels at random: hardly a tie for relu and pooling, few sums are long."""
    random = np.random.RandomState(0)
    images = random.randint(0, 256, (320, 8, 8, 1)).astype(np.uint8)
    examples = Examples(images, np.arange(320) % 10)
    return small._replace(train=examples, valid=examples)


@pytest.mark.parametrize('num_towers', [2, 4])
def test_synchronized_towers_are_one_big_batch(run_steps, noise, num_towers):
    flags = SGD + ['--model', 'article', '--batch_size']
    many = flags + [str(32 // num_towers), '--num_gpus', str(num_towers)]
    one = run_steps(10, *flags, '32', data=noise)
    together = run_steps(10, *many, '--sync_batch_norm', data=noise)
    assert largest_difference(one, together) <= 1e-5
    apart = run_steps(10, *many, data=noise)
    assert largest_difference(one, apart) > 0.1


def test_synchronized_statistics_are_those_of_the_big_batch():
    x = np.random.RandomState(0).randn(4, 3, 2, 2, 5) * [1, 2, 3, 1e-3, 0] + 1000
    build_towers(x, lambda x: batch_norm.batch_norm(x, True, 'norm'), group_size=4)
    statistics = batch_norm.average_statistics(4)
    with utils.open_session(utils.choose_devices('cpu', 4), THREADS) as session:
        session.run(tf.global_variables_initializer())
        (mean, _), (variance, _) = session.run(statistics)
    rows = x.astype(np.float32).astype(np.float64).reshape(-1, 5)
    np.testing.assert_allclose(mean, rows.mean(0), rtol=1e-6)
    # E[x^2] - E[x]^2 in float32 is nowhere near.
    np.testing.assert_allclose(variance, rows.var(0, ddof=1), rtol=1e-3, atol=1e-7)


def test_the_gradient_of_synchronized_towers_is_that_of_the_big_batch():
    random = np.random.RandomState(1)
    x, pull = random.randn(2, 3, 2, 2, 3), random.randn(6, 2, 2, 3)
    pulls = iter(np.split(pull, 2))

    def build(x):
        with set_variables(gamma=GAMMA, beta=BETA):
            y = batch_norm.batch_norm(x, True, 'norm')
        loss = tf.reduce_sum(tf.tanh(y) * next(pulls))
        return tf.gradients(loss, [x] + tf.trainable_variables())

    own = build_towers(x, build, group_size=2)
    pulls = iter([pull])
    with tf.variable_scope('big'):
        (big,) = build_towers([x.reshape(6, 2, 2, 3)], build)
    big = big[:1] + big[-2:]
    with utils.open_session(utils.choose_devices('cpu', 2), THREADS) as session:
        session.run(tf.global_variables_initializer())
        own, (dx, *rest) = session.run([own, big])
    np.testing.assert_allclose(np.concatenate([g[0] for g in own]), dx, atol=1e-5)
    for place, wanted in enumerate(rest, start=1):
        np.testing.assert_allclose(own[0][place] + own[1][place], wanted, atol=1e-5)


@pytest.mark.parametrize('flag', [[], ['--sync_batch_norm']])
def test_only_the_towers_that_train_have_collectives(small, flag):
    argv = ['--model', 'article', '--batch_size', '4']
    train_multi_gpu.build_job(make_flags(*argv, *flag), ['/cpu:0', '/cpu:1'], small)
    ops = tf.get_default_graph().get_operations()
    collectives = [op for op in ops if op.type == 'CollectiveReduce']
    # One to meet, three for each of four layers.
    assert len(collectives) == (2 * (1 + 4 * 3) if flag else 0)
    assert all(op.name.startswith('tower_') for op in collectives)
    by_key = {}
    for op in collectives:
        by_key.setdefault(op.get_attr('instance_key'), []).append(op.device[-1])
    assert all(sorted(devices) == ['0', '1'] for devices in by_key.values())


def test_a_tower_that_fails_ends_the_step_of_those_that_wait_for_it():
    def build(x):
        return batch_norm.batch_norm(tf.debugging.check_numerics(x, 'odd'), True, 'n')

    towers = build_towers([[[1.0]], [[np.nan]]], build, group_size=2)
    with utils.open_session(utils.choose_devices('cpu', 2), THREADS) as session:
        session.run(tf.global_variables_initializer())
        session.run(tf.local_variables_initializer())
        with pytest.raises(tf.errors.InvalidArgumentError, match='odd'):
            session.run(towers)


@pytest.mark.parametrize('left', [0, 1, 2, 3])
def test_towers_whose_input_ends_do_not_wait_for_each_other(left):
    queue = tf.FIFOQueue(9, [tf.float32], [[2, 3]])
    fill = queue.enqueue_many([np.random.randn(left, 2, 3).astype(np.float32)])

    def build(x):
        return batch_norm.batch_norm(x + queue.dequeue(), True, 'n')

    towers = build_towers([[[0.0] * 3] * 2] * 2, build, group_size=2)
    with utils.open_session(utils.choose_devices('cpu', 2), THREADS) as session:
        session.run([tf.global_variables_initializer(), fill])
        session.run([tf.local_variables_initializer(), queue.close()])
        for _ in range(left // 2):
            session.run(towers)
        with pytest.raises(tf.errors.OutOfRangeError):
            session.run(towers)


SPOILED = """
import model
from tf1 import tf

def spoiled(images, training, *settings):
    if training and 'tower_1' in tf.get_default_graph().get_name_scope():
        late = tf.train.get_global_step() >= 3
        images += tf.where(late, float('nan'), 0.0)
    return model.article(images, training, *settings)
"""


@pytest.mark.parametrize('asked', ['--sync_batch_norm', '@sync.txt'])
def test_a_number_that_is_not_finite_ends_a_synchronized_run(flags, tmp_path, asked):
    (tmp_path / 'sync.txt').write_text('--sync_batch_norm  # in a file of flags\n')
    (tmp_path / 'net.py').write_text(SPOILED.replace('*settings', 'classes, dropout'))
    flags += ['--num_gpus', '2', '--model', 'net.py:spoiled', asked]
    # What this process has set is not what a user's has.
    env = {k: v for k, v in os.environ.items() if k != 'TF_CPP_MIN_LOG_LEVEL'}
    done = run_python('train_multi_gpu.py', '--batch_size', '8', *flags, env=env)
    told = 'has NaN values; the checkpoints are from before it\n'
    assert done.status == 1 and done.err.startswith('ERROR: step 4, tower '), done.err
    assert done.err.endswith(told) and done.err.count('\n') == 1, done.err


def test_xla_leaves_batch_norm_what_it_is(run_steps, monkeypatch, noise):
    def network(images, training, num_classes, dropout):
        x = model.conv_norm(images, 3, 3, training, 'conv')
        return dropout(model.dense(model.flatten(tf.tanh(x)), num_classes, 'dense'))

    monkeypatch.setitem(model.NETWORKS, 'cnn', network)
    for more in ([], ['--sync_batch_norm']):
        argv = SGD + ['--num_gpus', '2', '--batch_size', '4'] + more
        off, on = (
            run_steps(2, *argv, '--xla', choice, data=noise) for choice in ('off', 'on')
        )
        for name in off:
            limit = 1e-5 * np.abs(off[name]).max()
            assert np.abs(on[name] - off[name]).max() <= limit, name


def test_the_flag_without_a_batch_norm_is_a_mistake(main, flags):
    done = main('train_multi_gpu.py', '--sync_batch_norm', '--num_gpus', '2', *flags)
    assert_mistake(done, '--sync_batch_norm goes with a network that has batch_norm')
    assert files() == []


def test_a_run_is_continued_with_the_flag_or_without(main, flags):
    flags += ['--model', 'article', '--batch_size', '8', '--model_dir', 'm']
    flags += ['--num_gpus', '2', '--max_steps']
    assert main('train_multi_gpu.py', *flags, '2').status == 0
    done = main('train_multi_gpu.py', *flags, '4', '--sync_batch_norm')
    assert (
        done.status == 0
        and 'no --sync_batch_norm, not --sync_batch_norm so far' in done.err
    )


# Networks that update variables themselves


def own_network(images, training, num_classes, dropout):
    """Counts, in variables of its own, what is built and run."""
    del dropout
    count = tf.get_variable(
        'count', [], initializer=tf.zeros_initializer(), trainable=False
    )
    mean = tf.get_variable(
        'mean', [], initializer=tf.zeros_initializer(), trainable=False
    )
    if training:
        for update in (
            count.assign_add(1),
            mean.assign_add(0.5 * (tf.reduce_mean(images) - mean)),
        ):
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
    return model.dense(model.flatten(images), num_classes, 'dense')


@pytest.mark.parametrize('script', [train, train_multi_gpu])
def test_a_networks_own_updates_run_once_per_step_in_tower_0(
    run_steps, monkeypatch, noise, script
):
    monkeypatch.setitem(model.NETWORKS, 'cnn', own_network)
    towers = [] if script is train else ['--num_gpus', '3']
    values = run_steps(1, '--batch_size', '4', *towers, script=script, data=noise)
    assert values['count'] == 1
    # The first tower's four images of 12: its mean is no other's.
    values = run_steps(7, '--batch_size', '4', *towers, script=script, data=noise)
    assert values['count'] == 7 and values['mean'] != 0


def test_several_machines_refuse_a_networks_own_updates(monkeypatch, noise):
    monkeypatch.setitem(model.NETWORKS, 'cnn', own_network)
    flags = make_flags('--batch_size', '4')
    machines = Machines(['a:1', 'b:1'], 0)
    with pytest.raises(UserError, match='updates variables itself .* on 2 machines'):
        train_multi_gpu.build_job(flags, ['/cpu:0'], noise, machines=machines)


# What comes after training


def convolve(x, kernel):
    """SAME convolution of stride 1 in numpy, 3 x 3."""
    _, height, width, _ = x.shape
    padded = np.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)], 'constant')
    return sum(
        padded[:, i : i + height, j : j + width] @ kernel[i, j]
        for i in range(3)
        for j in range(3)
    )


def pool(x):
    """2 x 2 max pooling, SAME."""
    odd = [(0, n % 2) for n in x.shape[1:3]]
    x = np.pad(x, [(0, 0), *odd, (0, 0)], 'constant', constant_values=-np.inf)
    n, height, width, channels = x.shape
    return x.reshape(n, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4))


def infer_article(images, values):
    """The network `article` in numpy; returns logits."""
    x = images / 127.5 - 1
    for layer in (1, 2, 3, 4):
        own = {
            name.rpartition('/')[2]: value.astype(np.float64)
            for name, value in values.items()
            if name.startswith('conv%d/' % layer) and 'Adam' not in name
        }
        x = convolve(x, own['kernel']) - own['moving_mean']
        x = x / np.sqrt(own['moving_variance'] + 1e-3) * own['gamma'] + own['beta']
        x = np.maximum(x, 0)
        x = x if layer == 3 else pool(x)
    x = x.reshape(len(x), -1) @ values['dense1/kernel'] + values['dense1/bias']
    return np.maximum(x, 0) @ values['dense2/kernel'] + values['dense2/bias']


def test_a_trained_article_is_evaluated_and_exported_as_numpy_computes_it(
    main, flags, small
):
    flags += ['--model', 'article', '--num_gpus', '2', '--epochs', '1']
    done = main('train_multi_gpu.py', '--model_dir', 'm', *flags)
    assert done.status == 0 and done.err == ''
    (row,) = read_metrics('m')
    images, labels = small.valid.images, small.valid.labels
    logits = infer_article(images, read_checkpoint(checkpoints.find('m')[0]))
    shifted = logits - logits.max(axis=1, keepdims=True)
    probabilities = np.exp(shifted) / np.exp(shifted).sum(axis=1, keepdims=True)
    losses = -np.log(probabilities[np.arange(len(labels)), labels])
    assert row['valid_loss'] == pytest.approx(losses.mean(), rel=1e-4)
    assert row['valid_acc'] == (logits.argmax(axis=1) == labels).mean()

    done = main('evaluate.py', '--model_dir', 'm', '--device', 'cpu')
    shown = 'valid/acc: %.4f, valid/loss: %.4f' % (row['valid_acc'], row['valid_loss'])
    assert done.status == 0 and done.out.splitlines()[1] == shown
    argv = ['--model_dir', 'm', '--export_dir', 'saved', '--frozen', 'frozen.pb']
    assert main('export.py', *argv).status == 0
    found = []
    with tf.Graph().as_default(), tf.Session() as session:
        loaded = tf.saved_model.load(session, ['serve'], 'saved')
        signature = loaded.signature_def['serving_default']
        found.append(
            session.run(
                signature.outputs['probabilities'].name,
                {signature.inputs['images'].name: images},
            )
        )
    definition = tf.GraphDef()
    with open('frozen.pb', 'rb') as file:
        definition.ParseFromString(file.read())
    with tf.Graph().as_default(), tf.Session() as session:
        tf.import_graph_def(definition, name='')
        found.append(session.run('probabilities:0', {'images:0': images}))
    for values in found:
        np.testing.assert_allclose(values, probabilities, atol=1e-4)
