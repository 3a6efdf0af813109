"""Mixed precision: float16 math, float32 variables, and a loss scale between them.

Small gradients are zero in float16. So the loss is multiplied by a scale before the
backward pass, and the averaged gradients, float32, are divided by it. Where they are
not finite the scale was too large: the step changes no weight, and the scale is halved.

Source: Micikevicius et al. 2018, "Mixed precision training", section 3.2, with the
dynamic scale of its implementations.
"""

import collections
import contextlib

from tf1 import tf
from utils import create_scalar

FIRST = 2.0**15
LARGEST = 2.0**24
# It doubles after so many steps without an overflow.
GROW_STEPS = 2000

# Variables, so that a checkpoint holds them. scale: float32. good_steps: int64, since
# it was changed. skipped: int64, steps that updated nothing.
LossScale = collections.namedtuple('LossScale', 'scale good_steps skipped')


def create_loss_scale(wanted):
    """Creates the variables of a `LossScale`; None where it is not wanted."""
    if not wanted:
        return None
    with tf.variable_scope('loss_scale'):
        return LossScale(
            create_scalar('scale', tf.float32, FIRST),
            create_scalar('good_steps', tf.int64),
            create_scalar('skipped', tf.int64),
        )


@contextlib.contextmanager
def variables_as(dtype):
    """Shows the variables that a network asks for in the block in what it computes in.

    They are float32 all the same. A network needs to know nothing of this, but one that
    asks for float32 by name gets that.

    Args:
      dtype: float32 or float16.
    """
    if dtype == tf.float32:
        yield
        return

    def get(getter, **settings):
        if settings['dtype'] != dtype or settings['trainable'] is False:
            return getter(**settings)
        return tf.cast(getter(**dict(settings, dtype=tf.float32)), dtype)

    scope = tf.get_variable_scope()
    with tf.variable_scope(scope, dtype=dtype, custom_getter=get):
        yield


def scale_up(loss, loss_scale):
    """Returns what a tower computes its gradients of."""
    return loss if loss_scale is None else loss * loss_scale.scale


def scale_down(grads_and_vars, loss_scale):
    """Divides averaged gradients by the scale: a list of (gradient, variable).

    It is a power of two: no digit is lost. The step fails where one is not finite at a
    scale of 1: that is no overflow.
    """
    if loss_scale is None:
        return grads_and_vars
    scale = loss_scale.scale
    # No scale helps where they are not finite without one.
    total = tf.where(scale > 1, 0.0, _add_up([g for g, _ in grads_and_vars]))
    checked = tf.debugging.check_numerics(
        total, 'all towers: a gradient, at a loss scale of 1,'
    )
    with tf.control_dependencies([checked]):
        factor = 1 / scale

    def divide(gradient, variable):
        with tf.device(variable.device):
            if isinstance(gradient, tf.IndexedSlices):
                values = gradient.values * factor
                return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
            return gradient * factor

    return [(divide(g, v), v) for g, v in grads_and_vars]


def update_if_finite(loss_scale, gradients, update):
    """Runs an update where all gradients are finite, and adapts the scale.

    Args:
      loss_scale: a `LossScale`; None: `update` is run whatever they are.
      gradients: list of float32 tensors or `IndexedSlices`.
      update: () -> list of ops; variables that it creates have initial values of their
        own.

    Returns:
      A list of ops.
    """
    if loss_scale is None:
        return update()
    scale, good_steps, skipped = loss_scale
    finite = tf.is_finite(_add_up(gradients))
    good = tf.where(finite, good_steps + 1, tf.zeros_like(good_steps))
    grows = good >= GROW_STEPS
    larger = tf.where(grows, tf.minimum(scale * 2, LARGEST), scale + 0)
    new = [
        (scale, tf.where(finite, larger, tf.maximum(scale / 2, 1))),
        (good_steps, tf.where(grows, tf.zeros_like(good), good)),
        (skipped, skipped + tf.cast(tf.logical_not(finite), tf.int64)),
    ]
    updated = tf.cond(finite, lambda: tf.group(*update()), tf.no_op)
    with tf.control_dependencies([updated] + [value for _, value in new]):
        return [variable.assign(value) for variable, value in new]


def _add_up(gradients):
    """Returns the sum of all their values, which is not finite where one is not."""
    sums = []
    for gradient in gradients:
        sparse = isinstance(gradient, tf.IndexedSlices)
        values = gradient.values if sparse else gradient
        with tf.device(values.device):
            sums.append(tf.reduce_sum(values))
    return tf.add_n(sums)
