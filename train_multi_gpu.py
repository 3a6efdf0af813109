"""Trains one model on several GPUs: a tower on each."""

import functools
import itertools
import os
import sys

import accumulation
import all_reduce
import batch_norm
import check_towers
import cluster
import command_line
import data_sets
import evaluation
import gradient_packs
import input_pipeline
import mixed_precision
import model
import networks
import records
import replicas
import training
import updates
import utils
import weight_averages
from tf1 import tf
from utils import UserError, log


def main():
    flags = command_line.parse(__doc__, model.NETWORKS, towers=True)
    machines = cluster.read_machines(os.environ.get('TF_CONFIG'))
    if flags.check and machines != cluster.ONE:
        raise UserError(
            '--check compares the towers of one machine: drop it, or TF_CONFIG'
        )
    replicas.check_machines(flags, machines)
    devices = utils.choose_devices(flags.device, flags.num_gpus, flags.gpus)
    with records.claim_model_dir(flags, len(devices.towers), machines) as model_dir:
        threads = records.choose_threads(flags, devices, model_dir)
        data = data_sets.load(flags, threads)
        records.check_data(model_dir, data)
        if flags.check:
            check(flags, devices, data, threads)
        with tf.Graph().as_default(), tf.device('/cpu:0'):
            job = build_job(flags, devices.towers, data, machines=machines)
            training.run(flags, devices, data, job, model_dir, machines)


def build_job(
    flags, devices, data, build_input=input_pipeline.build, machines=cluster.ONE
):
    """Builds the whole graph, a tower per device; returns it as a `training.Job`."""
    tf.set_random_seed(flags.seed)
    state = training.create_state()
    pipeline, feeds = build_input(
        data.train,
        flags.batch_size,
        len(devices),
        flags.seed,
        state,
        machines,
        flags.augment,
        flags.accumulate,
    )
    if flags.staging:
        pipeline = input_pipeline.stage(pipeline, devices)
    build_model = functools.partial(
        model.model_fn,
        network=networks.find_network(flags.model, model.NETWORKS),
        num_classes=len(data.classes),
        moments=data.moments,
        label_smoothing=flags.label_smoothing,
    )
    dtype = tf.float16 if flags.fp16 else tf.float32

    run_number = accumulation.number_runs(state.global_step, flags.accumulate)

    # Of how many towers the statistics of a batch norm are.
    group_size = None
    if flags.sync_batch_norm:
        group_size = len(devices) * len(machines.addresses)

    def build_tower(tower, images, labels):
        number = machines.index * len(devices) + tower  # among those of all machines
        dropout = model.dropout_layers(flags.dropout, flags.seed, number, run_number)
        with batch_norm.in_tower(tower, group_size):
            return build_model(
                images, labels, training=True, dropout=dropout, dtype=dtype
            )

    learning_rate = updates.learning_rate(flags, state, pipeline)
    # One for each copy of the variables.
    replicated = flags.variables == 'replicated' and len(devices) > 1
    optimizer, *more_optimizers = [
        updates.create_optimizer(flags.optimizer, learning_rate)
        for _ in (devices if replicated else devices[:1])
    ]
    loss_scale = mixed_precision.create_loss_scale(flags.fp16)
    specs, tower_grads = build_towers(
        devices,
        pipeline.batches,
        build_tower,
        optimizer,
        utils.use_xla(flags.xla, devices),
        utils.place_variables(flags.variable_device, devices),
        replicated,
        loss_scale,
    )
    # A list for each copy of the variables.
    averaged = average_towers(flags, devices, specs, tower_grads, pipeline.puts)
    averaged = [mixed_precision.scale_down(grads, loss_scale) for grads in averaged]
    statistics = batch_norm.average_statistics(len(devices))
    if flags.sync_batch_norm:
        batch_norm.check_synchronized(statistics)
    sums = updates.sum_up(specs)
    means, sums, puts, micro_steps = accumulation.accumulate(
        [*itertools.chain(*averaged), *statistics],
        sums,
        pipeline.puts,
        flags.accumulate,
    )
    if machines != cluster.ONE:
        means, sums = average_over_machines(means, sums, machines)
    means = iter(means)
    gradients, *of_copies = [
        updates.clip(
            list(itertools.islice(means, len(grads))), flags.clip_norm, loss_scale
        )
        for grads in averaged
    ]
    statistics = list(means)
    averages = weight_averages.create(flags.ema, state.global_step)
    train_op = updates.apply_gradients(
        optimizer,
        gradients,
        learning_rate,
        sums,
        state,
        puts,
        statistics,
        batch_norm.get_own_updates(len(machines.addresses)),
        flags.weight_decay,
        averages,
        loss_scale,
        list(zip(more_optimizers, of_copies)),
    )
    evaluated, more_feeds = evaluation.build(
        data.valid,
        devices,
        weight_averages.evaluate_with(averages, build_model),
        machines=machines,
    )
    feeds.update(more_feeds)
    return training.Job(
        state,
        learning_rate,
        gradients,
        train_op,
        pipeline,
        evaluated,
        feeds,
        micro_steps,
        loss_scale,
        replicas.build(len(devices)) if replicated else replicas.NONE,
    )


def average_towers(flags, devices, specs, tower_grads, puts=()):
    """Averages the gradients of the towers as `--variables` asks.

    Returns:
      A list of lists of (gradient, variable): one for each copy of the variables.
    """
    if flags.variables == 'replicated' and len(devices) > 1:
        # What may fail, before any tower waits for another.
        losses = [spec.losses for spec in specs]
        return replicas.average_gradients(
            leave_out_untrained(tower_grads), devices, losses + list(puts)
        )
    packed = gradient_packs.pack(tower_grads, flags.gradient_packs)
    return [gradient_packs.unpack(average_gradients(packed))]


def check(flags, devices, data, threads):
    """Compares a step of the towers with one of a single tower, as `--check` asks."""

    def build_gradients(devices, batches, build_tower):
        replicated = flags.variables == 'replicated' and len(devices) > 1
        specs, tower_grads = build_towers(
            devices,
            batches,
            build_tower,
            updates.create_optimizer('sgd', 1.0),
            utils.use_xla(flags.xla, devices),
            utils.place_variables(flags.variable_device, devices),
            replicated,
        )
        gradients, *_ = average_towers(flags, devices, specs, tower_grads)
        copy = replicas.build(len(devices)).copy if replicated else ()
        return gradients, copy

    build_model = functools.partial(
        model.model_fn,
        network=networks.find_network(flags.model, model.NETWORKS),
        num_classes=len(data.classes),
        moments=data.moments,
        label_smoothing=flags.label_smoothing,
    )
    check_towers.check(flags, devices, data, threads, build_model, build_gradients)


def build_towers(
    devices,
    batches,
    build_tower,
    optimizer,
    xla=False,
    place_variable=utils.on_cpu,
    replicated=False,
    loss_scale=None,
):
    """Builds a tower per device; all share the variables that the first creates.

    Args:
      devices: a device string per tower.
      batches: what each tower takes in, a list of tensors per tower.
      build_tower: (tower, *batch) -> `ModelSpec`.
      optimizer: a `tf.train.Optimizer`.
      xla: whether XLA compiles the towers.
      place_variable: (op of a variable) -> the device it goes to.
      replicated: whether instead each tower has a copy of them on its device.
      loss_scale: what `mixed_precision.create_loss_scale` returned.

    Returns:
      (specs, tower_grads): per tower, its `ModelSpec` and what `compute_gradients`
      gives for its loss, times the loss scale if there is one.
    """
    specs, tower_grads = [], []
    for tower, (device, batch) in enumerate(zip(devices, batches)):
        if replicated:
            place_variable = utils.place_variables('gpu', [device])
        place = utils.on_tower(device, tower > 0, xla, place_variable)
        own_variables = replicas.own_variables(tower, replicated)
        with place, tf.name_scope('tower_%d' % tower), own_variables as variables:
            spec = build_tower(tower, *batch)
            # Inside the tower's scope, or all backward passes run on one device.
            loss = mixed_precision.scale_up(spec.loss, loss_scale)
            grads = optimizer.compute_gradients(loss, variables)
            grads, spec = updates.check_finite(grads, spec, tower, loss_scale)
        tower_grads.append(grads)
        specs.append(spec)
    return specs, tower_grads


def average_gradients(tower_grads):
    """Averages the gradients of the towers.

    A gradient that is None in some towers counts as zero there. One that is None in
    every tower is dropped, with a warning. Sparse gradients stay sparse if they are
    sparse in every tower.

    Args:
      tower_grads: per tower, a list of (gradient, variable), as
        `optimizer.compute_gradients` returns them.

    Returns:
      A list of (gradient, variable), each gradient the mean over the towers.

    Raises:
      ValueError: there are no towers or no gradients, or a tower has other variables
        than tower 0.
    """
    averaged = []
    for pairs in zip(*leave_out_untrained(tower_grads)):
        variable = pairs[0][1]
        gradients = [gradient for gradient, _ in pairs if gradient is not None]
        with tf.device(variable.device), tf.name_scope('average'):
            averaged.append((_mean(gradients, len(pairs)), variable))
    return averaged


def leave_out_untrained(tower_grads):
    """Returns `tower_grads` without what is None in every tower.

    See `average_gradients`, also for what is raised.
    """
    if not tower_grads:
        raise ValueError('average_gradients: no towers')
    _check_same_variables(tower_grads)
    trained = []
    for pairs in zip(*tower_grads):
        if any(gradient is not None for gradient, _ in pairs):
            trained.append(pairs)
        else:
            name = pairs[0][1].name
            log.warning('%s has no gradient in any tower: not trained', name)
    if not trained:
        raise ValueError('average_gradients: no variable has a gradient in any tower')
    return list(zip(*trained))


def _check_same_variables(tower_grads):
    names_of_towers = [
        [replicas.plain_name(variable.name) for _, variable in grads]
        for grads in tower_grads
    ]
    expected = names_of_towers[0]
    for tower, names in enumerate(names_of_towers):
        for name, wanted in itertools.zip_longest(names, expected):
            if name != wanted:
                raise ValueError(
                    'average_gradients: tower %d has %s where tower 0 has %s'
                    % (tower, name or 'nothing', wanted or 'nothing')
                )


def _mean(gradients, num_towers):
    """The sum of the given gradients over the number of towers, None counted as 0."""
    if all(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
        # The optimizer adds up rows that more than one tower touched.
        return tf.IndexedSlices(
            tf.concat([gradient.values for gradient in gradients], 0) / num_towers,
            tf.concat([gradient.indices for gradient in gradients], 0),
            gradients[0].dense_shape,
        )
    dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
    return tf.add_n(dense) * (1.0 / num_towers)


def average_over_machines(grads_and_vars, sums, machines):
    """Averages over the machines what each has averaged over its towers.

    One all-reduce carries all: gradients in float32, sparse ones made dense, the
    step's sums, and which machines wish to stop after it.

    Args:
      grads_and_vars: list of (gradient, variable), what `average_gradients` and
        `batch_norm.average_statistics` returned.
      sums: the `updates.Sums` of this machine's towers.
      machines: the `cluster.Machines`.

    Returns:
      (grads_and_vars, sums) of all machines, the same bits on each.
    """
    num_machines = len(machines.addresses)
    own = [tf.cast(tf.convert_to_tensor(g), tf.float32) for g, _ in grads_and_vars]
    own = [gradient * (1.0 / num_machines) for gradient in own]
    own += [tf.cast(sums.loss, tf.float32), sums.correct]
    own += [all_reduce.put_in_slot(all_reduce.get_wish().own, machines)]
    *means, loss, correct, wishes = all_reduce.add_up(
        own, machines, all_reduce.STEP_KEY
    )
    averaged = [
        (tf.cast(mean, variable.dtype.base_dtype), variable)
        for mean, (_, variable) in zip(means, grads_and_vars)
    ]
    images = sums.images * num_machines
    return averaged, updates.Sums(tf.cast(loss, tf.float64), correct, images, wishes)


if __name__ == '__main__':
    sys.exit(utils.run_main(main))
