"""Data sets of encoded images: folders of files, and TFRecords.

Which images there are, where, of what size and class, is read once and kept. So each
epoch shuffles the whole set, any image can be read at any time, and a run goes on at
the image where it stopped.
"""

import contextlib
import functools
import glob
import gzip
import json
import os
import re
import shutil
import struct
import tempfile
import zlib

import numpy as np

import decoding
import image_headers
import kept
import utils
from array_files import Half, list_entries, list_names
from tf1 import tf
from utils import UserError, count, find_cause

ENDINGS = ('.png', '.jpg', '.jpeg', '.bmp', '.gif')
# The first of these that is there is validated on.
VALID_NAMES = ('valid', 'validation', 'val', 'test')


def _names(split):
    return ('train',) if split == 'train' else VALID_NAMES


# Folders


def find_folders(data_dir, split):
    """Returns the directory of a split, None if there is none."""
    for name in _names(split):
        path = os.path.join(data_dir, name)
        if os.path.isdir(path) and list_classes(path):
            return path
    return None


def list_classes(directory):
    """Returns the names of the directories in a directory."""
    # An entry knows what it is; of thousands of classes the disk is asked once.
    found = [entry.name for entry in list_entries(directory) if entry.is_dir()]
    return [name for name in found if not name.startswith('.')]


def load_folders(flags, split):
    """Finds the images of `train/CLASS/*`, or those of `valid/` or `test/`.

    Args:
      flags: those of `command_line.add_data`.
      split: 'train' or 'valid'.

    Returns:
      A `Half`, the shape of its `decoding.Stream` still open; None if there is no such
      directory.

    Raises:
      UserError: names the file or directory, and what is wrong with it.
    """
    directory = find_folders(flags.data_dir, split)
    if directory is None:
        return None
    paths, classes = [], []
    for name in list_classes(directory):
        found = _list_images(os.path.join(directory, name))
        paths += found
        classes += [name] * len(found)

    def scan(faults):
        for number, path in enumerate(_show(paths, flags.data_dir)):
            try:
                header, length = _read_header(path)
            except (OSError, ValueError) as error:
                faults.append((path, getattr(error, 'strerror', None) or str(error)))
            else:
                yield number, 0, length, 0, header, 0

    stream, _, faults = _index(flags, os.path.basename(directory), paths, scan)
    stream = stream._replace(paths=[os.fsencode(path) for path in paths], offset=None)
    labels = np.array(classes)[stream.file]
    gone = sorted(set(classes) - set(labels.tolist()))
    if gone and split == 'train':
        raise UserError(
            '%s: no image of class %s can be decoded' % (flags.data_dir, gone[0])
        )
    return _make_half(stream, labels, faults)


def _make_half(stream, labels, faults):
    return Half(
        stream, labels, functools.partial(decoding.name_image, stream), faults, {}
    )


def _list_images(directory):
    """Returns the paths of the image files in a directory, sorted."""
    found = [
        os.path.join(directory, name)
        for name in list_names(directory)
        if name.lower().endswith(ENDINGS) and not name.startswith('.')
    ]
    if not found:
        raise UserError(
            '%s holds no image (%s): an empty class can not be learned; remove it'
            % (directory, ', '.join(ENDINGS))
        )
    return found


def _read_header(path):
    """Returns (header, length) of an image file."""
    with open(path, 'rb') as file:
        length = os.fstat(file.fileno()).st_size
        data = file.read(image_headers.FIRST_BYTES)
        try:
            return image_headers.read_header(data, length), length
        except image_headers.Incomplete:
            return _read_whole_header(data + file.read()), length


def _read_whole_header(data):
    try:
        return image_headers.read_header(data, len(data))
    except image_headers.Incomplete:
        raise ValueError('ends in its header, after %d bytes' % len(data)) from None


# TFRecords

RECORD_FILE = re.compile(r'(?i).*(\.tfrecords?(\.gz)?|tfrecord.*|-\d+-of-\d+(\.gz)?)$')


def find_records(data_dir, split):
    """Returns the paths of a split's TFRecord files, sorted."""
    for name in _names(split):
        found = glob.glob(os.path.join(glob.escape(data_dir), name + '*'))
        paths = [p for p in found if _is_record_file(p)]
        if paths:
            return sorted(paths)
    return []


def _is_record_file(path):
    return RECORD_FILE.match(os.path.basename(path)) and os.path.isfile(path)


def load_records(flags, split):
    """Finds the images in `train*.tfrecord`, or in those of `valid*` or `test*`.

    Every record's checksum is verified. Files compressed with GZIP are expanded once,
    beside the index.

    Args, returns and raises: as `load_folders`.

    Source: TensorFlow's guide to TFRecord; the names of the features are those of its
    ImageNet scripts.
    """
    paths = find_records(flags.data_dir, split)
    if not paths:
        return None
    plain_paths = [_expand(flags, path) for path in paths]

    def scan(faults):
        for number, path in enumerate(_show(paths, flags.data_dir)):
            for record in _read_records(path, plain_paths[number], flags, faults):
                yield (number,) + record

    names = [split, flags.image_feature, flags.label_feature]
    name = 'records-%08x' % zlib.crc32('\n'.join(names).encode())
    stream, labels, faults = _index(flags, name, paths, scan)
    wrong = np.flatnonzero(labels < 0)
    stream = stream._replace(
        paths=[os.fsencode(path) for path in plain_paths],
        names=[os.fsencode(path) for path in paths],
    )
    half = _make_half(stream, labels, faults)
    if len(wrong):
        raise UserError(
            '%s: label %d is below 0' % (half.name_example(wrong[0]), labels[wrong[0]])
        )
    return half


def _read_records(path, plain_path, flags, faults):
    """Yields (offset, length, number, header, label) per good record of a file."""
    for number, start, record in _iterate(path, plain_path, faults):
        name = '%s: record %d' % (path, number)
        try:
            features = tf.train.Example.FromString(record).features.feature
        except Exception as error:  # its type differs by protobuf's version
            faults.append((name, 'no tf.train.Example (%s)' % type(error).__name__))
            continue
        image = features[flags.image_feature].bytes_list.value
        label = features[flags.label_feature].int64_list.value
        if len(image) != 1 or len(label) != 1:
            raise UserError(_explain_features(name, record, flags))
        try:
            header = _read_whole_header(image[0])
        except ValueError as error:
            faults.append((name, str(error)))
            continue
        offset = start + record.find(image[0])
        yield offset, len(image[0]), number, header, label[0]


def _explain_features(name, record, flags):
    features = tf.train.Example.FromString(record).features.feature
    kinds = ((key, features[key].WhichOneof('kind')) for key in sorted(features))
    found = ', '.join('%s (%s)' % (key, kind) for key, kind in kinds if kind)
    return (
        '%s has no single %s (bytes) and %s (int64), it has %s: name them with '
        '--image_feature and --label_feature'
        % (name, flags.image_feature, flags.label_feature, found or 'nothing')
    )


def _iterate(path, plain_path, faults):
    """Yields (number, offset, bytes) of each good record of a file."""
    number = start = 0
    size = os.path.getsize(plain_path)
    if not os.path.getsize(path):  # as a copy that failed leaves it
        faults.append((path, 'empty'))
    while start < size:
        with _rest_of(plain_path, start) as rest:
            try:
                for record in tf.python_io.tf_record_iterator(rest):
                    yield number, start + 12, record
                    number, start = number + 1, start + 16 + len(record)
                if start < size:  # too little for a length: no error to TensorFlow
                    faults.append(('%s: record %d' % (path, number), 'the file ends'))
                return
            except tf.errors.OpError as error:
                faults.append(('%s: record %d' % (path, number), find_cause(error)))
        # Where the length is right the damage is in what follows, and another record
        # begins after it. Else the rest of the file is lost.
        length = _read_length(plain_path, start)
        if length is None:
            return
        number, start = number + 1, start + 16 + length


@contextlib.contextmanager
def _rest_of(path, start):
    """Yields the path of a file that holds the given one from byte `start` on."""
    if start == 0:
        yield path
        return
    with tempfile.NamedTemporaryFile() as rest, open(path, 'rb') as file:
        file.seek(start)
        shutil.copyfileobj(file, rest)
        rest.flush()
        yield rest.name


def _read_length(path, start):
    """Returns the length of the record at byte `start`, None if that is damaged."""
    with open(path, 'rb') as file:
        file.seek(start)
        head = file.read(12)
    if len(head) < 12:
        return None
    length, checksum = struct.unpack('<QI', head)
    return length if checksum == mask(crc32c(head[:8])) else None


def crc32c(data):
    """Returns the CRC-32C of a few bytes. Source: RFC 3720, appendix B.4."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def mask(crc):
    """Returns a checksum as TFRecords have it. Source: TensorFlow's record format."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _expand(flags, path):
    """Returns the path of a file's records: itself, or its copy that is expanded."""
    try:
        with gzip.open(path) as file:
            file.read(1)
    except (OSError, EOFError, zlib.error):
        return path  # what is wrong with it, if anything, is found as it is read
    stamp = zlib.crc32(kept.make_stamp([path]))
    name = '%s-%08x' % (os.path.basename(path), stamp)
    copy = os.path.join(kept.find_directory(flags), name)
    if not os.path.exists(copy):
        try:
            with gzip.open(path) as file, kept.write_whole(copy) as expanded:
                shutil.copyfileobj(file, expanded)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError('%s: %s' % (path, error)) from None
    return copy


# Both


def _index(flags, name, paths, scan):
    """Returns what is in files: (stream, labels, faults).

    Args:
      flags: say where it is kept.
      name: to keep it under.
      paths: of the files.
      scan: (list to add faults to) -> yields (file, offset, length, number, header,
        label) of each good image.
    """

    def find_out():
        faults = []
        found = list(scan(faults))
        refuse(faults, flags)
        if not found:
            raise UserError(
                '%s: no image in %s' % (paths[0], count(len(paths), 'file'))
            )
        file, offset, length, number, header, label = zip(*found)
        return {
            'file': np.array(file, np.int32),
            'offset': np.array(offset, np.int64),
            'length': np.array(length, np.int64),
            'number': np.array(number, np.int64),
            'kind': np.array([h.kind for h in header], np.uint8),
            'size': np.array([(h.height, h.width) for h in header], np.int32),
            'grey': np.array([h.grey for h in header], bool),
            'label': np.array(label, np.int64),
            'faults': json.dumps(faults),
        }

    index = kept.remember(flags, name, paths, find_out)
    faults = [tuple(fault) for fault in json.loads(str(index.pop('faults')))]
    refuse(faults, flags)
    labels = index.pop('label')
    return decoding.Stream(paths=None, names=None, shape=None, **index), labels, faults


def refuse(faults, flags):
    """Refuses images that can't be decoded, unless `--skip_bad`."""
    if faults and not flags.skip_bad:
        more = ' (%d more have faults)' % (len(faults) - 1) if len(faults) > 1 else ''
        raise UserError(
            '%s: %s%s; --skip_bad leaves such images out' % (*faults[0], more)
        )


def _show(paths, title):
    """Returns the paths; on a terminal, with a bar."""
    return utils.open_bar('indexing %s' % title, 'file', paths)
