"""What a model_dir holds beside checkpoints: config.json, metrics.jsonl, train.log."""

import datetime
import json
import os
import platform
import shlex
import sys
import tempfile

import numpy as np

import utils
from tf1 import tf
from utils import UserError

# Flags that the variables of a checkpoint depend on.
BINDING_FLAGS = ('model', 'optimizer')


def choose_model_dir(flags, towers):
    """Returns the directory of the run, checked but not yet made.

    Args:
      flags: what `utils.parse_flags` returned.
      towers: how many; part of a new directory's name.

    Raises:
      UserError: `--model_dir` can't be written, or belongs to other variables.
    """
    model_dir = flags.model_dir
    if model_dir is None:
        name = '%s-%s-%d' % (
            datetime.datetime.now().strftime('%Y%m%d-%H%M%S'),
            flags.model,
            towers,
        )
        model_dir = os.path.join('runs', name)
        again = 2
        while os.path.exists(model_dir):
            model_dir = os.path.join('runs', '%s-run%d' % (name, again))
            again += 1
    _check_writable(model_dir)
    saved = read_config(model_dir).get('flags', {})
    differing = [
        '--%s %s, not %s' % (name, saved[name], getattr(flags, name))
        for name in BINDING_FLAGS
        if name in saved and saved[name] != getattr(flags, name)
    ]
    if differing:
        raise UserError(
            '%s was trained with %s: give the same, or another --model_dir'
            % (model_dir, ' and '.join(differing))
        )
    return model_dir


def _check_writable(model_dir):
    path = os.path.abspath(model_dir)
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    if not os.path.isdir(path):
        raise UserError('--model_dir %s: %s is not a directory' % (model_dir, path))
    try:  # permission bits tell nothing of a read-only disk, nor anything to root
        os.rmdir(tempfile.mkdtemp(dir=path))
    except OSError as error:
        raise UserError(
            '--model_dir %s: %s can not be written (%s)'
            % (model_dir, path, error.strerror)
        ) from None


def open_model_dir(model_dir, config):
    """Makes the directory and its config.json, and starts to write its train.log."""
    os.makedirs(model_dir, exist_ok=True)
    write_whole(
        os.path.join(model_dir, 'config.json'),
        json.dumps(config, indent=2, sort_keys=True) + '\n',
    )
    utils.log_to(os.path.join(model_dir, 'train.log'))


def write_whole(path, text):
    """Writes a text file beside its place, then renames it into place."""
    with open(path + '.new', 'w', encoding='utf-8') as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + '.new', path)


# config.json


def describe(flags, devices, data, threads):
    """Returns what config.json says of a run."""
    images = data.train.images
    return {
        'command': ' '.join(map(shlex.quote, [sys.executable] + sys.argv)),
        'flags': vars(flags),
        'devices': {'towers': devices.towers, 'gpus': devices.gpus},
        'threads': list(threads),
        'data': {
            'train_images': len(images),
            'valid_images': len(data.valid.images),
            'image_shape': list(images.shape[1:]),
            'num_classes': data.num_classes,
        },
        'versions': {
            'python': platform.python_version(),
            'tensorflow': tf.version.VERSION,
            'numpy': np.__version__,
        },
    }


def read_config(model_dir):
    """Returns the dict in `model_dir`'s config.json, {} if there is none yet.

    Raises:
      UserError: the file can't be read as JSON.
    """
    path = os.path.join(model_dir, 'config.json')
    try:
        with open(path, encoding='utf-8') as file:
            return json.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(
            '%s: %s; move it away to go on without it' % (path, error)
        ) from None


# metrics.jsonl


def _metrics_path(model_dir):
    return os.path.join(model_dir, 'metrics.jsonl')


def read_metrics(model_dir):
    """Returns the rows of metrics.jsonl, a dict per epoch; a torn last line is none."""
    try:
        with open(_metrics_path(model_dir), encoding='utf-8') as file:
            return [json.loads(line) for line in file if line.endswith('}\n')]
    except FileNotFoundError:
        return []


def append_metrics(model_dir, row):
    """Adds one epoch's row."""
    with open(_metrics_path(model_dir), 'a', encoding='utf-8') as file:
        file.write(json.dumps(row) + '\n')


def drop_metrics_after(model_dir, epochs_done):
    """Drops the rows of epochs that the restored checkpoint has not seen.

    A row is written before its checkpoint: a kill between the two leaves a row that
    training will write again.
    """
    rows = read_metrics(model_dir)
    kept = [row for row in rows if row['epoch'] <= epochs_done]
    if len(kept) < len(rows) or rows:
        write_whole(
            _metrics_path(model_dir), ''.join(json.dumps(row) + '\n' for row in kept)
        )
