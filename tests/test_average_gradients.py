"""average_gradients: every rule, by value."""

import numpy as np
import pytest

import utils
from tests.conftest import make_flags
from tf1 import tf
from train_multi_gpu import average_gradients, build_job
from utils import UserError


def variable(name, shape=(2,)):
    return tf.get_variable(name, shape, initializer=tf.zeros_initializer())


def evaluate(grads_and_vars):
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        return session.run([gradient for gradient, _ in grads_and_vars])


def sparse(rows, num_rows=3):
    return tf.IndexedSlices(
        tf.ones([len(rows), 1]), tf.constant(rows, tf.int64), tf.constant([num_rows, 1])
    )


def test_mean_over_towers_in_the_order_given():
    a, b = variable('a'), variable('b')
    towers = [
        [(tf.constant([1.0, 2.0]), a), (tf.constant([10.0, 10.0]), b)],
        [(tf.constant([3.0, 4.0]), a), (tf.constant([20.0, 20.0]), b)],
        [(tf.constant([8.0, 0.0]), a), (tf.constant([60.0, 0.0]), b)],
    ]
    averaged = average_gradients(towers)
    assert [v for _, v in averaged] == [a, b]
    first, second = evaluate(averaged)
    np.testing.assert_allclose(first, [4, 2])
    np.testing.assert_allclose(second, [30, 10])


def test_one_tower_is_left_bit_for_bit():
    a = variable('a')
    value = np.array([1 / 3, 1e-30], np.float32)
    assert evaluate(average_gradients([[(tf.constant(value), a)]]))[0].tobytes() == (
        value.tobytes()
    )


def test_none_in_some_towers_counts_as_zero():
    a = variable('a')
    averaged = average_gradients(
        [[(None, a)], [(tf.constant([3.0, 6.0]), a)], [(None, a)]]
    )
    np.testing.assert_allclose(evaluate(averaged)[0], [1, 2])


def test_none_in_every_tower_is_dropped_with_a_warning_that_names_it(
    caplog, monkeypatch
):
    monkeypatch.setattr(utils.log, 'propagate', True)
    a, frozen = variable('a'), variable('frozen')
    tower = [(tf.constant([1.0, 1.0]), a), (None, frozen)]
    assert [v for _, v in average_gradients([tower, tower])] == [a]
    # By record: where an earlier test has run a script, pytest hears each twice.
    warnings = {id(r): r.getMessage() for r in caplog.records if r.levelno > 20}
    told = 'frozen:0 has no gradient in any tower: not trained'
    assert list(warnings.values()) == [told]


def test_none_everywhere_is_an_error():
    a = variable('a')
    with pytest.raises(UserError, match='no variable has a gradient'):
        average_gradients([[(None, a)], [(None, a)]])


@pytest.mark.parametrize('towers', [[], [[], []]])
def test_nothing_to_average_is_an_error(towers):
    with pytest.raises((ValueError, UserError)):
        average_gradients(towers)


def test_other_order_is_an_error_that_names_variable_and_tower():
    a, b = variable('a'), variable('b')
    g = tf.constant([1.0, 1.0])
    with pytest.raises(ValueError, match='tower 2 has b:0 where tower 0 has a:0'):
        average_gradients([[(g, a), (g, b)], [(g, a), (g, b)], [(g, b), (g, a)]])


def test_missing_variable_is_an_error_and_not_cut_in_silence():
    a, b = variable('a'), variable('b')
    g = tf.constant([1.0, 1.0])
    with pytest.raises(ValueError, match='tower 1 has nothing where tower 0 has b:0'):
        average_gradients([[(g, a), (g, b)], [(g, a)]])
    with pytest.raises(ValueError, match='tower 1 has b:0 where tower 0 has nothing'):
        average_gradients([[(g, a)], [(g, a), (g, b)]])


def test_sparse_stays_sparse_and_repeated_rows_add_up():
    table = variable('table', (3, 1))
    averaged = average_gradients([[(sparse([0, 1]), table)], [(sparse([2, 2]), table)]])
    assert isinstance(averaged[0][0], tf.IndexedSlices)
    train = tf.train.GradientDescentOptimizer(-1.0).apply_gradients(averaged)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(train)
        np.testing.assert_allclose(session.run(table)[:, 0], [0.5, 0.5, 1])


def test_sparse_with_none_counts_the_absent_tower():
    table = variable('table', (3, 1))
    averaged = average_gradients([[(sparse([0, 1]), table)], [(None, table)]])
    values = evaluate([(tf.convert_to_tensor(averaged[0][0]), table)])[0]
    np.testing.assert_allclose(values[:, 0], [0.5, 0.5, 0])


def test_sparse_mixed_with_dense_becomes_dense():
    table = variable('table', (3, 1))
    averaged = average_gradients(
        [[(sparse([0, 0]), table)], [(tf.constant([[2.0], [4.0], [6.0]]), table)]]
    )
    assert not isinstance(averaged[0][0], tf.IndexedSlices)
    np.testing.assert_allclose(evaluate(averaged)[0][:, 0], [2, 2, 3])


def test_a_foreign_trainable_variable_is_left_alone(small):
    foreign = tf.get_variable('foreign', [2], initializer=tf.ones_initializer())
    flags = make_flags('--batch_size', '4')
    job = build_job(flags, ['/cpu:0', '/cpu:0'], small)
    with tf.Session() as session:
        session.run(
            [tf.global_variables_initializer(), tf.local_variables_initializer()],
            job.feeds,
        )
        feed = {t: v for batch in job.pipeline.batches for t, v in zip(batch, tiny())}
        session.run(job.step.train_op, feed)
        np.testing.assert_array_equal(session.run(foreign), [1, 1])


def tiny():
    return np.zeros([4, 14, 14, 1], np.uint8), np.arange(4)
