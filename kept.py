"""What is found out about a data set once and kept beside the model_dir."""

import contextlib
import functools
import hashlib
import os
import tempfile
import zipfile
import zlib

import numpy as np

from array_files import list_members, read_member
from utils import log

# numpy's own arguments have names, too.
PREFIX = 'found-'


def find_directory(flags):
    """Returns the directory beside the model_dir that is this data set's."""
    parent = os.path.dirname(os.path.abspath(flags.model_dir or 'runs/run'))
    checksum = zlib.crc32(os.fsencode(os.path.abspath(flags.data_dir)))
    return os.path.join(parent, 'data-%08x' % checksum)


def remember(flags, name, paths, find_out):
    """Returns what `find_out()` does, or what it did as long as no file has changed.

    Args:
      flags: `data_dir` and `model_dir` say where it is kept.
      name: of what is found out; a file's.
      paths: the files it depends on: on their names, sizes and times.
      find_out: () -> a dict of arrays.
    """
    stamp = np.frombuffer(make_stamp(paths), np.uint8)
    path = os.path.join(find_directory(flags), name + '.npz')
    found = _read(path, stamp)
    if found is not None:
        return found
    found = find_out()
    try:
        with write_whole(path) as file:
            arrays = {PREFIX + key: value for key, value in found.items()}
            np.savez(file, stamp=stamp, names=list(found), **arrays)
    except OSError as error:
        _warn(os.path.dirname(path), error.strerror)
    return {key: np.asarray(value) for key, value in found.items()}


@functools.lru_cache(maxsize=None)  # once is enough
def _warn(directory, why):
    log.warning(
        '%s can not be written (%s): what is found out about the data is not kept for '
        'the next start',
        directory,
        why,
    )


def make_stamp(paths):
    """Returns bytes that differ if a file has another name, size or time, or none."""
    digest = hashlib.sha256()
    for path in paths:
        line = 'none '
        with contextlib.suppress(OSError):  # of a file that is gone, who reads it tells
            status = os.stat(path)
            line = '%d %d ' % (status.st_size, status.st_mtime_ns)
        digest.update(line.encode() + os.fsencode(os.path.abspath(path)) + b'\n')
    return digest.digest()


def _read(path, stamp):
    """Returns what was found out and kept, None if not all is there or it is old."""
    try:
        with zipfile.ZipFile(path) as file:
            arrays = {name: read_member(file, name) for name in list_members(file)}
        if not np.array_equal(arrays['stamp'], stamp):
            return None
        return {name: arrays[PREFIX + name] for name in arrays['names'].tolist()}
    except Exception:  # whatever is wrong with it, it is made again
        return None


@contextlib.contextmanager
def write_whole(path):
    """Yields a binary file that is at `path`, whole, once the block is done."""
    directory = os.path.dirname(path)
    os.makedirs(directory, exist_ok=True)
    # Another process may be writing the same.
    with tempfile.NamedTemporaryFile(dir=directory, delete=False) as file:
        try:
            yield file
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.remove(file.name)
            raise
