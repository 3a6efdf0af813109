"""Damages files at random, and shows that at most one line comes of it.

    python -m tests.fuzz --rounds 1000 --kinds npz records

Each round damages one file of a small good set and gives the set to what a user's run
gives it to. That must come to the right result, or to a `UserError` or `RunFailed` of
one line that names a file: not to another error, a crash, a hang, much memory, or a
wrong result. What is drawn depends on kind, seed and round only.
"""

import argparse
import collections
import contextlib
import copy
import faulthandler
import functools
import io
import json
import logging
import logging.handlers
import os
import random
import resource
import shutil
import sys
import tempfile

import numpy as np

import checkpoints
import data_sets
import decoding
import evaluate
import image_headers
import predict
import records
import screen
import trained
import training
import utils
from tests import images
from tests.conftest import (
    THREADS,
    data_flags,
    make_examples,
    make_flags,
    make_record,
    read_files,
    write_idx,
)
from tf1 import tf
from utils import RunFailed, UserError

MOST_SECONDS = 60
MOST_MEMORY = 3 * 2**30

# What a kind of files is tried with. files: {path: bytes}, a good set. damaged: those
# of its paths that get damaged. use: (directory, path of the damaged file) -> does what
# a run does with it; AssertionError where the result is wrong.
Kind = collections.namedtuple('Kind', 'files damaged use')


# Damage


def damage(data, rng):
    """Returns other bytes than `data`, and in words what was done to them."""
    while True:
        how = rng.choice(DAMAGES)
        changed = bytes(how(bytearray(data), rng))
        if changed != data:
            return changed, how.__name__


def cut(data, rng):
    return data[: rng.randrange(len(data))]


def cut_little(data, rng):
    return data[: -rng.randint(1, 20)]


def empty(data, rng):
    return b''


def flip_bits(data, rng):
    for _ in range(rng.choice([1, 1, 2, 5])):
        data[_place(data, rng)] ^= 1 << rng.randrange(8)
    return data


def set_bytes(data, rng):
    for _ in range(rng.choice([1, 1, 2, 5])):
        data[_place(data, rng)] = rng.choice(
            [0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)]
        )
    return data


def insert(data, rng):
    more = bytes(rng.randrange(256) for _ in range(rng.choice([1, 2, 8, 100])))
    place = rng.choice([_place(data, rng), len(data)])
    return data[:place] + rng.choice([more, bytes(len(more))]) + data[place:]


def delete(data, rng):
    place = _place(data, rng)
    return data[:place] + data[place + rng.choice([1, 2, 8, 100]) :]


def zero_block(data, rng):
    place, length = _place(data, rng), rng.choice([4, 16, 64, 512])
    length = len(data[place : place + length])
    return data[:place] + bytes(length) + data[place + length :]


def swap_blocks(data, rng):
    length = rng.choice([1, 4, 16, 64])
    one, other = sorted([_place(data, rng), _place(data, rng)])
    other = max(other, one + length)
    first, second = data[one : one + length], data[other : other + length]
    middle = data[one + length : other]
    return data[:one] + second + middle + first + data[other + length :]


def repeat_block(data, rng):
    place, length = _place(data, rng), rng.choice([4, 16, 64, 512])
    return data[: place + length] + data[place:]


def _place(data, rng):
    """Returns a place in the data; often in its first or last bytes, the headers."""
    low = rng.choice([0, 0, max(0, len(data) - 64)])
    return rng.randrange(low, rng.choice([len(data), min(len(data), low + 64)]))


DAMAGES = (
    [cut, cut_little, empty, insert, delete, zero_block, swap_blocks, repeat_block]
    + 4 * [flip_bits]
    + 4 * [set_bytes]
)


# Data sets of arrays


# Larger than what zipfile reads at once.
TRAIN, VALID = make_examples(900, 6, 5, 1), make_examples(600, 6, 5, 1, seed=1)


def read_data_set(directory, **flags):
    """Loads a data set and decodes its images: (DataSet, {half: (pixels, labels)})."""
    flags = data_flags(os.path.join(directory, 'data'), **flags)
    data = data_sets.load(flags, THREADS)
    halves = {}
    for name, examples in (('train', data.train), ('valid', data.valid)):
        rows = np.arange(len(examples.labels))
        pixels = data_sets.read_images(examples.images, rows, THREADS)
        assert pixels.dtype == np.uint8 and len(pixels) == len(rows)
        halves[name] = pixels, [data.classes[place] for place in examples.labels]
    return data, halves


def use_checksummed(directory, path):
    """Whatever loads is what was written: there are checksums over all of it."""
    _, halves = read_data_set(directory)
    for name, good in (('train', TRAIN), ('valid', VALID)):
        pixels, labels = halves[name]
        assert pixels.shape == good.images.shape, '%s: %s' % (name, pixels.shape)
        assert (pixels == good.images).all(), '%s: other pixels' % name
        assert labels == good.labels.tolist(), '%s: other labels' % name


def make_idx(directory, ending):
    for prefix, examples in (('train', TRAIN), ('t10k', VALID)):
        path = os.path.join(directory, prefix)
        write_idx(path + '-images-idx3-ubyte' + ending, examples.images[..., 0])
        write_idx(path + '-labels-idx1-ubyte' + ending, examples.labels)


@contextlib.contextmanager
def open_idx():
    """Without checksums what loads is the file, byte for byte, as it is now."""

    def use(directory, path):
        _, halves = read_data_set(directory)
        pixels, labels = halves['train' if 'train' in path else 'valid']
        array = pixels[..., 0] if 'images' in path else np.array(labels)
        write_idx('again', array)
        with open('again', 'rb') as again, open(path, 'rb') as file:
            assert again.read() == file.read(), 'not what the file holds'

    files = written(make_idx, '')
    yield Kind(files, sorted(files), use)


@contextlib.contextmanager
def open_idx_gz():
    files = written(make_idx, '.gz')
    yield Kind(files, sorted(files), use_checksummed)


def make_cifar(directory, batches):
    rng = np.random.RandomState(0)
    for number in range(batches + 1):
        name = 'test_batch' if number == batches else 'data_batch_%d' % (number + 1)
        data = rng.randint(0, 256, [4, 3073])
        data[:, 0] = [0, 3, 9, 5]
        data.astype(np.uint8).tofile(os.path.join(directory, name + '.bin'))


@contextlib.contextmanager
def open_cifar():
    def use(directory, path):
        _, halves = read_data_set(directory)
        kept = b''
        for name in ('train', 'valid'):
            for pixels, label in zip(*halves[name]):
                assert label < 10, 'a class that CIFAR-10 has not'
                kept += bytes([label]) + pixels.transpose(2, 0, 1).tobytes()
        files = read_files(os.path.join(directory, 'data'))
        held = b''.join(files[name] for name in sorted(files))
        assert kept == held, 'not what the files hold'

    files = written(make_cifar, 2)
    yield Kind(files, sorted(files), use)


@contextlib.contextmanager
def open_npz(savez=np.savez):
    buffer = io.BytesIO()
    savez(
        buffer,
        x_train=TRAIN.images,
        y_train=TRAIN.labels,
        x_test=VALID.images,
        y_test=VALID.labels,
    )
    yield Kind({'data/a.npz': buffer.getvalue()}, ['data/a.npz'], use_checksummed)


def written(make, *args):
    """Returns {path: bytes} of what `make(directory, ...)` writes to data/."""
    with tempfile.TemporaryDirectory() as directory:
        os.mkdir(os.path.join(directory, 'data'))
        make(os.path.join(directory, 'data'), *args)
        return read_files(directory)


# Encoded images


SIZE = 9, 7


def make_images():
    """Returns {name: bytes}: an image of each format and kind."""
    rng = np.random.RandomState(0)

    def draw(channels):
        return rng.randint(0, 256, SIZE + (channels,)).astype(np.uint8)

    palette = draw(4)[:2].tobytes()
    return {
        'a.png': images.png(draw(3), more=b'comment\0of some length'),
        'b.jpg': images.jpeg(draw(3)),
        'c.gif': images.gif(draw(1), draw(1)),
        'd.bmp': images.bmp(draw(3)),
        'e.bmp': images.bmp(draw(1) % 14, 8, palette),
        'f.bmp': images.bmp(draw(4), 32),
        'g.png': images.png(draw(4)),
        'h.png': images.png(draw(1), clear=b'\0\7'),
        'i.png': images.png(draw(1), interlaced=True),
        'j.png': images.png(
            draw(1) % 14, palette=palette[:42], clear=draw(1)[0].tobytes()
        ),
        'k.jpg': images.jpeg(draw(1), progressive=True),
        'l.jpg': images.jpeg(draw(3), progressive=True),
    }


def make_folders(directory):
    found = sorted(make_images().items())
    for split, part in (('train', found), ('valid', found[:2] + found[-2:])):
        for number, (name, data) in enumerate(part):
            place = os.path.join(directory, split, 'ab'[number % 2])
            os.makedirs(place, exist_ok=True)
            images.write(os.path.join(place, name), data)


# In turns: bad images end the run, or are left out and all are made one size.
WAYS = [
    dict(skip_bad=False, image_size=None),
    dict(skip_bad=True, image_size=[8, 8]),
]


def choose_way(path):
    """Returns flags, by what a damaged file holds: the same for each seed and round."""
    with open(path, 'rb') as file:
        return WAYS[sum(file.read()) % len(WAYS)]


def name_images(directory, **flags):
    """Loads encoded images: (DataSet, {(file, number of record): (pixels, label)})."""
    data, halves = read_data_set(directory, **flags)
    found = {}
    for name, examples in (('train', data.train), ('valid', data.valid)):
        for row in range(len(examples.labels)):
            image = decoding.name_image(examples.images, row)
            pixels, labels = halves[name]
            found[os.path.relpath(image, directory)] = pixels[row], labels[row]
    return data, found


@contextlib.contextmanager
def open_folders():
    files = written(make_folders)
    good = load_good(files)

    def use(directory, path):
        flags = choose_way(path)
        data, found = name_images(directory, **flags)
        bad = os.path.relpath(path, directory)
        lost = good[str(flags)].keys() - found.keys()
        assert lost <= {bad}, 'lost: %s' % lost
        assert bool(lost) == bool(data.faults), 'lost: %s, %s' % (lost, data.faults)
        for name, (pixels, label) in found.items():
            before, label_before = good[str(flags)][name]
            assert label == label_before, '%s: another label' % name
            if name != bad or name.endswith('.png'):
                assert (pixels == before).all(), '%s: other pixels' % name

    yield Kind(files, sorted(files), use)


def load_good(files):
    """Returns {str(flags): {name: (pixels, label)}} of a good set."""
    good = {}
    for flags in WAYS:
        with tempfile.TemporaryDirectory() as directory, inside(directory):
            write_files(directory, files)
            _, good[str(flags)] = name_images(directory, **flags)
    return good


def make_records(directory, gz):
    kind = tf.python_io.TFRecordCompressionType
    options = tf.python_io.TFRecordOptions(kind.GZIP if gz else kind.NONE)
    found = [data for name, data in sorted(make_images().items()) if 'png' in name]
    for part, name in enumerate(['train-0', 'train-1', 'valid']):
        path = os.path.join(directory, name + '.tfrecord' + '.gz' * gz)
        with tf.python_io.TFRecordWriter(path, options) as writer:
            for number, data in enumerate(found[part:] + found[:part]):
                writer.write(make_record(data, number % 2))


@contextlib.contextmanager
def open_records(gz=False):
    files = written(make_records, gz)
    good = load_good(files)

    def use(directory, path):
        flags = choose_way(path)
        data, found = name_images(directory, **flags)
        bad = os.path.relpath(path, directory)
        lost = sorted(good[str(flags)].keys() - found.keys())
        assert all(name.startswith(bad) for name in lost), 'lost: %s' % lost
        if lost and not data.faults:
            # Nothing tells that a file was cut just between two records.
            names = sorted(n for n in good[str(flags)] if n.startswith(bad))
            assert lost == names[-len(lost) :] != names, 'lost unseen: %s' % lost
        for name, (pixels, label) in found.items():
            before, label_before = good[str(flags)][name]
            assert label == label_before, '%s: another label' % name
            assert (pixels == before).all(), '%s: other pixels' % name

    yield Kind(files, sorted(files), use)


@contextlib.contextmanager
def open_kept():
    """What was found out about a data set and is damaged is found out again."""
    flags = dict(skip_bad=True, standardize=True)
    with tempfile.TemporaryDirectory() as home, inside(home):
        write_files(home, written(make_folders))
        data, good = name_images(home, **flags)
        kept = {
            os.path.join('runs', name): content
            for name, content in read_files('runs').items()
        }

        def use(directory, path):
            shutil.copytree(os.path.join(directory, 'runs'), os.path.join(home, 'runs'))
            try:
                with inside(home):
                    again, found = name_images(home, **flags)
            except UserError as error:
                raise AssertionError('refused: %s' % error) from None
            finally:
                shutil.rmtree(os.path.join(home, 'runs'))
            assert found.keys() == good.keys()
            for name in good:
                assert found[name][1] == good[name][1], '%s: another label' % name
                assert (found[name][0] == good[name][0]).all(), '%s: pixels' % name
            for one, other in zip(again.moments, data.moments):
                assert (one == other).all(), 'other moments'

        shutil.rmtree('runs')
        yield Kind(kept, sorted(kept), use)


@contextlib.contextmanager
def open_images():
    """The decoders by themselves: thousands of images in a few seconds."""
    files = {os.path.join('data', n): data for n, data in make_images().items()}
    with tf.Graph().as_default(), utils.open_session(utils.CPU, THREADS) as session:
        contents = tf.placeholder(tf.string, [])
        calls = {}
        for kind in image_headers.KINDS:
            for fitted in (False, True):
                shape = (8, 8, 3) if fitted else SIZE + (3,)
                plan = decoding.Plan(shape, 3, [kind], fitted)
                image = decoding.decode_image(contents, tf.constant(kind), plan)
                calls[kind, fitted] = session.make_callable(image, [contents])
        predict_decode = predict.make_decode(session, *predict.build_decoders())

        def decode(data):
            """Returns what comes out of each way to decode an image, where one does."""
            header = image_headers.read_header(data, len(data))
            found = {}
            for fitted in (False, True):
                if fitted or (header.height, header.width) == SIZE:
                    found[fitted] = calls[header.kind, fitted](data)
            return found

        def decode_alone(data):
            pixels = predict.prepare(predict_decode(data), SIZE + (1,), 0)
            assert pixels.dtype == np.float32 and pixels.ndim == 3
            return {'alone': pixels}

        def use(directory, path):
            with open(path, 'rb') as file:
                data = file.read()
            good = files[os.path.relpath(path, directory)]
            why = None
            for way in (decode, decode_alone):
                try:
                    found, before = way(data), way(good)
                except (ValueError, image_headers.Incomplete, *DECODE_ERRORS) as error:
                    why = type(error).__name__
                    continue
                for key in found.keys() if path.endswith('.png') else ():
                    assert (found[key] == before[key]).all(), 'other pixels'
            if why:
                raise UserError('%s: %s' % (path, why))

        yield Kind(files, sorted(files), use)


DECODE_ERRORS = OSError, MemoryError, tf.errors.OpError


# What a run keeps


def make_run(directory):
    """Writes what a run of two checkpoints, and a best one, leaves."""
    flags = make_flags('--device', 'cpu', '--data_dir', os.path.abspath('data'))
    data = data_sets.load(flags, THREADS)
    with tf.Graph().as_default(), utils.open_session(utils.CPU, THREADS) as session:
        state, saver = build_variables()
        session.run(tf.global_variables_initializer())
        os.makedirs(directory)
        for step in (3, 5):
            session.run(state.global_step.assign(step))
            session.run([v.assign(v + 1) for v in tf.trainable_variables()])
            checkpoints.save(saver, session, directory, 1, step, keep=9)
        checkpoints.save(saver, session, os.path.join(directory, 'best'), 1, 5, 2)
    config = records.describe(flags, utils.CPU, data, THREADS)
    config['command'] = 'python train.py'
    records.begin(directory, config)
    rows = []
    for epoch in (1, 2, 3):
        now = training.State(3 * epoch, epoch - 1, *[0] * 6)
        rows.append(
            training.make_row(now, (0.5, 0.25), (0.75, 0.875), 1e-3, 900.5, 9.25)
        )
    records.write_metrics(directory, rows)
    return flags, data, config


def build_variables():
    """Builds a small model's variables: (state, saver)."""
    state = training.create_state()
    for name, shape in (('w', [20, 10]), ('b', [10]), ('alone', [])):
        tf.get_variable(name, shape, initializer=tf.random_uniform_initializer(seed=1))
    return state, checkpoints.create_saver()


@contextlib.contextmanager
def open_run():
    """Yields (files of a model_dir, what `make_run` returned)."""
    with tempfile.TemporaryDirectory() as home, inside(home):
        write_files(home, written(make_idx, ''))
        with told():
            made = make_run('m')
        files = {
            os.path.join('m', name): data for name, data in read_files('m').items()
        }
        yield files, made


@contextlib.contextmanager
def open_checkpoints():
    with contextlib.ExitStack() as stack:
        files, _ = stack.enter_context(open_run())
        stack.enter_context(tf.Graph().as_default())
        session = stack.enter_context(utils.open_session(utils.CPU, THREADS))
        _, saver = build_variables()
        variables = tf.global_variables()
        good = {}
        for step in (3, 5):
            name = 'model.ckpt-1-%d' % step
            saver.restore(session, os.path.join('m', name))
            good[name] = session.run(variables)

        def use(directory, path):
            model_dir = os.path.dirname(path)
            prefix = checkpoints.restore(saver, session, model_dir)
            name = os.path.basename(prefix)
            for one, other in zip(session.run(variables), good[name]):
                assert one.tobytes() == other.tobytes(), 'other values of ' + name
            if name != 'model.ckpt-1-5':
                # A warning has named it.
                raise UserError(path)

        damaged = [n for n in sorted(files) if '-5.' in n or n == 'm/checkpoint']
        yield Kind(files, [n for n in damaged if 'best' not in n], use)


@contextlib.contextmanager
def open_metrics():
    with open_run() as (files, _):
        good = [json.loads(line) for line in files['m/metrics.jsonl'].splitlines()]

        def use(directory, path):
            model_dir = os.path.dirname(path)
            rows = records.read_metrics(model_dir, 3)
            state = training.State(9, 3, *[0] * 6)
            screen.conclude(rows, state, model_dir)
            assert records.write_metrics(model_dir, rows)
            assert records.read_metrics(model_dir, 3) == rows, 'not what was written'
            if any(row not in good for row in rows):
                return  # a digit is another: there is no checksum
            assert [row for row in good if row in rows] == rows, 'another order'

        yield Kind(files, ['m/metrics.jsonl'], use)


@contextlib.contextmanager
def open_config(edit=False):
    with open_run() as (files, (flags, data, config)):
        home = os.getcwd()
        if edit:
            # What is drawn must not depend on the directory that config.json names.
            files = dict(files, **{'m/config.json': bytes(range(256))})

        def use(directory, path):
            if edit:
                with open(path, 'rb') as file:
                    rng = random.Random(file.read())
                with open(path, 'w') as file:
                    json.dump(edit_json(config, rng), file)
            model_dir = os.path.dirname(path)
            text = '%s: %s' % (path, os.path.relpath(home))
            try:
                use_config(model_dir)
            except UserError as error:
                # Some are of the flags, and so of the model_dir, or of the data.
                raise UserError('%s: %s' % (text, error)) from None

        def use_config(model_dir):
            mistakes = []
            ways = [
                lambda: records.check_data(model_dir, data),
                lambda: records.choose_threads(flags, utils.CPU, model_dir),
                lambda: records._check_flags(model_dir, flags),
                lambda: evaluate.load(evaluate.parse([]), trained.find(asked)),
                lambda: records.begin(model_dir, config),
            ]
            asked = evaluate.parse(['--model_dir', model_dir])
            for way in ways:
                try:
                    way()
                except (UserError, RunFailed) as error:
                    mistakes.append(error)
            if mistakes:
                raise mistakes[0]

        yield Kind(files, ['m/config.json'], use)


ODD_VALUES = [
    None,
    True,
    -1,
    0,
    1,
    1e999,
    2**70,
    '',
    'x',
    '\ud800',
    [],
    {},
    [[]],
    [1],
]


def edit_json(value, rng):
    """Returns a copy of what JSON holds in which a value is another."""
    value = copy.deepcopy(value)
    inside = value
    while True:
        key = rng.choice(
            sorted(inside) if isinstance(inside, dict) else range(len(inside))
        )
        if (
            not isinstance(inside[key], (dict, list))
            or not inside[key]
            or rng.random() < 0.3
        ):
            break
        inside = inside[key]
    if rng.random() < 0.2:
        del inside[key]
    else:
        inside[key] = rng.choice(ODD_VALUES)
    return value


# Rounds


KINDS = collections.OrderedDict(
    idx=open_idx,
    idx_gz=open_idx_gz,
    cifar=open_cifar,
    npz=open_npz,
    npz_packed=functools.partial(open_npz, np.savez_compressed),
    images=open_images,
    folders=open_folders,
    records=open_records,
    records_gz=functools.partial(open_records, gz=True),
    kept=open_kept,
    checkpoints=open_checkpoints,
    metrics=open_metrics,
    config=open_config,
    edited_config=functools.partial(open_config, edit=True),
)


def fuzz(name, rounds, seed=0, first=0, show=lambda line: None):
    """Runs rounds of a kind.

    Returns:
      (refused, faults): how many rounds were refused or told of in a line, and a line
      on each round that came to what it must not.
    """
    refused, faults = 0, []
    with KINDS[name]() as kind:
        for number in range(first, first + rounds):
            rng = random.Random('%s %d %d' % (name, seed, number))
            path = rng.choice(kind.damaged)
            data, how = damage(kind.files[path], rng)
            where = '%s, round %d (%s of %s)' % (name, number, how, path)
            show(where)
            try:
                with tempfile.TemporaryDirectory() as directory, inside(directory):
                    write_files(directory, dict(kind.files, **{path: data}))
                    with limits(), told() as lines:
                        refused += is_refused(kind, directory, path, lines)
            except Exception as error:
                faults.append('%s: %s: %s' % (where, type(error).__name__, error))
                show(faults[-1])
    return refused, faults


def is_refused(kind, directory, path, lines):
    """Runs one round; returns whether the damaged file was refused, or told of."""
    try:
        kind.use(directory, os.path.join(directory, path))
        return bool(lines)
    except (UserError, RunFailed) as error:
        text = str(error)
        assert directory in text, 'names no file: %s' % text
        lines.append(text)
        return True
    finally:
        for line in lines:
            assert len(line.splitlines()) == 1, 'several lines: %r' % line


@contextlib.contextmanager
def told():
    """Yields the list of the lines that the log gets inside the block."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    held = logging.handlers.MemoryHandler(1000)  # for a train.log
    before, utils.log.handlers[:] = utils.log.handlers[:], [handler, held]
    try:
        yield lines
    finally:
        utils.log.handlers[:] = before


@contextlib.contextmanager
def limits():
    """Inside the block much memory ends the process, and so does a hang."""
    faulthandler.dump_traceback_later(MOST_SECONDS, exit=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open('/proc/self/statm') as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MOST_MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def inside(directory):
    before = os.getcwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


def write_files(directory, files):
    for name, data in files.items():
        path = os.path.join(directory, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        images.write(path, data)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--kinds', nargs='+', choices=KINDS, default=list(KINDS))
    parser.add_argument('--rounds', type=int, default=100)
    parser.add_argument(
        '--first', type=int, default=0, help='number of the first round'
    )
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--show', action='store_true', help='say what each round does')
    flags = parser.parse_args()
    faulthandler.enable()
    show = functools.partial(print, flush=True) if flags.show else lambda line: None
    failed = 0
    for name in flags.kinds:
        refused, faults = fuzz(name, flags.rounds, flags.seed, flags.first, show)
        print(
            '%s: %d rounds, %d refused, %d faults'
            % (name, flags.rounds, refused, len(faults)),
            flush=True,
        )
        for fault in faults:
            print(fault)
        failed += len(faults)
    return int(failed > 0)


if __name__ == '__main__':
    sys.exit(main())
