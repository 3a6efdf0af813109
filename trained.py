"""A model that was trained: which run, which checkpoint, and its weights.

What evaluate.py, predict.py and export.py share.
"""

import collections
import contextlib
import glob
import os

import numpy as np

import checkpoints
import model
import networks
import records
import weight_averages
from tf1 import tf
from utils import UserError

# title: a line that says which model it is. prefix: of the checkpoint. network: what
# `find_network` returned. classes: what each is called. image_shape: [height, width,
# channels]. moments: as `model.scale` takes them; their values are in the checkpoint.
# border: brightness, 0 to 255, of the edge of the images it was trained on. flags: the
# run's, a dict. threads: (intra-op, inter-op).
Trained = collections.namedtuple(
    'Trained',
    'title model_dir prefix network classes image_shape moments border flags threads',
)


GONE = (
    '%s can not be read any more: a run that goes on deletes old checkpoints; try again'
)


def add_flags(parser):
    """Adds the flags that say which model is meant."""
    parser.add_argument(
        '--model_dir', help='the run (default: the newest in runs/ that has saved)'
    )
    parser.add_argument(
        '--checkpoint',
        metavar='best|last|PATH',
        help='which of its checkpoints (default: best, or last while there is no best)',
    )
    parser.add_argument(
        '--model',
        metavar='FILE.py:FUNCTION',
        help='where a network of your own is now (default: where it was in training)',
    )
    parser.add_argument(
        '--verbose', action='store_true', help="TensorFlow's own messages too"
    )


def find(flags):
    """Finds the model that the flags mean, and checks it.

    Returns:
      A `Trained`.

    Raises:
      UserError: there is none, or it can't be read.
    """
    newest = ''
    model_dir = flags.model_dir
    if model_dir is None and flags.checkpoint not in (None, 'best', 'last'):
        model_dir = os.path.dirname(os.path.abspath(flags.checkpoint))
        if os.path.basename(model_dir) == 'best':
            model_dir = os.path.dirname(model_dir)
        model_dir = os.path.relpath(model_dir)
    elif model_dir is None:
        model_dir, newest = _newest_run(), ' (the newest run)'
    records.check_name(model_dir)
    if not os.path.isdir(model_dir):
        raise UserError('--model_dir %s is not a directory' % model_dir)
    config = records.read_config(model_dir)
    if not config:
        raise UserError('%s has no config.json: no run wrote it' % model_dir)
    image_shape, classes, border = _read_data(model_dir, config)
    standardize = config['flags'].get('standardize')
    nothing = np.zeros(image_shape[2], np.float32)
    prefix = _choose_checkpoint(model_dir, flags.checkpoint)
    name = flags.model or str(config['flags'].get('model'))
    try:
        network = networks.find_network(name, model.NETWORKS)
    except UserError as error:
        if flags.model:
            raise
        raise UserError(
            '%s was trained with %s; say with --model where it is now'
            % (model_dir, error)
        ) from None
    averaged = ', the average of its weights' if config['flags'].get('ema') else ''
    return Trained(
        'model %s of %s%s%s' % (networks.shorten(name), prefix, newest, averaged),
        model_dir,
        prefix,
        network,
        classes,
        image_shape,
        (nothing, nothing) if standardize else None,
        border,
        config['flags'],
        tuple(config['threads']),
    )


def _read_data(model_dir, config):
    """Returns what config.json says of the data: (image_shape, classes, border)."""
    data = config.get('data')
    data = data if isinstance(data, dict) else {}
    shape, num_classes = data.get('image_shape'), data.get('num_classes')
    numbers = (shape if isinstance(shape, list) else []) + [num_classes]
    if len(numbers) != 4 or not all(type(n) is int and 0 < n < 2**20 for n in numbers):
        raise UserError(
            '%s/config.json does not say what data the model is for: '
            '"image_shape" %r, "num_classes" %r' % (model_dir, shape, num_classes)
        )
    # What older runs do not say is as in MNIST: dark, and classes that are numbers.
    border = data.get('border')
    classes = data.get('classes')
    if not isinstance(classes, list) or len(classes) != num_classes:
        classes = list(range(num_classes))
    return shape, classes, border if isinstance(border, (int, float)) else 0


def _newest_run():
    saved = {}
    for path in glob.glob('runs/*/model.ckpt-*.index'):
        with contextlib.suppress(OSError):  # a run that goes on deletes old ones
            saved[path] = os.path.getmtime(path)
    if not saved:
        raise UserError('no run in runs/ has saved anything: name one with --model_dir')
    return os.path.dirname(max(saved, key=saved.get))


def _choose_checkpoint(model_dir, choice):
    best = checkpoints.find(os.path.join(model_dir, 'best'))
    if choice == 'last' or (choice is None and not best):
        prefix, _ = checkpoints.find_good(model_dir)
        if prefix is None:
            raise UserError('%s holds no checkpoint' % model_dir)
        return prefix
    if choice in (None, 'best'):
        if not best:
            raise UserError(
                '%s has no best checkpoint, no epoch is done: --checkpoint last'
                % model_dir
            )
        prefix = best[0]
    else:
        prefix = choice[: -len('.index')] if choice.endswith('.index') else choice
        if not os.path.exists(prefix + '.index'):
            raise UserError('--checkpoint %s: there is no %s.index' % (choice, prefix))
    fault = checkpoints.find_fault(prefix)
    if fault is not None:
        if not os.path.exists(prefix + '.index'):
            raise UserError(GONE % prefix)
        raise UserError(
            '%s is damaged (%s): name another, or --checkpoint last' % (prefix, fault)
        )
    return prefix


def restore(session, trained):
    """Gives the variables of the graph the trained values, or `--ema`'s of them.

    Raises:
      UserError: the checkpoint is of another model, or was deleted meanwhile.
    """
    try:
        checkpoints.check_variables(trained.prefix, whole=False)
        saved = tf.train.NewCheckpointReader(trained.prefix)
        names = {}
        for variable in tf.global_variables():
            average = variable.op.name + weight_averages.SUFFIX
            has_average = trained.flags.get('ema') and saved.has_tensor(average)
            names[average if has_average else variable.op.name] = variable
        tf.train.Saver(names).restore(session, trained.prefix)
    except tf.errors.OpError:
        raise UserError(GONE % trained.prefix) from None
