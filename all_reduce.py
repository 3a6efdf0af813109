"""The graph's part of several machines: tensors added up over all of them.

Every machine must run the same of these ops in the same order: one that is run alone
waits for the others for ever.
"""

import collections
import itertools

from cluster import name_machine
from tf1 import tf
from utils import UserError, list_few

# One group of all machines; each op has an instance key of its own.
GROUP_KEY = 1
STEP_KEY, EVALUATION_KEY, FINGERPRINTS_KEY, BROADCAST_KEY = range(1, 5)


# own: float32 scalar, 0 or what this machine ends with, see `Watch.wish`. value: what
# is fed to `put`, the op that changes it.
Wish = collections.namedtuple('Wish', 'own value put')


def get_wish():
    """Returns the graph's `Wish`.

    A variable, and no placeholder: a feed would cost each step more than the sum does,
    and a machine wishes for something once.
    """
    if not tf.get_collection('wish'):
        with tf.device('/cpu:0'):
            own = tf.Variable(
                0.0,
                trainable=False,
                collections=[tf.GraphKeys.LOCAL_VARIABLES],
                name='wish',
            )
            value = tf.placeholder(tf.float32, [])
            put = own.assign(value).op
        tf.add_to_collection('wish', Wish(own + 0, value, put))
    return tf.get_collection('wish')[0]


def add_in_group(tensor, group_size, group_key, key):
    """Adds a tensor up over a group: of machines, or of towers.

    Args:
      tensor: of known shape, the same in each member.
      group_size: how many members.
      group_key: an integer that no other group has.
      key: an integer that no other such op of the process has.

    Returns:
      The sum, the same bits in each member.
    """
    total = tf.raw_ops.CollectiveReduce(
        input=tensor,
        group_size=group_size,
        group_key=group_key,
        instance_key=key,
        merge_op='Add',
        final_op='Id',
        subdiv_offsets=[0],
    )
    total.set_shape(tensor.shape)
    return total


def add_up(tensors, machines, key):
    """Adds tensors up, element by element, over all machines.

    They travel as one vector: an all-reduce costs more than its bytes.

    Args:
      tensors: list of dense tensors of one dtype (float32, float64, int32 or int64)
        and of known shape, the same on every machine.
      machines: the `cluster.Machines`.
      key: an integer that no other call in the graph has.

    Returns:
      A list of tensors, the same bits on every machine.
    """
    with tf.device('/cpu:0'), tf.name_scope('all_reduce'):
        packed = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)
        total = add_in_group(packed, len(machines.addresses), GROUP_KEY, key)
        ends = list(itertools.accumulate(t.shape.num_elements() for t in tensors))
        # Slices share the vector's memory where it is aligned; `tf.split` copies.
        parts = [total[start:end] for start, end in zip([0] + ends, ends)]
        return [tf.reshape(part, tensor.shape) for part, tensor in zip(parts, tensors)]


def put_in_slot(tensor, machines):
    """Returns [machines, ...]: the tensor in this machine's place, zeros elsewhere."""
    before, after = machines.index, len(machines.addresses) - 1 - machines.index
    paddings = [[before, after]] + [[0, 0]] * tensor.shape.ndims
    with tf.device('/cpu:0'):
        return tf.pad(tensor[tf.newaxis], paddings)


def gather(tensors, machines, key):
    """Returns each tensor as [machines, ...], that of every machine.

    The arguments are `add_up`'s.
    """
    return add_up([put_in_slot(tensor, machines) for tensor in tensors], machines, key)


def average_over_machines(grads_and_vars, sums, machines):
    """Averages over the machines what each has averaged over its towers.

    One all-reduce carries all: gradients in float32, sparse ones made dense, the
    step's sums, and which machines wish to stop after it.

    Args:
      grads_and_vars: list of (gradient, variable), what this machine averaged over
        its towers.
      sums: the `updates.Sums` of this machine's towers.
      machines: the `cluster.Machines`.

    Returns:
      (grads_and_vars, sums) of all machines, the same bits on each.
    """
    num_machines = len(machines.addresses)
    own = [tf.cast(tf.convert_to_tensor(g), tf.float32) for g, _ in grads_and_vars]
    own = [gradient * (1.0 / num_machines) for gradient in own]
    own += [tf.cast(sums.loss, tf.float32), sums.correct]
    own += [put_in_slot(get_wish().own, machines)]
    *means, loss, correct, wishes = add_up(own, machines, STEP_KEY)
    averaged = [
        (tf.cast(mean, variable.dtype.base_dtype), variable)
        for mean, (_, variable) in zip(means, grads_and_vars)
    ]
    sums = sums._replace(
        loss=tf.cast(loss, tf.float64),
        correct=correct,
        images=sums.images * num_machines,
        wishes=wishes,
    )
    return averaged, sums


# broadcast: op that gives all variables machine 0's values. fingerprints: int64
# [machines, variables]. names: of these variables.
Equality = collections.namedtuple('Equality', 'broadcast fingerprints names')


def build_equality(variables, own, machines):
    """Builds what makes all machines' variables equal, and what proves it.

    Args:
      variables: all that a checkpoint holds.
      own: those of them that only machine 0 keeps right.
      machines: the `cluster.Machines`.

    Returns:
      An `Equality`, None on one machine.
    """
    if len(machines.addresses) == 1:
        return None
    shared = [variable for variable in variables if variable not in own]
    return Equality(
        build_broadcast(variables, machines, BROADCAST_KEY),
        build_fingerprints(shared, machines, FINGERPRINTS_KEY),
        [variable.op.name for variable in shared],
    )


def build_broadcast(variables, machines, key):
    """Returns the op that gives the variables machine 0's values, bit for bit.

    Args:
      variables: of numbers or bools.
      machines: the `cluster.Machines`.
      key: the first of two integers.

    Raises:
      UserError: a variable is of another type.
    """
    first = machines.index == 0
    by_dtype = collections.OrderedDict()
    for variable in variables:
        # As integers, of which zero added changes none: minus zero would become zero.
        bits = to_bits(variable)
        bits = bits if first else tf.zeros_like(bits)
        by_dtype.setdefault(bits.dtype, []).append((variable, bits))
    assigns = []
    for place, pairs in enumerate(by_dtype.values()):
        totals = add_up([bits for _, bits in pairs], machines, key + place)
        for (variable, _), total in zip(pairs, totals):
            assigns.append(
                variable.assign(_from_bits(total, variable.dtype.base_dtype))
            )
    return tf.group(*assigns)


def to_bits(variable):
    """Returns a variable's bits as int32, or int64 where that has no room for them."""
    value, dtype = tf.identity(variable), variable.dtype.base_dtype
    if dtype.is_floating:
        value = tf.bitcast(value, {2: tf.int16, 4: tf.int32, 8: tf.int64}[dtype.size])
    elif not (dtype.is_integer or dtype == tf.bool):
        raise UserError(
            'variable %s is %s: several machines share only numbers and bools'
            % (variable.op.name, dtype.name)
        )
    return tf.cast(value, tf.int64 if dtype.size == 8 else tf.int32)


def _from_bits(bits, dtype):
    if not dtype.is_floating:
        return tf.cast(bits, dtype)
    integers = {2: tf.int16, 4: tf.int32, 8: tf.int64}[dtype.size]
    return tf.bitcast(tf.cast(bits, integers), dtype)


def build_fingerprints(variables, machines, key):
    """Returns int64 [machines, variables]: a hash of each variable of each machine."""
    hashes = []
    for variable in variables:
        bits = tf.cast(tf.reshape(to_bits(variable), [-1]), tf.int64)
        factors = _mix(tf.range(bits.shape.num_elements(), dtype=tf.int64))
        hashes.append(tf.reduce_sum(bits * factors))
    return gather([tf.stack(hashes)], machines, key)[0]


def _mix(numbers):
    """Returns an odd int64 for each, such that no few of them stand in a simple ratio.

    Source: the mixing step of Steele et al. 2014, "Fast splittable pseudorandom number
    generators", with its constants as signed numbers.
    """
    mixed = (numbers + 1) * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        shifted = tf.bitwise.right_shift(mixed, tf.constant(shift, tf.int64))
        mixed = tf.bitwise.bitwise_xor(mixed, shifted) * factor
    return tf.bitwise.bitwise_or(mixed, tf.constant(1, tf.int64))


def find_difference(fingerprints, names, machines):
    """Returns a line that says which machine holds other values of what, or None.

    Args:
      fingerprints: int64 [machines, variables].
      names: of the variables.
      machines: the `cluster.Machines`.
    """
    for index, own in enumerate(fingerprints):
        differing = [n for n, a, b in zip(names, own, fingerprints[0]) if a != b]
        if differing:
            return (
                '%s holds other values than machine 0 of %s: have all the same '
                'processors, libraries and network?'
            ) % (name_machine(machines, index), list_few(differing))
    return None
