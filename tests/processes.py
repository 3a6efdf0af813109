"""Real processes that start fast: forked off one that has imported TensorFlow.

To import TensorFlow takes most of the time of a short run, and tests of several
machines start many. The one that forks opens no session and so has no threads.
"""

import atexit
import json
import os
import subprocess
import sys
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

_lock = threading.Lock()
_parent = None


class Process:
    """Runs Python code in a process of its own, its output in files."""

    def __init__(self, code, argv, out, err, env=()):
        """Starts it, in the current directory.

        Args:
          code: Python source, run as `__main__`.
          argv: list of strings.
          out, err: paths that stdout and stderr are written to.
          env: {name: value} added to the environment.
        """
        for path in (out, err):
            with open(path, 'w'):
                pass
        self.pid = _ask(
            code=code,
            argv=['-c'] + list(argv),
            paths=[os.path.abspath(path) for path in (out, err)],
            cwd=os.getcwd(),
            env=dict(env),
        )
        self.status = None

    def poll(self):
        """Returns its exit status, -number if a signal has ended it, None before."""
        if self.status is None:
            self.status = _ask(pid=self.pid)
        return self.status

    def wait(self, seconds):
        """Returns its exit status once it has ended."""
        deadline = time.monotonic() + seconds
        while self.poll() is None:
            assert time.monotonic() < deadline, 'it runs for more than %g s' % seconds
            time.sleep(0.02)
        return self.status

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)


def _ask(**request):
    global _parent
    with _lock:
        if _parent is None:
            _parent = subprocess.Popen(
                [sys.executable, '-m', 'tests.processes'],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                universal_newlines=True,
                cwd=ROOT,
                # What the import of TensorFlow looks at is as the children have it.
                env=dict(os.environ, TF_CONFIG='{}', TF_CPP_MIN_LOG_LEVEL='3'),
            )
            atexit.register(_parent.kill)
        _parent.stdin.write(json.dumps(request) + '\n')
        _parent.stdin.flush()
        return json.loads(_parent.stdout.readline())


def serve():
    """What the parent does: forks, and says what has become of its children."""
    import stopping
    import tf1
    import train_multi_gpu  # noqa: F401

    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), 'w')
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    for line in requests:
        request = json.loads(line)
        if 'pid' in request:
            pid, status = os.waitpid(request['pid'], os.WNOHANG)
            ended = os.WEXITSTATUS(status) or -os.WTERMSIG(status)
            answer = ended if pid else None
        else:
            answer = os.fork()
        if answer == 0 and 'pid' not in request:
            requests.close()
            answers.close()
            stopping.STARTED = tf1.STARTED = time.monotonic()
            _become(request)
            return
        answers.write(json.dumps(answer) + '\n')
        answers.flush()


def _become(request):
    """In the child: runs the code; what it raises ends the interpreter as usual."""
    os.chdir(request['cwd'])
    os.environ.update(request['env'])
    for number, path in enumerate(request['paths'], start=1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(file, number)
        os.close(file)
    sys.argv = request['argv']
    sys.modules['__main__'].__dict__.clear()
    sys.modules['__main__'].__dict__['__name__'] = '__main__'
    exec(compile(request['code'], '-c', 'exec'), sys.modules['__main__'].__dict__)


if __name__ == '__main__':
    from tests.processes import serve as serve_requests

    serve_requests()
