"""What a run leaves to look at: TensorBoard's event files, and the trace of a step.

An event file is a TFRecord file of Event messages. `tf.summary.FileWriter` would write
it in a thread of its own, which a full disk kills; here the run itself writes and
learns of it.
"""

import collections
import contextlib
import functools
import glob
import json
import os
import socket
import time

import utils
from tf1 import quiet_stderr, tf, timeline
from utils import log

# Functions (step, tf.Summary) that write to the event files of train/ and valid/.
Events = collections.namedtuple('Events', 'train valid')
NO_EVENTS = Events(lambda step, summary: None, lambda step, summary: None)

# String tensors, each a serialised tf.Summary; None where it was not asked for.
Summaries = collections.namedtuple('Summaries', 'samples gradients weights')


WRITE_ERRORS = (tf.errors.OpError, OSError)


# In the graph


def build(samples, grads_and_vars, histograms):
    """Builds what is more than a scalar; call it before the graph is finalized.

    Args:
      samples: uint8 [n, height, width, channels], what the network trains on, or None.
      grads_and_vars: list of (gradient, variable), averaged over the towers.
      histograms: whether there are to be any.

    Returns:
      `Summaries`.
    """
    shown = gradients = weights = None
    with tf.device('/cpu:0'), tf.name_scope('summaries'):
        # TensorBoard's own limit: grey, colour, with an alpha channel.
        if samples is not None and samples.shape.as_list()[3] in (1, 3, 4):
            shown = tf.raw_ops.ImageSummary(
                tag='samples', tensor=samples, max_images=samples.shape.as_list()[0]
            )
        if histograms:
            values = [(v, _values(g)) for g, v in grads_and_vars]
            gradients = _histograms('gradients/', values)
            weights = _histograms('weights/', [(v, v + 0) for _, v in grads_and_vars])
    return Summaries(shown, gradients, weights)


def _values(gradient):
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _histograms(prefix, tensors):
    return tf.raw_ops.MergeSummary(
        inputs=[
            tf.raw_ops.HistogramSummary(tag=prefix + variable.op.name, values=tensor)
            for variable, tensor in tensors
        ]
    )


# Event files


@contextlib.contextmanager
def open_events(model_dir, step, wanted=True):
    """Opens event files in `train/` and `valid/` of a run, each once it is written to.

    What older files hold of later steps is removed: a run that was killed has written
    it, and this one will write it anew.

    Args:
      model_dir: the directory of the run.
      step: the global step it goes on from.
      wanted: whether there are to be event files at all.

    Yields:
      `Events`.
    """
    if not wanted:
        yield NO_EVENTS
        return
    train, valid = (os.path.join(model_dir, name) for name in ('train', 'valid'))
    with _event_file(train, step) as train, _event_file(valid, step) as valid:
        yield Events(train, valid)


@contextlib.contextmanager
def _event_file(directory, first):
    """Yields the function that writes to a new event file; it never raises.

    The first error is told, and nothing is written from then on.
    """
    path = writer = None
    failed = False

    def write(step, summary):
        nonlocal path, writer, failed
        if failed:
            return
        try:
            if writer is None:
                path = _new_path(directory)
                writer = tf.python_io.TFRecordWriter(path)
                _put(writer, 0, file_version='brain.Event:2')
                # A TensorBoard that has read the removed events drops them, too.
                start = tf.SessionLog(status=tf.SessionLog.START)
                _put(writer, first + 1, session_log=start)
            _put(writer, step, summary=summary)
            writer.flush()
        except WRITE_ERRORS as error:
            log.error('%s: no more events: %s', path or directory, _line(error))
            failed = True

    try:
        remove_later_events(directory, first)
    except WRITE_ERRORS as error:
        log.error('%s: old events stay: %s', directory, _line(error))
    try:
        yield write
    finally:
        if writer is not None:
            with contextlib.suppress(*WRITE_ERRORS):
                writer.close()


def _new_path(directory):
    os.makedirs(directory, exist_ok=True)
    name = 'events.out.tfevents.%010d.%s' % (time.time(), socket.gethostname())
    path = os.path.join(directory, name)
    while os.path.exists(path):  # two starts within a second
        path += '.1'
    return path


def _put(writer, step, **fields):
    event = tf.Event(wall_time=time.time(), step=step, **fields)
    writer.write(event.SerializeToString())


def _line(error):
    # TensorFlow says "path; cause".
    text = getattr(error, 'strerror', None) or utils.find_cause(error)
    return text.rpartition('; ')[2]


def remove_later_events(directory, step):
    """Removes the events of steps after `step` from the event files of a directory."""
    pattern = os.path.join(glob.escape(directory), 'events.out.tfevents.*')
    for path in glob.glob(pattern):
        events = list(read_events(path))
        kept = [event for event in events if event.step <= step]
        if len(kept) == len(events):
            continue
        # Not a name that TensorBoard would read.
        new = os.path.join(directory, 'unfinished')
        try:
            with tf.python_io.TFRecordWriter(new) as writer:
                for event in kept:
                    writer.write(event.SerializeToString())
            os.replace(new, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.remove(new)


def read_events(path):
    """Yields the events of a file; what a kill cut short ends it."""
    with contextlib.suppress(tf.errors.DataLossError):
        for record in tf.python_io.tf_record_iterator(path):
            yield tf.Event.FromString(record)


def scalars(**values):
    """Returns a `tf.Summary` of numbers, {tag: number}; None is left out."""
    return tf.Summary(
        value=[
            tf.Summary.Value(tag=tag, simple_value=value)
            for tag, value in values.items()
            if value is not None
        ]
    )


# Steps that are run to be looked at


def make_special_steps(session, job, summary, write, traced, model_dir):
    """Returns the function that says which steps are run in another way.

    A last step of an epoch gives the histograms of gradients and weights, if there are
    to be any. The step before the traced one is run in the same way as this: where
    XLA compiles once more, it does not do so in the trace.

    Args:
      session: where the variables are.
      job: the `training.Job`: its micro_steps and its train_op make a step.
      summary: `Summaries`.
      write: (step, tf.Summary) -> None, to the event file of `train/`.
      traced: the global step whose trace is wanted, or None.
      model_dir: where the trace goes.

    Returns:
      (global step, steps, whether they end an epoch) -> a dict: which of these
      steps, counted from 1, and what to call for it with the usual function.
    """
    histograms = summary.gradients is not None
    if histograms:
        run_with_gradients = session.make_callable(
            [job.step.train_op, summary.gradients]
        )
        read_weights = session.make_callable(summary.weights)

    def run_micro_steps():
        for op in job.step.micro_steps:
            session.run(op)

    def run_traced(ends_epoch, path):
        fetches = [job.step.train_op]
        if ends_epoch and histograms:
            fetches.append(summary.gradients)
        options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
        run_metadata = tf.RunMetadata()
        with quiet_stderr():  # its tracer looks for a GPU, too
            found = session.run(fetches, None, options, run_metadata)
        if path is not None:
            write_trace(path, run_metadata)
        return found

    def run_special(number, ends_epoch, step):
        if traced is not None and number in (traced - 1, traced):
            path = find_trace(model_dir, traced) if number == traced else None
            run_micro_steps()
            metrics, *gradients = run_traced(ends_epoch, path)
        elif ends_epoch and histograms:
            run_micro_steps()
            metrics, *gradients = run_with_gradients()
        else:
            metrics, gradients = step(), []
        if number == 1 and summary.samples is not None:
            write(1, tf.Summary.FromString(session.run(summary.samples)))
        if gradients:
            write(number, tf.Summary.FromString(gradients[0]))
            write(number, tf.Summary.FromString(read_weights()))
        return metrics

    def find(first, steps, ends_epoch):
        last = first + steps
        numbers = {1, last} if ends_epoch and histograms else {1}
        if traced is not None:
            numbers |= {traced - 1, traced}
        return {
            number - first: functools.partial(
                run_special, number, ends_epoch and number == last
            )
            for number in numbers
            if first < number <= last
        }

    return find


def find_trace(model_dir, step):
    """Returns the path of a step's trace."""
    return os.path.join(model_dir, 'trace-%d.json' % step)


def write_trace(path, run_metadata):
    """Writes the times of a step's ops in Chrome's format, a group of rows per device.

    Args:
      path: the JSON file.
      run_metadata: `tf.RunMetadata` of a run with `FULL_TRACE`.
    """
    trace = timeline.Timeline(run_metadata.step_stats)
    events = json.loads(trace.generate_chrome_trace_format(show_dataflow=False))
    events = events['traceEvents']
    # Without the groups that stay empty, and the one that 1.15 has of all ops again.
    names = {e['pid']: e['args']['name'] for e in events if e['ph'] == 'M'}
    busy = {e['pid'] for e in events if e['ph'] == 'X'}
    shown = {pid for pid in busy if not names[pid].startswith('/host:')}
    events = [event for event in events if event['pid'] in shown]
    try:
        with open(path, 'w', encoding='utf-8') as file:
            json.dump({'traceEvents': events}, file, indent=0)
        log.info('trace of the step: %s', path)
    except OSError as error:
        log.error('%s is not written: %s', path, error.strerror)
