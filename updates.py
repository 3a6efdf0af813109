"""One step: learning rate, optimizer, the update, and what is added up with it."""

import collections
import itertools
import math
import re

import accumulation
import all_reduce
import batch_norm
import mixed_precision
import replicas
import weight_averages
from cluster import ONE
from tf1 import tf
from utils import UserError, log

# Loss, accuracy and learning rate, that each step gives.
NUM_METRICS = 3

NO_GRADIENT = (
    'no variable has a gradient: the loss must depend on one by ops that have one'
)

# What a step adds to an epoch's sums. loss: float64 and correct: float32, scalars, over
# the images of all towers. images: how many these are. wishes: float32 [machines], see
# `Watch.hear`; None on one machine.
Sums = collections.namedtuple('Sums', 'loss correct images wishes')

# How variables change. learning_rate: float32 scalar. optimizer: a
# `tf.train.Optimizer` with this rate. loss_scale: a `LossScale` or None.
Rule = collections.namedtuple('Rule', 'learning_rate optimizer loss_scale')

# What `build_step` returns. gradients: list of (gradient, variable), as they are
# applied. train_op: what `apply_gradients` returns. micro_steps: ops that are run
# before it. averages: what `weight_averages.create` returns.
Step = collections.namedtuple('Step', 'gradients train_op micro_steps averages')


def create_rule(flags, state, pipeline):
    """Returns the `Rule` of a run.

    Args:
      flags: what `command_line.parse` returned.
      state: the `State`.
      pipeline: the `Pipeline`, for its num_images and global_batch.
    """
    rate = learning_rate(flags, state, pipeline)
    optimizer = create_optimizer(flags.optimizer, rate)
    return Rule(rate, optimizer, mixed_precision.create_loss_scale(flags.fp16))


def create_sgd(rate):
    """Returns the `Rule` of plain SGD."""
    return Rule(tf.constant(rate), create_optimizer('sgd', rate), None)


def base_rate(flags, global_batch):
    """Returns the rate that a schedule starts from, a float.

    Args:
      flags: what `command_line.parse` returned.
      global_batch: images per step.

    Source: the linear scaling rule of Goyal et al. 2017, "Accurate, Large Minibatch
    SGD", for `--scale_lr`.
    """
    if flags.scale_lr:
        return flags.learning_rate * (global_batch // flags.batch_size)
    return flags.learning_rate


def learning_rate(flags, state, pipeline):
    """Returns the learning rate, float32 scalar: a function of images seen only.

    Over `--epochs`, `--schedule` cosine falls to 0, step to a tenth at a half and again
    at three quarters, exponential evenly to a hundredth; constant stays. With
    `--warmup_epochs` it rises to that; the first step has a rate, too.

    Args:
      flags: what `command_line.parse` returned.
      state: the `State`.
      pipeline: the `Pipeline`, for its num_images and global_batch.

    Source: Loshchilov and Hutter 2016, "SGDR", equation 5, without restarts; He et al.
    2015, "Deep Residual Learning for Image Recognition", section 4.2; the warm-up of
    Goyal et al. 2017.
    """
    num_images = pipeline.num_images
    base = base_rate(flags, pipeline.global_batch)
    if flags.schedule == 'constant' and not flags.warmup_epochs:
        return tf.constant(base, tf.float32)
    images_seen = state.epoch * num_images + state.epoch_images
    progress = tf.cast(images_seen, tf.float64) / (flags.epochs * num_images)
    rate = {
        'constant': lambda: tf.constant(base, tf.float64),
        'cosine': lambda: base * 0.5 * (1 + tf.cos(math.pi * progress)),
        'step': lambda: _fall_in_steps(base, progress),
        'exponential': lambda: base * tf.exp(math.log(0.01) * progress),
    }[flags.schedule]()
    if flags.warmup_epochs:
        after_step = tf.cast(images_seen + pipeline.global_batch, tf.float64)
        rate *= tf.minimum(after_step / (flags.warmup_epochs * num_images), 1)
    return tf.cast(rate, tf.float32)


def _fall_in_steps(base, progress):
    steps = tf.reduce_sum(tf.cast(progress >= [0.5, 0.75], tf.int32))
    return tf.gather(tf.constant([base, base / 10, base / 100], tf.float64), steps)


def create_optimizer(name, learning_rate):
    """Returns the `tf.train.Optimizer` that `--optimizer name` stands for."""
    return {
        'adam': lambda: tf.train.AdamOptimizer(learning_rate),
        'sgd': lambda: tf.train.GradientDescentOptimizer(learning_rate),
        'momentum': lambda: tf.train.MomentumOptimizer(learning_rate, 0.9),
        'rmsprop': lambda: tf.train.RMSPropOptimizer(learning_rate),
    }[name]()


def compute_gradients(rule, spec, tower, variables=None):
    """Builds the backward pass of a tower, its numbers checked.

    Args:
      rule: the `Rule`.
      spec: the tower's `ModelSpec`.
      tower: its number.
      variables: those it trains; None for all that are trainable.

    Returns:
      (grads_and_vars, spec): a list of (gradient, variable), the gradients times the
      loss scale if there is one, and the `ModelSpec`.
    """
    loss = mixed_precision.scale_up(spec.loss, rule.loss_scale)
    grads_and_vars = rule.optimizer.compute_gradients(loss, variables)
    return check_finite(grads_and_vars, spec, tower, rule.loss_scale)


def build_step(flags, rule, state, pipeline, specs, averaged, machines=ONE):
    """Builds what comes after the towers' gradients are averaged, up to the train op.

    Args:
      flags: what `command_line.parse` returned.
      rule: the `Rule` that the gradients were computed with.
      state: the `State`.
      pipeline: the `Pipeline`.
      specs: a `ModelSpec` per tower of this machine.
      averaged: for each copy of the variables, a list of (gradient, variable), the
        gradients averaged over these towers.
      machines: the `cluster.Machines`.

    Returns:
      A `Step`.
    """
    averaged = [mixed_precision.scale_down(g, rule.loss_scale) for g in averaged]
    statistics = batch_norm.average_statistics(len(specs))
    means, sums, puts, micro_steps = accumulation.accumulate(
        [*itertools.chain(*averaged), *statistics],
        sum_up(specs),
        pipeline.puts,
        flags.accumulate,
    )
    if machines != ONE:
        means, sums = all_reduce.average_over_machines(means, sums, machines)
    means = iter(means)
    gradients, *of_copies = [
        clip(
            list(itertools.islice(means, len(grads))), flags.clip_norm, rule.loss_scale
        )
        for grads in averaged
    ]
    averages = weight_averages.create(flags.ema, state.global_step)
    train_op = apply_gradients(
        rule,
        gradients,
        sums,
        state,
        puts,
        statistics=list(means),
        own_updates=batch_norm.get_own_updates(len(machines.addresses)),
        weight_decay=flags.weight_decay,
        averages=averages,
        copies=[
            (create_optimizer(flags.optimizer, rule.learning_rate), grads)
            for grads in of_copies
        ],
    )
    return Step(gradients, train_op, micro_steps, averages)


def sum_up(specs):
    """Returns the `Sums` of one step's images over its towers."""
    losses = tf.concat([spec.losses for spec in specs], axis=0)  # [towers * batch]
    correct = tf.concat([spec.correct for spec in specs], axis=0)
    return Sums(
        tf.reduce_sum(tf.cast(losses, tf.float64)),
        tf.reduce_sum(correct),
        losses.shape.as_list()[0],
        wishes=None,
    )


def drop_missing(grads_and_vars):
    """Returns the pairs that have a gradient; a warning names the other variables."""
    for gradient, variable in grads_and_vars:
        if gradient is None:
            log.warning('%s has no gradient: not trained', variable.name)
    trained = [pair for pair in grads_and_vars if pair[0] is not None]
    if not trained:
        raise UserError(NO_GRADIENT)
    return trained


def clip(grads_and_vars, clip_norm, loss_scale=None):
    """Scales the gradients, where their global norm is above `clip_norm`, down to it.

    Args:
      grads_and_vars: list of (gradient, variable), averaged over all towers.
      clip_norm: the largest norm, or None for no limit.
      loss_scale: with one, a norm may be infinite: the step will update nothing.

    Returns:
      The list with other gradients; sparse ones stay sparse.

    Source: Pascanu et al. 2013, "On the difficulty of training recurrent neural
    networks", algorithm 1, over all gradients at once.
    """
    if clip_norm is None:
        return grads_and_vars

    def scale(gradient, variable):
        with tf.device(variable.device):
            if isinstance(gradient, tf.IndexedSlices):
                values = gradient.values * tf.cast(factor, gradient.dtype)
                return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
            return gradient * tf.cast(factor, gradient.dtype)

    with tf.name_scope('clip_norm'):
        halves = [_half_square(g, v) for g, v in grads_and_vars]
        norm = tf.sqrt(2 * tf.add_n(halves))
        if loss_scale is None:
            # One that is infinite would make every gradient 0, for ever and unseen.
            norm = tf.debugging.check_numerics(norm, "all towers: the gradients' norm")
        factor = clip_norm / tf.maximum(norm, clip_norm)
        return [(scale(g, v), v) for g, v in grads_and_vars]


def _half_square(gradient, variable):
    """Returns half the sum of squares of a gradient, float64 scalar."""
    device = variable.device
    if isinstance(gradient, tf.IndexedSlices):
        # Rows that several towers touched count as their sum, as they will in the
        # update. GPUs have no kernel that finds them.
        device = '/cpu:0'
        with tf.device(device):
            rows, places = tf.unique(gradient.indices)
            gradient = tf.unsorted_segment_sum(gradient.values, places, tf.size(rows))
    with tf.device(device):
        if gradient.dtype.size < 4:
            gradient = tf.cast(gradient, tf.float32)
        return tf.cast(tf.nn.l2_loss(gradient), tf.float64)


def apply_gradients(
    rule,
    grads_and_vars,
    sums,
    state,
    puts=(),
    statistics=(),
    own_updates=(),
    weight_decay=0,
    averages=None,
    copies=(),
):
    """Builds one step: one update, and the epoch's running sums.

    Call it outside every variable scope: slots take the scope as a prefix.

    Args:
      rule: the `Rule`.
      grads_and_vars: list of (gradient, variable), averaged over the towers.
      sums: the `Sums`.
      state: the `State` to advance.
      puts: the `Pipeline`'s.
      statistics: list of (mean, moving average), averaged like the gradients.
      own_updates: what `batch_norm.get_own_updates` returned.
      weight_decay: which share of each kernel, times the learning rate, is taken off.
      averages: what `weight_averages.create` returned.
      copies: for each tower that has variables of its own, (optimizer,
        grads_and_vars): what an optimizer keeps beside its slots it would advance with
        every use.

    Returns:
      train_op, which runs the step: float32 [3 + machines], the mean loss and the
      accuracy of its images, over all towers, its learning rate, and the wishes of
      the machines if there are several.
    """
    num_correct = tf.cast(sums.correct, tf.int64)
    metrics = tf.stack(
        [
            tf.cast(sums.loss / sums.images, tf.float32),
            sums.correct / sums.images,
            rule.learning_rate,
        ]
    )
    if sums.wishes is not None:
        metrics = tf.concat([metrics, sums.wishes], axis=0)
    pairs = [(rule.optimizer, grads_and_vars), *copies]
    gradients = [gradient for _, grads in pairs for gradient, _ in grads]
    # All that is read comes before anything is written: no tower sees a weight of
    # the next step, and a step that fails leaves nothing half-applied.
    read = gradients + [mean for mean, _ in statistics]
    read += [rule.learning_rate, sums.loss, num_correct] + list(puts)

    def update_variables():
        updates = []
        for tower, (own, grads) in enumerate(pairs):
            # Both write the kernels: without an order bits would depend on which won.
            decays = decay(grads, rule.learning_rate, weight_decay)
            slots = replicas.own_slots(tower)
            # What an optimizer keeps has the same names inside a `tf.cond`.
            with tf.control_dependencies(decays), tf.name_scope(None), slots:
                updates.append(own.apply_gradients(grads))
        return updates

    with tf.control_dependencies(read):
        update = tf.group(
            *mixed_precision.update_if_finite(
                rule.loss_scale, gradients, update_variables
            ),
            state.global_step.assign_add(1),
            state.epoch_images.assign_add(sums.images),
            state.loss_sum.assign_add(sums.loss),
            state.correct.assign_add(num_correct),
            *batch_norm.move(statistics),
            *own_updates,
        )
    if averages is not None:
        with tf.control_dependencies([update]):
            update = averages.apply([variable for _, variable in grads_and_vars])
    with tf.control_dependencies([update]):
        return tf.identity(metrics, 'train_op')


def decay(grads_and_vars, learning_rate, weight_decay):
    """Takes learning_rate * weight_decay of every kernel off it.

    Kernels are the variables of two dimensions or more; biases are left as they are.
    What the optimizer takes off does not depend on their values any more, so this is
    what the values before the update lose, though it comes first.

    Args:
      grads_and_vars: list of (gradient, variable).
      learning_rate: float32 scalar.
      weight_decay: a float; with 0 nothing is built.

    Returns:
      A list of ops.

    Source: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization",
    algorithms 1 and 2, with the learning rate as the schedule multiplier.
    """
    if not weight_decay:
        return []
    ops = []
    with tf.name_scope('weight_decay'):
        share = learning_rate * weight_decay
        for _, variable in grads_and_vars:
            if variable.shape.ndims < 2:
                continue
            with tf.device(variable.device):
                part = variable * tf.cast(share, variable.dtype.base_dtype)
                ops.append(tf.group(variable.assign_sub(part)))
    return ops


def check_finite(grads_and_vars, spec, tower, loss_scale=None):
    """Makes a step fail, before it updates anything, where a number is not finite.

    Args:
      grads_and_vars: what `compute_gradients` gave for the tower.
      spec: the tower's `ModelSpec`.
      tower: its number.
      loss_scale: with one, gradients may be infinite: it will be adapted.

    Returns:
      (grads_and_vars, spec), the same numbers, checked.
    """

    def check(tensor, what):
        return tf.debugging.check_numerics(tensor, 'tower %d: %s' % (tower, what))

    def check_gradient(gradient, variable):
        if gradient is None:
            return None
        what = 'the gradient of %s' % replicas.plain_name(variable.op.name)
        values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
        # A sum is not finite where a value is not, and takes a quarter of the time. (So
        # it is where values of 1e33 add up: as lost a run.)
        with tf.control_dependencies([check(tf.reduce_sum(values), what)]):
            values = tf.identity(values)
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return values

    # XLA would compile the checks away.
    with tf.xla.experimental.jit_scope(compile_ops=False):
        spec = spec._replace(losses=check(spec.losses, 'the loss'))
        if loss_scale is not None:
            return grads_and_vars, spec
        return [(check_gradient(g, v), v) for g, v in grads_and_vars], spec


def find_not_finite(error):
    """Returns what of which tower a failed step found not finite, or None."""
    where = r'((?:tower \d+|all towers): .*?) ?: Tensor had (.*?) values'
    found = re.search(where, str(error))
    return found and '%s has %s values' % found.groups()
