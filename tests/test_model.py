"""Networks, dropout and the model's loss, by value."""

import numpy as np
import pytest

import model
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
