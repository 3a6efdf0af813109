"""Data sets on disk, found, checked and loaded."""

import collections
import functools
import gzip
import operator
import os
import zlib

import numpy as np

from utils import UserError

NUM_CLASSES = 10

# images: uint8 [n, height, width, channels]; labels: int64 [n].
Examples = collections.namedtuple('Examples', 'images labels')
DataSet = collections.namedtuple('DataSet', 'train valid num_classes')


def load(data_dir):
    """Loads and checks a data set of four IDX files in MNIST's layout.

    Args:
      data_dir: directory with `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`
        and the same two with `t10k`; `.idx3` for `-idx3` and gzip are fine too.

    Returns:
      A `DataSet` of `Examples`.

    Raises:
      UserError: a file is missing, unreadable, damaged, or does not fit the others.
    """
    valid = load_valid(data_dir)
    train = _load_examples(data_dir, 'train')
    if train.images.shape[1:] != valid.images.shape[1:]:
        raise UserError(
            '%s: training images are %s, test images %s: one network takes one size'
            % (data_dir, _size(train.images), _size(valid.images))
        )
    return DataSet(train, valid, NUM_CLASSES)


def load_valid(data_dir):
    """Loads and checks the test half of a data set only; see `load`."""
    if not os.path.isdir(data_dir):
        raise UserError('--data_dir %s is not a directory' % data_dir)
    return _load_examples(data_dir, 't10k')


def _size(images):
    return 'x'.join(map(str, images.shape[1:3]))


def _load_examples(data_dir, prefix):
    images_path = _find(data_dir, prefix + '-images', 'idx3-ubyte')
    labels_path = _find(data_dir, prefix + '-labels', 'idx1-ubyte')
    images = read_idx(images_path, rank=3)
    labels = read_idx(labels_path, rank=1)
    if len(images) != len(labels):
        raise UserError(
            '%s holds %d images, %s holds %d labels'
            % (images_path, len(images), labels_path, len(labels))
        )
    wrong = np.flatnonzero(labels >= NUM_CLASSES)
    if len(wrong):
        raise UserError(
            '%s: label %d at index %d; the %d classes are 0 to %d'
            % (labels_path, labels[wrong[0]], wrong[0], NUM_CLASSES, NUM_CLASSES - 1)
        )
    return Examples(images[..., np.newaxis], labels.astype(np.int64))


def _find(data_dir, stem, ending):
    names = [stem + dot + ending + gz for gz in ('', '.gz') for dot in '-.']
    for name in names:
        path = os.path.join(data_dir, name)
        if os.path.exists(path):
            return path
    raise UserError(
        '%s has no %s (nor %s)' % (data_dir, names[0], ', '.join(names[1:]))
    )


def read_idx(path, rank):
    """Reads an IDX file of unsigned bytes, gzip or not (told by content).

    Args:
      path: the file.
      rank: how many dimensions it must have.

    Returns:
      A uint8 array of that rank, with at least one element.

    Raises:
      UserError: the file can't be read or is not what it should be.

    Source: the IDX format as described with the MNIST database.
    """
    try:
        with open(path, 'rb') as file:
            data = file.read()
        if data[:2] == b'\x1f\x8b':
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        cause = error.args[-1] if error.args else error
        raise UserError('%s: %s' % (path, cause)) from None

    header = 4 + 4 * rank
    if len(data) < header:
        raise UserError(
            '%s: %d bytes, an IDX header has %d' % (path, len(data), header)
        )
    magic = bytes([0, 0, 8, rank])
    if data[:4] != magic:
        raise UserError(
            '%s: starts with bytes %s, IDX of %d dimensions with %s'
            % (path, data[:4].hex(), rank, magic.hex())
        )
    shape = [int(n) for n in np.frombuffer(data, '>u4', rank, offset=4)]
    size = functools.reduce(operator.mul, shape)
    if len(data) != header + size:
        raise UserError(
            '%s: the header says %s, so %d bytes; found %d'
            % (path, ' x '.join(map(str, shape)), header + size, len(data))
        )
    if size == 0:
        raise UserError('%s: empty (%s)' % (path, ' x '.join(map(str, shape))))
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)
