"""Batch normalisation that is right with towers.

    from batch_norm import batch_norm

    x = batch_norm(x, training)

While a tower trains, it normalises with the statistics of its own batch, or with
`--sync_batch_norm` with those of the batches of all towers. An evaluation normalises
with moving averages, which all towers share: each step moves them once, towards the
mean over the towers.

Source: Ioffe and Szegedy 2015, "Batch Normalization: Accelerating Deep Network Training
by Reducing Internal Covariate Shift".
"""

import collections
import contextlib
import itertools

import all_reduce
from tf1 import tf
from utils import UserError

EPSILON = 1e-3
# A moving average keeps this share of itself in each step.
MOMENTUM = 0.9

# All towers of all machines. Their instance keys are other than those of all_reduce.py:
# one table holds both.
GROUP_KEY = all_reduce.GROUP_KEY + 1
FIRST_KEY = 1000

# What is being built, in the collection of this name: its last.
# number: of the tower, among those of its machine. group_size: how many towers have
# their statistics in common, those of all machines counted; None without
# `--sync_batch_norm`. keys: of collectives.
Tower = collections.namedtuple('Tower', 'number group_size keys')
TOWERS = 'batch_norm_towers'

# What towers note, in the collection of this name.
# tower: its number. value: float32 [channels], of the tower's batch. variable: the
# moving average.
Statistic = collections.namedtuple('Statistic', 'tower value variable')
STATISTICS = 'batch_norm_statistics'


@contextlib.contextmanager
def in_tower(number, group_size=None):
    """Says whose statistics a training network makes that is built inside the block.

    Updates that it leaves in `tf.GraphKeys.UPDATE_OPS` stay there if it is tower 0:
    those of another would be a second step of the same variables.

    Args:
      number: of the tower, among those of its machine.
      group_size: of how many towers, on all machines, the statistics are; None for
        the tower's own. Every tower must build the same: one that is run alone waits
        for ever.
    """
    towers = tf.get_collection_ref(TOWERS)
    towers.append(Tower(number, group_size, itertools.count(FIRST_KEY)))
    updates = tf.get_collection_ref(tf.GraphKeys.UPDATE_OPS)
    before = len(updates)
    try:
        if (group_size or 1) > 1:
            _meet(towers[-1])
        yield
    finally:
        towers.pop()
        if number > 0:
            del updates[before:]


def _meet(tower):
    """Lets the towers of a group meet when a session makes its local variables.

    Where they have not, and one fails in the first step, those that wait for it do so
    for ever on TensorFlow 1.15.
    """
    with tf.name_scope('meet'), tf.xla.experimental.jit_scope(compile_ops=False):
        met = _average(tf.zeros([1]), tower.group_size, next(tower.keys))
        tf.Variable(
            tf.cast(met, tf.int32),  # integers stay on the CPU
            trainable=False,
            collections=[tf.GraphKeys.LOCAL_VARIABLES],
        )


def batch_norm(x, training, name='batch_norm'):
    """Normalises each channel to mean 0 and variance 1, then scales and shifts it.

    Args:
      x: [batch, ..., channels], float32 or float16. Statistics are float32, and so are
        the variables gamma, beta, moving_mean and moving_variance, each [channels].
      training: whether this copy of the network trains.
      name: of the variables' scope.

    Returns:
      Shape and dtype of x.
    """
    channels = x.shape.as_list()[-1]

    def variable(name, start, trainable=True):
        start = tf.constant_initializer(start)
        return tf.get_variable(
            name, [channels], tf.float32, initializer=start, trainable=trainable
        )

    with tf.variable_scope(name):
        gamma, beta = variable('gamma', 1), variable('beta', 0)
        moving = [
            variable('moving_mean', 0, trainable=False),
            variable('moving_variance', 1, trainable=False),
        ]
        rows = tf.reshape(x, [-1, 1, 1, channels]) if x.shape.ndims != 4 else x
        if training:
            rows, statistics = _normalize(rows, gamma, beta)
            for pair in zip(statistics, moving):
                tf.add_to_collection(STATISTICS, Statistic(_get_tower().number, *pair))
        else:
            rows, _, _ = tf.nn.fused_batch_norm(
                rows, gamma, beta, *moving, epsilon=EPSILON, is_training=False
            )
        return rows if x.shape.ndims == 4 else _reshape_like(rows, x)


def _get_tower():
    towers = tf.get_collection(TOWERS)
    return towers[-1] if towers else Tower(0, None, None)


def _reshape_like(rows, x):
    rows = tf.reshape(rows, tf.shape(x))
    rows.set_shape(x.shape)
    return rows


def _normalize(x, gamma, beta):
    """Returns x normalised, and (mean, variance) of the batch, the latter unbiased."""
    tower = _get_tower()
    if tower.group_size is None:
        y, *statistics = tf.nn.fused_batch_norm(x, gamma, beta, epsilon=EPSILON)
        return y, statistics
    keys = [next(tower.keys) for _ in range(3)]
    y, mean, variance = _normalize_together(
        tf.cast(x, tf.float32), gamma, beta, tower.group_size, keys
    )
    images = tf.cast(tf.size(x) * tower.group_size, tf.float32) / x.shape.as_list()[-1]
    unbiased = variance * (images / tf.maximum(images - 1, 1))
    return tf.cast(y, x.dtype), [mean, unbiased]


def _normalize_together(x, gamma, beta, group_size, keys):
    """Normalises with the statistics of a group's towers, forward and backward.

    The gradients of gamma and beta are the tower's own: their mean over the towers is
    that of one big batch, as it is with every other variable.

    Args:
      x: float32 [batch, h, w, channels], as much in each tower.
      gamma, beta: float32 [channels].
      group_size: the number of towers.
      keys: instance keys of three collectives.

    Returns:
      (y, mean, variance), the variance the one that divides by the number of values.
    """

    def average_values(x):  # [batch, h, w, channels] -> [channels]
        # Axis by axis: one long sum in float32 loses three digits.
        for _ in range(3):
            x = tf.reduce_mean(x, axis=-2)
        return x

    @tf.custom_gradient
    def normalize(x, gamma, beta):
        mean = _average(average_values(x), group_size, keys[0])
        centered = x - mean
        # Not E[x^2] - E[x]^2, which loses digits.
        variance = _average(average_values(centered**2), group_size, keys[1])
        scale = tf.rsqrt(variance + EPSILON)
        normalized = centered * scale

        def find_gradients(dy, *_):  # nothing that is trained depends on statistics
            both = tf.stack([average_values(dy), average_values(dy * normalized)])
            mean_dy, mean_product = tf.unstack(_average(both, group_size, keys[2]))
            dx = gamma * scale * (dy - mean_dy - normalized * mean_product)
            return (
                dx,
                tf.reduce_sum(dy * normalized, axis=[0, 1, 2]),
                tf.reduce_sum(dy, axis=[0, 1, 2]),
            )

        return (normalized * gamma + beta, mean, variance), find_gradients

    return normalize(x, gamma, beta)


def _average(tensor, group_size, key):
    """Averages a float32 tensor over a group's towers: the same bits in each."""
    if group_size == 1:
        return tensor
    # XLA has no such op.
    with tf.xla.experimental.jit_scope(compile_ops=False):
        total = all_reduce.add_in_group(tensor, group_size, GROUP_KEY, key)
    return total * (1.0 / group_size)


# After the towers


def average_statistics(num_towers):
    """Averages what the towers have noted, so that it can travel like gradients.

    A variance is the mean of the towers' variances; what the towers' means differ by is
    not in it.

    Args:
      num_towers: on this machine.

    Returns:
      A list of (float32 [channels], moving average), in the order of the layers; empty
      if the network has no `batch_norm`.

    Raises:
      ValueError: a tower has noted other statistics than tower 0.
    """
    noted = [[] for _ in range(num_towers)]
    for statistic in tf.get_collection(STATISTICS):
        noted[statistic.tower].append(statistic)
    _check_same_layers(noted)
    values = collections.OrderedDict()
    for statistic in itertools.chain(*noted):
        # More than one of a tower where it has a layer twice.
        values.setdefault(statistic.variable, []).append(statistic.value)
    averaged = []
    for variable, own in values.items():
        with tf.device(variable.device), tf.name_scope('average'):
            averaged.append((tf.add_n(own) * (1.0 / len(own)), variable))
    return averaged


def _check_same_layers(noted):
    expected = [statistic.variable.name for statistic in noted[0]]
    for tower, statistics in enumerate(noted):
        names = [statistic.variable.name for statistic in statistics]
        for name, wanted in itertools.zip_longest(names, expected):
            if name != wanted:
                raise ValueError(
                    'average_statistics: tower %d has %s where tower 0 has %s'
                    % (tower, name or 'nothing', wanted or 'nothing')
                )


def move(statistics):
    """Returns ops that move each average by one step, once the statistics are there.

    Args:
      statistics: list of (mean, moving average), what `average_statistics` returned.
    """
    moves = []
    for mean, variable in statistics:
        with tf.device(variable.device):
            moves.append(variable.assign_add((1 - MOMENTUM) * (mean - variable)).op)
    return moves


def get_own_updates(num_machines=1):
    """Returns what tower 0 of the network has left in `tf.GraphKeys.UPDATE_OPS`.

    Call it before an evaluation is built.

    Raises:
      UserError: there are some, and several machines, which would part.
    """
    updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
    if updates and num_machines > 1:
        raise UserError(
            'the network updates variables itself (%s), on each machine by its own '
            'images: on %d machines use batch_norm of batch_norm.py'
            % (updates[0].name, num_machines)
        )
    return updates


def check_synchronized():
    """Refuses `--sync_batch_norm` where the towers have nothing to synchronize."""
    if not tf.get_collection(STATISTICS):
        raise UserError(
            '--sync_batch_norm goes with a network that has batch_norm of '
            'batch_norm.py: drop it, or name such a --model'
        )
