"""The process of benchmark.py that measures towers: the whole loop, and its limit."""

import argparse
import contextlib
import functools
import itertools
import math
import sys
import time

import benchmark_rounds
import checkpoints
import command_line
import input_pipeline
import model
import screen
import train_multi_gpu
import training
import utils
from tf1 import tf

# Steps at the start of a slice that don't count: after them the queues' reserve of
# batches, made while others were measured, is used up.
WARM_UP_STEPS = 20
# In a round the loop and its limit take turns this often: what else the machine does
# slows both.
SLICES = 4


@contextlib.contextmanager
def prepare(argument):
    """Builds and warms up what is measured; see `benchmark_rounds.serve`.

    Args:
      argument: `training`, flags of train_multi_gpu.py; `seconds`, about how long a
        round takes.
    """
    flags = command_line.parse('', model.NETWORKS, True, argument['training'])
    flags.save_every_seconds = math.inf
    devices = utils.choose_devices(flags.device, flags.num_gpus, flags.gpus)
    threads = utils.choose_threads(flags, devices.towers)
    data = input_pipeline.load(flags.data_dir)

    began = time.perf_counter()
    with tf.Graph().as_default(), tf.device('/cpu:0'):
        train_multi_gpu.build_job(flags, devices.towers, data)
    ready = {
        'towers': devices.towers,
        'threads': threads,
        'tensorflow': tf.version.VERSION,
        'graph_seconds': time.perf_counter() - began,
    }
    unstaged = argparse.Namespace(**vars(flags))
    unstaged.staging = False
    with contextlib.ExitStack() as stack:
        open_job = functools.partial(_open_job, stack, devices, threads, data)
        loop = open_job(flags, input_pipeline.build)
        limit = open_job(
            unstaged, functools.partial(build_constant_input, devices.towers)
        )
        timed = open_job(
            unstaged,
            functools.partial(build_timed_input, flags.staging and devices.towers),
        )

        def run_loop(steps, between):
            return training.take_steps(loop.step, steps, WARM_UP_STEPS, between)

        def run_limit(steps):
            return training.take_steps(limit.step, steps, WARM_UP_STEPS, lambda _: 0.0)

        def run_timed(steps):
            for _ in range(WARM_UP_STEPS):
                timed.step()
            began = time.perf_counter()
            waited = sum(timed.step() for _ in range(steps - WARM_UP_STEPS))
            return waited / (time.perf_counter() - began)

        run_loop(5 * WARM_UP_STEPS, lambda _: 0.0)
        run_timed(5 * WARM_UP_STEPS)
        steps_per_second = run_limit(5 * WARM_UP_STEPS)
        slice_seconds = argument['seconds'] / (2 * SLICES + 1)
        steps = int(slice_seconds * steps_per_second) + WARM_UP_STEPS

        def measure():
            rates = []
            with screen.open_bar(flags, 0, SLICES * steps) as bar:
                between = training.make_between(flags, loop, bar, SLICES * steps, None)
                for before in range(0, SLICES * steps, steps):
                    rate = run_loop(steps, lambda done: between(before + done))  # noqa: B023
                    rates.append((rate, run_limit(steps)))
            images = flags.batch_size * flags.num_gpus
            return {
                'rates': [(images * rate, images * limit) for rate, limit in rates],
                'input_wait_share': run_timed(steps),
            }

        yield ready, measure


def _open_job(stack, devices, threads, data, flags, build_input):
    """Builds a job and feeds its queues until the stack ends; returns its calls."""
    with tf.Graph().as_default(), tf.device('/cpu:0'):
        job = train_multi_gpu.build_job(flags, devices.towers, data, build_input)
        waited = tf.get_collection('waited')
        end_of_epoch = training.build_end_of_epoch(job.state)
        saver = checkpoints.create_saver()
        xla = utils.use_xla(flags.xla, devices.towers)
        session = stack.enter_context(training.open_session(devices, threads, xla))
        session.run(
            [tf.global_variables_initializer(), tf.local_variables_initializer()],
            job.feeds,
        )
        session.run(job.pipeline.start)
        stack.enter_context(training.queue_runners(session))
        calls = training.make_calls(
            session, saver, job, end_of_epoch, flags.keep, lambda: None
        )
        calls.prefill()
        if waited:
            step = session.make_callable([waited[0], job.train_op])
            calls = calls._replace(step=lambda: step()[0])
        return calls


def build_constant_input(
    devices, examples, batch_size, num_towers, seed=None, state=None
):
    """In place of `input_pipeline.build`: each tower has one batch, on its device.

    It lies in a staging area there and each step looks at it: of a constant the
    graph's optimizer would compute in advance, and GPUs have no variables of bytes.
    """
    del seed, state
    batches, puts = [], []
    for tower, device in enumerate(devices):
        batch = [a[tower * batch_size : (tower + 1) * batch_size] for a in examples]
        area = {'capacity': 1, 'shared_name': 'constant_%d' % tower}
        with tf.device(device):
            puts.append(tf.raw_ops.Stage(values=list(map(tf.constant, batch)), **area))
            dtypes = [a.dtype for a in batch]
            batches.append(tf.raw_ops.StagePeek(index=0, dtypes=dtypes, **area))
        for tensor, like in zip(batches[-1], batch):
            tensor.set_shape(like.shape)
    global_batch = batch_size * num_towers
    pipeline = input_pipeline.Pipeline(
        batches, tf.no_op(), tf.group(*puts), [], len(examples.labels), global_batch
    )
    return pipeline, {}


def build_timed_input(staging_devices, *arguments):
    """The training's own input, its towers held back until all batches are there.

    How many seconds a step waits for that goes into the collection 'waited'.
    """
    started = tf.timestamp()
    with tf.control_dependencies([started]):
        pipeline, feeds = input_pipeline.build(*arguments)
        if staging_devices:
            pipeline = input_pipeline.stage(pipeline, staging_devices)
    with tf.control_dependencies(list(itertools.chain(*pipeline.batches))):
        arrived = tf.timestamp()
    tf.add_to_collection('waited', arrived - started)
    with tf.control_dependencies([arrived]):
        batches = [
            [_identity_where_it_is(tensor) for tensor in batch]
            for batch in pipeline.batches
        ]
    return pipeline._replace(batches=batches), feeds


def _identity_where_it_is(tensor):
    with tf.device(tensor.device):
        return tf.identity(tensor)


if __name__ == '__main__':
    sys.exit(utils.run_main(lambda: benchmark_rounds.serve(prepare)))
