"""Data sets are checked as they are loaded."""

import numpy as np
import pytest

from data_sets import Examples, load
from tests.conftest import data_flags, write_data_set
from utils import UserError


def test_mnist_is_the_true_split(mnist):
    assert mnist.train.images.shape == (60000, 28, 28, 1)
    assert mnist.valid.images.shape == (10000, 28, 28, 1)
    assert list(mnist.train.labels[:5]) == [5, 0, 4, 1, 9]
    assert list(mnist.valid.labels[:5]) == [7, 2, 1, 0, 4]
    assert np.bincount(mnist.train.labels)[1] == 6742


def test_any_image_size(tmp_path, small):
    examples = Examples(np.ones([20, 9, 5, 1], np.uint8), np.arange(20) % 10)
    data = small._replace(train=examples, valid=examples)
    directory = write_data_set(tmp_path / 'data', data)
    assert load(data_flags(directory)).train.images.shape == (20, 9, 5, 1)


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
