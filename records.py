"""What a model_dir holds beside checkpoints: config.json, metrics.jsonl, train.log."""

import contextlib
import datetime
import fcntl
import functools
import itertools
import json
import os
import platform
import shlex
import shutil
import sys
import zlib

import numpy as np

import decoding
import networks
import utils
from cluster import ONE
from tf1 import tf
from utils import UserError, log

# Flags that a checkpoint's variables, or the order of its images, depend on.
BINDING_FLAGS = {'ema', 'fp16', 'model', 'optimizer', 'seed', 'standardize'}
# Flags that say nothing of the training itself.
PASSING_FLAGS = {
    'cache',
    'check',
    'early_stopping',
    'gradient_packs',
    'histograms',
    'inter_op_threads',
    'intra_op_threads',
    'keep',
    'max_minutes',
    'max_steps',
    'model_dir',
    'no_progress',
    'save_every_seconds',
    'staging',
    'stop_at',
    'summary_steps',
    'trace',
    'variable_device',
    'start_timeout',
    'step_timeout',
    'verbose',
}
# Flags that machines may have each for itself; towers are compared as devices.
OWN_FLAGS = {
    'cache',
    'data_dir',
    'gpus',
    'keep',
    'max_minutes',
    'model_dir',
    'no_progress',
    'num_gpus',
    'save_every_seconds',
    'summary_steps',
    'trace',
    'verbose',
}


@contextlib.contextmanager
def claim_model_dir(flags, towers, machines=ONE):
    """Makes the run's directory and keeps other runs out of it inside the block.

    A directory that is still empty at the end of the block is removed again.

    Args:
      flags: what `command_line.parse` returned.
      towers: how many on each machine; part of a new directory's name.
      machines: `cluster.Machines`; only the first has a directory.

    Yields:
      Its path, or None.

    Raises:
      UserError: `--model_dir` can't be written, is in use by another run, or belongs
        to a run with other variables.
    """
    if machines.index > 0:
        yield None
        return
    if flags.model_dir is None:
        model_dir, made = _make_new(flags, towers * len(machines.addresses))
    else:
        model_dir, made = flags.model_dir, _make_directories(flags.model_dir)
    remove_empty = functools.partial(_remove_empty, made)
    utils.cleaning.append(remove_empty)
    directory = None
    try:
        directory = _lock(model_dir)
        _check_flags(model_dir, flags)
        yield model_dir
    finally:
        if directory is not None:
            os.close(directory)
        remove_empty()
        utils.cleaning.remove(remove_empty)


def _remove_empty(directories):
    with contextlib.suppress(OSError):  # not empty
        for path in directories:
            os.rmdir(path)


def _make_new(flags, towers):
    """Makes a directory that no other run has; returns it as `_make_directories`."""
    now = datetime.datetime.now().strftime('%Y%m%d-%H%M%S')
    function = flags.model.rpartition(':')[2]
    name = '%s-%s-%d' % (now, function, towers)
    for again in itertools.count(1):
        path = os.path.join('runs', name if again == 1 else '%s-%d' % (name, again))
        made = _make_directories(path)
        if os.path.abspath(path) in made:
            return path, made


def _make_directories(path):
    """Makes `path`, writable; returns the directories made, deepest first."""
    check_name(path)
    missing = []
    parent = os.path.abspath(path)
    while not os.path.lexists(parent):
        missing.append(parent)
        parent = os.path.dirname(parent)
    made = []
    try:
        for directory in reversed(missing):
            # Another run may have made it just now.
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory)
                made.insert(0, directory)
        utils.check_writable(path)
    except OSError as error:
        for directory in made:
            os.rmdir(directory)
        raise UserError(
            '--model_dir %s can not be written: %s' % (path, error.strerror)
        ) from None
    return made


def check_name(model_dir):
    """Refuses a path that TensorFlow would not find again.

    It takes some characters of a checkpoint's path for a pattern.
    """
    if not model_dir:
        raise UserError('--model_dir is empty: name a directory')
    try:
        model_dir.encode('utf-8')
    except UnicodeEncodeError:
        raise UserError(
            '--model_dir %r is not UTF-8: name another' % model_dir
        ) from None
    found = [character for character in '*?[]\\' if character in model_dir]
    if found:
        raise UserError(
            '--model_dir %s: TensorFlow takes %s for a pattern: name another'
            % (model_dir, ' '.join(found))
        )


def _lock(model_dir):
    """Locks the directory itself: no lock file, and no lock outlives its process."""
    directory = os.open(model_dir, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(directory)
        raise UserError(
            '%s is in use by another run: wait for it, or give another --model_dir'
            % model_dir
        ) from None
    except OSError as error:
        log.warning('%s can not be locked: %s', model_dir, error.strerror)
    return directory


def _find_changes(before, now, names):
    """Returns what differs in two dicts of flags: '--seed 0, not 1 and --keep ...'.

    The file of a user's own network may have moved, or be named from elsewhere.
    """
    before, now = (
        {k: networks.shorten(str(v)) if k == 'model' else v for k, v in flags.items()}
        for flags in (before, now)
    )
    return ' and '.join(
        _describe_change(name, before[name], now[name])
        for name in sorted(names & set(before) & set(now))
        if before[name] != now[name]
    )


def _describe_change(name, before, now):
    """Returns '--seed 0, not 1', or '--fp16, not no --fp16'."""
    before, now = (_format_flag(name, value) for value in (before, now))
    flag = '--%s ' % name
    if before.startswith(flag) and now.startswith(flag):
        now = now[len(flag) :]
    return '%s, not %s' % (before, now)


def _format_flag(name, value):
    """Returns '--seed 0', '--fp16', or 'no --fp16'."""
    if value is None or value is False or value == []:
        return 'no --%s' % name
    if value is True:
        return '--%s' % name
    text = ','.join(map(str, value)) if isinstance(value, (list, tuple)) else value
    return '--%s %s' % (name, text)


def _check_flags(model_dir, flags):
    before = read_config(model_dir).get('flags', {})
    changes = _find_changes(before, vars(flags), BINDING_FLAGS)
    if changes:
        raise UserError(
            '%s was trained with %s: give the same, or another --model_dir'
            % (model_dir, changes)
        )


def begin(model_dir, config):
    """Writes config.json and starts to write train.log; says which flags changed.

    Raises:
      UserError: one of them can't be written.
    """
    before = read_config(model_dir)
    flags = before.get('flags', {})
    changes = _find_changes(flags, config['flags'], set(flags) - PASSING_FLAGS)
    if changes:
        log.warning('%s was trained with %s so far', model_dir, changes)
    if before.get('threads', config['threads']) != config['threads']:
        log.warning(
            '%s was trained with threads %s, not %s so far: bits depend on them',
            model_dir,
            *(before['threads'], config['threads']),
        )
    machines = len(before.get('machines', config['machines']))
    if machines != len(config['machines']):
        log.warning(
            '%s was trained on %s, not %d so far',
            model_dir,
            utils.count(machines, 'machine'),
            len(config['machines']),
        )
    text = json.dumps(config, indent=2, sort_keys=True)
    path = os.path.join(model_dir, 'train.log')
    try:
        utils.log_to(path)
        path = os.path.join(model_dir, 'config.json')
        write_whole(path, text + '\n')
    except OSError as error:
        # (Of a full disk it does not know the file.)
        raise UserError('%s: %s' % (path, error.strerror)) from None


def write_whole(path, text):
    """Writes a text file beside its place, then renames it into place."""
    try:
        with open(path + '.new', 'w', encoding='utf-8') as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path + '.new', path)
    except OSError:
        with contextlib.suppress(OSError):
            os.remove(path + '.new')
        raise


# config.json


def describe(flags, devices, data, threads, machines=ONE):
    """Returns what config.json says of a run."""
    return {
        'command': ' '.join(map(shlex.quote, [sys.executable] + sys.argv)),
        # Whoever uses the run may stand elsewhere.
        'flags': dict(
            vars(flags),
            data_dir=os.path.abspath(flags.data_dir),
            model=networks.locate(flags.model),
        ),
        'devices': {'towers': devices.towers, 'gpus': devices.gpus},
        'machines': machines.addresses,
        'threads': list(threads),
        'data': describe_data(data),
        'versions': {
            'python': platform.python_version(),
            'tensorflow': tf.version.VERSION,
            'numpy': np.__version__,
        },
    }


def describe_data(data):
    """Returns what config.json says of a `DataSet`."""
    return {
        'border': data.border,
        'classes': data.classes,
        'format': data.kind,
        'held_out': data.held_out,
        'train_images': len(data.train.labels),
        'valid_images': len(data.valid.labels),
        'image_shape': list(data.train.images.shape[1:]),
        'num_classes': len(data.classes),
    }


def describe_facts(flags, devices, data, machines):
    """Returns what must be equal on all machines, {name: JSON's types}."""
    here = os.path.dirname(os.path.abspath(__file__))
    # Not by getattr, which makes TensorFlow's lazy modules import what they stand for.
    paths = [vars(m).get('__file__') for m in list(sys.modules.values()) if m]
    sources = {os.path.abspath(path) for path in paths if path}
    facts = {'--' + k: v for k, v in vars(flags).items() if k not in OWN_FLAGS}
    facts['--model'] = networks.shorten(flags.model)
    network = networks.find_source(flags.model)
    if network is not None:
        # Wherever it is on each machine.
        sources.discard(network)
        facts[networks.shorten(flags.model)] = _checksum_file(network)
    for path in sources:
        directory, name = os.path.split(path)
        if directory == here:
            facts[name] = _checksum_file(path)
    for name, examples in (('training', data.train), ('validation', data.valid)):
        stream = decoding.is_stream(examples.images)
        # Of encoded images their lengths stand for all: to read them takes an epoch.
        content = examples.images.length if stream else examples.images
        facts[name + ' data'] = _checksum(content, examples.labels)
    names = ' '.join(map(str, data.classes))
    # A message has its limit.
    short = len(names) <= 1000
    facts['classes'] = names if short else _checksum(os.fsencode(names))
    facts.update(towers=' '.join(devices.towers), TensorFlow=tf.version.VERSION)
    facts['TF_CONFIG'] = ' '.join(machines.addresses)
    return facts


def _checksum_file(path):
    with open(path, 'rb') as file:
        return _checksum(file.read())


def _checksum(*parts):
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return 'with checksum %08x' % checksum


def continuing_command(model_dir):
    """Returns the command line that goes on with this run."""
    words = [_python()] + sys.argv
    if model_dir and '--model_dir' not in ' '.join(words):
        words += ['--model_dir', model_dir]
    text = ' '.join(map(shlex.quote, words))
    config = os.environ.get('TF_CONFIG', '')
    if 'cluster' in config:  # of several machines; the others have their own
        text = 'TF_CONFIG=%s %s' % (shlex.quote(config), text)
    return text


def next_command(script, model_dir):
    """Returns the command line of a script beside this one that uses the run."""
    path = os.path.join(os.path.dirname(sys.argv[0]), script)
    return ' '.join(map(shlex.quote, [_python(), path, '--model_dir', model_dir]))


def _python():
    """Returns how this interpreter is called from here, the shortest way."""
    if shutil.which('python') == sys.executable:
        return 'python'
    return min(sys.executable, os.path.relpath(sys.executable), key=len)


def read_config(model_dir):
    """Returns the dict in `model_dir`'s config.json, {} if there is none (yet).

    Raises:
      UserError: the file can't be read as JSON.
    """
    if model_dir is None:
        return {}
    path = os.path.join(model_dir, 'config.json')
    try:
        with open(path, encoding='utf-8') as file:
            config = json.load(file)
        _check_config(config)
        return config
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(
            '%s: %s; mend it, or move it away to train on without it' % (path, error)
        ) from None


def _check_config(config):
    flags = config.get('flags') if isinstance(config, dict) else None
    if not isinstance(flags, dict):
        raise ValueError('not what this program writes there')
    for value in flags.values():
        if isinstance(value, str):
            os.fsencode(value)  # what can be no file's name raises a ValueError
    data = config.get('data', {})
    classes = data.get('classes', []) if isinstance(data, dict) else None
    if not isinstance(classes, list) or not all(
        isinstance(name, (int, str)) for name in classes
    ):
        raise ValueError('"data" is not what this program writes there')
    if not isinstance(config.get('machines', []), list):
        raise ValueError('"machines" are no list')
    threads = config.get('threads')
    if not isinstance(threads, list) or len(threads) != 2:
        raise ValueError('"threads" are not two numbers')
    if not all(isinstance(n, int) and 0 <= n <= 4096 for n in threads):
        raise ValueError('"threads" are not from 0 to 4096')


def choose_threads(flags, devices, model_dir):
    """Returns the session's threads, `utils.choose_threads`; a run keeps its own."""
    before = read_config(model_dir).get('threads')
    return utils.choose_threads(flags, devices.towers, before)


def check_data(model_dir, data):
    """Refuses to continue a run on other data than it began with.

    Raises:
      UserError: names what differs.
    """
    now = describe_data(data)
    before = read_config(model_dir).get('data', now)
    names = ['image_shape', 'num_classes', 'train_images']
    pairs = [(name, before.get(name, now[name]), now[name]) for name in names]
    classes = zip(before.get('classes', now['classes']), now['classes'])
    pairs += [('class %d being' % n, *pair) for n, pair in enumerate(classes)]
    for name, was, found in pairs:
        if was != found:
            raise UserError(
                '%s was trained on data with %s %s, not %s: give the same, or another '
                '--model_dir' % (model_dir, name, was, found)
            )


# metrics.jsonl

# What each row has at least; none is negative.
NUMBERS = ('epoch', 'step', 'train_loss', 'train_acc', 'valid_loss', 'valid_acc')


def read_metrics(model_dir, epochs_done):
    """Returns the rows of metrics.jsonl, a dict per epoch, of the first epochs.

    Later rows are of epochs that the restored checkpoint has not seen: a row is
    written before its checkpoint, and a kill may come between the two.

    Args:
      model_dir: the directory of the run.
      epochs_done: how many epochs the restored checkpoint has seen.

    Raises:
      UserError: the file can't be read.
    """
    path = os.path.join(model_dir, 'metrics.jsonl')
    try:
        with open(path, encoding='utf-8', errors='replace') as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError('%s: %s' % (path, error.strerror)) from None
    rows, seen = [], set()
    for number, line in enumerate(lines, start=1):
        try:
            if line in seen:
                raise ValueError('twice')
            seen.add(line)
            row = json.loads(line)
            if min(row[name] for name in NUMBERS) < 0:
                raise ValueError('negative')
            if row['epoch'] <= epochs_done:
                rows.append(row)
        except (ValueError, TypeError, KeyError):
            log.warning('%s: line %d is damaged and dropped', path, number)
    return rows


def write_metrics(model_dir, rows):
    """Writes the rows of all epochs; returns whether that worked."""
    path = os.path.join(model_dir, 'metrics.jsonl')
    try:
        write_whole(path, ''.join(json.dumps(row) + '\n' for row in rows))
    except OSError as error:
        log.error('%s is not written: %s', path, error.strerror)
        return False
    return True
