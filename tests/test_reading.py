"""What the towers read: augmented images, and those of encoded data sets."""

import collections

import numpy as np
import pytest

import augmentation
import data_sets
import decoding
import input_pipeline
import training
import utils
from cluster import ONE, Machines
from data_sets import Examples
from tests.conftest import (
    data_flags,
    start,
    write_folders,
    write_records,
)
from tf1 import tf

pytestmark = pytest.mark.usefixtures('small_graphs')

NUM_IMAGES = 50
SEED = 3


def tagged():
    """Examples whose labels are their rows, and whose images are all different."""
    images = np.random.RandomState(0).randint(0, 256, [NUM_IMAGES, 9, 8, 3])
    return Examples(images.astype(np.uint8), np.arange(NUM_IMAGES))


Read = collections.namedtuple('Read', 'images labels')


def read_steps(
    examples, batch, num_towers, steps, augment=(), epoch=0, consumed=0, machines=ONE
):
    """What the towers of one machine read in these steps, a `Read` of it in a row."""
    with tf.Graph().as_default(), tf.device('/cpu:0'):
        state = training.create_state()
        pipeline, feeds = input_pipeline.build(
            examples, batch, num_towers, SEED, state, machines, augment
        )
        job = training.Job(state, None, pipeline, None, None, feeds)
        place = tf.group(state.epoch.assign(epoch), state.epoch_images.assign(consumed))
        devices = utils.choose_devices('cpu', num_towers)
        with start(job, devices, place) as session:
            read = [session.run(pipeline.batches) for _ in range(steps)]
    pairs = [batch for step in read for batch in step]
    return Read(*(np.concatenate(part) for part in zip(*pairs)))


def assert_same(one, other):
    assert one.labels.tolist() == other.labels.tolist()
    differing = np.flatnonzero((one.images != other.images).any(axis=(1, 2, 3)))
    assert not len(differing), 'images differ, the first: %d' % differing[0]


def find_order(epochs, global_batch):
    """Returns the rows that whole steps of the epochs take, in their order."""
    with tf.Graph().as_default(), tf.Session() as session:
        orders = [
            session.run(input_pipeline.epoch_order(NUM_IMAGES, SEED, np.int64(epoch)))
            for epoch in epochs
        ]
    whole = NUM_IMAGES // global_batch * global_batch
    return [order[:whole] for order in orders]


@pytest.fixture(params=['folders', 'tfrecord'])
def stream(request, tmp_path):
    """Encoded `tagged` images, and their rows as labels."""
    images, _ = tagged()
    if request.param == 'folders':
        names = ['%02d' % row for row in range(NUM_IMAGES)]
        whole = Examples(images, np.arange(NUM_IMAGES))
        path = write_folders(tmp_path / 'own', names, train=whole, valid=whole)
    else:
        # Its first file has the even rows.
        order = np.argsort(np.r_[0:NUM_IMAGES:2, 1:NUM_IMAGES:2])
        whole = Examples(images[order], order)
        path = write_records(tmp_path / 'own', train=whole, valid=whole)
    examples = data_sets.load(data_flags(path)).train
    assert decoding.is_stream(examples.images)
    assert examples.labels.tolist() == list(range(NUM_IMAGES))
    return examples


# Augmentation


@pytest.mark.parametrize('kinds', [['flip'], ['shift', 'brightness'], 'all'], ids=str)
def test_what_an_image_becomes_is_its_own_of_seed_and_epoch(kinds):
    kinds = augmentation.KINDS if kinds == 'all' else kinds
    examples = tagged()
    steps = NUM_IMAGES // 8
    read = read_steps(examples, 8, 1, 3 * steps, kinds)
    orders = find_order(range(3), 8)
    assert read.labels.tolist() == np.concatenate(orders).tolist()
    for epoch, order in enumerate(orders):
        with tf.Graph().as_default(), tf.Session() as session:
            draws = augmentation.draw(NUM_IMAGES, SEED, tf.constant(epoch, tf.int64))
            changed = augmentation.augment(tf.constant(examples.images), draws, kinds)
            expected = session.run(changed)
        part = slice(epoch * len(order), (epoch + 1) * len(order))
        assert (read.images[part] == expected[order]).all(), 'epoch %d' % epoch
        assert (read.images[part] != examples.images[order]).any()


@pytest.mark.parametrize('num_towers', [2, 4])
def test_towers_augment_what_one_large_batch_augments(num_towers):
    one = read_steps(tagged(), 8, 1, 14, augmentation.KINDS)
    many = read_steps(tagged(), 8 // num_towers, num_towers, 14, augmentation.KINDS)
    assert_same(one, many)


def test_a_start_inside_an_epoch_augments_the_rest_alike():
    whole = read_steps(tagged(), 8, 1, 12, augmentation.KINDS)
    rest = read_steps(tagged(), 4, 2, 8, augmentation.KINDS, consumed=32)
    assert_same(rest, Read(*(part[32:] for part in whole)))
    later = read_steps(tagged(), 8, 1, 6, augmentation.KINDS, epoch=1)
    assert_same(later, Read(*(part[48:] for part in whole)))


def test_machines_augment_what_one_machine_augments():
    one = read_steps(tagged(), 6, 4, 6, augmentation.KINDS)
    for machine in range(2):
        machines = Machines(['a:1', 'b:1'], machine)
        own = read_steps(tagged(), 6, 2, 6, augmentation.KINDS, machines=machines)
        rows = np.arange(len(one.labels)).reshape(6, 2, 12)[:, machine].ravel()
        assert_same(own, Read(*(part[rows] for part in one)))


# Encoded images


@pytest.mark.parametrize('augment', [(), ('flip', 'shift')], ids=['plain', 'augmented'])
def test_towers_read_of_a_stream_what_one_large_batch_reads(stream, augment):
    one = read_steps(stream, 8, 1, 14, augment)
    assert one.labels[:96].tolist() == np.concatenate(find_order([0, 1], 8)).tolist()
    assert_same(one, read_steps(tagged(), 8, 1, 14, augment))
    assert_same(one, read_steps(stream, 4, 2, 14, augment))


def test_a_start_inside_an_epoch_of_a_stream_goes_on_at_the_next_image(stream):
    whole = read_steps(tagged(), 8, 1, 12)
    rest = read_steps(stream, 4, 2, 8, consumed=32)
    assert_same(rest, Read(*(part[32:] for part in whole)))


def test_a_batch_of_more_than_is_decoded_side_by_side_keeps_its_order(
    stream, monkeypatch
):
    monkeypatch.setattr(decoding, 'PART', 16)
    for batch in (33, 48):
        assert_same(read_steps(stream, batch, 1, 3), read_steps(tagged(), batch, 1, 3))


@pytest.fixture
def fetched(monkeypatch):
    """The rows of a stream in the order in which they are read from disk."""
    rows = []
    make_read_bytes = decoding.make_read_bytes

    def make(stream):
        read_bytes = make_read_bytes(stream)

        def read(row):
            rows.append(row)
            return read_bytes(row)

        return read

    monkeypatch.setattr(decoding, 'make_read_bytes', make)
    return rows


@pytest.mark.parametrize('index', [0, 1, 2])
def test_a_machine_reads_only_its_own_images_of_a_stream(stream, fetched, index):
    machines = Machines(['a:1', 'b:1', 'c:1'], index)
    read = read_steps(stream, 2, 2, 7, machines=machines)
    one = read_steps(tagged(), 2, 6, 7)
    rows = np.arange(7 * 12).reshape(7, 3, 4)[:, index].ravel()
    assert_same(read, Read(*(part[rows] for part in one)))
    # Some are read ahead of the steps, those of later epochs too.
    orders = np.concatenate(find_order(range(30), 12))
    own = orders.reshape(-1, 3, 4)[:, index].ravel()
    taken = fetched[input_pipeline.NUM_SAMPLES :]  # those for TensorBoard come first
    assert len(read.labels) <= len(taken) < len(own)
    assert taken == own[: len(taken)].tolist()


def test_samples_of_a_stream_are_spread_over_it(stream, fetched):
    pipeline, feeds = input_pipeline.build(stream, 8, 1, SEED, training.create_state())
    with tf.Session() as session:
        session.run(tf.local_variables_initializer(), feeds)
        samples = session.run(pipeline.samples)
    assert fetched == [0, 7, 14, 21, 28, 35, 42, 49]
    assert (samples == tagged().images[fetched]).all()


def test_a_stream_is_evaluated_in_its_order_by_any_towers(stream):
    import evaluation

    def build_model(images, labels):
        total = tf.reduce_sum(tf.cast(images, tf.float32), axis=[1, 2, 3])
        spec = collections.namedtuple('Spec', 'losses predictions')
        return spec(total, labels)

    expected = tagged().images.astype(int).sum(axis=(1, 2, 3))
    for num_towers, batch in ((1, 250), (2, 7)):
        devices = utils.choose_devices('cpu', num_towers)
        with tf.Graph().as_default(), tf.device('/cpu:0'):
            built, feeds = evaluation.build(
                stream, devices.towers, build_model, batch, reuse=False
            )
            with utils.open_session(devices, (1, 2)) as session:
                session.run(tf.local_variables_initializer(), feeds)
                losses, predictions = evaluation.make_predict(session, built)()
        assert losses.tolist() == expected.tolist()
        assert predictions.tolist() == list(range(NUM_IMAGES))
