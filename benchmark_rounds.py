"""A process that measures when it is asked: both ends of its pipes.

Thread pools and devices are a process's own, so each thing that is measured has one,
and waits on its stdin while the others have their turn.
"""

import collections
import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import threading

# Lines kept of what a process says on its stderr.
TAIL = 50


class Ended(Exception):
    """A process ended before its answer; `status` and `said` tell why."""

    def __init__(self, status, said):
        super().__init__(said)
        self.status = status
        self.said = said


@contextlib.contextmanager
def start(script, argument):
    """Starts `script`, its stderr on a terminal; ends it after the block.

    Args:
      script: a path of a Python script that calls `serve`.
      argument: what it is told, as JSON on its command line.

    Yields:
      ask: () -> what the process answers: first once it is ready, then a round each.
    """
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, script, json.dumps(argument)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=slave,
        universal_newlines=True,
        start_new_session=True,
    )
    os.close(slave)
    said = collections.deque(maxlen=TAIL)
    reader = threading.Thread(target=_listen, args=(master, said), daemon=True)
    reader.start()

    def ask():
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write('\n')
            process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            status = process.wait()
            reader.join(1)
            raise Ended(status, '\n'.join(said))
        return json.loads(answer)

    try:
        yield ask
    finally:
        # It may have started others.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdin.close()
        process.stdout.close()


def _listen(terminal, said):
    """Reads a terminal until its other end is closed; its last lines go to `said`."""
    lines = open(terminal, errors='replace', newline='\n')  # noqa: SIM115
    with lines, contextlib.suppress(OSError):  # how a closed pseudo-terminal ends
        said.extend(line.rstrip() for line in lines)


def serve(prepare):
    """The other end: answers on stdout, a line of JSON each.

    Args:
      prepare: a context manager (argument) -> (ready, measure). ready: the first
        answer. measure: () -> the answers after it.
    """
    answers = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)  # nothing else may come between the answers

    def answer(value):
        answers.write(json.dumps(value) + '\n')
        answers.flush()

    with prepare(json.loads(sys.argv[1])) as (ready, measure):
        for _ in sys.stdin:
            answer(ready or measure())
            ready = None
