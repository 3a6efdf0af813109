"""Data sets on disk: told by what they hold, loaded, checked and numbered."""

import collections
import json
import os
import zlib

import numpy as np

import array_files
import decoding
import encoded_files
import kept
from utils import UserError, log

# images: uint8 [n, height, width, channels], or a `decoding.Stream`. labels: int64 [n],
# places in `classes`.
Examples = collections.namedtuple('Examples', 'images labels')

# classes: what each is called, a list of numbers or strings. kind: a key of `FORMATS`.
# held_out: the share of the training images that is `valid`, None where the data set
# has a half for that. moments: `find_moments`, None without `--standardize`. border:
# mean brightness of the edges of training images, 0 to 255. faults: list of (name, what
# is wrong) of the images left out.
DataSet = collections.namedtuple(
    'DataSet', 'train valid classes kind held_out moments border faults'
)

# find: (data_dir, split) -> something true if it is there. load: (flags, split) -> a
# `Half`, None if there is none and needs be none. holds: what is looked for.
Format = collections.namedtuple('Format', 'find load holds')
FORMATS = collections.OrderedDict(
    idx=Format(array_files.find_idx, array_files.load_idx, 'train-images-idx3-ubyte'),
    cifar=Format(
        array_files.find_cifar, array_files.load_cifar, 'data_batch_1.bin or train.bin'
    ),
    npz=Format(array_files.find_npz, array_files.load_npz, 'one npz file'),
    folders=Format(
        encoded_files.find_folders, encoded_files.load_folders, 'train/CLASS/*.png'
    ),
    tfrecord=Format(
        encoded_files.find_records, encoded_files.load_records, 'train*.tfrecord'
    ),
)

# Held out for validation where the data set has no half for it.
VALID_FRACTION = 0.1
# So many images tell what their border is like; fewer where they must be decoded.
BORDER_IMAGES = 1000
BORDER_DECODED = 100
# `--cache` may take this share of the free memory.
CACHE_SHARE = 0.8


def load(flags, threads=(0, 0)):
    """Loads and checks a data set.

    Args:
      flags: those of `command_line.add_data`, and `model_dir`.
      threads: of sessions that decode, see `decoding.decode_all`.

    Returns:
      A `DataSet`.

    Raises:
      UserError: names the file that is missing, unreadable or damaged, or what does not
        fit.
    """
    kind = find_format(flags)
    train, valid, held_out = _load_halves(flags, kind)
    train_labels = sorted(set(train.labels.tolist()))
    if len(train_labels) < 2:
        raise UserError(
            '%s: all %d training images are of class %s: there is nothing to tell apart'
            % (
                flags.data_dir,
                len(train.labels),
                train.names.get(train_labels[0], train_labels[0]),
            )
        )
    classes = [train.names.get(label, label) for label in train_labels]
    shape = _choose_shape(train, flags)
    train, valid = (
        _finish(half, shape, flags, threads, name)
        for half, name in ((train, 'train'), (valid, 'valid'))
    )
    if valid.images.shape[1:] != shape:
        raise UserError(
            '%s: training images are %s, test images %s: one network takes one size'
            % (flags.data_dir, _say(shape), _say(valid.images.shape[1:]))
        )
    if len(set(train.labels.tolist())) < len(classes):
        gone = sorted(set(train_labels) - set(train.labels.tolist()))
        raise UserError(
            '%s: no image of class %s can be decoded' % (flags.data_dir, gone[0])
        )
    faults = train.faults + [f for f in valid.faults if f not in train.faults]
    train, valid = (_number(half, classes) for half in (train, valid))
    moments = find_moments(train.images, flags, threads) if flags.standardize else None
    border = find_border(train.images, threads)
    return DataSet(train, valid, classes, kind, held_out, moments, border, faults)


def load_valid(flags, classes, shape, threads=(0, 0)):
    """Loads what a data set validates on, for a model that was trained.

    Args:
      flags, threads: as in `load`.
      classes: the model's, as in `DataSet`.
      shape: (height, width, channels) of its images; streams are made so, others must
        be checked.

    Returns, raises: `Examples`; as `load`.
    """
    kind = find_format(flags)
    half = FORMATS[kind].load(flags, 'valid')
    if half is None:
        _, half, _ = _load_halves(flags, kind)
    return _number(_finish(half, tuple(shape), flags, threads, 'valid'), classes)


def find_format(flags):
    """Returns the key of `FORMATS` that a data set is, or that `--format` says."""
    data_dir = flags.data_dir
    if os.path.isfile(data_dir) and data_dir.endswith('.npz'):
        return 'npz'
    if not os.path.isdir(data_dir):
        raise UserError('--data_dir %s is not a directory' % data_dir)
    array_files.list_names(data_dir)  # or nothing would be found in it
    if flags.format is not None:
        return flags.format
    found = [
        name
        for name, form in FORMATS.items()
        if form.find(data_dir, 'train') or form.find(data_dir, 'valid')
    ]
    if not found:
        raise UserError(
            '%s holds no data set: %s'
            % (
                data_dir,
                ', '.join('no %s (%s)' % (f.holds, n) for n, f in FORMATS.items()),
            )
        )
    if len(found) > 1:
        raise UserError(
            '%s holds %s: say which with --format' % (data_dir, ' and '.join(found))
        )
    return found[0]


def _load_halves(flags, kind):
    """Returns (train, valid, held_out), both a `Half`; the last as in `DataSet`."""
    train, valid = (FORMATS[kind].load(flags, split) for split in ('train', 'valid'))
    if train is None:
        raise UserError('%s has no %s' % (flags.data_dir, FORMATS[kind].holds))
    if valid is not None and flags.valid_fraction is not None:
        raise UserError(
            '--valid_fraction: %s has images of its own for that: leave it out'
            % flags.data_dir
        )
    if valid is not None:
        return train, valid, None
    held_out = flags.valid_fraction or VALID_FRACTION
    return hold_out(train, held_out, flags.data_dir) + (held_out,)


def hold_out(half, fraction, data_dir):
    """Splits a half in two, class by class: the same way for every seed and machine.

    Of each class those images are held out whose names have the lowest checksums, as
    many as make `fraction`, rounded; at least one, and not all.

    Args:
      half: the `Half` to split.
      fraction: in (0, 1).
      data_dir: names begin after it.

    Returns:
      (rest, held out), each a `Half`.
    """
    names = (half.name_example(row) for row in range(len(half.labels)))
    keys = [zlib.crc32(os.fsencode(os.path.relpath(name, data_dir))) for name in names]
    order = np.lexsort([np.array(keys), np.unique(half.labels, return_inverse=True)[1]])
    held_out = []
    for label in np.unique(half.labels):
        rows = order[half.labels[order] == label]
        number = int(round(fraction * len(rows)))
        held_out += rows[: min(max(number, 1), len(rows) - 1)].tolist()
    held_out = np.isin(np.arange(len(half.labels)), held_out)
    if not held_out.any():
        raise UserError('%s: too few images to hold some out' % data_dir)
    rest, held_out = (
        _take(half, np.flatnonzero(part)) for part in (~held_out, held_out)
    )
    return rest, held_out._replace(faults=[])  # each fault is counted once


def _take(half, rows):
    """Returns a `Half` of some of a half's examples."""
    return half._replace(
        images=decoding.take(half.images, rows),
        labels=half.labels[rows],
        name_example=lambda row: half.name_example(rows[row]),
    )


def _choose_shape(train, flags):
    """Returns (height, width, channels) that all images are to have."""
    if not decoding.is_stream(train.images):
        if flags.image_size is not None:
            raise UserError(
                '--image_size is for folders and tfrecord: the images of %s have the '
                'size they have' % flags.data_dir
            )
        return train.images.shape[1:]
    channels = 1 if train.images.grey.all() else 3
    size = flags.image_size or tuple(train.images.size[0].tolist())
    return tuple(size) + (channels,)


def _finish(half, shape, flags, threads, name):
    """Returns a `Half` whose images can be used: of one shape, without bad ones."""
    stream = half.images
    if not decoding.is_stream(stream):
        return half
    others = np.flatnonzero((stream.size != shape[:2]).any(axis=1))
    if len(others) and flags.image_size is None:
        raise UserError(
            '%s is %s, the first training image %s: --image_size %s makes all the same'
            % (
                half.name_example(others[0]),
                _say(stream.size[others[0]]),
                _say(shape[:2]),
                _say(shape[:2]),
            )
        )
    half = half._replace(images=stream._replace(shape=(len(half.labels),) + shape))
    if flags.skip_bad:
        half = _skip_bad(half, flags, threads, name)
    if flags.cache:
        half = _cache(half, threads)
    return half


def _say(shape):
    return 'x'.join(map(str, shape))


def _skip_bad(half, flags, threads, name):
    """Leaves out what can't be decoded; that is found out once, before the run."""
    stream = half.images

    def find_out():
        bad = decoding.find_bad(stream, threads)
        return {'rows': np.array([row for row, _ in bad], int), 'bad': json.dumps(bad)}

    found = kept.remember(flags, _name(name + '-bad', stream), stream.paths, find_out)
    bad = json.loads(str(found['bad']))
    faults = half.faults + [(half.name_example(row), why) for row, why in bad]
    if len(bad) == len(half.labels):
        raise UserError('%s: no image can be decoded: %s: %s' % (name, *faults[0]))
    if faults:
        log.warning(
            '%d of %d images for %s can not be decoded and are left out, the first: %s',
            len(faults),
            len(half.labels) + len(half.faults),
            'training' if name == 'train' else 'validation',
            '%s: %s' % faults[0],
        )
    rows = np.setdiff1d(np.arange(len(half.labels)), found['rows'])
    return _take(half._replace(faults=faults), rows)


def _name(name, stream):
    """Returns a name to keep under what depends on which images a stream has.

    A record may hold several: which it is, its place and length tell.
    """
    checksum = zlib.crc32(repr(stream.shape).encode())
    places = [] if stream.offset is None else [stream.offset]
    for array in [stream.file, stream.number, stream.length] + places:
        checksum = zlib.crc32(np.ascontiguousarray(array), checksum)
    return '%s-%08x' % (name, checksum)


def _cache(half, threads):
    """Decodes all images into memory, if they fit."""
    needed = int(np.prod(half.images.shape))
    # While they go into the session they are there twice.
    if 2 * needed > CACHE_SHARE * free_memory():
        log.warning(
            '--cache: %.1f GB, twice while they are loaded, do not fit into the %.1f '
            'GB that are free: images are decoded each time',
            needed / 1e9,
            free_memory() / 1e9,
        )
        return half
    held = np.empty(half.images.shape, np.uint8)
    filled = 0
    for part in decoding.decode_all(half.images, threads):
        held[filled : filled + len(part)] = part
        filled += len(part)
    return half._replace(images=held)


def free_memory():
    """Returns how many bytes this process may still take; infinity if unknown."""
    free = [float('inf')]
    try:
        with open('/proc/meminfo', encoding='ascii') as file:
            lines = dict(line.split(':') for line in file)
        free.append(1024 * int(lines['MemAvailable'].split()[0]))
        with open('/sys/fs/cgroup/memory.max', encoding='ascii') as file:
            limit = int(file.read())
        with open('/sys/fs/cgroup/memory.current', encoding='ascii') as file:
            free.append(limit - int(file.read()))
    except (OSError, ValueError, KeyError):
        pass  # not Linux, or no limit
    return min(free)


def _number(half, classes):
    """Returns the `Examples` of a half, its labels numbered as `classes` has them."""
    values, inverse = np.unique(half.labels, return_inverse=True)
    places = {name: place for place, name in enumerate(classes)}
    numbers = [places.get(half.names.get(value, value)) for value in values.tolist()]
    if None in numbers:
        wrong = numbers.index(None)
        raise UserError(
            '%s: label %s; the %d classes of the training images are %s'
            % (
                half.name_example(np.flatnonzero(inverse == wrong)[0]),
                values[wrong],
                len(classes),
                list_classes(classes),
            )
        )
    return Examples(half.images, np.array(numbers, np.int64)[inverse])


def list_classes(classes, most=10):
    """Returns the classes as a short text: '0 to 9', 'cat, dog', 'a, b, ... z'."""
    numbers = all(isinstance(name, int) for name in classes)
    # Numbers may lie far apart.
    if numbers and classes == list(range(classes[0], classes[0] + len(classes))):
        return '%d to %d' % (classes[0], classes[-1])
    if len(classes) <= most:
        return ', '.join(map(str, classes))
    return '%s, ... %s' % (', '.join(map(str, classes[: most - 1])), classes[-1])


def find_moments(training_images, flags, threads):
    """Returns (mean, deviation) of a set's brightness, 0 to 255: float32 [channels]."""

    def find_out():
        count, total, squares = 0, 0, 0  # whole numbers: exact, in any order
        for part in decoding.decode_all(training_images, threads):
            pixels = part.reshape(-1, part.shape[3]).astype(np.int64)
            count += len(pixels)
            total += pixels.sum(axis=0)
            squares += (pixels * pixels).sum(axis=0)
        # Python's whole numbers: a small variance is no difference of large floats.
        variance = [
            (count * square - one * one) / (count * count)
            for one, square in zip(total.tolist(), squares.tolist())
        ]
        deviation = np.sqrt(variance)
        deviation[deviation == 0] = 1  # a channel without any
        return {'mean': np.float32(total / count), 'deviation': np.float32(deviation)}

    if not decoding.is_stream(training_images):
        found = find_out()
    else:
        name = _name('moments', training_images)
        found = kept.remember(flags, name, training_images.paths, find_out)
    return found['mean'], found['deviation']


def find_border(training_images, threads):
    """Returns the mean brightness of the images' edges, 0 to 255.

    It tells predict.py whether they are light on dark. Only grey images are asked this.
    """
    number = BORDER_IMAGES
    if decoding.is_stream(training_images):
        if training_images.shape[3] > 1:
            return 0.0
        number = BORDER_DECODED
    rows = np.arange(min(number, training_images.shape[0]))
    first = read_images(training_images, rows, threads)
    edges = [first[:, 0], first[:, -1], first[:, :, 0], first[:, :, -1]]
    return float(np.mean([edge.mean() for edge in edges]))


def read_images(images, rows, threads=(0, 0)):
    """Returns some of the images, uint8 [k, height, width, channels]."""
    if not len(rows):
        return np.empty((0,) + tuple(images.shape[1:]), np.uint8)
    return np.concatenate(
        list(decoding.decode_all(decoding.take(images, rows), threads))
    )
