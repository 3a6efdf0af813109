"""A copy of the trainable variables on each tower's device, kept equal by all-reduce.

Tower 0 has the variables themselves. The copies of tower k, and their optimizer's
slots, are named `replica_k/...` and are local variables: no checkpoint holds them, no
other file knows of them. They get tower 0's values when a process starts, and then
each tower makes the same update of its own copy.

Source: the "replicated" variables of TensorFlow's benchmarks.
"""

import collections
import contextlib
import re

import all_reduce
import cluster
from tf1 import tf
from utils import UserError, list_few

# The group of all towers. TensorFlow 1.15 looks an instance's key up without its
# group's: these are none of `all_reduce`'s.
GROUP_KEY = 3
FIRST_KEY = 101


# copy: op that gives all copies tower 0's values. equal: bool [towers - 1, variables],
# whether the bits of a tower's copy are tower 0's. names: of the variables.
Replicas = collections.namedtuple('Replicas', 'copy equal names')
NONE = Replicas((), (), ())


def check_machines(flags, machines):
    """Refuses replicated variables where there are several machines."""
    if flags.variables == 'replicated' and machines != cluster.ONE:
        raise UserError(
            '--variables replicated is not yet built for several machines: drop it, or '
            'TF_CONFIG'
        )


def are_wanted(flags, devices):
    """Returns whether each of the towers on `devices` gets variables of its own."""
    return flags.variables == 'replicated' and len(devices) > 1


# Variables


def plain_name(name):
    """Returns the name of tower 0's variable, given its own or a copy's."""
    return re.sub(r'^replica_\d+/', '', name)


@contextlib.contextmanager
def own_variables(tower, replicated=True):
    """Inside the block `tf.get_variable` gives a tower its own trainable variables.

    Others, such as moving averages, are tower 0's for all.

    Args:
      tower: its number; tower 0 has been built before any other.
      replicated: False leaves all as it is.

    Yields:
      What `compute_gradients` takes: the tower's variables in tower 0's order, None
      for tower 0, which is about to create them.
    """
    if tower == 0 or not replicated:
        yield None
        return
    copies = collections.OrderedDict(
        (variable.name, _create_copy(variable, tower))
        for variable in tf.trainable_variables()
    )

    def get_own(getter, name, *args, **kwargs):
        variable = getter(name, *args, **kwargs)
        if not hasattr(variable, 'op'):
            raise UserError(
                '--variables replicated knows no partitioned variables, as %s is: drop '
                'the partitioner, or the flag' % name
            )
        return copies.get(variable.name, variable)

    with tf.variable_scope(tf.get_variable_scope(), custom_getter=get_own):
        yield list(copies.values())


def _create_copy(variable, tower):
    dtype = variable.dtype.base_dtype
    with tf.name_scope(None):
        return tf.Variable(
            lambda: tf.zeros(variable.shape, dtype),
            trainable=False,
            collections=[tf.GraphKeys.LOCAL_VARIABLES],
            name='replica_%d/%s' % (tower, variable.op.name),
            dtype=dtype,
            use_resource=variable.op.type == 'VarHandleOp',
        )


# A step


def average_gradients(tower_grads, devices, after=()):
    """Averages the gradients of the towers by an all-reduce between their devices.

    Those of a tower travel as one vector: float32, but for those of float64 variables.
    A gradient that is None counts as zero, a sparse one is made dense.

    Args:
      tower_grads: per tower, a list of (gradient, variable), the same in each.
      devices: a device string per tower.
      after: what else of the step may fail. No all-reduce begins before all this is
        done: a step that fails leaves no copy updated, and no tower waiting.

    Returns:
      Per tower, a list of (gradient, variable): the means, the same bits in each.
    """
    packs = []
    for grads, device in zip(tower_grads, devices):
        with tf.device(device), tf.name_scope('pack'):
            packs.append(_pack(grads))
    vectors = [vector for pack in packs for vector in pack.values()]
    with tf.device('/cpu:0'), tf.control_dependencies(vectors + list(after)):
        computed = tf.no_op('all_towers_computed')
    averaged = []
    for grads, device, pack in zip(tower_grads, devices, packs):
        with tf.device(device), tf.name_scope('average'):
            means = _reduce(pack, len(devices), computed)
            averaged.append(_unpack(means, [variable for _, variable in grads]))
    return averaged


def _travel_type(variable):
    # TensorFlow 1.15 reduces no halves.
    return tf.float64 if variable.dtype.base_dtype == tf.float64 else tf.float32


def _pack(grads):
    """Returns {dtype: vector [number of elements]} of a tower's gradients."""
    parts = collections.OrderedDict()
    for gradient, variable in grads:
        dtype = _travel_type(variable)
        if gradient is None:
            gradient = tf.zeros(variable.shape, dtype)
        gradient = tf.cast(tf.convert_to_tensor(gradient), dtype)
        parts.setdefault(dtype, []).append(tf.reshape(gradient, [-1]))
    return collections.OrderedDict((d, tf.concat(p, axis=0)) for d, p in parts.items())


def _reduce(pack, num_towers, computed):
    """Returns a tower's {dtype: vector}, the mean over the towers."""
    means = {}
    for place, (dtype, vector) in enumerate(pack.items()):
        with tf.control_dependencies([computed]):
            total = all_reduce.add_in_group(
                vector, num_towers, GROUP_KEY, FIRST_KEY + place
            )
        means[dtype] = total * (1.0 / num_towers)
    return means


def _unpack(vectors, variables):
    """Returns a list of (gradient, variable), cut from {dtype: vector}."""
    starts = dict.fromkeys(vectors, 0)
    grads = []
    for variable in variables:
        dtype = _travel_type(variable)
        start, end = starts[dtype], starts[dtype] + variable.shape.num_elements()
        gradient = tf.reshape(vectors[dtype][start:end], variable.shape)
        grads.append((tf.cast(gradient, variable.dtype.base_dtype), variable))
        starts[dtype] = end
    return grads


@contextlib.contextmanager
def own_slots(tower):
    """Inside the block variables are made as `_create_copy` makes them.

    Those of tower 0 are made as ever.
    """
    if tower == 0:
        yield
        return
    prefix = 'replica_%d/' % tower

    def create(next_creator, **kwargs):
        if not kwargs['name'].startswith(prefix):
            kwargs['name'] = prefix + kwargs['name']
        kwargs['collections'] = [tf.GraphKeys.LOCAL_VARIABLES]
        return next_creator(**kwargs)

    with tf.variable_creator_scope(create):
        yield


# Equality


def build(num_copies):
    """Returns the graph's `Replicas`; call it once all variables and slots exist.

    Args:
      num_copies: of the variables, tower 0's counted.
    """
    if num_copies == 1:
        return NONE
    originals = {variable.name: variable for variable in tf.global_variables()}
    copies = collections.OrderedDict()
    for variable in tf.local_variables():
        name = plain_name(variable.name)
        assert 'replica_' not in name, name
        if name != variable.name:
            copies.setdefault(name, []).append(variable)
    assigns, equal = [], []
    with tf.device('/cpu:0'), tf.name_scope('replicas'):
        for name, of_towers in copies.items():
            assert len(of_towers) == num_copies - 1, name
            assigns += [copy.assign(originals[name]) for copy in of_towers]
            bits = all_reduce.to_bits(originals[name])
            equal.append(
                [
                    tf.reduce_all(tf.equal(bits, all_reduce.to_bits(copy)))
                    for copy in of_towers
                ]
            )
        return Replicas(
            tf.group(*assigns),
            tf.stack([tf.stack(row) for row in zip(*equal)]),
            [originals[name].op.name for name in copies],
        )


def find_difference(equal, names):
    """Returns a line that says which tower holds other values of what, or None.

    Args:
      equal, names: as in `Replicas`.
    """
    for tower, row in enumerate(equal, start=1):
        differing = [name for name, same in zip(names, row) if not same]
        if differing:
            return 'tower %d holds other values than tower 0 of %s' % (
                tower,
                list_few(differing),
            )
    return None
