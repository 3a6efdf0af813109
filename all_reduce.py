"""The graph's part of several machines: tensors added up over all of them.

Every machine must run the same of these ops in the same order: one that is run alone
waits for the others for ever.
"""

import collections

from tf1 import tf

# One group of all machines; each op has an instance key of its own.
GROUP_KEY = 1


def add_up(tensors, num_machines, key):
    """Adds tensors up, element by element, over all machines.

    They travel as one vector: an all-reduce costs more than its bytes.

    Args:
      tensors: list of dense tensors of one dtype (float32, float64 or int64) and of
        known shape, the same on every machine.
      num_machines: how many.
      key: an integer that no other call in the graph has.

    Returns:
      A list of tensors, the same bits on every machine.
    """
    with tf.device('/cpu:0'), tf.name_scope('all_reduce'):
        packed = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)
        total = tf.raw_ops.CollectiveReduce(
            input=packed,
            group_size=num_machines,
            group_key=GROUP_KEY,
            instance_key=key,
            merge_op='Add',
            final_op='Id',
            subdiv_offsets=[0],
        )
        total.set_shape(packed.shape)
        parts = tf.split(total, [tensor.shape.num_elements() for tensor in tensors])
        return [tf.reshape(part, tensor.shape) for part, tensor in zip(parts, tensors)]


def build_broadcast(variables, index, num_machines, key):
    """Returns the op that gives the variables machine 0's values, bit for bit.

    Args:
      variables: of float32, float64 or int64.
      index: which machine this is.
      num_machines: how many.
      key: the first of as many integers as there are dtypes.
    """
    by_dtype = collections.OrderedDict()
    for variable in variables:
        by_dtype.setdefault(variable.dtype.base_dtype, []).append(variable)
    assigns = []
    for place, group in enumerate(by_dtype.values()):
        # A value plus zeros is the value; minus zero is the exception, and equal.
        values = [v + 0 if index == 0 else tf.zeros(v.shape, v.dtype) for v in group]
        sums = add_up(values, num_machines, key + place)
        assigns += [variable.assign(total) for variable, total in zip(group, sums)]
    return tf.group(*assigns)


def build_fingerprints(variables, index, num_machines, key):
    """Returns int64 [machines]: a hash of each machine's variables.

    Equal variables have equal hashes on every machine.
    """
    own = tf.constant(0, tf.int64)
    for place, variable in enumerate(variables, start=1):
        value = tf.reshape(variable + 0, [-1])
        kind = {4: tf.int32, 8: tf.int64}[value.dtype.size]
        bits = tf.cast(tf.bitcast(value, kind), tf.int64)
        # Odd factors, so that neither an exchange nor any one bit goes unseen.
        factors = 2 * tf.range(value.shape.num_elements(), dtype=tf.int64) + 1
        own += (2 * place + 1) * tf.reduce_sum(bits * factors)
    slots = own * tf.one_hot(index, num_machines, dtype=tf.int64)
    return add_up([slots], num_machines, key)[0]
