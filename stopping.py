"""Ctrl-C, SIGTERM and the time limit: finish the step, save, leave.

Python's signal handlers run only when `session.run` returns, so never while it waits
on an empty queue. The C handler's wake-up byte arrives at once, and a thread reads it.
"""

import contextlib
import os
import select
import signal
import threading
import time

from tf1 import STARTED
from utils import RunStopped, raised

# A healthy step ends sooner; one that has not is waiting for input.
PATIENCE_SECONDS = 1.0
# What a last save and the way out may take before --max_minutes is over.
RESERVE_SECONDS = 10.0

HANDLED = signal.SIGINT, signal.SIGTERM
# Of the block, said as a signal is; none has this number.
END = 0

_received = []


def find_stop(deadline=None):
    """Returns a `RunStopped` once a signal has come or the deadline has passed.

    A signal may have come before training, and be lost to what ran just then.

    Args:
      deadline: seconds on `time.monotonic`'s clock, or None.
    """
    if raised:
        return raised[0]
    status = None
    if _received:
        status = 128 + _received[0]
    elif deadline is not None and time.monotonic() >= deadline:
        status = 0
    return None if status is None else RunStopped(explain(status), status)


def explain(status):
    """Returns why a run was stopped that ends with this status."""
    if status == 0:
        return '--max_minutes is nearly over'
    return 'stopped by %s' % signal.Signals(status - 128).name


def find_deadline(max_minutes):
    """Returns when to stop so that all is over by then; None without a limit."""
    if max_minutes is None:
        return None
    seconds = max_minutes * 60
    return STARTED + seconds - min(RESERVE_SECONDS, seconds / 10)


@contextlib.contextmanager
def signals(unblock, deadline=None):
    """Inside the block SIGINT and SIGTERM are for `find_stop` to find.

    A second signal ends the process at once.

    Args:
      unblock: called in a thread when a signal or the deadline has not ended the
        block within PATIENCE_SECONDS; makes what the main thread may be waiting for
        fail.
      deadline: as in `find_stop`.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # A job in the background ignores Ctrl-C.
    handled = [n for n in HANDLED if signal.getsignal(n) != signal.SIG_IGN]
    wakeup_before = signal.set_wakeup_fd(writer)
    before = {number: signal.signal(number, _receive) for number in handled}
    watcher = threading.Thread(
        target=_watch, args=(reader, unblock, deadline), daemon=True
    )
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup_before)
        for number in handled:
            signal.signal(number, before[number])
        os.write(writer, bytes([END]))
        watcher.join()
        os.close(reader)
        os.close(writer)
        del _received[:]


def _receive(number, frame):
    del frame
    _received.append(number)


def _watch(reader, unblock, deadline):
    heard = _next_signal(reader) if _wait(reader, deadline) else None
    if heard == END:
        return
    # In a thread: it may itself hang, and a second signal must still be heard.
    patience = threading.Timer(PATIENCE_SECONDS, _call, [unblock])
    patience.daemon = True
    patience.start()
    if heard is None:  # the deadline is no signal
        heard = _next_signal(reader)
    if heard != END:
        heard = _next_signal(reader)
    patience.cancel()
    if heard != END:
        os._exit(128 + heard)


def _wait(reader, until):
    """Waits for a byte until the given time; returns whether there is one."""
    seconds = None if until is None else max(0, until - time.monotonic())
    return bool(select.select([reader], [], [], seconds)[0])


def _call(unblock):
    with contextlib.suppress(Exception):  # the session may be closed by now
        unblock()


def _next_signal(reader):
    """Waits for SIGINT or SIGTERM, or for `END`."""
    while True:
        (number,) = os.read(reader, 1)
        if number in (END, *HANDLED):
            return number
