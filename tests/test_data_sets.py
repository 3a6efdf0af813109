"""Data sets are checked as they are loaded."""

import gzip

import numpy as np
import pytest

from array_files import read_idx
from data_sets import Examples, load
from tests.conftest import data_flags, write_data_set, write_idx
from utils import UserError


def test_mnist_is_the_true_split(mnist):
    assert mnist.train.images.shape == (60000, 28, 28, 1)
    assert mnist.valid.images.shape == (10000, 28, 28, 1)
    assert list(mnist.train.labels[:5]) == [5, 0, 4, 1, 9]
    assert list(mnist.valid.labels[:5]) == [7, 2, 1, 0, 4]
    assert np.bincount(mnist.train.labels)[1] == 6742


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


def test_any_image_size(tmp_path, small):
    examples = Examples(np.ones([20, 9, 5, 1], np.uint8), np.arange(20) % 10)
    data = small._replace(train=examples, valid=examples)
    directory = write_data_set(tmp_path / 'data', data)
    assert load(data_flags(directory)).train.images.shape == (20, 9, 5, 1)


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


@pytest.mark.parametrize(
    'change, told',
    [
        ('fewer labels', 'labels-idx1-ubyte holds 1999 labels'),
        (
            'label',
            't10k-labels-idx1-ubyte: index 7: label 10; the 10 classes of the training '
            'images are 0 to 9',
        ),
        ('size', 'training images are 28x28x1, test images 27x28x1'),
        ('missing', 'data has no t10k-labels-idx1-ubyte, nor with .idx or .gz'),
    ],
)
def test_files_that_do_not_fit_each_other(tmp_path, small, change, told):
    train, valid = small.train, small.valid
    if change == 'fewer labels':
        train = train._replace(labels=train.labels[:-1])
    if change == 'label':
        labels = valid.labels.copy()
        labels[7] = 10
        valid = valid._replace(labels=labels)
    if change == 'size':
        valid = valid._replace(images=valid.images[:, 1:])
    directory = tmp_path / 'data'
    write_data_set(directory, small._replace(train=train, valid=valid))
    if change == 'missing':
        (directory / 't10k-labels-idx1-ubyte').unlink()
    with pytest.raises(UserError) as error:
        load(data_flags(directory))
    assert told in str(error.value)


def test_a_directory_in_a_files_place(tmp_path, small):
    write_data_set(tmp_path / 'data', small)
    path = tmp_path / 'data' / 'train-images-idx3-ubyte'
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match='Is a directory'):
        load(data_flags(tmp_path / 'data'))
