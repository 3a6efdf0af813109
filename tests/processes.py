"""Real processes that start fast: forked off one that has imported TensorFlow.

To import TensorFlow takes most of the time of a short run, and the tests start many.
The one that forks opens no session and so has no threads. What a process does from its
first moment on is tested with `run_python`.
"""

import atexit
import collections
import gc
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

Finished = collections.namedtuple('Finished', 'status out err')

_lock = threading.Lock()
_parent = None
_outputs = None
_numbers = itertools.count()


def run_python(script, *argv, **options):
    """Runs a script in an interpreter of its own; returns it `Finished`.

    Args:
      script: its name.
      argv: strings.
      options: what `subprocess.run` takes.
    """
    done = subprocess.run(
        [sys.executable, os.path.join(ROOT, script)] + list(argv),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
        timeout=300,
        **options,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


class Process:
    """Runs a script in a process of its own; its output goes to files.

    So no pipe fills up.
    """

    def __init__(self, script, argv, code=None, env=(), cwd=None):
        """Starts it.

        Args:
          script: its name, '-c' where `code` is given.
          argv: list of strings.
          code: Python source to be run in place of a script.
          env: {name: value} added to the environment.
          cwd: where it is to be; default the current directory.
        """
        place = os.path.join(_find_outputs(), str(next(_numbers)))
        self.paths = [place + '.out', place + '.err']
        if code is None:
            script = os.path.join(ROOT, script)
            with open(script, encoding='utf-8') as file:
                code = file.read()
        self.pid = _ask(
            script=script,
            argv=list(argv),
            code=code,
            paths=self.paths,
            cwd=cwd or os.getcwd(),
            env=dict(env),
        )
        self.status = None

    def read(self):
        """Returns what it has written to stdout and stderr."""
        return [_read(path) for path in self.paths]

    def poll(self):
        """Returns its exit status, -number if a signal has ended it, None before."""
        if self.status is None:
            self.status = _ask(pid=self.pid)
        return self.status

    def wait_for(self, text, seconds=60):
        """Returns once it has written a text."""
        deadline = time.monotonic() + seconds
        while not any(text in said for said in self.read()):
            assert self.poll() is None, self.read()
            assert time.monotonic() < deadline, self.read()
            time.sleep(0.02)

    def end(self, seconds=120):
        """Returns it `Finished`, once it has ended by itself."""
        deadline = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() > deadline:
                self.send_signal(9)
                raise AssertionError('more than %g s: %s' % (seconds, self.read()))
            time.sleep(0.01)
        return Finished(self.status, *self.read())

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)


def _read(path):
    if not os.path.exists(path):  # it is about to
        return ''
    with open(path, encoding='utf-8', errors='surrogateescape') as file:
        return file.read()


def _find_outputs():
    """Returns the directory of all outputs of this process's children."""
    global _outputs
    if _outputs is None:
        _outputs = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, _outputs)
    return _outputs


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

    if hasattr(gc, 'freeze'):  # not on Python 3.6
        gc.freeze()  # or the first collection of a child copies all there is
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
    for number, path in enumerate(request['paths'], start=1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(file, number)
        os.close(file)
    os.chdir(request['cwd'])
    os.environ.update(request['env'])
    sys.argv = [request['script']] + request['argv']
    names = sys.modules['__main__'].__dict__
    names.clear()
    names.update(__name__='__main__', __file__=request['script'])
    exec(compile(request['code'], request['script'], 'exec'), names)


if __name__ == '__main__':
    from tests.processes import serve as serve_requests

    serve_requests()
