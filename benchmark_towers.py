"""The process of benchmark.py that measures towers: the whole loop, and its limit."""

import argparse
import contextlib
import functools
import itertools
import math
import sys
import tempfile
import time

import numpy as np

import benchmark_rounds
import command_line
import data_sets
import input_pipeline
import keeper
import model
import screen
import summaries
import train_multi_gpu
import training
import utils
from cluster import ONE
from tf1 import tf

# In a round the loop and its limit take turns this often: what else the machine does
# slows both.
SLICES = 4
# Measured in each slice, however slow a step is.
LEAST_STEPS = 10


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
    data = data_sets.load(flags, threads)

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
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        wanted = flags.summary_steps > 0
        events = stack.enter_context(summaries.open_events(directory, 0, wanted))
        loop, _ = open_job(flags, input_pipeline.build, events)
        limit, _ = open_job(
            unstaged, functools.partial(build_constant_input, devices.towers)
        )
        _, timed_step = open_job(
            flags, input_pipeline.build if flags.staging else build_timed_input
        )
        global_batch = flags.batch_size * flags.num_gpus * flags.accumulate
        warm_up = count_warm_up(global_batch, data.train.images)

        def take(step, steps, between=lambda *_: 0.0):
            return training.take_steps(step, steps, warm_up, between, global_batch)

        def run_timed(steps):
            for _ in range(warm_up):
                timed_step()
            began = time.perf_counter()
            waited = sum(timed_step()[0] for _ in range(steps - warm_up))
            return waited / (time.perf_counter() - began)

        few = warm_up + LEAST_STEPS
        take(loop.step, few)
        run_timed(few)
        take(limit.step, few)
        rate = take(limit.step, few) / global_batch
        slices = 2 * SLICES + 1  # of the loop, of the limit, and one timed
        steps = int(argument['seconds'] / slices * rate)
        steps = warm_up + max(LEAST_STEPS, steps)
        ready['round_seconds'] = slices * steps / rate
        ready['steps'] = steps

        def measure():
            rates = []
            with screen.open_bar(flags, 0, SLICES * steps) as bar:
                between = training.make_between(flags, loop, bar, 0, SLICES * steps)
                for before in range(0, SLICES * steps, steps):
                    rate = take(
                        loop.step,
                        steps,
                        lambda done, *rest: between(before + done, *rest),  # noqa: B023
                    )
                    rates.append((rate, take(limit.step, steps)))
            return {'rates': rates, 'input_wait_share': run_timed(steps)}

        yield ready, measure


def count_warm_up(own_batch, images):
    """Returns after how many steps the input is no longer ahead.

    The batches it had made while it was not measured are used up by then: two runs of
    its thread in the queue and one under way.
    """
    return 3 * input_pipeline.steps_per_enqueue(own_batch, images) + 1


def _open_job(
    stack, devices, threads, data, flags, build_input, events=summaries.NO_EVENTS
):
    """Builds a job and feeds its queues until the stack ends.

    Returns:
      (calls, timed_step): its `training.Calls`, and a step that returns how many
      seconds it waited for input (and None).
    """
    with tf.Graph().as_default(), tf.device('/cpu:0'):
        job = train_multi_gpu.build_job(flags, devices.towers, data, build_input)
        waited = tf.get_collection('waited') or [build_timed_puts(job)]
        end_of_epoch = training.build_end_of_epoch(job.state)
        xla = utils.use_xla(flags.xla, devices.towers)
        session = stack.enter_context(utils.open_session(devices, threads, xla))
        session.run(
            [tf.global_variables_initializer(), tf.local_variables_initializer()],
            job.feeds,
        )
        session.run([job.replicas.copy, job.pipeline.start])
        stack.enter_context(training.queue_runners(session))
        kept = keeper.NOTHING._replace(events=events)
        calls = training.make_calls(session, job, end_of_epoch, lambda: None, kept)
        calls.prefill()
        return calls, session.make_callable([waited[0], job.step.train_op])


def build_constant_input(
    devices,
    examples,
    batch_size,
    num_towers,
    seed=None,
    state=None,
    machines=ONE,
    augment=(),
    micro_steps=1,
):
    """In place of `input_pipeline.build`: each tower has one batch, on its device.

    It lies in a staging area there and each step looks at it: of a constant the
    graph's optimizer would compute in advance, and GPUs have no variables of bytes.
    """
    del seed, state, augment
    batches, puts = [], []
    for tower, device in enumerate(devices):
        rows = np.arange(tower * batch_size, (tower + 1) * batch_size)
        batch = [
            data_sets.read_images(examples.images, rows),
            examples.labels[rows],
        ]
        area = {'capacity': 1, 'shared_name': 'constant_%d' % tower}
        with tf.device(device):
            puts.append(tf.raw_ops.Stage(values=list(map(tf.constant, batch)), **area))
            dtypes = [a.dtype for a in batch]
            batches.append(tf.raw_ops.StagePeek(index=0, dtypes=dtypes, **area))
        for tensor, like in zip(batches[-1], batch):
            tensor.set_shape(like.shape)
    pipeline = input_pipeline.Pipeline(
        batches,
        start=tf.no_op(),
        prefill=tf.group(*puts),
        puts=[],
        samples=None,
        num_images=len(examples.labels),
        global_batch=batch_size * num_towers * len(machines.addresses) * micro_steps,
    )
    return pipeline, {}


def build_timed_input(*arguments):
    """In place of `input_pipeline.build`: the same, all towers wait for all batches.

    How many seconds a step waits for that goes into the collection 'waited'.
    """
    started = tf.timestamp()
    with tf.control_dependencies([started]):
        pipeline, feeds = input_pipeline.build(*arguments)
    with tf.control_dependencies(list(itertools.chain(*pipeline.batches))):
        arrived = tf.timestamp()
    tf.add_to_collection('waited', arrived - started)
    with tf.control_dependencies([arrived]):
        batches = [[tf.identity(t) for t in batch] for batch in pipeline.batches]
    return pipeline._replace(batches=batches), feeds


def build_timed_puts(job):
    """Returns how many seconds a step waits for its staging areas to be filled again.

    It does so once the towers are done, and each gradient has been checked.
    """
    operations = tf.get_default_graph().get_operations()
    with tf.control_dependencies(
        [op for op in operations if op.type == 'CheckNumerics']
    ):
        computed = tf.timestamp()
    with tf.control_dependencies(job.pipeline.puts):
        put = tf.timestamp()
    return tf.maximum(put - computed, 0)


if __name__ == '__main__':
    sys.exit(utils.run_main(lambda: benchmark_rounds.serve(prepare)))
