"""The process of benchmark.py that is one of several machines, on loopback."""

import contextlib
import math
import os
import statistics
import sys
import time

import all_reduce
import benchmark_rounds
import command_line
import data_sets
import keeper
import model
import replicas
import screen
import sessions
import train_multi_gpu
import training
import utils
from benchmark_towers import SLICES, count_warm_up
from cluster import Machines
from tf1 import tf

# Of the all-reduce alone, in each round.
RUNS = 50
# No other op of the graph has it.
KEY = 100


@contextlib.contextmanager
def prepare(argument):
    """Builds and warms up what is measured; see `benchmark_rounds.serve`.

    Args:
      argument: `training`, flags of train_multi_gpu.py; `addresses` and `index`, those
        of `cluster.Machines`; `steps`, how many each slice of a round has.
    """
    flags = command_line.parse('', model.NETWORKS, True, argument['training'])
    flags.save_every_seconds = flags.step_timeout = math.inf  # others have their turns
    machines = Machines(argument['addresses'], argument['index'])
    replicas.check_machines(flags, machines)
    take_cores(machines)
    devices = utils.choose_devices(flags.device, flags.num_gpus, flags.gpus)
    data = data_sets.load(flags, utils.choose_threads(flags, devices.towers))
    steps = argument['steps']
    own_batch = flags.batch_size * flags.num_gpus * flags.accumulate
    warm_up = count_warm_up(own_batch, data.train.images)

    def find_stop():
        return None

    with contextlib.ExitStack() as stack:
        stack.enter_context(tf.Graph().as_default())
        stack.enter_context(tf.device('/cpu:0'))
        job = train_multi_gpu.build_job(flags, devices.towers, data, machines=machines)
        end_of_epoch = training.build_end_of_epoch(job.state)
        equality = all_reduce.build_equality(tf.global_variables(), [], machines)
        reduce_alone = build_alone(job.step.gradients, machines)
        initialise = [
            tf.global_variables_initializer(),
            tf.local_variables_initializer(),
        ]
        session, _, watch = stack.enter_context(
            sessions.open_session(flags, devices, data, None, machines, find_stop)
        )
        session.run(initialise, job.feeds)
        session.run(equality.broadcast)
        session.run(job.pipeline.start)
        calls = training.make_calls(
            session, job, end_of_epoch, find_stop, keeper.NOTHING
        )
        calls = training.add_machines(calls, session, job, equality, machines, watch)
        reduce_alone = session.make_callable(reduce_alone)
        stack.enter_context(training.queue_runners(session, find_stop, watch.leave))
        calls.prefill()

        def take(steps):
            with screen.open_bar(flags, 0, steps) as bar:
                between = training.make_between(flags, calls, bar, 0, steps)
                return training.take_steps(
                    calls.step, steps, warm_up, between, job.pipeline.global_batch
                )

        def measure():
            rates = [take(steps) for _ in range(SLICES)]
            began = time.perf_counter()
            for _ in range(RUNS):
                reduce_alone()
            return {
                'images_per_second': statistics.median(rates),
                'all_reduce_seconds': (time.perf_counter() - began) / RUNS,
            }

        rate = take(steps) / job.pipeline.global_batch
        reduce_alone()
        yield {'round_seconds': SLICES * steps / rate}, measure


def take_cores(machines):
    """Keeps this process to its share of the cores, as a machine has its own."""
    if hasattr(os, 'sched_getaffinity'):
        cores = sorted(os.sched_getaffinity(0))
        share = len(cores) // len(machines.addresses)
        if share:
            own = cores[machines.index * share : (machines.index + 1) * share]
            os.sched_setaffinity(0, own)


def build_alone(grads_and_vars, machines):
    """Returns the op that adds up as many numbers as a step does, and nothing else."""
    size = sum(variable.shape.num_elements() for _, variable in grads_and_vars)
    numbers = tf.Variable(
        tf.zeros([size + 2 + len(machines.addresses)]),
        trainable=False,
        collections=[tf.GraphKeys.LOCAL_VARIABLES],
        name='numbers',
    )
    return all_reduce.add_up([numbers + 0], machines, KEY)[0].op


if __name__ == '__main__':
    sys.exit(utils.run_main(lambda: benchmark_rounds.serve(prepare)))
