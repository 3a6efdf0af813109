"""Random changes to training images: shift, flip, crop, rotate, brightness.

An image of h x w pixels is changed, each time otherwise, but for its size:

    crop        a window of 80 to 100 % of the height and, alike, of the width,
                wherever it fits, is scaled to h x w, bilinear
    shift       by whole pixels, -round(h / 8) to round(h / 8) down and -round(w / 8)
                to round(w / 8) to the right, each as likely as the others
    flip        left becomes right, for half of the images
    rotate      by -15 to 15 degrees around the centre, bilinear
    brightness  all channels times one factor in [0.75, 1.25], at most 255

They come in this order, whatever order they are asked for in. The first three are one
resampling (it is the window that shifts, by pixels of the image), rotate is another.
What comes in from outside mirrors the image at its edge, the pixels at the edge twice.
Values are float32 between them, and rounded once, halves up, at the end; without crop,
rotate and brightness they are bytes that are moved.

The bits depend neither on threads nor on the other images of a batch nor on the line of
TensorFlow: all is moved, added and multiplied, one value at a time.
"""

import math

import numpy as np

from tf1 import tf

KINDS = ('shift', 'flip', 'crop', 'rotate', 'brightness')

# The columns of `draw`: each kind has its own, whichever others are asked for.
SHIFT_Y, SHIFT_X, FLIP, CROP_SIDE, CROP_Y, CROP_X, ROTATE, BRIGHTNESS = range(8)
NUM_DRAWS = 8

LARGEST_SHIFT = 1 / 8  # of height and width
SMALLEST_CROP = 0.8  # of height and width
LARGEST_ANGLE = math.radians(15)
LARGEST_DARKENING = 0.25


def draw(num_images, seed, epoch):
    """Draws the random numbers of one epoch, a row for each image of the data set.

    Stateless, like `input_pipeline.epoch_order`, whose key is (seed, epoch), and
    apart from it.

    Args:
      num_images: of the data set.
      seed: in [0, 2**31).
      epoch: int64 scalar.

    Returns:
      float32 [num_images, NUM_DRAWS], in [0, 1).
    """
    key = tf.stack([tf.constant(seed + (1 << 32), tf.int64), epoch])
    return tf.random.stateless_uniform([num_images, NUM_DRAWS], key)


def augment(images, draws, kinds):
    """Changes each image as its own random numbers say.

    Args:
      images: uint8 [k, h, w, c]; h, w and c are static.
      draws: float32 [k, NUM_DRAWS], rows of what `draw` returns.
      kinds: names of `KINDS`; for none the images are returned as they are.

    Returns:
      uint8 [k, h, w, c].
    """
    x = images
    with tf.name_scope('augment'):
        if {'shift', 'flip', 'crop'} & set(kinds):
            x = _resample(x, draws, kinds)
        if 'rotate' in kinds:
            x = _rotate(x, (2 * draws[:, ROTATE] - 1) * LARGEST_ANGLE)
        if 'brightness' in kinds:
            x = _brighten(x, 1 + (2 * draws[:, BRIGHTNESS] - 1) * LARGEST_DARKENING)
        if x.dtype == tf.float32:
            x = tf.cast(x + 0.5, tf.uint8)
    x.set_shape(images.shape)
    return x


def _resample(images, draws, kinds):
    """Crops, shifts and flips: -> [k, h, w, c], float32 if it had to interpolate."""
    _, height, width, _ = images.shape.as_list()
    y = _find_sources(height, draws, SHIFT_Y, CROP_Y, kinds)
    x = _find_sources(width, draws, SHIFT_X, CROP_X, kinds)
    if 'flip' in kinds:
        x = tf.where(draws[:, FLIP] < 0.5, x[:, ::-1], x)
    if 'crop' not in kinds:
        rows = _take(images, y, axis=1)
        return _take(rows, x, axis=2)
    # Columns as rows: weights that vary along the last axes are slow.
    columns = tf.transpose(_interpolate_rows(images, y), [0, 2, 1, 3])
    return tf.transpose(_interpolate_rows(columns, x), [0, 2, 1, 3])


def _find_sources(size, draws, shift, place, kinds):
    """Returns from where each row (or column) comes, float32 [k, size].

    Args:
      size: height (or width).
      shift, place: columns of `draws`.
      draws, kinds: `augment`'s.
    """
    source = tf.zeros_like(draws[:, :1]) + np.arange(size, dtype=np.float32)
    if 'crop' in kinds:
        side = 1 - (1 - SMALLEST_CROP) * draws[:, CROP_SIDE, None]
        start = (1 - side) * size * draws[:, place, None]
        source = start + (source + 0.5) * side - 0.5
    if 'shift' in kinds:
        most = round(size * LARGEST_SHIFT)
        # A product with an odd number is never rounded up to it.
        source -= tf.floor(draws[:, shift, None] * (2 * most + 1)) - most
    return source


def _take(images, source, axis, step=0):
    """Takes whole rows (axis 1) or columns (axis 2), `step` behind their source."""
    size = images.shape.as_list()[axis]
    index = tf.cast(tf.floor(source), tf.int32) + step
    index = tf.maximum(index, -1 - index)
    index = tf.minimum(index, 2 * size - 1 - index)
    return tf.gather(images, index, axis=axis, batch_dims=1)


def _interpolate_rows(images, source):
    """[k, h, w, c] and the rows' sources [k, h] -> float32 [k, h, w, c]."""
    share = (source - tf.floor(source))[:, :, None, None]
    return _mix(_take(images, source, 1), _take(images, source, 1, step=1), share)


def _mix(one, other, share):
    """Interpolates in float32; between equal values exactly."""
    one, other = tf.cast(one, tf.float32), tf.cast(other, tf.float32)
    return one + (other - one) * share


def _rotate(images, angle):
    """Turns images counterclockwise by angles [k] in radians: -> float32 [k, h, w, c].

    Pixels are numbered once, but their weights are made for each value [k, h, w * c]:
    broadcasting along the last axis is slow. So is tf.pad's kernel for mirrors.
    """
    _, height, width, channels = images.shape.as_list()
    # So far the corners come from outside; one more for the neighbour.
    top = math.ceil(math.sin(LARGEST_ANGLE) * (width - 1) / 2) + 1
    left = math.ceil(math.sin(LARGEST_ANGLE) * (height - 1) / 2) + 1
    padded = _mirror_margins(_mirror_margins(images, 1, top), 2, left)
    sin, cos = _sin_cos(angle[:, None])
    y = np.arange(height, dtype=np.float32) - (height - 1) / 2
    x = np.arange(width, dtype=np.float32) - (width - 1) / 2
    x = np.repeat(x, channels)
    from_y = (cos * y + (top + (height - 1) / 2))[:, :, None] + (sin * x)[:, None]
    from_x = (cos * x + (left + (width - 1) / 2))[:, None] - (sin * y)[:, :, None]
    turned = _interpolate_values(padded, from_y, from_x)
    return tf.reshape(turned, [-1, height, width, channels])


def _mirror_margins(images, axis, margin):
    """Puts `margin` mirrored rows (axis 1) or columns (axis 2) on both sides."""
    size = images.shape.as_list()[axis]
    source = np.arange(-margin, size + margin) % (2 * size)
    source = np.minimum(source, 2 * size - 1 - source)
    before = tf.gather(images, source[:margin], axis=axis)
    after = tf.gather(images, source[-margin:], axis=axis)
    return tf.concat([before, images, after], axis)


def _interpolate_values(images, y, x):
    """[k, h, w, c] at positions inside, both float32 [k, n, m * c] -> alike.

    Args:
      y, x: the positions of each value; those of a pixel's channels are equal.
    """
    _, height, width, channels = images.shape.as_list()
    low_y, low_x = tf.floor(y), tf.floor(x)
    first = tf.range(tf.shape(images)[0]) * (height * width)
    index = tf.cast((low_y * width + low_x)[:, :, ::channels], tf.int32)  # [k, n, m]
    index += first[:, None, None]
    pixels = tf.reshape(images, [-1, channels])
    corners = [
        tf.reshape(tf.gather(pixels, index + step), tf.shape(y))
        for step in (0, 1, width, width + 1)
    ]
    above = _mix(corners[0], corners[1], x - low_x)
    below = _mix(corners[2], corners[3], x - low_x)
    return _mix(above, below, y - low_y)


def _sin_cos(angle):
    """Taylor's series, exact in float32 up to `LARGEST_ANGLE`.

    The bits of tf.sin depend on the kernel, and may on where in a batch a number is.
    """
    square = angle * angle
    sin = angle * (1 - square / 6 * (1 - square / 20 * (1 - square / 42)))
    return sin, 1 - square / 2 * (1 - square / 12 * (1 - square / 30))


def _brighten(images, factor):
    """Multiplies by factors [k]: -> float32 [k, h, w, c], at most 255."""
    bright = tf.cast(images, tf.float32) * factor[:, None, None, None]
    return tf.minimum(bright, 255)
