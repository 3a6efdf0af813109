"""Checkpoints of a model_dir: save, find, verify, restore, keep the best.

A checkpoint is named `model.ckpt-<epochs done>-<step>`: what it holds is a function
of these two. It holds the weights, the optimizer's slots and the training state, and
nothing that depends on the number of towers. The best one so far has a copy in
`best/`.
"""

import glob
import os
import re
import shutil

import utils
from tf1 import tf
from utils import UserError, log

# What TensorFlow raises when it can't write: by errno, by file, by line.
SAVE_ERRORS = (tf.errors.OpError, OSError, ValueError)


def create_saver():
    """Returns a Saver of every global variable; `save` deletes old files itself.

    Only so can a resumed run delete what an earlier one left, and not the best.
    """
    return tf.train.Saver(max_to_keep=0, save_relative_paths=True)


def find(directory):
    """Returns the prefixes of the checkpoints in a directory, newest first.

    The `checkpoint` state file is not asked: it may be lost, empty, or older than the
    newest checkpoint after a kill.
    """
    paths = _glob(directory, 'model.ckpt-*.index')
    prefixes = [path[: -len('.index')] for path in paths]
    found = [prefix for prefix in prefixes if _position(prefix)]
    return sorted(found, key=_position, reverse=True)


def _position(prefix):
    """Returns (epochs done, step) of a checkpoint's name, None if it is no name."""
    match = re.match(r'model\.ckpt-(\d+)-(\d+)$', os.path.basename(prefix))
    return match and tuple(map(int, match.groups()))


def save(saver, session, directory, epochs_done, step, keep):
    """Saves everything, then deletes all but the last `keep` checkpoints.

    A checkpoint of the same name is left as it is: it holds the same.

    Args:
      saver: what `create_saver` returned.
      session: where the variables are.
      directory: the model_dir, or its `best`.
      epochs_done, step: where training stands.
      keep: how many checkpoints stay.

    Returns:
      Whether it is saved. If not, an error says why, and the older checkpoints and
      the state file are what they were.
    """
    prefix = os.path.join(directory, 'model.ckpt-%d-%d' % (epochs_done, step))
    if prefix in find(directory):
        return True
    try:
        os.makedirs(directory, exist_ok=True)
        saver.save(session, prefix, write_meta_graph=False)
    except SAVE_ERRORS as error:
        remove_litter(directory)
        log.error('%s is not saved: %s', prefix, _explain(error, directory))
        return False
    prune(directory, keep)
    return True


def prune(directory, keep):
    """Deletes all but the last `keep` checkpoints in a directory."""
    for prefix in find(directory)[keep:]:
        # The index first: without it the rest is no checkpoint, at any moment.
        _remove([prefix + '.index'] + _glob(*os.path.split(prefix + '.data-*')))


def _remove(paths):
    for path in paths:
        try:
            os.remove(path)
        except OSError as error:
            log.warning('%s: %s', path, error.strerror)


def _explain(error, directory):
    text = str(error)
    cause = re.search(r'No space left on device|File too large|Permission denied', text)
    try:
        free = '%d MB free' % (shutil.disk_usage(directory).free // 1e6)
    except OSError as gone:
        free = gone.strerror
    return '%s (%s)' % (cause.group() if cause else utils.find_cause(error), free)


def _glob(directory, pattern):
    return sorted(glob.glob(os.path.join(glob.escape(directory), pattern)))


def remove_litter(directory):
    """Removes what a save that was cut short leaves; never part of a checkpoint."""
    whole = find(directory)
    litter = _glob(directory, '*.tempstate*') + _glob(directory, 'checkpoint.tmp*')
    for path in _glob(directory, 'model.ckpt-*.data-*'):
        if path.rpartition('.data-')[0] not in whole:
            litter.append(path)
    _remove(litter)


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
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    return None


def find_good(model_dir):
    """Finds the newest undamaged checkpoint; a warning names each damaged one.

    Returns:
      (prefix, damaged): its prefix, None if there has never been one; and the
      prefixes of the damaged checkpoints that are newer.

    Raises:
      UserError: there have been checkpoints, and none can be read.
    """
    prefixes = find(model_dir)
    data = {p.rpartition('.data-')[0] for p in _glob(model_dir, 'model.ckpt-*.data-*')}
    orphans = sorted(data - set(prefixes))
    best = find(os.path.join(model_dir, 'best'))
    # Saver writes its state file after the first checkpoint is whole, and a kill
    # before that leaves one orphan, and a best one of the first epoch, at most.
    had_one = (
        os.path.exists(os.path.join(model_dir, 'checkpoint'))
        or len(orphans) > 1
        or any(_position(prefix)[0] > 1 for prefix in best)
    )
    if had_one:
        for prefix in orphans:
            log.warning('%s has no .index, lost or never written: left out', prefix)
    damaged = []
    for prefix in prefixes:
        fault = find_fault(prefix)
        if fault is None:
            return prefix, damaged
        log.warning('%s is damaged: left out (%s)', prefix, fault)
        damaged.append(prefix)
    if prefixes or had_one:
        raise UserError(
            '%s: no checkpoint in it can be read; bring one back, or start anew in '
            'another --model_dir' % model_dir
        )
    return None, []


def restore(saver, session, model_dir):
    """Restores the newest undamaged checkpoint and clears the way for new ones.

    What a run that is begun again from here will write anew is renamed to `unused-...`:
    newer damaged checkpoints, and a best one of later. What kills left is removed.

    Returns:
      The prefix restored, None if `model_dir` has never held a checkpoint.

    Raises:
      UserError: none can be read, or it holds other variables than this model.
    """
    prefix, damaged = find_good(model_dir)
    if prefix is not None:
        check_variables(prefix)
        saver.restore(session, prefix)
    best_dir = os.path.join(model_dir, 'best')
    later = [
        best
        for best in find(best_dir)
        if prefix is None or _position(best) > _position(prefix)
    ]
    for unused in damaged + later:
        directory, name = os.path.split(unused)
        for path in _glob(directory, name + '.*'):
            aside = os.path.join(directory, 'unused-' + os.path.basename(path))
            os.rename(path, aside)
    remove_litter(model_dir)
    remove_litter(best_dir)
    return prefix


def check_variables(prefix, whole=True):
    """Refuses a checkpoint that does not fit the variables of the graph.

    Args:
      prefix: the checkpoint.
      whole: whether the graph must have all that the checkpoint holds.

    Raises:
      UserError: names the variable that differs.
    """
    saved = tf.train.NewCheckpointReader(prefix).get_variable_to_shape_map()
    built = {v.op.name: v.shape.as_list() for v in tf.global_variables()}
    for name in sorted(set(saved) | set(built) if whole else built):
        if saved.get(name) != built.get(name):
            raise UserError(
                '%s is of another model: %s is %s there and %s here; give the flags '
                'it was trained with, or another --model_dir'
                % (prefix, name, saved.get(name, 'absent'), built.get(name, 'absent'))
            )
