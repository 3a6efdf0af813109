"""Errors, devices, logging and the exit status: what every script needs."""

import collections
import contextlib
import logging
import logging.handlers
import os
import re
import signal
import sys
import tempfile
import traceback

from tqdm import tqdm

from tf1 import leave_at_once, quiet_stderr, show_stderr, tf

log = logging.getLogger('train')

# Functions that `leave` calls.
cleaning = []

# What signals have raised before training. What ran just then may have swallowed it, as
# every destructor does.
raised = []


class UserError(Exception):
    """A mistake of the user's: its text is the one line that is shown, exit 2."""

    def __init__(self, text):
        super().__init__(in_one_line(text))


class RunStopped(BaseException):
    """A signal or the time limit ends the run; `status` is the process's.

    Like KeyboardInterrupt nothing for an `except Exception` on its way.
    """

    def __init__(self, reason, status):
        super().__init__(reason)
        self.status = status


def raise_if(stop):
    """Raises a `RunStopped` if there is one."""
    if stop is not None:
        raise stop


class RunFailed(Exception):
    """The run can't go on; its text is the cause and needs no traceback, exit 1."""

    def __init__(self, text):
        super().__init__(in_one_line(text))


def in_one_line(text):
    """Returns a text with its line breaks, a file's name may have some, as escapes."""
    return re.sub(r'[\x00-\x1f\x7f-\x9f\u2028\u2029]', lambda m: repr(m[0])[1:-1], text)


# Devices


def visible_gpus():
    """Returns the names of the GPUs TensorFlow may use, without opening any.

    `device_lib.list_local_devices()` would take all their memory; this reads the
    driver's list, obeys CUDA_VISIBLE_DEVICES and leaves XLA's devices out.
    """
    with quiet_stderr():
        gpus = tf.config.experimental.list_physical_devices('GPU')
    return [gpu.name for gpu in gpus]


# towers: a device string per tower, such as '/gpu:0'. gpus: the numbers of the GPUs
# these are, an empty list for CPU towers.
Devices = collections.namedtuple('Devices', 'towers gpus')
CPU = Devices(['/cpu:0'], [])


def choose_devices(device, num_gpus=None, gpus=None, find_gpus=None):
    """Chooses one device per tower.

    Args:
      device: 'auto', 'gpu' or 'cpu', as `--device`.
      num_gpus: number of towers, or None for all GPUs (1 without any).
      gpus: list of GPU numbers to use, or None for the first ones.
      find_gpus: returns the names of the visible GPUs; default `visible_gpus`.

    Returns:
      `Devices`.

    Raises:
      UserError: what was asked for is not there.
    """
    if gpus is not None and num_gpus not in (None, len(gpus)):
        raise UserError(
            '--gpus names %s, the run has %s: make them equal'
            % (count(len(gpus), 'GPU'), count(num_gpus, 'tower'))
        )
    if device == 'cpu':
        if gpus is not None:
            raise UserError('--gpus goes with GPUs, not with --device cpu: drop one')
        return Devices(['/cpu:%d' % i for i in range(num_gpus or 1)], [])

    visible = (find_gpus or visible_gpus)()
    if not visible and (device == 'gpu' or gpus is not None):
        asked = '--device gpu' if device == 'gpu' else '--gpus'
        raise UserError(
            '%s: TensorFlow %s sees no GPU; --verbose shows what it looked for; '
            '--device cpu trains without' % (asked, tf.version.VERSION)
        )
    if not visible:
        return Devices(['/cpu:%d' % i for i in range(num_gpus or 1)], [])

    chosen = gpus if gpus is not None else list(range(num_gpus or len(visible)))
    if len(chosen) > len(visible) or max(chosen) >= len(visible):
        raise UserError(
            'asked for %s, TensorFlow sees %d (%s)'
            % (
                'GPU %d' % max(chosen) if gpus is not None else '%d GPUs' % len(chosen),
                len(visible),
                ', '.join(visible),
            )
        )
    return Devices(['/gpu:%d' % i for i in range(len(chosen))], chosen)


def count_cores():
    """Returns how many cores this process may use."""
    if hasattr(os, 'sched_getaffinity'):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def choose_threads(flags, towers, before=None):
    """Returns (intra-op, inter-op) thread counts; 0 leaves one to TensorFlow.

    CPU towers share the cores. On TensorFlow 2.x one thread inside each op is fastest
    for any number of towers. On 1.15 the ops need all cores; compiled with XLA, the
    towers' share of them.

    Args:
      flags: `--intra_op_threads` and `--inter_op_threads` come first.
      towers: a device string per tower.
      before: the counts of the run that is continued, since bits depend on them.
    """
    cores = count_cores()
    on_cpu = towers[0].startswith('/cpu')
    intra_op = 1 if on_cpu else 0
    if on_cpu and tf.version.VERSION.startswith('1.'):
        sharing = len(towers) if use_xla(flags.xla, towers) else 1
        intra_op = max(1, cores // sharing)
    # A thread more than a stuck producer holds, or nothing could close its queue.
    inter_op = max(2, cores) if on_cpu or cores == 1 else 0
    chosen = before or (intra_op, inter_op)
    asked = (flags.intra_op_threads, flags.inter_op_threads)
    return tuple(b if a is None else a for a, b in zip(asked, chosen))


def use_xla(choice, towers):
    """Returns whether towers are compiled with XLA, `choice` being `--xla`.

    Measured on 2 cores: 1.2 to 1.5 times as fast on 1.15's CPU, 0.35 times on 2.21's.
    """
    slow_kernels = tf.version.VERSION.startswith('1.') and towers[0].startswith('/cpu')
    return choice == 'on' or (choice == 'auto' and slow_kernels)


def session_config(devices, threads, xla=False):
    """Returns the `tf.ConfigProto` that opens the given devices and no other.

    Args:
      devices: `Devices`.
      threads: what `choose_threads` returned.
      xla: whether XLA compiles the towers.
    """
    config = tf.ConfigProto(
        allow_soft_placement=False,
        intra_op_parallelism_threads=threads[0],
        inter_op_parallelism_threads=threads[1],
    )
    if xla:
        # It would fuse convolution and bias, and XLA would not take the fused op.
        config.graph_options.rewrite_options.remapping = OFF
    if devices.gpus:
        config.gpu_options.allow_growth = True
        config.gpu_options.visible_device_list = ','.join(map(str, devices.gpus))
    else:
        config.device_count['GPU'] = 0
        config.device_count['CPU'] = len(devices.towers)
    return config


# Of the proto RewriterConfig.Toggle, which has no public name.
OFF = 2


@contextlib.contextmanager
def open_session(devices, threads, xla=False, start_server=lambda config: ''):
    """A session as `session_config` describes it; its start is silent.

    Args:
      devices, threads, xla: `session_config`'s.
      start_server: (config) -> the target of a server, '' for none.
    """
    config = session_config(devices, threads, xla)
    target = start_server(config)
    with quiet_stderr():
        session = tf.Session(target, config=config)
        if not devices.gpus:
            _use_half_precision(config)
    with session:
        yield session


def _use_half_precision(config):
    """Lets oneDNN tell, once per process, what it lacks for this CPU: where it is held.

    A step of `--fp16` would tell it, as an error, and train all the same.
    """
    with tf.Graph().as_default(), tf.Session(config=config) as session:
        session.run([tf.zeros([], dtype) + 1 for dtype in (tf.float16, tf.bfloat16)])


VARIABLE_OPS = ('Variable', 'VariableV2', 'VarHandleOp')


def place_variables(choice, towers):
    """Returns a function (op of a variable) -> device, as `--variable_device` says.

    Args:
      choice: 'cpu'; 'gpu', the first tower's device; 'spread', the device among the
        towers' that holds the fewest bytes so far. What is no floating-point number
        stays on the CPU: GPUs have no kernels for it.
      towers: a device string per tower.
    """
    if choice == 'cpu':
        return on_cpu
    held = dict.fromkeys(towers if choice == 'spread' else towers[:1], 0)

    def place(op):
        dtype = op.get_attr('dtype')
        if not dtype.is_floating:
            return '/cpu:0'
        device = min(held, key=held.get)
        shape = tf.TensorShape(op.get_attr('shape'))
        held[device] += (shape.num_elements() or 0) * dtype.size
        return device

    return place


def on_cpu(op):
    """Places a variable, `place_variables('cpu', ...)`."""
    del op
    return '/cpu:0'


@contextlib.contextmanager
def on_tower(device, reuse, xla=False, place_variable=on_cpu):
    """Places ops on a tower's device, but variables, which all share, elsewhere.

    Args:
      device: the tower's device string.
      reuse: whether the variables exist; the first tower creates them.
      xla: whether XLA compiles the tower's ops.
      place_variable: what `place_variables` returned.
    """

    def place(op):
        if op.type in VARIABLE_OPS:
            return place_variable(op)
        return op.device or device  # a network may place an op itself

    # `reuse` ends with the block: what comes after, an optimizer's slots for
    # instance, can still create variables.
    variables = tf.variable_scope(tf.get_variable_scope(), reuse=reuse)
    compiler = tf.xla.experimental.jit_scope(compile_ops=xla)
    with tf.device(place), variables, compiler:
        yield


def create_scalar(name, dtype, start=0):
    """Creates a variable that is not trained, of one number, and saved like any."""
    start = tf.constant_initializer(start)
    return tf.get_variable(name, [], dtype, initializer=start, trainable=False)


# Screen and log


def count(number, noun):
    """Returns '1 tower', '2 towers'."""
    return '%d %s%s' % (number, noun, '' if number == 1 else 's')


def list_few(names):
    """Returns 'a, b, c and 2 more'."""
    more = ' and %d more' % (len(names) - 3) if len(names) > 3 else ''
    return ', '.join(names[:3]) + more


def open_bar(title, unit, things=None, total=None):
    """Returns a tqdm bar for what comes before a run, on a terminal only."""
    tqdm.monitor_interval = 0  # its thread would outlive it
    return tqdm(
        things,
        total=total,
        disable=not sys.stderr.isatty(),
        file=sys.stderr,
        ascii=True,
        leave=False,
        desc=title,
        unit=unit,
    )


class _BelowWarning(logging.Filter):
    def filter(self, record):
        return record.levelno < logging.WARNING


class _Above(logging.StreamHandler):
    """Writes lines above the bar, if there is one, not onto its row."""

    def emit(self, record):
        with tqdm.external_write_mode():
            super().emit(record)


class _Results(_Above):
    lost = None

    def handleError(self, record):  # noqa: N802
        error = sys.exc_info()[1]
        # A reader who has had enough has lost nothing.
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
            self.lost = error


def set_up_logging():
    """Results go to stdout, warnings and errors to stderr, one line each.

    Returns:
      The handler of the results: its `lost` is the OSError that lost some, or None.
    """
    log.setLevel(logging.INFO)
    log.propagate = False
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, 'reconfigure'):  # not on Python 3.6
            # A file's name may be no text.
            stream.reconfigure(errors='backslashreplace')
    results = _Results(sys.stdout)
    results.addFilter(_BelowWarning())
    warnings = _Above(sys.stderr)
    warnings.setLevel(logging.WARNING)
    warnings.setFormatter(logging.Formatter('%(levelname)s: %(message)s'))
    # What is said before there is a train.log, for train.log.
    held = logging.handlers.MemoryHandler(1000, flushLevel=logging.CRITICAL + 1)
    log.handlers[:] = [results, warnings, held]
    logging.raiseExceptions = False  # a full disk under train.log must not end a run
    return results


def log_to(path):
    """Writes every line shown, earlier ones too, with its time to the file `path`."""
    # A path on the screen may hold what is not UTF-8.
    file = open(path, 'a', encoding='utf-8', errors='backslashreplace')  # noqa: SIM115
    handler = logging.StreamHandler(file)
    handler.setFormatter(logging.Formatter('%(asctime)s %(levelname)s %(message)s'))
    held = log.handlers.pop()
    held.setTarget(handler)
    held.close()
    log.addHandler(handler)


def report(error):
    """Tells what ended the run; returns the exit status of the process.

    0: done. 1: failed; the cause comes first, its traceback after it. 2: a mistake
    of the user's, told in one line. 130 and 143: stopped by Ctrl-C or SIGTERM.
    """
    if error is None:
        return 0
    if isinstance(error, RunStopped):
        return error.status
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if isinstance(error, UserError):
        log.error('%s', error)
        return 2
    if isinstance(error, RunFailed):
        log.error('%s', error)
        return 1
    log.error('%s: %s', type(error).__name__, find_cause(error))
    # Of an error in the user's own code, the user's frames.
    frames = getattr(error, 'shown_traceback', error.__traceback__)
    lines = traceback.format_exception(type(error), error, frames)
    log.error('%s', ''.join(lines))
    return 1


def check_writable(path):
    """Raises OSError if a directory is not, or could not be made and be, written to.

    Nothing is left. Permission bits tell nothing of a read-only disk, nor of root.
    """
    path = os.path.abspath(path)
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    os.rmdir(tempfile.mkdtemp(dir=path))


def find_cause(error):
    """Returns in one line what an error says happened.

    TensorFlow 2.x puts where the op was built before that, both lines a count of
    errors if there are several, and a server which task it was.
    """
    text = re.sub(r'^From /job:\S+:\s*\n', '', str(error))
    if text.startswith('Graph execution error'):
        text = re.sub(r'(?s)^.*\nNode: [^\n]*\n', '', text)
    text = re.sub(r'^\d+ root error\(s\) found\.\s*\(0\) ', '', text)
    text = re.sub(r'^([\w ]+: )?From /job:\S+:\s*\n', r'\1', text)
    return (text.strip() or '(no message)').splitlines()[0]


def leave(error):
    """Ends the process at once, whatever its threads are doing."""
    show_stderr()
    status = report(error)
    for clean in cleaning:
        clean()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)


def run_main(main, must_show=False):
    """Runs `main()`, reports what ends it, and returns the exit status.

    With `must_show`, what stdout did not take is a failure: nothing else has it.
    """
    results = set_up_logging()
    del raised[:]
    before = signal.signal(signal.SIGTERM, _raise_stopped)
    ctrl_c_before = signal.getsignal(signal.SIGINT)
    if ctrl_c_before == leave_at_once:
        ctrl_c_before = signal.default_int_handler
    if ctrl_c_before == signal.default_int_handler:  # or it is ignored
        signal.signal(signal.SIGINT, _raise_stopped)
    try:
        _check_current_directory()
        main()
        if raised:
            raise raised[0]
        if must_show and results.lost is not None:
            raise RunFailed('stdout: %s' % results.lost.strerror)
        return 0
    except (Exception, RunStopped, KeyboardInterrupt) as error:
        return report(error)
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, ctrl_c_before)


def _check_current_directory():
    try:
        os.getcwd()
    except OSError as error:
        raise UserError(
            'the current directory: %s: cd to one that is there' % error.strerror
        ) from None


def _raise_stopped(number, frame):
    del frame
    name = signal.Signals(number).name
    raised.append(RunStopped('stopped by %s' % name, 128 + number))
    raise raised[-1]
