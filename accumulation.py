"""Gradient accumulation: a step of several micro-steps, whose images make one batch.

A step of K micro-steps runs K - 1 ops that only add up what the towers found, then the
train op, whose update is that of a batch K times as large. What is added up lies in
local variables: a step that is cut short leaves nothing in a checkpoint.
"""

from tf1 import tf

# Collection of the variable that says which micro-step of its step a run is.
NUMBER = 'micro_step'


def number_runs(global_step, count):
    """Returns an int64 scalar that no two runs share: dropout's masks depend on it.

    Args:
      global_step: int64 variable.
      count: micro-steps per step, the same for `accumulate`.
    """
    if count == 1:
        return global_step
    number = _create_local('micro_step', [], tf.int64)
    tf.add_to_collection(NUMBER, number)
    return global_step * count + number


def accumulate(grads_and_vars, sums, puts, count):
    """Adds up over the micro-steps of a step.

    Args:
      grads_and_vars: list of (gradient, variable) of a micro-step; sparse gradients are
        made dense.
      sums: its `updates.Sums`.
      puts: the `Pipeline`'s.
      count: micro-steps per step.

    Returns:
      (grads_and_vars, sums, puts, micro_steps): the means and the sums over a whole
      step, and its puts, all for the train op; and the ops that are run before it.
    """
    if count == 1:
        return grads_and_vars, sums, puts, []
    found = []
    for gradient, variable in grads_and_vars:
        with tf.device(variable.device):
            found.append(tf.convert_to_tensor(gradient))
        found[-1].set_shape(variable.shape)
    found += [sums.loss, sums.correct]
    (number,) = tf.get_collection(NUMBER)
    totals, starts, additions = [], [], []
    with tf.name_scope('accumulation'), tf.control_dependencies(found + puts):
        for tensor in found:
            # Where the tensor is: there its variable, too, is updated.
            with tf.device(tensor.device):
                held = _create_local('held', tensor.shape, tensor.dtype)
                totals.append(held + tensor)
                starts.append(held.assign(tensor))
                additions.append(held.assign_add(tensor))
        start = tf.group(*starts, number.assign(1))
        add = tf.group(*additions, number.assign_add(1))
        begin_again = number.assign(0)
    *totals, loss, correct = totals
    means = []
    for total, (_, variable) in zip(totals, grads_and_vars):
        with tf.device(total.device):
            means.append((total * (1.0 / count), variable))
    sums = sums._replace(loss=loss, correct=correct, images=sums.images * count)
    return means, sums, puts + [begin_again], [start] + [add] * (count - 2)


def _create_local(name, shape, dtype):
    # Not after what is computed, or no variable could be initialised before it.
    with tf.control_dependencies(None):
        return tf.Variable(
            tf.zeros(shape, dtype),
            trainable=False,
            collections=[tf.GraphKeys.LOCAL_VARIABLES],
            name=name,
        )
