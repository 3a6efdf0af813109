"""The moving average of the weights: steadier than any step's own, and what is kept.

Trained are the weights; evaluated, chosen as best, predicted with and exported is their
average over the last steps.
"""

from tf1 import tf

# What `tf.train.ExponentialMovingAverage` puts behind a variable's name.
SUFFIX = '/ExponentialMovingAverage'


def create(decay, global_step):
    """Returns the `tf.train.ExponentialMovingAverage` of a run, None without a decay.

    In the first steps the decay is less, (1 + step) / (10 + step), or the average would
    be that of the initial weights for long.

    Args:
      decay: of `--ema`, in [0, 1).
      global_step: int64 variable.
    """
    return tf.train.ExponentialMovingAverage(decay, global_step) if decay else None


def evaluate_with(averages, build_model):
    """Returns `build_model`, its trained variables replaced by their averages.

    Args:
      averages: what `create` returned, applied.
      build_model: (images, labels) -> `ModelSpec`.
    """
    if averages is None:
        return build_model

    def get_average(getter, *args, **kwargs):
        variable = getter(*args, **kwargs)
        average = averages.average(variable)
        return variable if average is None else average

    def build_averaged(*batch):
        scope = tf.get_variable_scope()
        with tf.variable_scope(scope, custom_getter=get_average):
            return build_model(*batch)

    return build_averaged
