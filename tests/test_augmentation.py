"""Augmented images against NumPy, which mirrors and interpolates in its own way."""

import itertools
import zlib

import numpy as np
import pytest

import augmentation
import input_pipeline
from tf1 import tf

ALMOST_ONE = np.nextafter(np.float32(1), np.float32(0))
SHAPES = [
    (1, 1, 1),
    (2, 2, 3),
    (3, 8, 1),
    (8, 8, 3),
    (1, 40, 3),
    (40, 2, 1),
    (28, 28, 1),
    (28, 19, 3),
]

CHECKSUM = 670326331
THOUSANDTHS = [
    [489, 210, 366, 125, 507, 142, 0, 608],
    [822, 640, 388, 932, 5, 172, 145, 137],
    [93, 638, 547, 613, 28, 554, 145, 612],
]


def noise(*shape):
    """Images in which no pixel is like its neighbours."""
    return np.random.RandomState(0).randint(0, 256, shape).astype(np.uint8)


def rows(number, **columns):
    """Draws that change nothing, except in the columns given."""
    draws = np.zeros([number, augmentation.NUM_DRAWS], np.float32)
    nothing = dict(shift_y=0.5, shift_x=0.5, flip=0.5, rotate=0.5, brightness=0.5)
    for name, value in {**nothing, **columns}.items():
        draws[:, getattr(augmentation, name.upper())] = value
    return draws


def random_rows(number, seed=0):
    """Draws like those of an epoch."""
    shape = [number, augmentation.NUM_DRAWS]
    return np.random.RandomState(seed).uniform(size=shape).astype(np.float32)


def augment(images, draws, *kinds, **config):
    """Runs `augmentation.augment`, with a batch size that the graph does not know."""
    with tf.Graph().as_default(), tf.device('/cpu:0'):
        fed_images = tf.placeholder(tf.uint8, (None,) + images.shape[1:])
        fed_draws = tf.placeholder(tf.float32, (None,) + draws.shape[1:])
        augmented = augmentation.augment(fed_images, fed_draws, list(kinds))
        assert augmented.dtype == tf.uint8
        assert augmented.shape.as_list() == fed_images.shape.as_list()
        with tf.Session(config=tf.ConfigProto(**config)) as session:
            return session.run(augmented, {fed_images: images, fed_draws: draws})


def draw(num_images, seed, epoch):
    with tf.Graph().as_default(), tf.Session() as session:
        epoch = tf.constant(epoch, tf.int64)
        return session.run(augmentation.draw(num_images, seed, epoch))


def sample(image, y, x):
    """Bilinear float64 [h, w, c] at positions [h, w], the image mirrored around."""
    far = 2 * max(image.shape)
    image = np.pad(image.astype(float), [(far, far), (far, far), (0, 0)], 'symmetric')
    top, left = np.floor(y).astype(int), np.floor(x).astype(int)
    total = 0
    for down, right in itertools.product((0, 1), (0, 1)):
        weight_y, weight_x = 1 - abs(y - top - down), 1 - abs(x - left - right)
        pixels = image[far + top + down, far + left + right]
        total = total + (weight_y * weight_x)[..., None] * pixels
    return total


def shift_of(size, u):
    most = round(size / 8)
    return int(np.floor(float(u) * (2 * most + 1))) - most


def expect(image, u, kinds):
    """One image as the module's docstring says."""
    height, width, _ = image.shape
    grid_y, grid_x = np.mgrid[:height, :width].astype(float)
    y, x = grid_y, grid_x
    side = 1 - 0.2 * float(u[augmentation.CROP_SIDE]) if 'crop' in kinds else 1
    y = (1 - side) * height * u[augmentation.CROP_Y] + (y + 0.5) * side - 0.5
    x = (1 - side) * width * u[augmentation.CROP_X] + (x + 0.5) * side - 0.5
    if 'shift' in kinds:
        y = y - shift_of(height, u[augmentation.SHIFT_Y])
        x = x - shift_of(width, u[augmentation.SHIFT_X])
    image = sample(image, y, x)
    if 'flip' in kinds and u[augmentation.FLIP] < 0.5:
        image = image[:, ::-1]
    if 'rotate' in kinds:
        angle = np.radians(-15 + 30 * float(u[augmentation.ROTATE]))
        y, x = grid_y - (height - 1) / 2, grid_x - (width - 1) / 2
        turned_y = np.cos(angle) * y + np.sin(angle) * x + (height - 1) / 2
        turned_x = np.cos(angle) * x - np.sin(angle) * y + (width - 1) / 2
        image = sample(image, turned_y, turned_x)
    if 'brightness' in kinds:
        # In float32, where the largest draw makes 50 exactly 62.5.
        factor = 1 + (2 * u[[augmentation.BRIGHTNESS]] - 1) / 4
        image = np.clip(image.astype(np.float32) * factor, 0, 255)
    return np.floor(image + 0.5)


def largest_error(images, draws, kinds):
    expected = np.stack([expect(*row, kinds=kinds) for row in zip(images, draws)])
    return abs(augment(images, draws, *kinds) - expected).max()


@pytest.mark.parametrize('size, most', [(28, 4), (8, 1), (12, 2), (3, 0), (1, 0)])
def test_shift_moves_by_each_whole_number_alike_both_ends_too(size, most):
    choices = 2 * most + 1
    image = np.arange(size, dtype=np.uint8)
    padded = np.pad(image, most, 'symmetric')
    u = (np.arange(20 * choices) + 0.5) / (20 * choices)
    u = np.concatenate([[0], u, [ALMOST_ONE]])
    moves = [-most] + list(np.repeat(np.arange(-most, most + 1), 20)) + [most]
    expected = np.stack([padded[most - move :][:size] for move in moves])
    down = np.tile(image[:, None, None], [len(u), 1, 1, 1])
    moved = augment(down, rows(len(u), shift_y=u), 'shift')
    assert (moved[:, :, 0, 0] == expected).all()
    right = np.tile(image[None, :, None], [len(u), 1, 1, 1])
    moved = augment(right, rows(len(u), shift_x=u), 'shift')
    assert (moved[:, 0, :, 0] == expected).all()


def test_flip_is_left_right_for_half_of_the_draws():
    images = noise(4, 5, 6, 3)
    draws = rows(4, flip=[0, np.nextafter(np.float32(0.5), np.float32(0)), 0.5, 1])
    flipped = augment(images, draws, 'flip')
    assert (flipped[:2] == images[:2, :, ::-1]).all()
    assert (flipped[2:] == images[2:]).all()


@pytest.mark.parametrize('kinds', [['shift'], ['flip'], ['shift', 'flip']])
@pytest.mark.parametrize('channels', [1, 3])
def test_shift_and_flip_move_bytes(kinds, channels):
    images, draws = noise(50, 17, 24, channels), random_rows(50)
    assert largest_error(images, draws, kinds) == 0


@pytest.mark.parametrize('shape', SHAPES)
@pytest.mark.parametrize('kind', augmentation.KINDS)
def test_each_kind_is_what_numpy_says(kind, shape):
    allowed = {'crop': 1, 'rotate': 1}.get(kind, 0)
    images, draws = noise(6, *shape), random_rows(6)
    draws[0], draws[1] = 0, ALMOST_ONE
    assert largest_error(images, draws, [kind]) <= allowed


@pytest.mark.parametrize('shape', SHAPES)
def test_all_kinds_come_in_their_order_in_any_size(shape):
    images, draws = noise(6, *shape), random_rows(6)
    draws[0], draws[1] = 0, ALMOST_ONE
    assert largest_error(images, draws, augmentation.KINDS[::-1]) <= 1


@pytest.mark.parametrize('number', [2, 3, 4])
def test_a_kind_does_the_same_whatever_others_are_asked_for(number):
    images, draws = noise(6, 11, 16, 3), random_rows(6)
    for kinds in itertools.combinations(augmentation.KINDS, number):
        assert largest_error(images, draws, kinds) <= 1, kinds


@pytest.mark.parametrize('kind', augmentation.KINDS)
def test_draws_in_the_middle_change_nothing(kind):
    images = noise(3, 28, 19, 3)
    assert (augment(images, rows(3), kind) == images).all()
    middle = rows(3, crop_y=0.9, crop_x=0.4)  # of a window of full size
    assert (augment(images, middle, *augmentation.KINDS) == images).all()


def test_no_kinds_add_no_ops():
    images = tf.constant(noise(2, 3, 3, 1))
    before = len(tf.get_default_graph().get_operations())
    assert augmentation.augment(images, None, []) is images
    assert len(tf.get_default_graph().get_operations()) == before


def test_brightness_is_rounded_and_stops_at_white():
    images = np.arange(256, dtype=np.uint8).reshape([1, 16, 16, 1])
    images = np.tile(images, [3, 1, 1, 1])
    bright = augment(images, rows(3, brightness=[0, 0.25, ALMOST_ONE]), 'brightness')
    for image, factor in zip(bright, (0.75, 0.875, 1.25)):
        expected = np.minimum(np.arange(256) * factor, 255)
        assert (image.ravel() == np.floor(expected + 0.5)).all()


def test_what_comes_in_mirrors_the_edge():
    images = noise(1, 16, 16, 1)
    corner = augment(images, rows(1, shift_y=ALMOST_ONE, shift_x=0), 'shift')[0]
    expected = images[0][[1, 0] + list(range(14))]
    assert (corner == expected[:, list(range(2, 16)) + [15, 14]]).all()
    # A black frame stays one, however it is moved.
    images[:, 4:-4, 4:-4], images[:, :4], images[:, -4:] = 255, 0, 0
    images[:, :, :4] = images[:, :, -4:] = 0
    turned = augment(np.tile(images, [9, 1, 1, 1]), random_rows(9), 'rotate')
    assert turned[:, [0, -1]].max() == 0 and turned[:, :, [0, -1]].max() == 0


def test_a_flat_image_stays_flat():
    images = np.full([40, 28, 28, 3], 200, np.uint8)
    kinds = ['shift', 'flip', 'crop', 'rotate']
    assert (augment(images, random_rows(40), *kinds) == 200).all()


def test_a_positive_angle_turns_counterclockwise():
    images = np.zeros([1, 21, 21, 1], np.uint8)
    images[0, 10, 20] = 255  # at the right, halfway down
    turned = augment(images, rows(1, rotate=ALMOST_ONE), 'rotate')[0, :, :, 0]
    y, x = np.unravel_index(turned.argmax(), turned.shape)
    assert (y, x) == (7, 20)


def test_the_same_bits_with_any_threads_and_in_any_batch():
    images, draws = noise(64, 40, 40, 3), random_rows(64)
    one, four = [
        augment(
            images,
            draws,
            *augmentation.KINDS,
            intra_op_parallelism_threads=threads,
            inter_op_parallelism_threads=threads,
            use_per_session_threads=True,
        )
        for threads in (1, 4)
    ]
    assert one.tobytes() == four.tobytes()
    few = augment(images[13:20], draws[13:20], *augmentation.KINDS)
    assert few.tobytes() == one[13:20].tobytes()


def test_the_same_bits_on_both_tensorflow_lines():
    augmented = augment(noise(16, 28, 28, 3), random_rows(16), *augmentation.KINDS)
    assert zlib.crc32(augmented.tobytes()) == CHECKSUM
    assert (draw(3, 1, 2) * 1000).astype(int).tolist() == THOUSANDTHS


def test_draws_depend_on_seed_epoch_and_image_only():
    first = draw(300, 1, 0)
    assert first.shape == (300, augmentation.NUM_DRAWS) and first.dtype == np.float32
    assert first.min() >= 0 and first.max() < 1
    assert len(np.unique(first)) > 0.99 * first.size
    assert (draw(300, 1, 0) == first).all()
    for other in (draw(300, 1, 1), draw(300, 2, 0), draw(300, 0, 1)):
        assert np.isin(other, first).mean() < 0.01


def test_all_seeds_have_draws():
    last = draw(300, 2**31 - 1, 10**6)
    assert abs(last.mean(axis=0) - 0.5).max() < 0.1


def test_draws_are_not_the_numbers_of_the_order():
    draws = draw(300, 1, 0)
    with tf.Session() as session:
        order = input_pipeline.epoch_order(300, 1, tf.constant(0, tf.int64))
        order = session.run(order)
    for column in range(augmentation.NUM_DRAWS):
        assert (np.argsort(draws[:, column]) != order).mean() > 0.9
    assert (np.argsort(draws.ravel()[:300]) != order).mean() > 0.9


def test_kinds_have_columns_of_their_own():
    images, draws = noise(8, 16, 16, 1), random_rows(8)
    columns = {
        'shift': [augmentation.SHIFT_Y, augmentation.SHIFT_X],
        'flip': [augmentation.FLIP],
        'crop': [augmentation.CROP_SIDE, augmentation.CROP_Y, augmentation.CROP_X],
        'rotate': [augmentation.ROTATE],
        'brightness': [augmentation.BRIGHTNESS],
    }
    assert sorted(sum(columns.values(), [])) == list(range(augmentation.NUM_DRAWS))
    for kind in augmentation.KINDS:
        others = random_rows(8, seed=1)
        others[:, columns[kind]] = draws[:, columns[kind]]
        assert (augment(images, draws, kind) == augment(images, others, kind)).all()
