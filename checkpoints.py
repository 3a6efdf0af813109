"""Checkpoints of a model_dir: save, find, verify, restore.

A checkpoint is named `model.ckpt-<epochs done>-<step>`. It holds the weights, the
optimizer's slots and the training state, and nothing that depends on the number of
towers.
"""

import glob
import os
import re

from tf1 import tf
from utils import UserError, log


def create_saver(keep=3):
    """Returns a Saver of every global variable that keeps the last `keep` files."""
    return tf.train.Saver(max_to_keep=keep, save_relative_paths=True)


def find(model_dir):
    """Returns the prefixes of the checkpoints in `model_dir`, newest first.

    The `checkpoint` state file is not asked: it may be lost, or older than the
    newest checkpoint after a kill.
    """
    found = []
    for path in glob.glob(os.path.join(glob.escape(model_dir), 'model.ckpt-*.index')):
        match = re.match(r'model\.ckpt-(\d+)-(\d+)\.index$', os.path.basename(path))
        if match:
            found.append(
                (int(match.group(1)), int(match.group(2)), path[: -len('.index')])
            )
    return [prefix for _, _, prefix in sorted(found, reverse=True)]


def save(saver, session, model_dir, epochs_done, step):
    """Saves everything under a name that no checkpoint has yet; returns it."""
    prefix = os.path.join(model_dir, 'model.ckpt-%d-%d' % (epochs_done, step))
    return saver.save(session, prefix, write_meta_graph=False)


def find_fault(prefix):
    """Reads every tensor of a checkpoint, and so its checksums.

    Returns:
      None, or one line that says what is wrong.
    """
    try:
        reader = tf.train.NewCheckpointReader(prefix)
        for name in reader.get_variable_to_shape_map():
            reader.get_tensor(name)
    except Exception as error:  # its type differs by TensorFlow line and fault
        return str(error).splitlines()[0]
    return None


def find_good(model_dir):
    """Returns the prefix of the newest undamaged checkpoint, None without any.

    Each damaged one is named in a warning.

    Raises:
      UserError: there are checkpoints, and all of them are damaged.
    """
    prefixes = find(model_dir)
    for prefix in prefixes:
        fault = find_fault(prefix)
        if fault is None:
            return prefix
        log.warning('%s is damaged (%s): left out', prefix, fault)
    if prefixes:
        raise UserError(
            '%s: none of its %d checkpoints can be read; start anew in another '
            '--model_dir' % (model_dir, len(prefixes))
        )
    return None


def restore(saver, session, model_dir):
    """Restores the newest undamaged checkpoint.

    Returns:
      Its prefix, or None if `model_dir` holds no checkpoint.
    """
    prefix = find_good(model_dir)
    if prefix is not None:
        saver.restore(session, prefix)
        # A new Saver knows of no earlier files and would never delete them.
        saver.recover_last_checkpoints(find(model_dir)[::-1])
    return prefix
