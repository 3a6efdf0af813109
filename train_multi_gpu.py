"""Trains one model on several GPUs: a tower on each."""

import itertools
import os
import sys

import accumulation
import batch_norm
import check_towers
import cluster
import command_line
import data_sets
import evaluation
import gradient_packs
import input_pipeline
import model
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
    rule = updates.create_rule(flags, state, pipeline)
    build_model = model.make_model_fn(flags, data)
    dtype = tf.float16 if flags.fp16 else tf.float32
    run_number = accumulation.number_runs(state.global_step, flags.accumulate)
    # Of how many towers the statistics of a batch norm are.
    all_towers = len(devices) * len(machines.addresses)
    group_size = all_towers if flags.sync_batch_norm else None

    def build_tower(tower, images, labels):
        number = machines.index * len(devices) + tower  # among those of all machines
        dropout = model.dropout_layers(flags.dropout, flags.seed, number, run_number)
        with batch_norm.in_tower(tower, group_size):
            return build_model(
                images, labels, training=True, dropout=dropout, dtype=dtype
            )

    specs, tower_grads = build_towers(
        flags, devices, pipeline.batches, build_tower, rule
    )
    if flags.sync_batch_norm:
        batch_norm.check_synchronized()
    averaged = average_towers(flags, devices, specs, tower_grads, pipeline.puts)
    step = updates.build_step(flags, rule, state, pipeline, specs, averaged, machines)
    evaluated, more_feeds = evaluation.build(
        data.valid,
        devices,
        weight_averages.evaluate_with(step.averages, build_model),
        machines=machines,
    )
    feeds.update(more_feeds)
    copies = replicas.build(len(averaged))
    return training.Job(state, rule, pipeline, step, evaluated, feeds, copies)


def average_towers(flags, devices, specs, tower_grads, puts=()):
    """Averages the gradients of the towers as `--variables` asks.

    Returns:
      For each copy of the variables, a list of (gradient, variable).
    """
    if replicas.are_wanted(flags, devices):
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
        rule = updates.create_sgd(1.0)
        specs, tower_grads = build_towers(flags, devices, batches, build_tower, rule)
        # Of all copies: an all-reduce of one tower would wait for the others' for ever.
        averaged = average_towers(flags, devices, specs, tower_grads)
        gradients = list(itertools.chain(*averaged))
        return gradients, replicas.build(len(averaged)).copy

    build_model = model.make_model_fn(flags, data)
    check_towers.check(flags, devices, data, threads, build_model, build_gradients)


def build_towers(flags, devices, batches, build_tower, rule):
    """Builds a tower per device; all share the variables that the first creates.

    Args:
      flags: what `command_line.parse` returned.
      devices: a device string per tower.
      batches: what each tower takes in, a list of tensors per tower.
      build_tower: (tower, *batch) -> `ModelSpec`.
      rule: the `updates.Rule`.

    Returns:
      (specs, tower_grads): per tower, its `ModelSpec` and what `compute_gradients`
      gives for its loss, times the loss scale if there is one.
    """
    xla = utils.use_xla(flags.xla, devices)
    place_variable = utils.place_variables(flags.variable_device, devices)
    replicated = replicas.are_wanted(flags, devices)
    specs, tower_grads = [], []
    for tower, (device, batch) in enumerate(zip(devices, batches)):
        if replicated:
            place_variable = utils.place_variables('gpu', [device])
        place = utils.on_tower(device, tower > 0, xla, place_variable)
        own_variables = replicas.own_variables(tower, replicated)
        with place, tf.name_scope('tower_%d' % tower), own_variables as variables:
            spec = build_tower(tower, *batch)
            # Inside the tower's scope, or all backward passes run on one device.
            grads, spec = updates.compute_gradients(rule, spec, tower, variables)
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
      ValueError: there are no towers, or a tower has other variables than tower 0.
      UserError: there are no gradients.
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
        raise UserError(updates.NO_GRADIENT)
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


if __name__ == '__main__':
    sys.exit(utils.run_main(main))
