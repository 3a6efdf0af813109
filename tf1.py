"""The one place that imports TensorFlow: graph mode on TensorFlow 1.15 and on 2.x.

Everything else says `from tf1 import tf`. The import says nothing unless it
fails or `--verbose` is on the command line.
"""

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import time

# Seconds on time.monotonic's clock; the import below is part of the run.
STARTED = time.monotonic()

for number, name in ((1, 'stdout'), (2, 'stderr')):
    if getattr(sys, name) is None:
        # Started with it closed: the next file opened would be taken for it.
        null = os.open(os.devnull, os.O_WRONLY)
        if null != number:
            os.dup2(null, number)
            os.close(null)
        setattr(sys, name, os.fdopen(number, 'w'))

# TensorFlow's log level is read at import, before any flag can be parsed.
VERBOSE = '--verbose' in sys.argv


# The stderr that `quiet_stderr` has put aside, if it has; and who may touch it.
_aside = []
_lock = threading.Lock()


@contextlib.contextmanager
def quiet_stderr():
    """Holds back what C++ code writes to stderr; replays it if the block raises.

    Environment variables silence neither oneDNN's lines nor the search for CUDA.
    """
    if VERBOSE:
        yield
        return
    stderr = os.dup(2)
    _aside.append(stderr)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except Exception:
            os.dup2(stderr, 2)
            held.seek(0)
            os.write(2, held.read())
            raise
        finally:
            with _lock:
                os.dup2(stderr, 2)
                _aside.remove(stderr)
                os.close(stderr)


def show_stderr():
    """Brings stderr back, for a thread that ends the process inside `quiet_stderr`."""
    with _lock:
        for stderr in _aside[:1]:
            os.dup2(stderr, 2)


# They run `utils.run_main`; whoever else imports this keeps Ctrl-C.
SCRIPTS = (
    'benchmark.py',
    'benchmark_machines.py',
    'benchmark_towers.py',
    'evaluate.py',
    'export.py',
    'input_pipeline.py',
    'model.py',
    'predict.py',
    'train.py',
    'train_multi_gpu.py',
)


def leave_at_once(number, frame):
    """What Ctrl-C does while libraries are imported, which may swallow it."""
    os._exit(128 + number)


@contextlib.contextmanager
def quick_ctrl_c():
    """Inside the block, and in `SCRIPTS` until `utils.run_main`, Ctrl-C ends all."""
    untouched = signal.getsignal(signal.SIGINT) == signal.default_int_handler
    if not untouched or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, leave_at_once)
    try:
        yield
    finally:
        if not is_script(getattr(sys.modules['__main__'], '__file__', None)):
            signal.signal(signal.SIGINT, signal.default_int_handler)


def is_script(path):
    """Returns whether a path, None without a file, is that of one of `SCRIPTS`."""
    if path is None:
        return False
    directory, name = os.path.split(os.path.realpath(path))
    return name in SCRIPTS and directory == os.path.dirname(os.path.realpath(__file__))


def import_tensorflow():
    """Returns `tensorflow.compat.v1`, v2 behaviour off, and what has no public name."""
    if not VERBOSE:
        # Of several machines, a lost one is told by name: its channels' errors are not.
        # Nor is that towers wait in vain for one that fails, but how it does.
        # (A file of flags may ask for that, too.)
        quiet = 'cluster' in os.environ.get('TF_CONFIG', '') or any(
            word == '--sync_batch_norm' or word.startswith('@') for word in sys.argv
        )
        level = '3' if quiet else '2'
        os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', level)
        logging.getLogger('tensorflow').setLevel(logging.ERROR)
    with quiet_stderr(), quick_ctrl_c():
        import tensorflow.compat.v1 as tensorflow

        tensorflow.disable_v2_behavior()
        from tensorflow.python.client import timeline
    return tensorflow, timeline


try:
    tf, timeline = import_tensorflow()
except ImportError as error:
    if (error.name or '').split('.')[0] != 'tensorflow':
        raise
    sys.stderr.write(
        'error: %s has no TensorFlow: run `make train`, or `%s -m pip install -r '
        'requirements.txt`\n' % (sys.executable, sys.executable)
    )
    sys.exit(2)
