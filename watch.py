"""Watches the other machines while they run.

A machine inside an all-reduce waits for the others for ever on TensorFlow 1.15, and
TensorFlow 2.x says only that something is unavailable. So threads of this room watch,
and end the process with a line that names the machine. None needs the main thread.
"""

import contextlib
import threading
import time

import stopping
import utils
from cluster import name_machine
from messages import receive, send
from tf1 import tf
from utils import RunFailed, RunStopped, UserError

BEAT_SECONDS = 1.0
# A machine that has not been heard for so long is gone.
SILENCE_SECONDS = 15.0
# What is in the text of an error that came with the all-reduce.
HANDED_ON = 'CollectiveReduce'
# How TensorFlow 2.x says that another machine is gone, before the watch has seen it.
LOSSES = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.InternalError,
    tf.errors.UnavailableError,
)


class AllStopped(RunStopped):
    """Every machine stops after the same step."""


class AllFailed(RunFailed):
    """Every machine ends for a cause that each has found."""


AGREED = (AllStopped, AllFailed)


class Watch:
    """Ends this process when another machine is gone or a step does not end."""

    def __init__(self, machines, connections, flags, find_stop, end=utils.leave):
        """Starts to watch.

        Args:
          machines: the `cluster.Machines`.
          connections: what `cluster.meet` returned.
          flags: `--step_timeout`; the first step has `--start_timeout`.
          find_stop: () -> a `RunStopped` that this machine wishes for, or None.
          end: (error) ends the process.
        """
        self._machines = machines
        self._connections = connections
        self._flags = flags
        self._find_stop = find_stop
        self._end = end
        self._sending = {index: threading.Lock() for index in connections}
        self._ending = threading.Lock()
        self._wished = False
        # (1 + the status it ends with) -> None, the wish that each step carries.
        self.make_wish = None
        self._steps = self._inside = 0
        # Of the others: twice the steps done, and one more inside a step.
        self._places = dict.fromkeys(connections, 0)
        self._heard_at = time.monotonic()
        self._parted = {index: threading.Event() for index in connections}
        self._closed = threading.Event()
        for index in connections:
            self._start(self._listen, index)
        self._start(self._beat)

    def _start(self, function, *args):
        threading.Thread(target=function, args=args, daemon=True).start()

    # What the main thread calls

    def wish(self):
        """Before each step: makes it carry the wish to stop, once there is one."""
        self._inside = 1
        stop = None if self._wished else self._find_stop()
        if stop is not None:
            self._wished = True
            self.make_wish(1 + stop.status)

    def hear(self, wishes=()):
        """Takes note of the end of a step, without wishes only that all is well.

        Args:
          wishes: those of all machines, as the step returned them.

        Returns:
          The `AllStopped` of the first machine that wishes to stop, or None.
        """
        self._heard_at = time.monotonic()
        if len(wishes):
            self._inside = 0
            self._steps += 1
        for index, wish in enumerate(wishes):
            if wish:
                reason, status = stopping.explain(int(wish) - 1), int(wish) - 1
                if index != self._machines.index:
                    reason = '%s: %s' % (name_machine(self._machines, index), reason)
                return AllStopped(reason, status)
        return None

    def part(self):
        """Returns once every machine has come so far; machine 0 comes last.

        A machine that left at once could take away what another still reads from it.
        """
        self.hear()
        if self._machines.index != 0:
            self._tell(bye=True)
        for parted in self._parted.values():
            parted.wait()
        if self._machines.index == 0:
            self._tell(bye=True)
        self.close()

    def close(self):
        """Ends the watch; tells nobody."""
        self._closed.set()

    def leave(self, error):
        """Ends this process for an error, and the others with its cause."""
        if error is None or isinstance(error, AGREED):
            self.part()
            self._end(error)
            return
        if is_echo(error):
            # By then it is known who it was; where it was nobody, who has not only been
            # handed the error tells it.
            beats = 4 if HANDED_ON in str(error) else 2
            time.sleep(SILENCE_SECONDS + beats * BEAT_SECONDS)
        told = find_reason(error)
        kind = 'mistake' if isinstance(error, UserError) else 'failed'
        name = name_machine(self._machines, self._machines.index)
        self._leave(error, **{kind: '%s: %s' % (name, told)})

    # What the threads do

    def _leave(self, error, **message):
        with self._ending:  # of several causes the first is told
            if not self._closed.is_set():
                self._tell(**message)
                self._closed.set()
                self._end(error)

    def _tell(self, **message):
        for index, connection in self._connections.items():
            with contextlib.suppress(OSError), self._sending[index]:
                send(connection, **message)

    def _beat(self):
        while not self._closed.wait(BEAT_SECONDS):
            self._tell(place=2 * self._steps + self._inside)
            if self._machines.index == 0:  # it hears of all, and waits for all
                self._check_step()

    def _check_step(self):
        flag = 'step_timeout' if self._steps else 'start_timeout'
        limit = getattr(self._flags, flag)
        if time.monotonic() - self._heard_at > limit:
            places = dict(self._places)
            places[0] = 2 * self._steps + self._inside
            behind = min(places, key=places.get)
            if len(set(places.values())) == 1:
                who = 'all machines are inside it: the input of one, or the network?'
            else:
                who = '%s is the furthest behind' % name_machine(self._machines, behind)
            reason = 'a step did not end within --%s %g; %s' % (flag, limit, who)
            self._leave(RunFailed(reason), failed=reason)

    def _listen(self, index):
        while True:
            try:
                message = receive(self._connections[index], SILENCE_SECONDS)
            except (OSError, ValueError) as error:
                name = name_machine(self._machines, index)
                reason = '%s is gone: %s' % (name, error)
                self._leave(RunFailed(reason), failed=reason)
                return
            if 'bye' in message:
                self._parted[index].set()
                return
            for kind, error in (('failed', RunFailed), ('mistake', UserError)):
                if kind in message:
                    reason = str(message[kind])
                    self._leave(error(reason), **{kind: reason})
                    return
            if isinstance(message.get('place'), int):
                self._places[index] = message['place']


def is_echo(error):
    """Returns whether an error is how another machine's end, or error, looks from here.

    TensorFlow 1.15 hands the other's own error on, as one of the all-reduce.
    """
    if isinstance(error, LOSSES):
        return True
    return isinstance(error, tf.errors.OpError) and HANDED_ON in str(error)


def find_reason(error):
    """Returns in one line why a machine ends."""
    if isinstance(error, KeyboardInterrupt):
        return 'stopped by SIGINT'
    if isinstance(error, (UserError, RunFailed, RunStopped)):
        return str(error)
    return '%s: %s' % (type(error).__name__, utils.find_cause(error))


@contextlib.contextmanager
def watched(watch):
    """Inside the block a failure ends all machines; after it they part."""
    try:
        yield
    except AGREED:
        watch.part()
        raise
    except BaseException as error:
        watch.leave(error)
        raise
    watch.part()
