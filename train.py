"""Trains one model on one GPU, or on the CPU: the baseline of train_multi_gpu.py."""

import functools
import os
import sys

import accumulation
import batch_norm
import cluster
import command_line
import data_sets
import evaluation
import input_pipeline
import mixed_precision
import model
import networks
import records
import training
import updates
import utils
import weight_averages
from tf1 import tf


def main():
    flags = command_line.parse(__doc__, model.NETWORKS, towers=False)
    cluster.check_alone(os.environ.get('TF_CONFIG'))
    devices = utils.choose_devices(flags.device, 1, flags.gpus)
    with records.claim_model_dir(flags, towers=1) as model_dir:
        threads = records.choose_threads(flags, devices, model_dir)
        data = data_sets.load(flags, threads)
        records.check_data(model_dir, data)
        with tf.Graph().as_default(), tf.device('/cpu:0'):
            job = build_job(flags, devices.towers[0], data)
            training.run(flags, devices, data, job, model_dir)


def build_job(flags, device, data):
    """Builds the whole graph, the model on `device`; returns it as a `training.Job`."""
    tf.set_random_seed(flags.seed)
    state = training.create_state()
    pipeline, feeds = input_pipeline.build(
        data.train,
        flags.batch_size,
        1,
        flags.seed,
        state,
        augment=flags.augment,
        micro_steps=flags.accumulate,
    )
    if flags.staging:
        pipeline = input_pipeline.stage(pipeline, [device])
    learning_rate = updates.learning_rate(flags, state, pipeline)
    optimizer = updates.create_optimizer(flags.optimizer, learning_rate)
    build_model = functools.partial(
        model.model_fn,
        network=networks.find_network(flags.model, model.NETWORKS),
        num_classes=len(data.classes),
        moments=data.moments,
        label_smoothing=flags.label_smoothing,
    )
    dtype = tf.float16 if flags.fp16 else tf.float32
    run_number = accumulation.number_runs(state.global_step, flags.accumulate)
    dropout = model.dropout_layers(flags.dropout, flags.seed, 0, run_number)
    loss_scale = mixed_precision.create_loss_scale(flags.fp16)
    images, labels = pipeline.batches[0]
    xla = utils.use_xla(flags.xla, [device])
    with tf.device(device), tf.xla.experimental.jit_scope(compile_ops=xla):
        spec = build_model(images, labels, training=True, dropout=dropout, dtype=dtype)
        loss = mixed_precision.scale_up(spec.loss, loss_scale)
        gradients = optimizer.compute_gradients(loss)
        gradients, spec = updates.check_finite(gradients, spec, 0, loss_scale)
    gradients = updates.drop_missing(gradients)
    gradients = mixed_precision.scale_down(gradients, loss_scale)
    statistics = batch_norm.average_statistics(1)
    means, sums, puts, micro_steps = accumulation.accumulate(
        gradients + statistics, updates.sum_up([spec]), pipeline.puts, flags.accumulate
    )
    gradients, statistics = means[: len(gradients)], means[len(gradients) :]
    gradients = updates.clip(gradients, flags.clip_norm, loss_scale)
    averages = weight_averages.create(flags.ema, state.global_step)
    train_op = updates.apply_gradients(
        optimizer,
        gradients,
        learning_rate,
        sums,
        state,
        puts,
        statistics,
        batch_norm.get_own_updates(),
        flags.weight_decay,
        averages,
        loss_scale,
    )
    evaluated, more_feeds = evaluation.build(
        data.valid, [device], weight_averages.evaluate_with(averages, build_model)
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
    )


if __name__ == '__main__':
    sys.exit(utils.run_main(main))
