"""Data sets of a few files that are read whole: IDX, CIFAR's binary files, npz."""

import collections
import contextlib
import functools
import gzip
import operator
import os
import re
import zipfile
import zlib

import numpy as np

from utils import UserError, count

# One half of a data set as its files have it. images: uint8 [n, height, width,
# channels], or a `decoding.Stream`. labels: [n], numbers or strings. name_example:
# (index) -> what to call an example that something is wrong with. faults: list of
# (name, what is wrong) of images left out. names: {label: what its class is called}.
Half = collections.namedtuple('Half', 'images labels name_example faults names')

# IDX


IDX_NAME = re.compile(
    r'(?P<set>.*?)(?P<split>train|t10k|test|valid)-(?P<what>images|labels)'
    r'[-.]idx(?P<rank>\d)-ubyte(\.gz)?$'
)


def list_entries(directory):
    """Returns what a directory holds, a list of `os.DirEntry` sorted by name.

    Raises:
      UserError: it can't be read.
    """
    try:
        with os.scandir(directory) as entries:
            return sorted(entries, key=operator.attrgetter('name'))
    except OSError as error:
        raise UserError('%s: %s' % (directory, error.strerror)) from None


def list_names(directory):
    """Returns the names in a directory, sorted; raises as `list_entries`."""
    return [entry.name for entry in list_entries(directory)]


def find_idx(data_dir, split):
    """Returns a match of `IDX_NAME` per IDX file of a split, those with .gz last."""
    names = sorted(list_names(data_dir), key=lambda name: name.endswith('.gz'))
    matches = filter(None, map(IDX_NAME.match, names))
    return [m for m in matches if (m.group('split') == 'train') == (split == 'train')]


def load_idx(flags, split):
    """Loads four IDX files named as MNIST's; `emnist-letters-` may come before.

    Images have 3 dimensions, or 4 in colour; labels 1. Gzip is told by content.

    Args:
      flags: those of `command_line.add_data`.
      split: 'train' or 'valid'.

    Returns:
      A `Half`.

    Raises:
      UserError: a file is missing, unreadable, damaged, or does not fit the other.
    """
    found = find_idx(flags.data_dir, split)
    prefix = 'train' if split == 'train' else 't10k'
    paths = {}
    for what, rank in (('images', 3), ('labels', 1)):
        matches = [match for match in found if match.group('what') == what]
        if not matches:
            raise UserError(
                '%s has no %s-%s-idx%d-ubyte, nor with .idx or .gz'
                % (flags.data_dir, prefix, what, rank)
            )
        paths[what] = matches[0]
    _check_one_set(flags.data_dir, found)
    images_path = os.path.join(flags.data_dir, paths['images'].string)
    labels_path = os.path.join(flags.data_dir, paths['labels'].string)
    images = read_idx(images_path, int(paths['images'].group('rank')))
    labels = read_idx(labels_path, rank=1)
    if images.ndim == 3:
        images = images[..., np.newaxis]
    if images.ndim != 4 or images.shape[3] not in (1, 3):
        raise UserError(
            '%s: %s: images are [n, height, width], or [n, height, width, 3]'
            % (images_path, ' x '.join(map(str, images.shape)))
        )
    if len(images) != len(labels):
        raise UserError(
            '%s holds %d images, %s holds %d labels'
            % (images_path, len(images), labels_path, len(labels))
        )
    return Half(images, labels.astype(np.int64), _name_by_index(labels_path), [], {})


def _check_one_set(data_dir, matches):
    """Refuses files of several sets: whose labels belong to which images?"""
    sets = {}
    for match in matches:
        name = match.group('set') + match.group('split')
        sets.setdefault(name, '%s-%s' % (name, match.group('what')))
    if len(sets) > 1:
        raise UserError(
            '%s holds %s: leave one, or give each a directory'
            % (data_dir, ' and '.join(sets[name] for name in sorted(sets)))
        )


def _name_by_index(path):
    return lambda index: '%s: index %d' % (path, index)


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
    data = _read_file(path)
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


def _read_file(path):
    """Returns the bytes of a file, expanded if they are gzip's."""
    try:
        with open(path, 'rb') as file:
            data = file.read()
        return gzip.decompress(data) if data[:2] == b'\x1f\x8b' else data
    except (OSError, EOFError, zlib.error) as error:
        cause = error.args[-1] if error.args else error
        raise UserError('%s: %s' % (path, cause)) from None


# CIFAR

# labels: bytes before the pixels of each image; the last one counts. names: a file with
# what the classes are called, a line each.
Cifar = collections.namedtuple('Cifar', 'train valid labels classes names')
CIFARS = (
    Cifar(r'data_batch_\d+\.bin', r'test_batch\.bin', 1, 10, 'batches.meta.txt'),
    Cifar(r'train\.bin', r'test\.bin', 2, 100, 'fine_label_names.txt'),
)
CIFAR_SHAPE = 3, 32, 32


def find_cifar(data_dir, split):
    """Returns a list of (which of `CIFARS`, the paths of its files)."""
    found = []
    for cifar in CIFARS:
        pattern = cifar.train if split == 'train' else cifar.valid
        names = [n for n in list_names(data_dir) if re.match(pattern + '$', n)]
        names.sort(key=lambda name: [int(n) for n in re.findall(r'\d+', name)])
        if names:
            found.append((cifar, [os.path.join(data_dir, name) for name in names]))
    return found


def load_cifar(flags, split):
    """Loads the binary version of CIFAR-10 or CIFAR-100 (its fine labels).

    Args, returns and raises: as `load_idx`.

    Source: the formats as described with the CIFAR-10 and CIFAR-100 data sets.
    """
    found = find_cifar(flags.data_dir, split)
    if not found:
        wanted = ' nor '.join(
            (c.train if split == 'train' else c.valid).replace('\\', '') for c in CIFARS
        )
        raise UserError('%s has no %s' % (flags.data_dir, wanted))
    if len(found) > 1:
        first = (os.path.basename(paths[0]) for _, paths in found)
        raise UserError(
            '%s holds %s: leave one, or give each a directory'
            % (flags.data_dir, ' and '.join(first))
        )
    cifar, paths = found[0]
    length = cifar.labels + int(np.prod(CIFAR_SHAPE))
    parts = []
    for path in paths:
        data = np.frombuffer(_read_file(path), np.uint8)
        if not data.size or data.size % length:
            raise UserError(
                '%s: %d bytes are not a number of records of %d'
                % (path, data.size, length)
            )
        parts.append(data.reshape(-1, length))
        labels = parts[-1][:, cifar.labels - 1]
        wrong = np.flatnonzero(labels >= cifar.classes)
        if len(wrong):
            raise UserError(
                '%s: label %d at index %d; the %d classes are 0 to %d'
                % (path, labels[wrong[0]], wrong[0], cifar.classes, cifar.classes - 1)
            )
    records = np.concatenate(parts)
    images = records[:, cifar.labels :].reshape((-1,) + CIFAR_SHAPE)
    images = np.ascontiguousarray(images.transpose(0, 2, 3, 1))
    labels = records[:, cifar.labels - 1].astype(np.int64)
    names = _read_names(os.path.join(flags.data_dir, cifar.names), cifar.classes)
    return Half(images, labels, _name_by_index(' '.join(paths)), [], names)


def _read_names(path, classes):
    """Returns {label: name} of a file with a name per line, {} without one for each."""
    try:
        with open(path, encoding='utf-8', errors='replace') as file:
            names = file.read().split('\n')
    except OSError:
        return {}
    names = [name.strip() for name in names if name.strip()]
    # Two classes of one name would be one.
    return dict(enumerate(names)) if len(names) == len(set(names)) == classes else {}


# npz


def find_npz(data_dir, split=None):
    """Returns the paths of the npz files in a directory; one holds both splits."""
    del split
    if os.path.isfile(data_dir):
        return [data_dir]
    names = [name for name in list_names(data_dir) if name.endswith('.npz')]
    return [os.path.join(data_dir, name) for name in names]


def load_npz(flags, split):
    """Loads `x_train`, `y_train`, `x_test` and `y_test` of the one npz file there is.

    Images are uint8 [n, height, width] or [n, height, width, 1 or 3], labels whole
    numbers [n] or [n, 1]. Nothing pickled is read.

    Args, returns and raises: as `load_idx`.
    """
    paths = find_npz(flags.data_dir)
    if len(paths) != 1:
        raise UserError(
            '%s has %s, not one' % (flags.data_dir, count(len(paths), 'npz file'))
        )
    path = paths[0]
    end = 'train' if split == 'train' else 'test'
    images = _read_npz_images(path, 'x_' + end)
    labels = _read_npz_labels(path, 'y_' + end)
    if len(images) != len(labels):
        raise UserError(
            '%s: x_%s has %d images, y_%s has %d labels'
            % (path, end, len(images), end, len(labels))
        )
    name_example = _name_by_index('%s: y_%s' % (path, end))
    return Half(images, labels, name_example, [], {})


def _read_npz_images(path, name):
    """Returns uint8 [n, height, width, 1 or 3], contiguous."""
    images = _read_array(path, name)
    shape = 'x'.join(map(str, images.shape))
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise UserError(
            '%s: %s is %s %s: images are uint8, 0 to 255, [n, height, width] or [n, '
            'height, width, 1 or 3]' % (path, name, images.dtype, shape)
        )
    if not images.size:
        raise UserError('%s: %s is empty (%s)' % (path, name, shape))
    if images.ndim == 3:
        images = images[..., np.newaxis]
    if images.shape[3] not in (1, 3):
        raise UserError(
            '%s: %s is %s: images have 1 or 3 channels, last' % (path, name, shape)
        )
    return np.ascontiguousarray(images)


def _read_npz_labels(path, name):
    """Returns int64 [n]."""
    labels = _read_array(path, name)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.dtype.kind not in 'ui' or labels.ndim != 1:
        raise UserError(
            '%s: %s is %s %s: labels are whole numbers, [n]'
            % (path, name, labels.dtype, 'x'.join(map(str, labels.shape)))
        )
    found = labels.astype(np.int64)
    wrong = np.flatnonzero(found < 0)  # below 0, or too large
    if len(wrong):
        raise UserError(
            '%s: %s: index %d: label %d is out of range: labels are from 0 on'
            % (path, name, wrong[0], labels[wrong[0]])
        )
    return found


def _read_array(path, name):
    try:
        with _open_npz(path) as file:
            names = list_members(file)
            if name not in names:
                found = ', '.join(sorted(names)) or 'no array'
                raise UserError('%s holds %s, no %s' % (path, found, name))
            return read_member(file, name)
    except UserError:
        raise
    except Exception as error:  # numpy, zipfile and zlib raise a dozen kinds
        cause = str(error).split('\n')[0] or type(error).__name__
        raise UserError('%s: %s: %s' % (path, name, cause)) from None


def list_members(file):
    """Returns the names of the arrays in an open npz file."""
    return [name[: -len('.npy')] for name in file.namelist() if name.endswith('.npy')]


def read_member(file, name):
    """Returns an array of an open npz file, its checksum compared.

    numpy by itself reads as much as the array's header says. Where that is damaged it
    may be less than there is, and the checksum is compared at the end only.
    """
    with file.open(name + '.npy') as member:
        array = np.lib.format.read_array(member, allow_pickle=False)
        if member.read(1):
            raise ValueError('more bytes than its header says')
    return array


@contextlib.contextmanager
def _open_npz(path):
    """Yields the zip archive that an npz file is.

    numpy's own reader takes a file for something else by its content, and prints a
    traceback of one that is damaged.
    """
    if not zipfile.is_zipfile(path):
        with open(path, 'rb'):  # tells what keeps it from being read
            raise ValueError('no npz file: not a zip archive, or one that was cut')
    with zipfile.ZipFile(path) as file:
        yield file
