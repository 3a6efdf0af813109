"""IDX, CIFAR and npz files: what is read, and what is refused in one line."""

import gc
import gzip
import os
import pickle
import zipfile

import numpy as np
import pytest

from array_files import read_idx
from data_sets import load, load_valid
from tests.conftest import (
    assert_mistake,
    data_flags,
    make_examples,
    write_data_set,
    write_idx,
    write_npz,
)
from utils import UserError


def refuse(data_dir, **flags):
    """Returns the one line that a data set is refused with."""
    with pytest.raises(UserError) as error:
        load(data_flags(data_dir, **flags))
    assert '\n' not in str(error.value)
    return str(error.value)


def assert_holds(examples, images, labels):
    """Examples are these, exactly."""
    assert examples.images.dtype == np.uint8 and examples.labels.dtype == np.int64
    assert examples.images.shape == images.shape
    assert (examples.images == images).all()
    assert examples.labels.tolist() == list(labels)


# IDX


@pytest.mark.parametrize('dot', '-.')
@pytest.mark.parametrize('ending', ['', '.gz'])
def test_plain_dotted_and_gzip_names(tmp_path, small, dot, ending):
    directory = tmp_path / 'data'
    write_data_set(directory, small)
    for path in directory.iterdir():
        name = path.name.replace('-idx', dot + 'idx') + ending
        data = path.read_bytes()
        path.unlink()
        (directory / name).write_bytes(gzip.compress(data) if ending else data)
    loaded = load(data_flags(directory))
    assert (loaded.train.images == small.train.images).all()
    assert (loaded.valid.labels == small.valid.labels).all()


def test_gzip_is_told_by_content_not_by_name(tmp_path):
    labels = np.arange(10, dtype=np.uint8)
    write_idx(tmp_path / 'x.gz', labels)
    (tmp_path / 'x.gz').rename(tmp_path / 'x')
    assert (read_idx(str(tmp_path / 'x'), 1) == labels).all()


IMAGES = np.zeros([4, 3, 2], np.uint8)
IDX = bytes([0, 0, 8, 3, 0, 0, 0, 4, 0, 0, 0, 3, 0, 0, 0, 2]) + IMAGES.tobytes()
# gzip's own header holds the time, and a test's name is made of this.
GZIP = b'\x1f\x8b\x08' + bytes(7) + gzip.compress(IDX)[10:]


@pytest.mark.parametrize(
    'data, told',
    [
        (b'', '0 bytes, an IDX header has 16'),
        (IDX[:10], '10 bytes, an IDX header has 16'),
        (IDX[:-1], 'the header says 4 x 3 x 2, so 40 bytes; found 39'),
        (IDX + b'x', 'the header says 4 x 3 x 2, so 40 bytes; found 41'),
        (b'\0\0\x08\x01' + IDX[4:], 'starts with bytes 00000801, IDX of 3 dimensions'),
        (b'\0\0\x0d\x03' + IDX[4:], 'starts with bytes 00000d03'),
        (b'GIF89a' + IDX, 'starts with bytes 47494638'),
        (b'\0\0\x08\x03' + b'\xff' * 12, 'found 16'),
        (b'\0\0\x08\x03' + bytes(12), 'empty (0 x 0 x 0)'),
        (GZIP[:-9], 'ended before'),
        (GZIP[:12] + b'\xff' * 30, ''),
        (GZIP[:-8] + b'12345678', 'CRC'),
        (b'\x1f\x8b', ''),
    ],
)
def test_a_damaged_file_is_named_with_what_was_found(tmp_path, data, told):
    path = tmp_path / 'images'
    path.write_bytes(data)
    with pytest.raises(UserError) as error:
        read_idx(str(path), 3)
    assert str(path) in str(error.value) and told in str(error.value)
    assert '\n' not in str(error.value)


def write_set(directory, train, valid, names, labels_from=0):
    """Writes IDX files, `names` their prefixes for training and for test images."""
    directory.mkdir(exist_ok=True)
    for name, (images, labels) in zip(names, (train, valid)):
        images = images[..., 0] if images.shape[3] == 1 else images
        path = '%s-images-idx%d-ubyte.gz' % (name, images.ndim)
        write_idx(directory / path, images)
        write_idx(directory / (name + '-labels-idx1-ubyte.gz'), labels + labels_from)


@pytest.mark.parametrize('channels', [1, 3])
def test_images_are_grey_or_in_colour(tmp_path, channels):
    train, valid = make_examples(9, 5, 4, channels), make_examples(6, 5, 4, channels)
    write_set(tmp_path / 'data', train, valid, ['train', 't10k'])
    loaded = load(data_flags(tmp_path / 'data'))
    assert_holds(loaded.train, *train)
    assert_holds(loaded.valid, *valid)
    assert (loaded.kind, loaded.classes) == ('idx', [0, 1, 2])


def test_two_channels_are_refused(tmp_path):
    examples = make_examples(9, 5, 4, 2)
    write_set(tmp_path / 'data', examples, examples, ['train', 't10k'])
    told = 'train-images-idx4-ubyte.gz: 9 x 5 x 4 x 2: images are [n, height, width]'
    assert told in refuse(tmp_path / 'data')


def test_emnists_names_and_its_letters_from_1_on(tmp_path):
    train = make_examples(52, 28, 28, 1, classes=26)
    valid = make_examples(30, 28, 28, 1, classes=26, seed=1)
    names = ['emnist-letters-train', 'emnist-letters-test']
    write_set(tmp_path / 'data', train, valid, names, labels_from=1)
    loaded = load(data_flags(tmp_path / 'data'))
    assert loaded.classes == list(range(1, 27))
    # Places in `classes`: what the network is trained on begins with 0.
    assert_holds(loaded.train, *train)
    assert_holds(loaded.valid, *valid)


def test_classes_are_the_values_present_whatever_lies_between(tmp_path):
    examples = make_examples(9, 5, 4, 1)
    values = np.array([200, 7, 31])[examples.labels]
    changed = examples._replace(labels=values)
    write_set(tmp_path / 'data', changed, changed, ['train', 't10k'])
    loaded = load(data_flags(tmp_path / 'data'))
    assert loaded.classes == [7, 31, 200]
    assert_holds(loaded.train, examples.images, [2, 0, 1] * 3)


@pytest.mark.parametrize(
    'names',
    [
        ('emnist-letters-train', 'emnist-letters-test', 'train', 't10k'),
        ('train', 'test', 'train', 't10k'),
        ('emnist-letters-train', 'test', 'emnist-digits-train', 'test'),
    ],
)
def test_several_sets_in_one_directory_are_one_line(tmp_path, names):
    examples = make_examples(9, 5, 4, 1)
    for pair in (names[:2], names[2:]):
        write_set(tmp_path / 'data', examples, examples, pair)
    told = refuse(tmp_path / 'data')
    first, second = sorted(set(names[0::2])) if names[0] != names[2] else names[1::2]
    pair = sorted([first, second])
    assert 'data holds %s-' % pair[0] in told and ' and %s-' % pair[1] in told, told
    assert told.endswith(': leave one, or give each a directory')


def test_images_of_one_set_never_get_the_labels_of_another(tmp_path):
    examples = make_examples(9, 5, 4, 1)
    write_set(tmp_path / 'data', examples, examples, ['train', 't10k'])
    labels = tmp_path / 'data' / 'train-labels-idx1-ubyte.gz'
    labels.rename(labels.parent / ('emnist-digits-' + labels.name))
    told = refuse(tmp_path / 'data')
    assert 'holds emnist-digits-train-labels and train-images: ' in told


@pytest.mark.parametrize(
    'gone, told',
    [
        ('train-images', 'has no train-images-idx3-ubyte, nor with .idx or .gz'),
        ('train-labels', 'has no train-labels-idx1-ubyte, nor with .idx or .gz'),
        ('t10k-images', 'has no t10k-images-idx3-ubyte, nor with .idx or .gz'),
        ('t10k-labels', 'has no t10k-labels-idx1-ubyte, nor with .idx or .gz'),
    ],
)
def test_a_missing_file_is_named(tmp_path, gone, told):
    examples = make_examples(9, 5, 4, 1)
    write_set(tmp_path / 'data', examples, examples, ['train', 't10k'])
    (path,) = (tmp_path / 'data').glob(gone + '*')
    path.unlink()
    assert told in refuse(tmp_path / 'data')


# CIFAR


CIFAR10_NAMES = ['airplane', 'automobile', 'bird', 'cat', 'deer']
CIFAR10_NAMES += ['dog', 'frog', 'horse', 'ship', 'truck']


def write_cifar(path, images, *labels):
    """Writes a file of CIFAR's: labels, then a red, a green and a blue plane."""
    planes = np.stack([images[..., channel] for channel in range(3)], axis=1)
    rows = [np.array(column)[:, None] for column in labels]
    rows.append(planes.reshape(len(images), -1))
    path.write_bytes(np.concatenate(rows, axis=1).astype(np.uint8).tobytes())


@pytest.fixture
def cifar10(tmp_path):
    """(directory, training, test examples) of a CIFAR-10 of 100 and 20 images."""
    directory = tmp_path / 'cifar'
    directory.mkdir()
    train = make_examples(100, 32, 32, 3, classes=10)
    valid = make_examples(20, 32, 32, 3, classes=10, seed=1)
    for part in range(5):
        rows = slice(20 * part, 20 * part + 20)
        path = directory / ('data_batch_%d.bin' % (part + 1))
        write_cifar(path, train.images[rows], train.labels[rows])
    write_cifar(directory / 'test_batch.bin', *valid)
    text = '\n'.join(CIFAR10_NAMES) + '\n\n'  # as it is in the archive
    (directory / 'batches.meta.txt').write_text(text)
    return directory, train, valid


def test_cifar_10_in_its_order_with_channels_last(cifar10):
    directory, train, valid = cifar10
    loaded = load(data_flags(directory))
    assert_holds(loaded.train, *train)
    assert_holds(loaded.valid, *valid)
    assert loaded.classes == CIFAR10_NAMES
    assert (loaded.kind, loaded.held_out) == ('cifar', None)


def test_ten_files_and_more_are_in_the_order_of_their_numbers(cifar10):
    directory, train, _ = cifar10
    (directory / 'data_batch_2.bin').rename(directory / 'data_batch_10.bin')
    labels = load(data_flags(directory)).train.images[:, 0, 0, 0]
    order = np.r_[0:20, 40:100, 20:40]
    assert labels.tolist() == train.images[order, 0, 0, 0].tolist()


def test_cifar_100_has_its_fine_labels(tmp_path):
    train = make_examples(200, 32, 32, 3, classes=100)
    valid = make_examples(100, 32, 32, 3, classes=100, seed=1)
    for name, (images, labels) in (('train.bin', train), ('test.bin', valid)):
        write_cifar(tmp_path / name, images, labels // 5, labels)
    names = ['kind %d' % number for number in range(100)]
    (tmp_path / 'fine_label_names.txt').write_text('\n'.join(names))
    loaded = load(data_flags(tmp_path))
    assert_holds(loaded.train, *train)
    assert_holds(loaded.valid, *valid)
    assert loaded.classes == names


@pytest.mark.parametrize(
    'names', [None, CIFAR10_NAMES[:9], CIFAR10_NAMES[:9] + ['cat']], ids=str
)
def test_without_a_name_for_each_class_classes_are_numbers(cifar10, names):
    path = cifar10[0] / 'batches.meta.txt'
    path.unlink()
    if names:
        path.write_text('\n'.join(names))
    assert load(data_flags(cifar10[0])).classes == list(range(10))


def test_some_classes_of_cifar_keep_their_names(cifar10):
    directory, _, _ = cifar10
    images = np.zeros([4, 32, 32, 3], np.uint8)
    for path in directory.glob('*.bin'):
        write_cifar(path, images, [9, 3, 9, 3])
    loaded = load(data_flags(directory))
    assert loaded.classes == ['cat', 'truck']
    assert loaded.valid.labels.tolist() == [1, 0, 1, 0]
    for path in directory.glob('*.bin'):
        write_cifar(path, images, [3] * 4)
    told = 'all 20 training images are of class cat: there is nothing to tell apart'
    assert told in refuse(directory)


@pytest.mark.parametrize('change', [b'x', b'x' * 3074, None])
def test_a_file_of_another_length_is_named(cifar10, change):
    path = cifar10[0] / 'data_batch_3.bin'
    data = path.read_bytes() + change if change else b''
    path.write_bytes(data)
    told = '%s: %d bytes are not a number of records of 3073' % (path, len(data))
    assert refuse(cifar10[0]) == told


@pytest.mark.parametrize('name', ['data_batch_4.bin', 'test_batch.bin'])
def test_a_label_out_of_range_has_its_file_and_index(cifar10, name):
    directory, train, _ = cifar10
    labels = train.labels[:20].copy()
    labels[13] = 10
    write_cifar(directory / name, train.images[:20], labels)
    told = '%s: label 10 at index 13; the 10 classes are 0 to 9' % (directory / name)
    assert refuse(directory) == told


@pytest.mark.parametrize('gone', ['data_batch_*.bin', 'test_batch.bin'])
def test_a_half_that_is_missing_is_named(cifar10, gone):
    for path in cifar10[0].glob(gone):
        path.unlink()
    other = {'data_batch_*.bin': 'train.bin', 'test_batch.bin': 'test.bin'}[gone]
    told = '%s has no %s nor %s' % (cifar10[0], gone.replace('*', r'\d+'), other)
    assert refuse(cifar10[0]).replace('d+', r'\d+') == told


def test_both_cifars_in_one_directory_are_one_line(cifar10):
    directory, train, _ = cifar10
    write_cifar(directory / 'train.bin', train.images, train.labels, train.labels)
    told = 'holds data_batch_1.bin and train.bin: leave one, or give each a directory'
    assert refuse(directory).endswith(told)


# npz


TRAIN, VALID = make_examples(12, 4, 5), make_examples(6, 4, 5, seed=1)


@pytest.mark.parametrize('form', ['rank 3', 'grey', 'colour'])
@pytest.mark.parametrize('columns', [False, True])
def test_npz_grey_and_colour_with_labels_in_a_row_or_a_column(tmp_path, form, columns):
    shape = {'rank 3': (4, 5), 'grey': (4, 5, 1), 'colour': (4, 5, 3)}[form]
    halves = make_examples(12, *shape), make_examples(6, *shape)
    written = halves
    if columns:
        written = [half._replace(labels=half.labels[:, None]) for half in halves]
    write_npz(tmp_path / 'a.npz', *written)
    loaded = load(data_flags(tmp_path))
    for examples, half in zip(loaded, halves):
        images = half.images[..., None] if form == 'rank 3' else half.images
        assert_holds(examples, images, half.labels)
    assert (loaded.kind, loaded.classes) == ('npz', [0, 1, 2])


@pytest.mark.parametrize('dtype', ['u1', 'i1', '>i2', '<u4', '>i8', 'u8'])
def test_labels_are_whole_numbers_of_any_size(tmp_path, dtype):
    labels = TRAIN.labels.astype(dtype) * 50
    write_npz(tmp_path / 'a.npz', TRAIN, VALID, y_train=labels, y_test=labels[:6])
    loaded = load(data_flags(tmp_path))
    assert loaded.classes == [0, 50, 100]
    assert all(type(name) is int for name in loaded.classes), 'JSON takes no other'
    assert loaded.train.labels.tolist() == TRAIN.labels.tolist()


def test_a_file_is_named_or_its_directory(tmp_path):
    path = write_npz(tmp_path / 'a.npz', TRAIN, VALID)
    write_npz(tmp_path / 'b.npz', VALID, TRAIN)
    assert len(load(data_flags(path)).train.labels) == 12
    assert refuse(tmp_path) == '%s has 2 npz files, not one' % tmp_path
    os.remove(path)
    assert len(load(data_flags(tmp_path)).train.labels) == 6


def test_arrays_in_the_order_of_fortran_are_the_same(tmp_path):
    images = np.asfortranarray(TRAIN.images)
    write_npz(tmp_path / 'a.npz', TRAIN, VALID, x_train=images)
    found = load(data_flags(tmp_path)).train.images
    assert (found[..., 0] == TRAIN.images).all()
    assert found.flags.c_contiguous, 'its checksum can not be taken'


class Trap:
    """Makes a directory where it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ('executed',)


def test_what_is_pickled_is_refused_and_never_executed(tmp_path):
    images = np.array([Trap()] * 12, object)
    write_npz(tmp_path / 'a.npz', TRAIN, VALID, x_train=images)
    told = refuse(tmp_path)
    assert told.startswith('%s: x_train: Object arrays' % (tmp_path / 'a.npz'))
    # A file that is one pickle, and a member that is.
    (tmp_path / 'a.npz').write_bytes(pickle.dumps(Trap()))
    assert refuse(tmp_path).startswith('%s: ' % (tmp_path / 'a.npz'))
    with zipfile.ZipFile(str(tmp_path / 'a.npz'), 'w') as file:
        file.writestr('x_train.npy', pickle.dumps(Trap()))
    assert refuse(tmp_path).startswith('%s: x_train' % (tmp_path / 'a.npz'))
    assert not os.path.exists('executed')


@pytest.mark.parametrize(
    'changes, told',
    [
        ({'x_train': TRAIN.images / 255}, 'x_train is float64 12x4x5: images are u'),
        ({'x_test': VALID.images.astype(int)}, 'x_test is int64 6x4x5: images are uin'),
        ({'x_train': TRAIN.images[0]}, 'x_train is uint8 4x5: images are uint8, 0 to '),
        ({'x_train': TRAIN.images[None, None]}, 'x_train is uint8 1x1x12x4x5: images '),
        ({'x_train': np.zeros([12, 4, 5, 4], 'u1')}, 'x_train is 12x4x5x4: images hav'),
        ({'x_train': np.zeros([12, 3, 9, 9], 'u1')}, 'x_train is 12x3x9x9: images hav'),
        ({'x_train': TRAIN.images[:0]}, 'x_train is empty (0x4x5)'),
        ({'x_test': VALID.images[:, :0]}, 'x_test is empty (6x0x5)'),
        ({'y_train': TRAIN.labels * 1.0}, 'y_train is float64 12: labels are whole nu'),
        ({'y_train': np.eye(12, dtype=int)}, 'y_train is int64 12x12: labels are who'),
        ({'y_test': np.array(['a'] * 6)}, 'y_test is <U1 6: labels are whole numbers'),
        ({'y_train': TRAIN.labels[:-1]}, 'x_train has 12 images, y_train has 11 lab'),
        ({'y_test': VALID.labels[:-1]}, 'x_test has 6 images, y_test has 5 labels'),
        ({'y_train': TRAIN.labels - 1}, 'y_train: index 0: label -1 is out of range'),
        ({'y_test': VALID.labels - 2}, 'y_test: index 0: label -2 is out of range'),
        (
            {'y_train': np.uint64(2**63) + TRAIN.labels.astype('u8')},
            'y_train: index 0: label 9223372036854775808 is out of range',
        ),
        ({'x_train': None}, 'holds x_test, y_test, y_train, no x_train'),
        ({'y_test': None, 'more': np.zeros(1)}, 'more, x_test, x_train, y_train, no '),
    ],
    ids=lambda value: value if isinstance(value, str) else '',
)  # fmt: skip
def test_arrays_of_another_kind_are_refused_by_name(tmp_path, changes, told):
    path = write_npz(tmp_path / 'a.npz', TRAIN, VALID, **changes)
    line = refuse(tmp_path)
    assert line.startswith(path) and told in line, line


def test_a_file_that_is_no_npz_is_refused(tmp_path):
    np.save(str(tmp_path / 'one.npy'), TRAIN.images)
    one_array = (tmp_path / 'one.npy').read_bytes()
    (tmp_path / 'one.npy').unlink()
    path = tmp_path / 'a.npz'
    for data in (b'', b'text', b'PK\x03\x04', one_array, one_array[:40]):
        path.write_bytes(data)
        assert refuse(tmp_path).startswith('%s: ' % path), data[:10]
    with zipfile.ZipFile(str(path), 'w') as file:
        file.writestr('x_train', b'no array at all')
    assert refuse(tmp_path) == '%s holds no array, no x_train' % path


@pytest.mark.parametrize('compressed', [False, True])
def test_any_damaged_byte_of_an_npz_is_one_line_or_harmless(tmp_path, compressed):
    path = tmp_path / 'a.npz'
    save = np.savez_compressed if compressed else np.savez
    names = 'x_train', 'y_train', 'x_test', 'y_test'
    save(str(path), **dict(zip(names, TRAIN + VALID)))
    data = path.read_bytes()
    random = np.random.RandomState(0)
    refused = 0
    for number in range(600):
        place = random.randint(len(data))
        damaged = data[:place]  # every other one is cut
        if number % 2:
            damaged += bytes([random.randint(256)]) + data[place + 1 :]
        path.write_bytes(damaged)
        try:
            loaded = load(data_flags(tmp_path))
        except UserError as error:
            refused += 1
            assert str(error).startswith(str(tmp_path)), error
            assert '\n' not in str(error), error
        else:
            assert (loaded.train.images[..., 0] == TRAIN.images).all()
    assert refused > 350


def test_an_array_whose_header_says_less_than_there_is_is_refused(tmp_path):
    # More than is read at once: numpy never sees the end, where the checksum is told.
    train = make_examples(2000, 4, 5)
    path = write_npz(tmp_path / 'a.npz', train, VALID)
    data = (tmp_path / 'a.npz').read_bytes()
    for name, form, less in (
        ('y_train', b"'<i8'", b"'<i4'"),  # every other label would be 0
        ('x_train', b'(2000, 4, 5)', b'(2000, 4, 1)'),
    ):
        place = data.index(form, data.index(name.encode()))
        damaged = data[:place] + less + data[place + len(form) :]
        (tmp_path / 'a.npz').write_bytes(damaged)
        told = '%s: %s: more bytes than its header says' % (path, name)
        assert refuse(tmp_path) == told


def test_a_damaged_npz_prints_no_traceback(tmp_path, capfd):
    (tmp_path / 'a.npz').write_bytes(b'PK\x05\x06' + b'\xff' * 18)
    refuse(tmp_path)
    gc.collect()
    assert capfd.readouterr().err == ''


def test_a_mistake_in_an_npz_ends_a_run_with_one_line(main, tmp_path):
    path = write_npz(tmp_path / 'a.npz', TRAIN, VALID, y_train=TRAIN.labels - 1)
    done = main('train.py', '--device', 'cpu', '--data_dir', path, '--model_dir', 'm')
    assert_mistake(done, 'y_train: index 0: label -1 is out of range')
    assert not os.path.exists('m')


# All


@pytest.mark.parametrize('form', ['idx', 'cifar', 'npz'])
def test_a_test_label_that_training_has_not_has_its_file_and_index(
    tmp_path, cifar10, form
):
    train, valid = make_examples(9, 4, 5, 1), make_examples(9, 4, 5, 1)
    valid.labels[4] = 3
    if form == 'idx':
        write_set(tmp_path / 'data', train, valid, ['train', 't10k'])
        where, directory = 't10k-labels-idx1-ubyte.gz: index 4', tmp_path / 'data'
    elif form == 'npz':
        directory = tmp_path
        where = write_npz(tmp_path / 'a.npz', train, valid) + ': y_test: index 4'
    else:
        directory, train, valid = cifar10
        for part in range(1, 6):
            path = directory / ('data_batch_%d.bin' % part)
            write_cifar(path, train.images[:3], [0, 1, 2])
        where = 'test_batch.bin: index 3'
    names = 'airplane, automobile, bird' if form == 'cifar' else '0 to 2'
    told = '%s: label 3; the 3 classes of the training images are %s'
    assert refuse(directory).endswith(told % (where, names))


@pytest.mark.parametrize('shape', [(4, 6, 1), (5, 5, 1), (4, 5, 3)])
def test_test_images_of_another_shape_are_refused(tmp_path, shape):
    write_npz(tmp_path / 'a.npz', make_examples(9, 4, 5, 1), make_examples(9, *shape))
    told = '%s: training images are 4x5x1, test images %s: one network takes one size'
    assert refuse(tmp_path) == told % (tmp_path, 'x'.join(map(str, shape)))


def test_one_class_only_is_refused(tmp_path):
    one = TRAIN._replace(labels=TRAIN.labels * 0 + 7)
    write_npz(tmp_path / 'a.npz', one, one)
    told = 'all 12 training images are of class 7: there is nothing to tell apart'
    assert refuse(tmp_path) == '%s: %s' % (tmp_path, told)


def test_a_size_is_nothing_to_ask_of_arrays(tmp_path):
    write_npz(tmp_path / 'a.npz', TRAIN, VALID)
    told = '--image_size is for folders and tfrecord: the images of %s have the size '
    assert refuse(tmp_path, image_size=[8, 8]).startswith(told % tmp_path)


def test_arrays_have_their_own_images_for_validation(tmp_path):
    write_npz(tmp_path / 'a.npz', TRAIN, VALID)
    told = '--valid_fraction: %s has images of its own for that: leave it out'
    assert refuse(tmp_path, valid_fraction=0.2) == told % tmp_path


def test_a_model_is_evaluated_on_test_images_alone(tmp_path):
    write_npz(tmp_path / 'a.npz', TRAIN, VALID, x_train=None, y_train=None)
    found = load_valid(data_flags(tmp_path), [0, 1, 2], [4, 5, 1])
    assert_holds(found, VALID.images[..., None], VALID.labels)
