"""Data sets are checked; the order of images is arithmetic."""

import gzip

import numpy as np
import pytest

import input_pipeline
import training
import utils
from cluster import ONE, Machines
from input_pipeline import Examples, load, read_idx
from tests.conftest import start, write_data_set, write_idx
from tf1 import tf
from utils import UserError

# Files


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
    loaded = load(str(directory))
    assert (loaded.train.images == small.train.images).all()
    assert (loaded.valid.labels == small.valid.labels).all()


def test_gzip_is_told_by_content_not_by_name(tmp_path):
    labels = np.arange(10, dtype=np.uint8)
    write_idx(tmp_path / 'x.gz', labels)
    (tmp_path / 'x.gz').rename(tmp_path / 'x')
    assert (read_idx(str(tmp_path / 'x'), 1) == labels).all()


def test_any_image_size(tmp_path):
    examples = Examples(np.ones([20, 9, 5, 1], np.uint8), np.arange(20) % 10)
    data = input_pipeline.DataSet(examples, examples, 10)
    directory = write_data_set(tmp_path / 'data', data)
    assert load(directory).train.images.shape == (20, 9, 5, 1)


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
        ('label', 'labels-idx1-ubyte: label 10 at index 7; the 10 classes are 0 to 9'),
        ('size', 'training images are 28x28, test images 27x28'),
        ('missing', 'has no t10k-labels-idx1-ubyte (nor t10k-labels.idx1-ubyte'),
    ],
)
def test_files_that_do_not_fit_each_other(tmp_path, small, change, told):
    train, valid = small.train, small.valid
    if change == 'fewer labels':
        train = train._replace(labels=train.labels[:-1])
    if change == 'label':
        labels = train.labels.copy()
        labels[7] = 10
        train = train._replace(labels=labels)
    if change == 'size':
        valid = valid._replace(images=valid.images[:, 1:])
    directory = tmp_path / 'data'
    write_data_set(directory, small._replace(train=train, valid=valid))
    if change == 'missing':
        (directory / 't10k-labels-idx1-ubyte').unlink()
    with pytest.raises(UserError) as error:
        load(str(directory))
    assert told in str(error.value)


def test_a_directory_in_a_files_place(tmp_path, small):
    write_data_set(tmp_path / 'data', small)
    path = tmp_path / 'data' / 'train-images-idx3-ubyte'
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match='Is a directory'):
        load(str(tmp_path / 'data'))


# Order

ORDER = [8, 4, 6, 3, 5, 1, 2, 7, 9, 0]


def tagged(num_images):
    """Examples whose images and labels say their index."""
    index = np.arange(num_images)
    return Examples(
        np.stack([index // 256, index % 256], axis=1)
        .astype(np.uint8)
        .reshape([-1, 1, 2, 1]),
        index.astype(np.int64),
    )


def read_steps(
    num_images,
    batch,
    num_towers,
    steps,
    seed=1,
    epoch=0,
    consumed=0,
    machines=ONE,
):
    """What the towers read, by index: int array [steps, num_towers, batch]."""
    with tf.Graph().as_default(), tf.device('/cpu:0'):
        state = training.create_state()
        pipeline, feeds = input_pipeline.build(
            tagged(num_images), batch, num_towers, seed, state, machines
        )
        job = training.Job(state, None, None, None, pipeline, None, feeds)
        place = tf.group(state.epoch.assign(epoch), state.epoch_images.assign(consumed))
        devices = utils.choose_devices('cpu', num_towers)
        with start(job, devices, place) as session:
            read = [session.run(pipeline.batches) for _ in range(steps)]
    for step in read:
        for images, labels in step:
            high, low = images.reshape([-1, 2]).astype(int).T
            assert (high * 256 + low == labels).all(), 'image and label came apart'
    return np.array([[labels for _, labels in step] for step in read])


@pytest.mark.parametrize('num_towers', [1, 2, 3])
def test_every_image_once_per_epoch_over_all_towers(num_towers):
    batch = 12 // num_towers
    read = read_steps(300, batch, num_towers, 75)
    epochs = read.reshape([3, -1])
    for epoch in epochs:
        assert sorted(epoch) == list(range(300))
    assert (epochs[0] != epochs[1]).any() and (epochs[1] != epochs[2]).any()
    assert (epochs[0] != np.arange(300)).any()


def test_towers_see_the_rows_of_one_big_batch():
    one = read_steps(300, 12, 1, 40)
    for num_towers in (2, 3, 4):
        many = read_steps(300, 12 // num_towers, num_towers, 40)
        assert (many.reshape([40, 12]) == one.reshape([40, 12])).all()


def test_the_ragged_rest_waits_for_another_epochs_shuffle():
    read = read_steps(310, 4, 3, 50).reshape([2, 300])
    for epoch in read:
        assert len(set(epoch)) == 300
    assert set(read[0]) != set(read[1])


def test_order_depends_on_seed_and_epoch_only():
    first = read_steps(300, 4, 3, 50)
    assert (first == read_steps(300, 4, 3, 50)).all()
    assert (first != read_steps(300, 4, 3, 50, seed=2)).any()
    assert (first[25:] == read_steps(300, 4, 3, 25, epoch=1)).all()


@pytest.mark.parametrize('batch, num_towers', [(4, 3), (5, 1), (10, 2)])
def test_a_start_inside_an_epoch_goes_on_at_the_next_image(batch, num_towers):
    whole = read_steps(300, 12, 1, 50).reshape([2, 300])
    steps = (300 - 120) // (batch * num_towers)
    read = read_steps(300, batch, num_towers, steps + 1, consumed=120)
    assert (read[:steps].ravel() == whole[0, 120:]).all()
    assert (read[steps].ravel() == whole[1, : batch * num_towers]).all()


def test_count_steps():
    pipeline = input_pipeline.Pipeline(None, None, None, [], None, 310, 12)
    assert input_pipeline.count_steps(pipeline, 0) == (0, 25)
    assert input_pipeline.count_steps(pipeline, 120) == (10, 15)
    assert input_pipeline.count_steps(pipeline, 300) == (25, 0)
    assert input_pipeline.count_steps(pipeline, 400) == (33, 0)


def test_the_same_permutation_on_both_tensorflow_lines():
    with tf.Session() as session:
        order = session.run(input_pipeline.epoch_order(10, 1, tf.constant(0, tf.int64)))
    assert list(order) == ORDER


def test_a_data_set_smaller_than_one_step_names_the_batch_that_fits():
    with pytest.raises(UserError, match='largest --batch_size that fits is 33'):
        input_pipeline.build(tagged(100), 64, 3, 0, training.create_state())


def test_a_data_set_smaller_than_the_towers_says_so():
    with pytest.raises(UserError, match='2 training images for 3 towers'):
        input_pipeline.build(tagged(2), 64, 3, 0, training.create_state())


def test_large_batches_keep_their_order_and_do_not_pile_up():
    one = read_steps(6000, 1500, 1, 8)
    assert (read_steps(6000, 500, 3, 8).reshape([8, 1500]) == one[:, 0]).all()
    input_pipeline.build(tagged(6000), 1500, 2, 0, training.create_state())
    batches = tf.get_default_graph().get_operation_by_name('input/batch_queue')
    assert batches.get_attr('capacity') == 4


@pytest.mark.parametrize('machines, towers', [(2, 1), (2, 2), (3, 2)])
def test_machines_read_what_the_towers_of_one_machine_read(machines, towers):
    addresses = ['a:1', 'b:1', 'c:1'][:machines]
    one = read_steps(100, 5, machines * towers, 6)
    for machine in range(machines):
        first = machine * towers
        read = read_steps(100, 5, towers, 6, machines=Machines(addresses, machine))
        assert (read == one[:, first : first + towers]).all()
    with pytest.raises(UserError, match='5 per tower x 24 towers'):
        read_steps(100, 5, 12, 1, machines=Machines(['a:1', 'b:1'], 1))


def test_the_samples_are_what_the_first_towers_read_and_cost_no_image():
    first = read_steps(100, 3, 2, 3).reshape(-1)[:8]
    state = training.create_state()
    pipeline, feeds = input_pipeline.build(tagged(100), 3, 2, 1, state)
    with tf.Session() as session:
        session.run(tf.local_variables_initializer(), feeds)
        samples = session.run(pipeline.samples)
    assert samples.shape == (8, 1, 2, 1)
    index = samples[:, 0, :, 0].dot(np.array([256, 1]))
    assert index.tolist() == first.tolist()


def test_neither_graph_nor_checkpoint_holds_the_data():
    state = training.create_state()
    input_pipeline.build(tagged(40000), 4, 2, 0, state)
    assert len(tf.get_default_graph().as_graph_def().SerializeToString()) < 50000
    saved = {v.op.name for v in tf.global_variables()}
    assert saved == {v.op.name for v in state}
