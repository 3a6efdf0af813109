"""Packs of gradients: the same averages, in fewer and larger pieces."""

import numpy as np
import pytest

import gradient_packs
from tf1 import tf
from train_multi_gpu import average_gradients

SHAPES = {'a': [2, 3], 'b': [4], 'c': [], 'd': [5, 1]}


@pytest.fixture
def variables():
    return [tf.get_variable(name, shape) for name, shape in SHAPES.items()]


def make_grads(variables, tower):
    """Gradients that differ in every element and tower."""
    return [
        (
            tf.constant(
                np.arange(v.shape.num_elements()) + 10.0 * i + tower, tf.float32
            ),
            v,
        )
        for i, v in enumerate(variables)
    ]


def reshape(grads):
    return [(tf.reshape(g, v.shape), v) for g, v in grads]


def evaluate(grads_and_vars):
    with tf.Session() as session:
        return {v.op.name: session.run(g) for g, v in grads_and_vars}


@pytest.mark.parametrize('num_packs', [1, 2, 3, 50])
def test_packed_averages_are_the_same(variables, num_packs):
    towers = [reshape(make_grads(variables, tower)) for tower in (0, 1)]
    packed = gradient_packs.pack(towers, num_packs)
    averages = evaluate(gradient_packs.unpack(average_gradients(packed)))
    plain = evaluate(average_gradients(towers))
    assert list(SHAPES) == sorted(averages)
    for name in SHAPES:
        assert averages[name].shape == tuple(SHAPES[name])
        assert averages[name].tobytes() == plain[name].tobytes(), name
    assert averages['b'].tolist() == [10.5, 11.5, 12.5, 13.5]


@pytest.mark.parametrize(
    'num_packs, packs',
    [
        (1, ['abcd']),
        # 6, 4, 1 and 5 elements: the middles are 3, 8, 10.5 and 13.5 of 16.
        (2, ['a', 'bcd']),
        (3, ['a', 'bc', 'd']),
        (16, ['a', 'b', 'c', 'd']),
    ],
)
def test_neighbours_share_a_pack_of_about_the_same_size(variables, num_packs, packs):
    towers = [reshape(make_grads(variables, tower)) for tower in (0, 1)]
    for grads in gradient_packs.pack(towers, num_packs):
        found = [getattr(v, 'variables', (v,)) for _, v in grads]
        assert [''.join(v.op.name for v in group) for group in found] == packs


def test_a_variable_without_elements_makes_no_pack_more():
    variables = [tf.get_variable('a', [3]), tf.get_variable('none', [0])]
    ((pair,),) = gradient_packs.pack([reshape(make_grads(variables, 0))], 1)
    assert [v.op.name for v in pair[1].variables] == ['a', 'none']


def test_no_towers_are_average_gradients_to_refuse():
    with pytest.raises(ValueError, match='average_gradients: no towers'):
        average_gradients(gradient_packs.pack([], 2))


def test_no_packs_change_nothing(variables):
    towers = [make_grads(variables, 0)]
    assert gradient_packs.pack(towers, 0) is towers


def test_sparse_gradients_and_ones_that_a_tower_lacks_stay_by_themselves(variables):
    a, b, c, d = variables

    def make(tower, gradient_of_c):
        (ga, _), (gb, _), _, _ = reshape(make_grads(variables, tower))
        rows = tf.IndexedSlices(
            tf.constant([[2.0]]), tf.constant([tower]), tf.constant([5, 1])
        )
        return [(ga, a), (gb, b), (gradient_of_c, c), (rows, d)]

    towers = [make(0, tf.constant(6.0)), make(1, None)]
    packed = gradient_packs.pack(towers, 1)
    assert [v for _, v in packed[0]][1:] == [c, d]
    averages = gradient_packs.unpack(average_gradients(packed))
    by_name = {v.op.name: g for g, v in averages}
    assert isinstance(by_name['d'], tf.IndexedSlices)
    with tf.Session() as session:
        assert session.run(by_name['c']) == 3.0
        assert session.run(by_name['d'].values).tolist() == [[1.0], [1.0]]
        assert session.run(by_name['b']).tolist() == [10.5, 11.5, 12.5, 13.5]


def test_towers_with_other_variables_are_still_named(variables):
    towers = [make_grads(variables, 0), make_grads(variables[:3], 1)]
    with pytest.raises(ValueError, match='tower 1 has nothing where tower 0 has d:0'):
        average_gradients(gradient_packs.pack(towers, 1))


def test_a_pack_is_made_on_its_tower_and_taken_apart_at_its_variables():
    with tf.device('/cpu:1'):
        one, two = tf.get_variable('one', [3]), tf.get_variable('two', [2])
    with tf.device('/gpu:1'):
        grads = [(tf.ones([3]), one), (tf.ones([2]), two)]
    ((buffer, pack),) = gradient_packs.pack([grads], 1)[0]
    assert buffer.device.lower().endswith('gpu:1')
    for gradient, _ in gradient_packs.unpack([(buffer, pack)]):
        assert gradient.device == one.device == pack.device


def test_variables_of_two_devices_share_no_pack():
    variables = []
    for i in range(4):
        with tf.device('/cpu:%d' % (i % 2)):
            variables.append(tf.get_variable('w%d' % i, [3]))
    ((first, second),) = gradient_packs.pack([make_grads(variables, 0)], 1)
    assert [v.op.name for v in first[1].variables] == ['w0', 'w2']
    assert [v.op.name for v in second[1].variables] == ['w1', 'w3']
