"""Trains one model on one GPU, or on the CPU: the baseline of train_multi_gpu.py."""

import os
import sys

import accumulation
import cluster
import command_line
import data_sets
import evaluation
import input_pipeline
import model
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
    rule = updates.create_rule(flags, state, pipeline)
    build_model = model.make_model_fn(flags, data)
    dtype = tf.float16 if flags.fp16 else tf.float32
    run_number = accumulation.number_runs(state.global_step, flags.accumulate)
    dropout = model.dropout_layers(flags.dropout, flags.seed, 0, run_number)
    images, labels = pipeline.batches[0]
    xla = utils.use_xla(flags.xla, [device])
    with tf.device(device), tf.xla.experimental.jit_scope(compile_ops=xla):
        spec = build_model(images, labels, training=True, dropout=dropout, dtype=dtype)
        gradients, spec = updates.compute_gradients(rule, spec, 0)
    gradients = updates.drop_missing(gradients)
    step = updates.build_step(flags, rule, state, pipeline, [spec], [gradients])
    evaluated, more_feeds = evaluation.build(
        data.valid, [device], weight_averages.evaluate_with(step.averages, build_model)
    )
    feeds.update(more_feeds)
    return training.Job(state, rule, pipeline, step, evaluated, feeds)


if __name__ == '__main__':
    sys.exit(utils.run_main(main))
