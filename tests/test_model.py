"""Networks, dropout and the model's loss, by value."""

import numpy as np
import pytest

import mixed_precision
import model
from tests.conftest import assert_mistake
from tests.processes import run_python
from tf1 import tf


def run(fetches):
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        return session.run(fetches)


def test_the_default_network_has_the_layers_it_should():
    images = tf.zeros([2, 28, 28, 1])
    logits = model.cnn(images, False, 10, lambda x: x)
    assert logits.shape.as_list() == [2, 10]
    shapes = {v.op.name: v.shape.as_list() for v in tf.trainable_variables()}
    assert shapes == {
        'conv1/kernel': [3, 3, 1, 16],
        'conv1/bias': [16],
        'conv2/kernel': [3, 3, 16, 32],
        'conv2/bias': [32],
        'conv3/kernel': [3, 3, 32, 64],
        'conv3/bias': [64],
        'dense1/kernel': [1024, 128],
        'dense1/bias': [128],
        'dense2/kernel': [128, 10],
        'dense2/bias': [10],
    }


def count_parameters():
    return sum(v.shape.num_elements() for v in tf.trainable_variables())


@pytest.mark.parametrize(
    'shape, left, parameters',
    [
        ((28, 28, 1), 4 * 4, 155786),  # MNIST's, as it was before other sizes
        ((32, 32, 3), 4 * 4, 156074),
        ((8, 8, 1), 4 * 4, 155786),
        ((7, 7, 1), 4 * 4, 155786),
        ((6, 6, 1), 6 * 6, 319626),
        ((1, 1, 1), 1, 32906),
        ((1, 40, 1), 40, 352394),
        ((100, 60, 3), 13 * 8, 876970),
    ],
)
def test_the_default_network_takes_any_size(shape, left, parameters):
    logits = model.cnn(tf.zeros((2,) + shape), False, 10, lambda x: x)
    assert logits.shape.as_list() == [2, 10]
    (dense,) = [v for v in tf.trainable_variables() if v.op.name == 'dense1/kernel']
    assert dense.shape.as_list() == [left * 64, 128]
    assert count_parameters() == parameters
    assert run(logits).tolist() == [[0] * 10] * 2  # no bias yet, nothing to see


# By hand, kernels and then what each channel or unit has beside them.
ARTICLE = 9 * (1 * 4 + 4 * 8 + 8 * 8 + 8 * 8) + 2 * (4 + 8 + 8 + 8)
ARTICLE += 4 * 4 * 8 * 64 + 64 + 64 * 10 + 10
CNN = 9 * (16 + 16 * 32 + 32 * 64) + 16 + 32 + 64 + 1024 * 128 + 128 + 128 * 10 + 10
LENET5 = 25 * (32 + 32 * 64) + 32 + 64 + 7 * 7 * 64 * 512 + 512 + 512 * 10 + 10
MLP = 784 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10
RESNET20 = 9 * (3 * 16 + 6 * 16 * 16 + 16 * 32 + 5 * 32 * 32 + 32 * 64 + 5 * 64 * 64)
RESNET20 += 2 * (7 * 16 + 6 * 32 + 6 * 64) + 64 * 10 + 10


def test_the_list_of_networks_says_how_large_each_is(main):
    done = run_python('model.py')
    assert done.status == 0 and done.err == ''
    titles, *lines, last = done.out.splitlines()
    assert titles.split()[:4] == ['network', 'parameters', 'multiply-adds', 'images']
    assert last == 'with 10 classes; images may be of any size'
    rows = {line.split()[0]: line.split()[1:4] for line in lines}
    found = {
        name: [int(row[0].replace(',', '')), int(row[1].replace(',', '')), row[2]]
        for name, row in rows.items()
    }
    # Each number of a layer's result takes a kernel's worth of products.
    area = 28 * 28
    assert found == {
        'article': [
            ARTICLE,
            9 * (area * 4 + area // 4 * 4 * 8 + area // 16 * 2 * 8 * 8)
            + 128 * 64
            + 64 * 10,
            '28x28x1',
        ],
        'cnn': [
            CNN,
            9 * (area * 16 + area // 4 * 16 * 32 + area // 16 * 32 * 64)
            + 1024 * 128
            + 128 * 10,
            '28x28x1',
        ],
        'lenet5': [
            LENET5,
            25 * (area * 32 + area // 4 * 32 * 64) + 3136 * 512 + 512 * 10,
            '28x28x1',
        ],
        'mlp': [MLP, 784 * 256 + 256 * 256 + 256 * 10, '28x28x1'],
        'resnet20': [RESNET20, 40551040, '32x32x3'],
    }
    assert (CNN, LENET5, RESNET20) == (155786, 1663370, 269722)
    assert 'residual network of 20 layers' in lines[-1]
    assert_mistake(
        main('model_description.py', '--what'), 'unrecognized arguments: --what'
    )


@pytest.mark.parametrize('name', sorted(model.NETWORKS))
@pytest.mark.parametrize('shape', [(1, 1, 1), (8, 8, 3), (3, 5, 2)])
def test_every_network_takes_small_images_and_can_be_trained(name, shape):
    images = np.random.RandomState(0).rand(4, *shape).astype(np.float32)
    logits = model.NETWORKS[name](tf.constant(images), True, 3, lambda x: x)
    with tf.variable_scope('', reuse=True):
        evaluated = model.NETWORKS[name](tf.constant(images), False, 3, lambda x: x)
    assert logits.shape.as_list() == evaluated.shape.as_list() == [4, 3]
    gradients = tf.gradients(tf.reduce_sum(logits**2), tf.trainable_variables())
    assert None not in gradients
    for value in run([logits, evaluated] + gradients):
        assert np.isfinite(value).all()


@pytest.mark.parametrize('name', sorted(model.NETWORKS))
@pytest.mark.parametrize('training', [True, False])
def test_every_network_computes_in_the_type_of_its_images(name, training):
    images = np.random.RandomState(0).rand(2, 6, 6, 1).astype(np.float32)
    logits = []
    for dtype in (tf.float16, tf.float32):
        with tf.variable_scope('', reuse=bool(logits)):
            x = tf.constant(images, dtype)
            with mixed_precision.variables_as(dtype):
                logits.append(model.NETWORKS[name](x, training, 3, lambda x: x))
    assert [x.dtype for x in logits] == [tf.float16, tf.float32]
    assert {v.dtype.base_dtype for v in tf.global_variables()} == {tf.float32}
    products = {
        op.inputs[0].dtype
        for op in tf.get_default_graph().get_operations()
        if op.type in ('Conv2D', 'MatMul')
    }
    assert products == {tf.float16, tf.float32}
    if not training or name not in ('article', 'resnet20'):
        # (With the statistics of two images a rounding error becomes large.)
        half, single = run(logits)
        np.testing.assert_allclose(half, single, atol=0.02 * np.abs(single).max())


def test_a_convolution_before_batch_norm_has_no_bias():
    for name in ('article', 'resnet20'):
        with tf.variable_scope(name):
            model.NETWORKS[name](tf.zeros([1, 8, 8, 1]), False, 10, lambda x: x)
    biases = [v.op.name for v in tf.trainable_variables() if v.op.name.endswith('bias')]
    assert biases == ['article/dense1/bias', 'article/dense2/bias'] + [
        'resnet20/dense/bias'
    ]


def test_a_block_that_halves_has_a_shortcut_without_parameters():
    x = np.random.RandomState(0).rand(2, 5, 4, 16).astype(np.float32)
    y = model.basic_block(tf.constant(x), 32, 2, training=False)
    shapes = {v.op.name: v.shape.as_list() for v in tf.trainable_variables()}
    assert {n: s for n, s in shapes.items() if 'kernel' in n} == {
        'conv1/kernel': [3, 3, 16, 32],
        'conv2/kernel': [3, 3, 32, 32],
    }
    # With the last scale at zero only the shortcut is left.
    with tf.variable_scope('conv2/batch_norm', reuse=True):
        gamma = tf.get_variable('gamma', [32])
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(gamma.assign(tf.zeros([32])))
        y = session.run(y)
    wanted = np.zeros([2, 3, 2, 32], np.float32)
    wanted[..., 8:24] = x[:, ::2, ::2]
    assert (y == wanted).all()


def test_loss_is_the_mean_of_the_cross_entropies():
    logits = np.array([[2.0, 0, 0], [0, 0, 100], [0, 3, 0]], np.float32)
    labels = np.array([0, 1, 1])
    spec = run(
        model.model_fn(
            tf.zeros([3, 2, 2, 1], tf.uint8),
            tf.constant(labels),
            network=lambda *_: tf.constant(logits),
            num_classes=3,
        )
    )
    losses = np.log(np.exp(logits.astype(float)).sum(1)) - logits[range(3), labels]
    np.testing.assert_allclose(spec.losses, losses, rtol=1e-5)
    np.testing.assert_allclose(spec.loss, losses.mean(), rtol=1e-5)
    assert list(spec.correct) == [1, 0, 1]
    assert list(spec.predictions) == [0, 2, 1]


@pytest.mark.parametrize('smoothing, loss', [(0, 2e4), (0.2, 1.8e4)])
def test_a_hopeless_example_has_a_finite_loss(smoothing, loss):
    spec = run(
        model.model_fn(
            tf.zeros([1, 2, 2, 1], tf.uint8),
            tf.constant([0], tf.int64),
            network=lambda *_: tf.constant([[-1e4, 1e4]]),
            num_classes=2,
            training=True,
            label_smoothing=smoothing,
        )
    )
    assert spec.loss == pytest.approx(loss)


@pytest.mark.parametrize('training', [True, False])
def test_labels_are_smoothed_in_training_only(training):
    logits = np.array([[2.0, 0, 0], [0, 0, 9], [0, 3, 0]], np.float32)
    labels = np.array([0, 1, 1])
    spec = run(
        model.model_fn(
            tf.zeros([3, 2, 2, 1], tf.uint8),
            tf.constant(labels),
            network=lambda *_: tf.constant(logits),
            num_classes=3,
            training=training,
            label_smoothing=0.3,
        )
    )
    surprise = np.log(np.exp(logits.astype(float)).sum(1))[:, np.newaxis] - logits
    losses = surprise[range(3), labels]
    if training:
        losses = 0.7 * losses + 0.3 * surprise.mean(axis=1)
    np.testing.assert_allclose(spec.losses, losses, rtol=1e-5)
    np.testing.assert_allclose(spec.loss, losses.mean(), rtol=1e-5)
    assert list(spec.correct) == [1, 0, 1]


def test_bytes_become_floats_from_minus_one_to_one():
    def network(images, *_):
        return tf.reshape(images, [1, 3])

    spec = run(
        model.model_fn(
            tf.constant([[[[0], [51], [255]]]], tf.uint8),
            tf.constant([0], tf.int64),
            network,
            num_classes=3,
        )
    )
    np.testing.assert_allclose(spec.logits[0], [-1, -0.6, 1], atol=1e-6)


def test_moments_are_variables_that_are_not_trained():
    moments = np.float32([10, 20]), np.float32([2, 0.5])
    scaled = model.scale(tf.constant([[[[12, 21]]]], tf.uint8), moments)
    assert run(scaled).tolist() == [[[[1, 2]]]]
    names = [v.op.name for v in tf.global_variables()]
    assert names == ['standardize/mean', 'standardize/deviation']
    assert tf.trainable_variables() == []


def masks(seed=1, tower=0, step=0, layers=1, rate=0.4):
    dropout = model.dropout_layers(rate, seed, tower, tf.constant(step, tf.int64))
    return run([dropout(tf.ones([50, 40])) for _ in range(layers)])


def test_dropout_keeps_the_mean_and_drops_the_share_asked_for():
    (mask,) = masks()
    assert set(np.unique(mask)) == {0, np.float32(1 / 0.6)}
    assert abs((mask == 0).mean() - 0.4) < 0.03


def test_dropout_masks_are_a_function_of_seed_step_tower_and_layer():
    (mask,) = masks()
    (again,) = masks()
    assert (mask == again).all()
    for other in (dict(seed=2), dict(tower=1), dict(step=1)):
        assert (masks(**other)[0] != mask).any(), other
    first, second = masks(layers=2)
    assert (first == mask).all() and (second != first).any()


def test_no_dropout_adds_no_op():
    x = tf.ones([2, 2])
    assert model.dropout_layers(0, 1, 0, None)(x) is x


@pytest.mark.parametrize('other', ['scope', 'order'])
def test_initial_weights_depend_on_seed_and_name_only(other):
    def build(seed, before=0):
        with tf.Graph().as_default():
            tf.set_random_seed(seed)
            for i in range(before):
                model.weight('before%d' % i, [3, 3])
            with tf.variable_scope('layer'):
                return run(model.weight('kernel', [3, 4]))

    assert (build(1) == build(1, before=3)).all()
    assert (build(1) != build(2)).all()
