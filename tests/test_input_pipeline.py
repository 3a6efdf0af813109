"""The order of images is arithmetic."""

import numpy as np
import pytest

import input_pipeline
import training
import utils
from cluster import ONE, Machines
from data_sets import Examples
from tests.conftest import start
from tf1 import tf
from utils import UserError

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
    micro_steps=1,
):
    """What the towers read, by index: int array [steps, num_towers, batch]."""
    with tf.Graph().as_default(), tf.device('/cpu:0'):
        state = training.create_state()
        pipeline, feeds = input_pipeline.build(
            tagged(num_images),
            batch,
            num_towers,
            seed,
            state,
            machines,
            micro_steps=micro_steps,
        )
        job = training.Job(state, None, pipeline, None, None, feeds)
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
