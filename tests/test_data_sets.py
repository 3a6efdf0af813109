"""Data sets are checked as they are loaded."""

import os

import numpy as np
import pytest

import data_sets
import decoding
from data_sets import Examples, load
from tests.conftest import (
    data_flags,
    encode_pngs,
    make_examples,
    make_record,
    write_data_set,
    write_folders,
    write_npz,
    write_records,
)
from tf1 import tf
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
        ('size', 'training images are 14x14x1, test images 13x14x1'),
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


def test_classes_are_said_in_short_however_large_their_numbers():
    for classes, told in (
        ([0, 1, 2], '0 to 2'),
        ([7], '7 to 7'),
        ([0, 2], '0, 2'),
        ([0, 2**70], '0, %d' % 2**70),
        (list(range(11)) + [2**40], '0, 1, 2, 3, 4, 5, 6, 7, 8, ... %d' % 2**40),
        (['a', 'b'], 'a, b'),
    ):
        assert data_sets.list_classes(classes) == told


def test_a_directory_in_a_files_place(tmp_path, small):
    write_data_set(tmp_path / 'data', small)
    path = tmp_path / 'data' / 'train-images-idx3-ubyte'
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match='Is a directory'):
        load(data_flags(tmp_path / 'data'))


# Formats


def write_format(directory, form):
    """Writes a data set of three classes, 4 x 5 pixels but for CIFAR."""
    train, valid = make_examples(9, 4, 5, 1), make_examples(6, 4, 5, 1)
    if form == 'folders':
        write_folders(directory, 'abc', train=train, valid=valid)
    elif form == 'tfrecord':
        write_records(directory, train=train, valid=valid)
    elif form == 'npz':
        directory.mkdir(exist_ok=True)
        write_npz(directory / 'a.npz', train, valid)
    elif form == 'idx':
        small = data_sets.DataSet(train, valid, *[None] * 6)
        write_data_set(directory, small)
    else:
        directory.mkdir(exist_ok=True)
        for name in ('data_batch_1.bin', 'test_batch.bin'):
            records = np.zeros([9, 3073], np.uint8)
            records[:, 0] = train.labels
            (directory / name).write_bytes(records.tobytes())


FORMS = ['idx', 'cifar', 'npz', 'folders', 'tfrecord']


@pytest.mark.parametrize('form', FORMS)
def test_a_format_is_told_by_what_is_there(tmp_path, form):
    write_format(tmp_path / 'data', form)
    (tmp_path / 'data' / 'README.txt').write_text('')
    flags = data_flags(tmp_path / 'data')
    assert data_sets.find_format(flags) == form
    data = load(flags)
    assert data.kind == form
    assert data.classes == (['a', 'b', 'c'] if form == 'folders' else [0, 1, 2])
    encoded = form in ('folders', 'tfrecord')
    assert decoding.is_stream(data.train.images) == encoded


@pytest.mark.parametrize('form', FORMS)
def test_one_half_is_enough_to_tell_a_format(tmp_path, form):
    write_format(tmp_path / 'data', form)
    for path in (tmp_path / 'data').iterdir():
        if path.name.startswith(('train', 'data_batch')):
            path.rename(tmp_path / path.name)
    assert data_sets.find_format(data_flags(tmp_path / 'data')) == form


def test_a_directory_without_data_is_told_what_was_looked_for(tmp_path):
    (tmp_path / 'train').mkdir()
    (tmp_path / 'train' / 'a.png').write_bytes(b'')  # of no class
    (tmp_path / 'test.csv').write_text('')
    with pytest.raises(UserError) as error:
        load(data_flags(tmp_path))
    assert str(error.value) == (
        '%s holds no data set: no train-images-idx3-ubyte (idx), no data_batch_1.bin '
        'or train.bin (cifar), no one npz file (npz), no train/CLASS/*.png (folders), '
        'no train*.tfrecord (tfrecord)' % tmp_path
    )


@pytest.mark.parametrize('path', ['absent', 'file', 'file.npz.gz'])
def test_what_is_no_directory_is_refused(tmp_path, path):
    if path != 'absent':
        (tmp_path / path).write_text('')
    with pytest.raises(UserError) as error:
        load(data_flags(tmp_path / path))
    assert str(error.value) == '--data_dir %s is not a directory' % (tmp_path / path)


@pytest.mark.parametrize('form', [None, 'idx', 'cifar', 'npz', 'folders', 'tfrecord'])
def test_a_directory_that_can_not_be_read_is_one_line(tmp_path, form):
    os.mkdir('data', 0o311)
    before = os.geteuid()
    if before == 0:  # whom no permission keeps out
        tmp_path.chmod(0o755)
        os.seteuid(65534)
    try:
        with pytest.raises(UserError) as error:
            load(data_flags('data', format=form))
    finally:
        os.seteuid(before)
        os.chmod('data', 0o755)
    assert str(error.value) == 'data: Permission denied'


def test_of_several_formats_one_is_to_be_named(tmp_path):
    for form in ('idx', 'npz', 'folders'):
        write_format(tmp_path / 'data', form)
    flags = data_flags(tmp_path / 'data')
    with pytest.raises(UserError) as error:
        load(flags)
    told = 'data holds idx and npz and folders: say which with --format'
    assert str(error.value).endswith(told)
    for form in ('idx', 'npz', 'folders'):
        flags.format = form
        assert load(flags).kind == form


def test_a_format_that_is_not_there_is_named(tmp_path):
    write_format(tmp_path / 'data', 'npz')
    told = dict.fromkeys(FORMS, 'data has no ')
    told.update(
        npz=None, folders='data has no train/CLASS/', tfrecord='data has no tra'
    )
    for form, line in told.items():
        flags = data_flags(tmp_path / 'data', format=form)
        if line is None:
            assert load(flags).kind == 'npz'
            continue
        with pytest.raises(UserError) as error:
            load(flags)
        assert line in str(error.value) and '\n' not in str(error.value)


# Moments


def moments(images, flags=None):
    """The mean and deviation of each channel, as the data set's own code finds them."""
    return data_sets.find_moments(images, flags, (0, 0))


def assert_moments(found, images):
    """They are NumPy's, to the last bit of float32."""
    pixels = images.reshape(-1, images.shape[3]).astype(np.float64)
    mean, deviation = pixels.mean(axis=0), pixels.std(axis=0)
    deviation[deviation == 0] = 1
    for name, one, other in zip(('mean', 'std'), found, (mean, deviation)):
        assert one.dtype == np.float32
        assert one.tolist() == other.astype(np.float32).tolist(), name


@pytest.mark.parametrize('channels', [1, 3])
def test_moments_are_those_of_numpy(channels):
    images = np.random.RandomState(0).randint(0, 256, [1100, 9, 8, channels])
    images[..., -1] //= 3
    images = images.astype(np.uint8)
    assert_moments(moments(images), images)


def test_a_constant_channel_is_divided_by_one():
    images = np.random.RandomState(0).randint(0, 256, [700, 9, 8, 3]).astype(np.uint8)
    images[..., 1] = 77
    mean, deviation = moments(images)
    assert (mean[1], deviation[1]) == (77, 1)
    assert_moments((mean, deviation), images)


def test_a_channel_that_is_nearly_constant_has_its_small_deviation():
    images = np.full([1000, 32, 32, 3], 255, np.uint8)
    images[500, 3, 4] = 254, 0, 255
    assert_moments(moments(images), images)


@pytest.mark.parametrize('form', ['folders', 'tfrecord'])
def test_moments_of_encoded_images_are_those_of_numpy(tmp_path, form):
    images, labels = make_examples(40, 6, 7, 3)
    images[..., 2] = 200
    train, valid = (
        Examples(images[:30], labels[:30]),
        Examples(images[30:], labels[30:]),
    )
    if form == 'folders':
        write_folders(tmp_path / 'data', 'abc', train=train, valid=valid)
    else:
        write_records(tmp_path / 'data', train=train, valid=valid)
    flags = data_flags(tmp_path / 'data', standardize=True)
    first = load(flags)
    assert_moments(first.moments, images[:30])
    again = load(flags)  # from what was kept
    for one, other in zip(first.moments, again.moments):
        assert one.tobytes() == other.tobytes()


def test_moments_are_those_of_the_feature_that_is_asked_for(tmp_path):
    one, other = make_examples(6, 4, 4, 3), make_examples(6, 4, 4, 3, seed=1)
    (tmp_path / 'data').mkdir()
    for name in ('train.tfrecord', 'valid.tfrecord'):
        with tf.python_io.TFRecordWriter(str(tmp_path / 'data' / name)) as writer:
            for pair in zip(*map(encode_pngs, (one.images, other.images)), one.labels):
                writer.write(make_record(pair[0], pair[2], second=pair[1]))
    for name, examples in (('image/encoded', one), ('second', other)):
        flags = data_flags(tmp_path / 'data', standardize=True, image_feature=name)
        assert_moments(load(flags).moments, examples.images)


def test_no_images_are_read_without_decoding(tmp_path):
    write_format(tmp_path / 'data', 'folders')
    images = load(data_flags(tmp_path / 'data')).train.images
    none = data_sets.read_images(images, np.array([], int))
    assert none.shape == (0, 4, 5, 1) and none.dtype == np.uint8
