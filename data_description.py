"""Describes a data set: what is in it, what is wrong with it, how fast it is read."""

import collections
import itertools
import os
import statistics
import time

import numpy as np

import command_line
import data_sets
import decoding
import input_pipeline
import records
import training
import utils
from tf1 import tf
from utils import RunFailed, log

# Of more classes only the largest and the smallest ones are shown, so many each.
MOST_CLASSES = 50
FEW_CLASSES = 10
# How long the longest bar of the histogram is.
BAR = 40
ROUNDS = 7
# Taken at a time, if there are so many, for the time of taking them to be none.
BATCHES = 4


def main():
    flags = parse()
    threads = records.choose_threads(flags, utils.CPU, None)
    data = data_sets.load(flags, threads)
    for line in describe(flags, data):
        log.info('%s', line)
    for fault in data.faults:
        log.info('fault: %s: %s', *fault)
    if data.faults:
        raise RunFailed(
            '%s can not be decoded; training stops at the first, or leaves them out '
            'with --skip_bad' % utils.count(len(data.faults), 'image')
        )
    log.info('no fault found')
    for line in measure(flags, data, threads):
        log.info('%s', line)


def parse(argv=None):
    parser = command_line.Parser(description=__doc__, prog='input_pipeline.py')
    command_line.add_data(parser)
    parser.add_argument(
        '--batch_size',
        type=command_line.number(int, 1, 65536),
        default=32,
        help='images per batch (default: 32)',
    )
    parser.add_argument(
        '--seconds',
        type=command_line.number(float, 0, 1e6, above=True),
        default=5,
        help='how long to measure (default: 5)',
    )
    command_line.add_threads(parser)
    flags = parser.parse_args(argv)
    # All faults are to be found, not only the first.
    flags.skip_bad, flags.model_dir, flags.xla = True, None, 'off'
    return flags


def describe(flags, data):
    """Yields lines on what is in a data set."""
    yield '%s: %s, images of %s, %d classes' % (
        os.path.relpath(flags.data_dir),
        data.kind,
        'x'.join(map(str, data.train.images.shape[1:])),
        len(data.classes),
    )
    if decoding.is_stream(data.train.images):
        size = data.train.images.size
        low, high = ('%dx%d' % tuple(f(axis=0)) for f in (size.min, size.max))
        on_disk = low if low == high else 'from %s to %s' % (low, high)
        if on_disk != '%dx%d' % data.train.images.shape[1:3]:
            yield 'as they are on disk: ' + on_disk
    if data.held_out:
        yield '%g of each class are held out for validation' % data.held_out
    halves = [np.bincount(e.labels, minlength=len(data.classes)) for e in data[:2]]
    names = ['class'] + [str(name) for name in data.classes] + ['all']
    width = max(map(len, names))
    yield '%s %9s %10s' % ('class'.rjust(width), 'training', 'validation')
    for place in choose_classes(halves[0]):
        if place is None:
            yield '...'.rjust(width)
            continue
        counts = [half[place] for half in halves]
        bar = '#' * max(1, round(BAR * counts[0] / halves[0].max()))
        yield '%s %9d %10d  %s' % (names[place + 1].rjust(width), *counts, bar)
    yield '%s %9d %10d' % ('all'.rjust(width), *(half.sum() for half in halves))


def choose_classes(counts):
    """Returns the classes to show, a list of places; None stands for those between."""
    if len(counts) <= MOST_CLASSES:
        return list(range(len(counts)))
    order = np.argsort(-counts, kind='stable').tolist()
    return order[:FEW_CLASSES] + [None] + order[-FEW_CLASSES:]


# Speed


def measure(flags, data, threads):
    """Yields a line on how fast batches come out of the queues.

    Of encoded images one, too, on decoding alone, measured in turns with it: the same
    ops on images that are in memory, without files, order, queues or augmentation.
    """
    stream = decoding.is_stream(data.train.images)
    number = min(BATCHES, max(1, len(data.train.labels) // flags.batch_size))
    with tf.Graph().as_default(), tf.device('/cpu:0'):
        state = training.create_state()
        pipeline, feeds = input_pipeline.build(
            data.train, flags.batch_size, number, 0, state, augment=flags.augment
        )
        batches = tf.group(*itertools.chain(*pipeline.batches))
        takes = {'the pipeline': (batches, pipeline.global_batch)}
        if stream:
            takes['decoding'] = build_decoding(data.train, feeds)
        with utils.open_session(utils.CPU, threads) as session:
            session.run(tf.global_variables_initializer())
            session.run(tf.local_variables_initializer(), feeds)
            session.run(pipeline.start)
            with training.queue_runners(session):
                rates = measure_rounds(session, takes, flags.seconds)
    for name, rate in rates.items():
        yield '%s alone: %s images/s' % (
            name,
            format(int(statistics.median(rate)), ','),
        )
    if stream:
        shares = [a / b for a, b in zip(rates['the pipeline'], rates['decoding'])]
        yield 'the pipeline makes %.0f %% of that (%d rounds, spread %.0f %%)' % (
            100 * statistics.median(shares),
            len(shares),
            100 * (max(shares) - min(shares)),
        )


def build_decoding(examples, feeds):
    """Returns (op, images it decodes): as many as are decoded side by side."""
    rows = np.arange(min(decoding.PART, len(examples.labels)), dtype=np.int32)
    reader = decoding.build_reader(examples)
    encoded = decoding.read_all(reader.read_bytes, rows)
    held, feed = decoding.hold(encoded, 'encoded')
    for more in (reader.feeds, feed):
        feeds.update(more)
    images, _ = reader.decode(tf.constant(rows), held)
    # What nobody takes is optimised away; all of it would be copied out.
    return images[:, 0, 0, 0], len(rows)


def measure_rounds(session, takes, seconds):
    """Returns {name: images per second, one number per round}, measured in turns."""
    calls = {name: session.make_callable(op) for name, (op, _) in takes.items()}
    rates = collections.OrderedDict((name, []) for name in takes)
    slice_seconds = seconds / ROUNDS / len(takes)
    ahead = 3 * input_pipeline.STEPS_PER_ENQUEUE + 1
    for _ in range(ROUNDS):
        for name, (_, images) in takes.items():
            for _ in range(ahead):  # what was made while this was not measured
                calls[name]()
            began, done = time.perf_counter(), 0
            while time.perf_counter() - began < slice_seconds:
                calls[name]()
                done += 1
            rates[name].append(done * images / (time.perf_counter() - began))
    return rates
