"""Folders and TFRecords: found, indexed once, and every fault named."""

import gzip
import os
import shutil
import struct
import zlib

import numpy as np
import pytest

import data_description
import data_sets
import decoding
import encoded_files
import kept
import utils
from tests import images
from tests.conftest import assert_mistake, data_flags, read_metrics
from tf1 import tf
from utils import UserError

SIZE = 6, 5


def picture(number, size=SIZE):
    """A grey image whose first pixels say its number."""
    image = np.full(size + (1,), 100, np.uint8)
    image[0, 0], image[0, 1] = divmod(number, 256)
    return image


def write_folders(root, train=5, valid=2, classes=('ant', 'bee')):
    """Writes train/CLASS/0.png and so on; each image has a number of its own."""
    number = 0
    for split, count in (('train', train), ('valid', valid)):
        for name in classes if count else ():
            directory = os.path.join(str(root), split, name)
            os.makedirs(directory)
            for file in range(count):
                path = os.path.join(directory, '%d.png' % file)
                images.write(path, images.png(picture(number)))
                number += 1
    return str(root)


def write_records(path, numbers, label=lambda number: number % 3 + 1, gz=False):
    kind = tf.python_io.TFRecordCompressionType
    options = tf.python_io.TFRecordOptions(kind.GZIP if gz else kind.NONE)
    with tf.python_io.TFRecordWriter(str(path), options) as writer:
        for number in numbers:
            example = tf.train.Example()
            feature = example.features.feature
            encoded = images.png(picture(number))
            feature['image/encoded'].bytes_list.value.append(encoded)
            feature['image/class/label'].int64_list.value.append(label(number))
            writer.write(example.SerializeToString())


def numbers_of(examples):
    """The numbers that the pictures of examples say."""
    pixels = data_sets.read_images(examples.images, np.arange(len(examples.labels)))
    return pixels[:, 0, :2, 0].astype(int).dot([256, 1]).tolist()


def load(directory, **flags):
    return data_sets.load(data_flags(directory, **flags))


def assert_refused(directory, *told, **flags):
    with pytest.raises(UserError) as error:
        load(directory, **flags)
    for text in told:
        assert text in str(error.value)
    assert '\n' not in str(error.value)


# Folders


@pytest.mark.parametrize('valid', ['valid', 'validation', 'val', 'test'])
def test_folders_are_classes_in_the_order_of_their_names(tmp_path, valid):
    write_folders(tmp_path, classes=('bee', 'ant', 'a cat'))
    (tmp_path / 'valid').rename(tmp_path / valid)
    (tmp_path / 'train' / 'ant' / 'notes.txt').write_text('no image')
    (tmp_path / 'train' / 'ant' / '.hidden.png').write_text('no image')
    (tmp_path / 'train' / '.git').mkdir()
    data = load(tmp_path)
    assert data.classes == ['a cat', 'ant', 'bee'] and data.kind == 'folders'
    assert data.train.images.shape == (15,) + SIZE + (1,)
    assert data.train.labels.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert numbers_of(data.train) == [*range(10, 15), *range(5, 10), *range(5)]
    assert numbers_of(data.valid) == [19, 20, 17, 18, 15, 16]


def test_a_name_may_be_any_and_lie_about_the_format(tmp_path):
    write_folders(tmp_path)
    directory = os.path.join(os.fsencode(str(tmp_path)), b'train', b'ant')
    data = images.jpeg(np.full(SIZE + (1,), 7, np.uint8), format='grayscale')
    for name in (b'\xff\xfe.PNG', 'ü ö.gif'.encode(), b'a?b*[1].jpg'):
        images.write(os.fsdecode(os.path.join(directory, name)), data)
    pixels = data_sets.read_images(load(tmp_path).train.images, range(8))
    assert (pixels == 7).all(axis=(1, 2, 3)).sum() == 3


def test_faults_of_folders_are_named(tmp_path):
    write_folders(tmp_path)
    empty = tmp_path / 'train' / 'cow'
    empty.mkdir()
    assert_refused(tmp_path, 'train/cow holds no image', 'remove it')
    empty.rmdir()
    other = tmp_path / 'valid' / 'cow'
    shutil.copytree(str(tmp_path / 'valid' / 'ant'), str(other))
    assert_refused(tmp_path, 'valid/cow/0.png: label cow; the 2 classes', 'ant, bee')
    shutil.rmtree(str(other))
    path = tmp_path / 'train' / 'bee' / '3.png'
    good = path.read_bytes()
    images.write(path, images.png(picture(0, (7, 5))))
    told = 'train/bee/3.png is 7x5, the first training image 6x5: --image_size 6x5'
    assert_refused(tmp_path, told)
    assert load(tmp_path, image_size=[4, 4]).train.images.shape == (10, 4, 4, 1)
    for data, told in (
        (b'', 'empty'),
        (b'plain text', 'no PNG, JPEG, GIF or BMP: starts with bytes 706c6169'),
        (good[:20], 'ends in its header, after 20 bytes'),
    ):
        path.write_bytes(data)
        assert_refused(tmp_path, 'bee/3.png: ' + told, '--skip_bad')
    for name in ('train', 'valid'):
        shutil.rmtree(str(tmp_path / name / 'bee'))
    assert_refused(tmp_path, 'all 5 training images are of class ant')


def test_images_are_held_out_by_their_names_only(tmp_path):
    write_folders(tmp_path, train=20, valid=0)
    data = load(tmp_path, valid_fraction=0.25)
    assert data.held_out == 0.25
    assert np.bincount(data.valid.labels).tolist() == [5, 5]
    held_out = numbers_of(data.valid)
    assert sorted(held_out + numbers_of(data.train)) == list(range(40))
    expected = []
    for first, name in ((0, 'ant'), (20, 'bee')):
        names = {n: b'train/%s/%d.png' % (name.encode(), n) for n in range(20)}
        lowest = sorted(names, key=lambda n: zlib.crc32(names[n]))[:5]  # noqa: B023
        expected += [first + number for number in lowest]
    assert sorted(held_out) == sorted(expected)
    assert len(load(tmp_path).valid.labels) == 4  # a tenth of each class
    shutil.rmtree(str(tmp_path / 'train' / 'ant'))
    write_folders(tmp_path / 'other', train=1, valid=0, classes=('ant',))
    shutil.move(str(tmp_path / 'other' / 'train' / 'ant'), str(tmp_path / 'train'))
    fewer = load(tmp_path, valid_fraction=0.25)
    assert numbers_of(fewer.valid) == held_out[5:], 'the other class changed'
    assert np.bincount(fewer.train.labels).tolist() == [1, 15]
    most = load(tmp_path, valid_fraction=0.9)
    assert np.bincount(most.train.labels).tolist() == [1, 2]


def test_nothing_is_held_out_where_there_is_a_valid(tmp_path):
    write_folders(tmp_path)
    assert_refused(tmp_path, '--valid_fraction', 'leave it out', valid_fraction=0.2)


# Damaged images


def damage(path):
    """Cuts an image in the middle of its pixels: the header stays good."""
    with open(str(path), 'rb') as file:
        data = file.read()
    images.write(path, data[: len(data) - 24])


@pytest.fixture
def damaged_dir(tmp_path):
    """40 training images, of which two are damaged, and 10 to validate on."""
    write_folders(tmp_path / 'data', train=20, valid=5)
    for name in ('ant/7.png', 'bee/11.png'):
        damage(tmp_path / 'data' / 'train' / name)
    return str(tmp_path / 'data')


FLAGS = ['--device', 'cpu', '--xla', 'off', '--batch_size', '4', '--epochs', '1']


def test_a_damaged_image_ends_the_run_with_its_name(main, damaged_dir, monkeypatch):
    argv = ['--device', 'cpu', '--data_dir', damaged_dir]
    told = 'ant/7.png can not be decoded: Invalid PNG data'
    assert_mistake(main('train.py', *argv), told)  # one of the first is looked at
    monkeypatch.setattr(data_sets, 'BORDER_DECODED', 1)
    done = main('train.py', *FLAGS, '--data_dir', damaged_dir)
    assert done.status == 1
    first = [line for line in done.err.splitlines() if line.startswith('ERROR: ')]
    assert len(first) == 1, done.err
    assert '.png can not be decoded: Invalid PNG' in first[0]
    assert 'ant/7.png' in first[0] or 'bee/11.png' in first[0]
    assert '--skip_bad' in first[0] and 'Traceback' not in done.err


def test_a_damaged_image_in_an_evaluation_is_named(main, damaged_dir, tmp_path):
    for name in ('ant/7.png', 'bee/11.png'):
        os.remove(os.path.join(damaged_dir, 'train', name))
    damage(tmp_path / 'data' / 'valid' / 'bee' / '4.png')
    done = main('train.py', *FLAGS, '--data_dir', damaged_dir, '--model_dir', 'm')
    assert done.status == 1 and 'Traceback' not in done.err
    assert 'valid/bee/4.png can not be decoded' in done.err


def test_skip_bad_leaves_them_out_the_same_way_each_time(main, damaged_dir):
    flags = FLAGS + ['--data_dir', damaged_dir, '--skip_bad']
    done = [main('train.py', *flags, '--model_dir', name) for name in ('one', 'two')]
    for run in done:
        assert run.status == 0, run.err
        told = '2 of 40 images for training can not be decoded and are left out'
        assert told in run.err and 'train/ant/7.png: Invalid PNG' in run.err
        assert '9 steps per epoch of 38 images (2 wait' in run.out
    rows = [read_metrics(name)[0] for name in ('one', 'two')]
    assert [row['train_loss'] for row in rows] == [rows[0]['train_loss']] * 2


def test_what_a_fault_leaves_out_is_found_once(damaged_dir, monkeypatch):
    assert len(load(damaged_dir, skip_bad=True).train.labels) == 38
    monkeypatch.setattr(decoding, 'find_bad', None)
    data = load(damaged_dir, skip_bad=True)
    assert len(data.train.labels) == 38
    assert [os.path.basename(name) for name, _ in data.faults] == ['7.png', '11.png']


@pytest.mark.parametrize(
    'other, argv, told',
    [
        ((6, 5), [], []),
        ((6, 5), ['--image_size', '4'], ['as they are on disk: 6x5']),
        ((7, 5), ['--image_size', '6x5'], ['as they are on disk: from 6x5 to 7x5']),
    ],
)
def test_sizes_on_disk_are_told_where_they_are_not_those_of_training(
    tmp_path, other, argv, told
):
    write_folders(tmp_path)
    images.write(str(tmp_path / 'train/ant/0.png'), images.png(picture(0, other)))
    flags = data_description.parse(['--data_dir', str(tmp_path)] + argv)
    lines = list(data_description.describe(flags, data_sets.load(flags)))
    assert [line for line in lines if 'on disk' in line] == told


def test_a_data_set_is_described_with_its_faults(damaged_dir, capfd, monkeypatch):
    from tests.conftest import command

    argv = ['--data_dir', damaged_dir, '--seconds', '0.2', '--batch_size', '2']
    done = command('input_pipeline.py', *argv)
    assert done.status == 1
    lines = done.out.splitlines()
    assert lines[0].endswith('data: folders, images of 6x5x1, 2 classes')
    assert lines[2:4] == [
        '  ant        19          5  ' + '#' * data_description.BAR,
        '  bee        19          5  ' + '#' * data_description.BAR,
    ]
    faults = [line for line in lines if line.startswith('fault: ')]
    assert len(faults) == 2 and 'ant/7.png: Invalid PNG' in faults[0]
    assert 'ERROR: 2 images can not be decoded' in done.err
    for name in ('ant/7.png', 'bee/11.png'):
        os.remove(os.path.join(damaged_dir, 'train', name))
    done = command('input_pipeline.py', *argv)
    assert done.status == 0, done.err
    assert 'no fault found' in done.out
    speeds = done.out.splitlines()[-3:]
    assert speeds[0].startswith('the pipeline alone: ')
    assert speeds[1].startswith('decoding alone: ')
    assert done.err == ''


# TFRecords


def write_record_set(root, gz=False):
    root.mkdir(exist_ok=True)
    end = '.gz' if gz else ''
    write_records(root / ('train-00000-of-00002' + end), range(7), gz=gz)
    write_records(root / ('train-00001-of-00002' + end), range(7, 12), gz=gz)
    write_records(root / ('test.tfrecord' + end), range(12, 18), gz=gz)
    return root


@pytest.mark.parametrize('gz', [False, True])
def test_records_are_all_found_in_their_order(tmp_path, gz):
    data = load(write_record_set(tmp_path / 'data', gz))
    assert data.classes == [1, 2, 3] and data.kind == 'tfrecord'
    assert numbers_of(data.train) == list(range(12))
    assert data.train.labels.tolist() == [number % 3 for number in range(12)]
    assert numbers_of(data.valid) == list(range(12, 18))
    name = decoding.name_image(data.train.images, 8)
    assert 'data/train-00001-of-00002' in name and name.endswith(': record 1')


def test_the_index_is_made_once_and_again_when_a_file_changes(tmp_path, monkeypatch):
    root = write_record_set(tmp_path / 'data')
    load(root)
    (directory,) = (tmp_path / 'runs').iterdir()
    assert str(directory) == kept.find_directory(data_flags(root))
    read = encoded_files._read_records
    scanned = []

    def count(path, *args):
        scanned.append(os.path.basename(path))
        return read(path, *args)

    monkeypatch.setattr(encoded_files, '_read_records', count)
    assert numbers_of(load(root).train) == list(range(12)) and scanned == []
    train = root / 'train-00001-of-00002'
    write_records(train, range(7, 13))
    assert numbers_of(load(root).train) == list(range(13))
    assert scanned == ['train-00000-of-00002', 'train-00001-of-00002']
    del scanned[:]
    os.utime(str(train), (1, 1))
    load(root)
    assert len(scanned) == 2
    del scanned[:]
    for path in directory.iterdir():
        path.write_bytes(path.read_bytes()[:50])
    assert numbers_of(load(root).train) == list(range(13)) and len(scanned) == 3


def test_what_is_kept_is_used_as_a_whole_or_not_at_all(tmp_path):
    root = write_record_set(tmp_path / 'data')
    load(root)
    (directory,) = (tmp_path / 'runs').iterdir()
    for path in directory.iterdir():
        with np.load(str(path)) as file:
            arrays = dict(file)
        del arrays['found-label']
        np.savez(str(path), **arrays)
    assert numbers_of(load(root).train) == list(range(12))


def test_what_can_not_be_kept_costs_one_warning(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(utils.log, 'propagate', True)
    root = write_record_set(tmp_path / 'data')
    kept._warn.cache_clear()
    (tmp_path / 'runs').write_text('a file in its place')
    assert numbers_of(load(root).train) == list(range(12))
    (told,) = {record.getMessage() for record in caplog.records}
    assert 'data-' in told and 'is not kept for the next start' in told


@pytest.mark.parametrize('ending', ['', '.gz'])
def test_an_empty_file_of_records_is_not_taken_for_one_without_any(tmp_path, ending):
    root = write_record_set(tmp_path / 'data')
    path = root / ('train-00002-of-00003' + ending)
    path.write_bytes(b'')
    assert_refused(root, '%s: empty; --skip_bad leaves' % path)
    data = load(root, skip_bad=True)
    assert numbers_of(data.train) == list(range(12))
    assert data.faults == [(str(path), 'empty')]


def test_faults_of_records_are_named(tmp_path):
    root = write_record_set(tmp_path / 'data')
    path = root / 'train-00000-of-00002'
    good = path.read_bytes()
    starts = [0]
    while starts[-1] < len(good):
        starts.append(starts[-1] + 16 + struct.unpack_from('<Q', good, starts[-1])[0])
    image = good.find(b'\x89PNG', starts[2])
    bad = bytearray(good)
    bad[image + 40] ^= 1
    path.write_bytes(bad)
    assert_refused(root, 'train-00000-of-00002: record 2: ', '--skip_bad')
    data = load(root, skip_bad=True)
    assert numbers_of(data.train) == [0, 1, *range(3, 12)], 'those after it are read'
    assert [name for name, _ in data.faults] == [str(path) + ': record 2']
    bad = bytearray(good)
    bad[starts[3]] ^= 1  # a length: where the next record begins is not known
    path.write_bytes(bad)
    assert_refused(root, 'train-00000-of-00002: record 3: ')
    assert numbers_of(load(root, skip_bad=True).train) == [0, 1, 2, *range(7, 12)]
    for length in (5, 30):
        path.write_bytes(good[: starts[3] + length])
        assert_refused(root, 'train-00000-of-00002: record 3: ')
    path.write_bytes(good)
    assert_refused(root, 'record 0', '--image_feature', image_feature='jpeg')
    write_records(path, range(5), label=lambda number: number - 1)
    assert_refused(root, 'train-00000-of-00002: record 0: label -1 is below 0')
    with tf.python_io.TFRecordWriter(str(path)) as writer:
        writer.write(b'\xff\xff\xff no example')
    assert_refused(root, 'record 0: no tf.train.Example')


def test_a_damaged_gzip_file_is_named(tmp_path):
    root = write_record_set(tmp_path / 'data', gz=True)
    path = root / 'train-00000-of-00002.gz'
    path.write_bytes(path.read_bytes()[:-20])
    assert_refused(root, str(path))
    plain = gzip.decompress((root / 'train-00001-of-00002.gz').read_bytes())
    path.write_bytes(plain)  # whatever it is called
    assert numbers_of(load(root).train) == [*range(7, 12), *range(7, 12)]


def test_what_is_held_out_of_gzip_files_depends_on_their_names_only(tmp_path):
    write_records(tmp_path / 'train.tfrecord.gz', range(60), gz=True)
    held_out = []
    for time, model_dir in ((1, 'one/run'), (2, 'two/run')):
        os.utime(str(tmp_path / 'train.tfrecord.gz'), (time, time))
        flags = data_flags(tmp_path)
        flags.model_dir = model_dir
        data = data_sets.load(flags)
        held_out.append(numbers_of(data.valid))
    assert held_out[0] == held_out[1] and len(held_out[0]) == 6
    name = decoding.name_image(data.train.images, 0)
    assert name.startswith(str(tmp_path / 'train.tfrecord.gz') + ': record ')


def test_crc32c_is_that_of_its_standard():
    # RFC 3720, B.4.
    assert encoded_files.crc32c(bytes(32)) == 0x8A9136AA
    assert encoded_files.crc32c(b'\xff' * 32) == 0x62A8AB43
    assert encoded_files.crc32c(bytes(range(32))) == 0x46DD794E


# In memory


def test_cache_holds_the_same_pixels_if_they_fit(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(utils.log, 'propagate', True)
    write_folders(tmp_path)
    streamed, held = load(tmp_path), load(tmp_path, cache=True)
    assert not decoding.is_stream(held.train.images)
    pixels = data_sets.read_images(streamed.train.images, range(10))
    assert (held.train.images == pixels).all()
    monkeypatch.setattr(data_sets, 'free_memory', lambda: 2 * 10 * 30)
    assert decoding.is_stream(load(tmp_path, cache=True).train.images)
    told = [record.getMessage() for record in caplog.records]
    assert told and all(line.startswith('--cache: ') for line in told)


# The command line


def test_mistakes_with_data_cost_one_line(main, tmp_path):
    root = write_folders(tmp_path / 'data', train=20)
    for argv, told in (
        (['--image_size', '0'], 'no size such as 64'),
        (['--image_size', '8x8x8'], 'no size such as 64'),
        (['--augment', 'shift,blur'], 'shift,flip,crop,rotate,brightness'),
        (['--augment', 'flip,flip'], 'shift,flip,crop,rotate,brightness'),
        (['--valid_fraction', '1'], '--valid_fraction'),
        (['--valid_fraction', '0.5'], 'leave it out'),
        (['--format', 'tfrecord'], 'has no train*.tfrecord'),
        (['--format', 'idx'], 'has no train-images-idx3-ubyte'),
    ):
        done = main('train.py', '--device', 'cpu', '--data_dir', root, *argv)
        assert_mistake(done, told)
