"""Packs of gradients: a few buffers cross the bus sooner than many small tensors.

    average = unpack(average_gradients(pack(tower_grads, num_packs)))

The numbers are the same, bit for bit, as without.
"""

import collections
import itertools

from tf1 import tf

# Stands for its variables where a (gradient, variable) pair has a variable.
# name: lists them. device: where all of them are.
Pack = collections.namedtuple('Pack', 'name device variables')


def pack(tower_grads, num_packs):
    """Joins the gradients of each tower, on the tower's device.

    Sparse gradients, and ones that a tower has none of, stay by themselves.

    Args:
      tower_grads: per tower, a list of (gradient, variable), as
        `optimizer.compute_gradients` returns them.
      num_packs: buffers per tower, of about the same size, for the variables of one
        device and type; 0 leaves everything as it is.

    Returns:
      Per tower, a list of (buffer [number of elements], `Pack`) and of
      (gradient, variable): what `average_gradients` takes.

    Source: the "gradient repacking" of TensorFlow's benchmarks.
    """
    if not num_packs or not tower_grads:
        return tower_grads
    packable = set.intersection(*map(_dense, tower_grads))
    return [_pack_tower(grads, packable, num_packs) for grads in tower_grads]


def unpack(grads_and_vars):
    """Makes (gradient, variable) pairs of each (buffer, `Pack`), on its device."""
    unpacked = []
    for gradient, variable in grads_and_vars:
        if isinstance(variable, Pack):
            with tf.device(variable.device):
                unpacked += _split(gradient, variable.variables)
        else:
            unpacked.append((gradient, variable))
    return unpacked


def _dense(grads):
    """Returns the names of the variables whose gradient is a tensor."""
    return {v.name for gradient, v in grads if isinstance(gradient, tf.Tensor)}


def _pack_tower(grads, packable, num_packs):
    by_place = collections.OrderedDict()
    kept = []
    for gradient, variable in grads:
        if variable.name in packable:
            place = (variable.device, gradient.dtype)
            by_place.setdefault(place, []).append((gradient, variable))
        else:
            kept.append((gradient, variable))
    packs = [
        _join(group)
        for same_place in by_place.values()
        for group in _divide(same_place, num_packs)
    ]
    return packs + kept


def _divide(grads, num_packs):
    """Returns runs of neighbours, at most `num_packs`, of about the same size."""
    ends = list(itertools.accumulate(v.shape.num_elements() for _, v in grads))
    starts = [0] + ends[:-1]
    middles = iter([start + end for start, end in zip(starts, ends)])

    def find_pack(_):
        # The middle of one without elements may be the very end.
        return min(next(middles) * num_packs // max(1, 2 * ends[-1]), num_packs - 1)

    return [list(group) for _, group in itertools.groupby(grads, find_pack)]


def _join(grads):
    if len(grads) == 1:
        return grads[0]
    gradients, variables = zip(*grads)
    name = 'a pack of %s' % ', '.join(v.name for v in variables)
    with tf.device(gradients[0].device):
        buffer = tf.concat([tf.reshape(g, [-1]) for g in gradients], axis=0)
    return buffer, Pack(name, variables[0].device, variables)


def _split(buffer, variables):
    parts = tf.split(buffer, [v.shape.num_elements() for v in variables])
    return [(tf.reshape(part, v.shape), v) for part, v in zip(parts, variables)]
