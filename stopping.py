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
from utils import RunStopped

# A healthy step ends sooner; one that has not is waiting for input.
PATIENCE_SECONDS = 1.0
# What a last save and the way out may take before --max_minutes is over.
RESERVE_SECONDS = 10.0

_received = []


def find_signal():
    """Returns a `RunStopped` once a signal has come, until then None."""
    if not _received:
        return None
    name = signal.Signals(_received[0]).name
    return RunStopped('stopped by %s' % name, 128 + _received[0])


def check(deadline=None):
    """Raises `RunStopped` once a signal has come or the deadline has passed.

    Args:
      deadline: seconds on `time.monotonic`'s clock, or None.
    """
    if _received:
        raise find_signal()
    if deadline is not None and time.monotonic() >= deadline:
        raise RunStopped('--max_minutes is nearly over', 0)


def find_deadline(max_minutes):
    """Returns when to stop so that all is over by then; None without a limit."""
    if max_minutes is None:
        return None
    seconds = max_minutes * 60
    return STARTED + seconds - min(RESERVE_SECONDS, seconds / 10)


@contextlib.contextmanager
def signals(unblock):
    """Inside the block SIGINT and SIGTERM are for `check` to find.

    A second signal ends the process at once.

    Args:
      unblock: called in a thread when a signal has not ended the block within
        PATIENCE_SECONDS; makes what the main thread may be waiting for fail.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    handled = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, _receive) for number in handled}
    wakeup_before = signal.set_wakeup_fd(writer)
    watcher = threading.Thread(target=_watch, args=(reader, unblock), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup_before)
        for number in handled:
            signal.signal(number, before[number])
        os.write(writer, b'\0')  # no signal has this number: the end
        watcher.join()
        os.close(reader)
        os.close(writer)
        del _received[:]


def _receive(number, frame):
    del frame
    _received.append(number)


def _watch(reader, unblock):
    if not _next_signal(reader):
        return
    if not select.select([reader], [], [], PATIENCE_SECONDS)[0]:
        # It may itself hang, and a second signal must still be heard.
        threading.Thread(target=_call, args=(unblock,), daemon=True).start()
    second = _next_signal(reader)
    if second:
        os._exit(128 + second)


def _call(unblock):
    with contextlib.suppress(Exception):  # the session may be closed by now
        unblock()


def _next_signal(reader):
    """Waits for SIGINT or SIGTERM, 0 for the end of the block."""
    while True:
        (number,) = os.read(reader, 1)
        if number in (0, signal.SIGINT, signal.SIGTERM):
            return number
