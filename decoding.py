"""The images of a data set in the graph: held as bytes, or decoded as they are needed.

The decoders of a batch run side by side and their images are stacked in the order of
the rows: what comes out does not depend on the number of threads.
"""

import collections
import contextlib
import functools
import os

import numpy as np

import utils
from image_headers import BMP8, BMP24, BMP32, CLEAR, GIF, PLAIN
from tf1 import quiet_stderr, tf
from utils import RunFailed, UserError

# n images on disk. paths: of the files, bytes. names: what these are called, where it
# is something else; else None. file: int32 [n], which of them. offset,
# length: int64 [n], where in it; offset is None where a file is one image. number:
# int64 [n], of the record in its file. kind: uint8 [n], see `image_headers`. size:
# int32 [n, 2], height and width as encoded. grey: bool [n]. shape: (n, height, width,
# channels) of the decoded images.
Stream = collections.namedtuple(
    'Stream', 'paths names file offset length number kind size grey shape'
)

# Decoders side by side. Larger batches are decoded in parts.
PART = 64
# How many parts of one batch may be under way.
PARALLEL_PARTS = 4
# Encoded images that together take no more are kept in memory.
HELD_BYTES = 2**28
# Images at a time where a whole stream is decoded.
CHUNK = 512
# Parts of red, green and blue in grey. Source: ITU-R BT.601.
LUMINANCE = np.array([0.299, 0.587, 0.114], np.float32)


def is_stream(images):
    """Returns whether images are encoded on disk rather than bytes in memory."""
    return isinstance(images, Stream)


def take(images, rows):
    """Returns some of the images, held or a stream, in the order of `rows`."""
    if not is_stream(images):
        return images[rows]
    fields = {}
    for name in ('file', 'offset', 'length', 'number', 'kind', 'size', 'grey'):
        array = getattr(images, name)
        fields[name] = None if array is None else array[rows]
    shape = images.shape  # None until all of a data set is known
    if shape is not None:
        shape = (len(fields['file']),) + shape[1:]
    return images._replace(shape=shape, **fields)


def name_image(stream, row):
    """Returns what an image of a stream is called: its file, and its record if any."""
    path = os.fsdecode((stream.names or stream.paths)[stream.file[row]])
    if stream.offset is None:
        return path
    return '%s: record %d' % (path, stream.number[row])


# In the graph


def hold(array, name):
    """Holds an array in a CPU variable that no checkpoint and no graph contains.

    Returns:
      (variable, feed): `feed` is to be given to the initialiser's run.
    """
    dtype = tf.string if array.dtype == object else array.dtype
    value = tf.placeholder(dtype, array.shape, name + '/value')
    variable = tf.Variable(
        value,
        trainable=False,
        collections=[tf.GraphKeys.LOCAL_VARIABLES],
        name=name,
    )
    return variable, {value: array}


# read_bytes: (row) -> its encoded image, None where images are in memory. decode: (rows
# int32 [k], their encoded images, string [k], or None) -> (images uint8 [k, height,
# width, channels], labels int64 [k]); k is known. feeds: for the initialisers' run.
Reader = collections.namedtuple('Reader', 'read_bytes decode feeds')


def build_reader(examples):
    """Builds what reads examples; to be placed on the CPU.

    Files are read in Python and fed: no op reads from the middle of a file, the one for
    a whole one takes longer, on 1.15 ten times, and a `py_func` of 2.x opens all GPUs.

    Args:
      examples: `data_sets.Examples`.

    Returns:
      A `Reader`.
    """
    labels, feeds = hold(examples.labels, 'labels')
    if is_stream(examples.images):
        read_bytes = make_read_bytes(examples.images)
        decode_images, more_feeds = _build_decode(examples.images)
    else:
        read_bytes = None
        images, more_feeds = hold(examples.images, 'images')

        def decode_images(rows, encoded):
            del encoded
            return tf.gather(images, rows)

    def decode(rows, encoded):
        return decode_images(rows, encoded), tf.gather(labels, rows)

    return Reader(read_bytes, decode, {**feeds, **more_feeds})


def read_all(read_bytes, rows):
    """Returns encoded images to be fed: rows, an array -> bytes objects, as shaped."""
    try:
        return _read_each(read_bytes, rows)
    except OSError as error:
        name = os.fsdecode(error.filename)
        raise RunFailed('%s: %s' % (name, error.strerror)) from None


def _read_each(read_bytes, rows):
    encoded = [read_bytes(row) for row in rows.ravel().tolist()]
    return np.array(encoded, object).reshape(rows.shape)


def make_read_bytes(stream):
    """Returns a function (row) -> the bytes of its encoded image.

    A small set is read from its files once; to open one takes as long as to decode a
    tenth of a small image.
    """
    lengths = stream.length.tolist()
    offsets = [0] * len(lengths) if stream.offset is None else stream.offset.tolist()
    paths = [stream.paths[file] for file in stream.file]

    def read_bytes(row):
        file = os.open(paths[row], os.O_RDONLY)
        try:
            return os.pread(file, lengths[row], offsets[row])
        finally:
            os.close(file)

    if sum(lengths) <= HELD_BYTES:
        return functools.lru_cache(maxsize=None)(read_bytes)
    return read_bytes


def _build_decode(stream):
    """Builds `Reader.decode` of a stream, for images only: (decode, feeds)."""
    kinds, feeds = hold(stream.kind.astype(np.int32), 'kinds')
    plan = make_plan(stream)
    alike = len(plan.kinds) == 1 and not plan.fitted

    def decode_part(part):
        pairs = zip(*map(tf.unstack, part))
        return tf.stack([decode_image(*pair, plan) for pair in pairs])

    def decode(rows, encoded):
        count = rows.shape.as_list()[0]
        rows = _note(stream, rows)
        with tf.control_dependencies([rows]):  # nothing else may need them
            parts = tf.identity(encoded), tf.gather(kinds, rows)
        if not alike:  # too many ops to have them for each image of a batch
            return tf.map_fn(
                lambda pair: decode_image(*pair, plan),
                parts,
                tf.uint8,
                parallel_iterations=PART,
            )
        if count <= PART:
            return decode_part(parts)
        filled = -(-count // PART) * PART
        places = tf.minimum(tf.range(filled), count - 1)  # the last one repeats
        parts = [tf.reshape(tf.gather(p, places), [-1, PART]) for p in parts]
        decoded = tf.map_fn(
            decode_part, tuple(parts), tf.uint8, parallel_iterations=PARALLEL_PARTS
        )
        return tf.reshape(decoded, (-1,) + stream.shape[1:])[:count]

    return decode, feeds


# How the images of a stream are decoded, found out once for all of them. shape:
# (height, width, channels) of the result. channels: that are decoded. kinds: that are
# present. fitted: whether any has another size than it is to have.
Plan = collections.namedtuple('Plan', 'shape channels kinds fitted')


def make_plan(stream):
    """Returns the `Plan` of a stream."""
    shape = stream.shape[1:]
    channels = 1 if shape[2] == 1 and stream.grey.all() else 3
    fitted = bool((stream.size != shape[:2]).any())
    return Plan(shape, channels, np.unique(stream.kind).tolist(), fitted)


# Which rows of which stream were read last: a decoder's error does not say of which.
READING = 'reading'


def _note(stream, rows):
    reading = tf.Variable(
        tf.zeros_like(rows),
        trainable=False,
        collections=[tf.GraphKeys.LOCAL_VARIABLES],
        name='reading',
    )
    tf.add_to_collection(READING, (stream, reading))
    return tf.identity(reading.assign(rows))


def decode_image(contents, kind, plan):
    """Decodes an image of a stream.

    Transparency becomes white; a grey image of a coloured set has three equal channels,
    and a coloured one of a grey set becomes grey.

    Args:
      contents: string scalar.
      kind: int32 scalar, see `image_headers`.
      plan: the stream's `Plan`.

    Returns:
      uint8 [height, width, channels].
    """
    shape, channels, kinds, fitted = plan
    decoders = list_decoders(contents, channels)
    decoders[GIF] = lambda: _decode_gif(contents, None if fitted else shape[:2] + (3,))
    image = _choose(kind, [(number, decoders[number]) for number in kinds])
    image.set_shape([None, None, channels])
    if channels > shape[2]:
        image = tf.tensordot(tf.cast(image, tf.float32), LUMINANCE, 1)[..., tf.newaxis]
    if fitted:
        image = fit(tf.cast(image, tf.float32), shape[:2])
    if image.dtype != tf.uint8:
        image = tf.cast(tf.round(image), tf.uint8)
    image.set_shape(shape)
    return image


def list_decoders(contents, channels=3):
    """Returns {kind: function that builds the decoder of such images}, all but GIF.

    Each gives uint8 [height, width, channels], transparency made white.

    Args:
      contents: string scalar.
      channels: 1 for images that are all grey, else 3.
    """
    return {
        PLAIN: lambda: tf.image.decode_png(contents, channels=channels),  # JPEG, too
        CLEAR: lambda: _blend(tf.image.decode_png(contents, channels=4), channels),
        BMP8: lambda: _decode_palette(contents)[..., :channels],
        BMP24: lambda: tf.image.decode_bmp(contents, channels=3),
        BMP32: lambda: _blend(_find_opaque(tf.image.decode_bmp(contents, channels=4))),
    }


def _choose(kind, decoders):
    """Builds the decoder of a kind; only where there are several, as a switch."""
    (number, decoder), *others = decoders
    if not others:
        return decoder()
    return tf.cond(tf.equal(kind, number), decoder, lambda: _choose(kind, others))


def _blend(image, channels=3):
    """Lays an image on white: uint8 [h, w, 4] -> uint8 [h, w, channels]."""
    pixels = tf.cast(image, tf.float32)
    opaque = pixels[..., 3:] / 255
    pixels = pixels[..., :channels] * opaque + 255 * (1 - opaque)
    return tf.cast(tf.round(pixels), tf.uint8)


def _find_opaque(image):
    """Makes a BMP opaque whose fourth bytes are all zero: they are not used."""
    alpha = tf.cast(image[..., 3:], tf.int32)
    unused = 255 * tf.cast(tf.equal(tf.reduce_max(alpha), 0), tf.int32)
    return tf.concat([image[..., :3], tf.cast(alpha + unused, tf.uint8)], axis=2)


def _decode_gif(contents, shape):
    """Decodes the first frame, which may be smaller than the header has it."""
    frame = tf.image.decode_gif(contents)[0]
    return frame if shape is None else tf.ensure_shape(frame, shape)


def _decode_palette(contents):
    """Decodes a BMP of 8 bits: TensorFlow gives the places in its palette."""
    places = tf.image.decode_bmp(contents)[..., 0]

    def number(start):
        return tf.decode_raw(tf.substr(contents, start, 4), tf.int32)[0]

    first = 14 + number(14)  # blue, green, red and nothing of each colour, then pixels
    length = tf.minimum(number(10) - first, 1024)
    table = tf.decode_raw(tf.substr(contents, first, length), tf.uint8)
    table = tf.pad(table, [[0, 1024 - tf.size(table)]])  # what it lacks is black
    table = tf.reshape(table, [256, 4])[:, 2::-1]
    return tf.gather(table, tf.cast(places, tf.int32))


def fit(pixels, size):
    """Scales an image by area, in its proportions; its border's mean fills the rest.

    Args:
      pixels: float32 [h, w, channels].
      size: (height, width) of the result.

    Returns:
      float32 [height, width, channels].
    """
    height, width = size
    edges = [pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]]
    background = tf.reduce_mean(tf.concat(edges, axis=0), axis=0)
    scaled_to = find_size(tf.shape(pixels)[:2], size)
    scaled = tf.image.resize_area(pixels[tf.newaxis], scaled_to)[0] - background
    top, left = (height - scaled_to[0]) // 2, (width - scaled_to[1]) // 2
    return tf.image.pad_to_bounding_box(scaled, top, left, height, width) + background


def find_size(size, room):
    """Returns the largest [height, width] within `room`, in the proportions of `size`.

    Args:
      size, room: int32 [2] both, tensors or arrays.
    """
    size, room = tf.cast(size, tf.float64), tf.cast(room, tf.float64)
    largest = tf.round(size * tf.reduce_min(room / size))
    return tf.maximum(tf.cast(largest, tf.int32), 1)


# Before a run


def decode_all(images, threads):
    """Yields all images in order, uint8 [m, height, width, channels].

    Args:
      images: a `Stream`, or bytes in memory.
      threads: of the session, as `utils.choose_threads` returns them: later sessions of
        the process have the same threads, whatever they ask for.

    Raises:
      UserError: names the image that can't be decoded.
    """
    if not is_stream(images):
        for start in range(0, len(images), CHUNK):
            yield images[start : start + CHUNK]
        return
    with _open_decoder(images, threads) as decode, _open_bar(images) as bar:
        for rows in _split_rows(images):
            decoded, why = _try(decode, rows)
            if why is not None:
                # What failed may be well when it is tried again.
                bad = _find_bad_rows(decode, rows) or [(rows[0], why)]
                raise UserError(explain_bad(images, *bad[0]))
            bar.update(len(rows))
            yield decoded


def find_bad(stream, threads):
    """Decodes all images of a stream.

    Returns:
      A list of (row, why) of those that can't be decoded.
    """
    bad = []
    with _open_decoder(stream, threads) as decode, _open_bar(stream) as bar:
        for rows in _split_rows(stream):
            if _try(decode, rows)[1] is not None:
                bad += _find_bad_rows(decode, rows)
            bar.update(len(rows))
    return bad


def _split_rows(stream):
    """Yields the rows of a stream, `CHUNK` at a time."""
    for start in range(0, stream.shape[0], CHUNK):
        yield range(start, min(start + CHUNK, stream.shape[0]))


def _try(decode, rows):
    """Returns (images, None), or (None, why) where one of them can't be decoded."""
    with quiet_stderr():  # the formats' own libraries speak, too
        try:
            return decode(rows), None
        except OSError as error:
            return None, error.strerror
        except tf.errors.OpError as error:
            return None, utils.find_cause(error)


def _find_bad_rows(decode, rows):
    """Returns a list of (row, why) of those among `rows` that can't be decoded."""
    tried = [(row, _try(decode, [row])[1]) for row in rows]
    return [(row, why) for row, why in tried if why is not None]


def explain_bad(stream, row, why):
    """Returns a line on an image that can't be decoded."""
    return '%s can not be decoded: %s; --skip_bad leaves such images out' % (
        name_image(stream, row),
        why,
    )


def find_culprit(session):
    """Returns a line on the image that made a read fail, None if none is bad.

    Args:
      session: in whose graph it failed.
    """
    for stream, reading in session.graph.get_collection(READING):
        rows = np.unique(session.run(reading))
        bad = find_bad(take(stream, rows), (0, 0))
        if bad:
            row, why = bad[0]
            return explain_bad(stream, rows[row], why)
    return None


@contextlib.contextmanager
def _open_decoder(stream, threads):
    """Yields a function (rows) -> their images, decoded in a session of its own."""
    calls = {}
    with tf.Graph().as_default(), tf.device('/cpu:0'):
        read_bytes = make_read_bytes(stream)
        decode_images, feeds = _build_decode(stream)
        for count in {1, min(CHUNK, stream.shape[0])}:
            rows = tf.placeholder(tf.int32, [count])
            encoded = tf.placeholder(tf.string, [count])
            calls[count] = [rows, encoded], decode_images(rows, encoded)
        with utils.open_session(utils.CPU, threads) as session:
            session.run(tf.local_variables_initializer(), feeds)
            calls = {n: session.make_callable(i, r) for n, (r, i) in calls.items()}

            def decode(rows):
                count = min(n for n in calls if n >= len(rows))
                padded = np.minimum(np.arange(count), len(rows) - 1)
                padded = np.array(rows, np.int32)[padded]
                return calls[count](padded, _read_each(read_bytes, padded))[: len(rows)]

            yield decode


def _open_bar(stream):
    """Returns a bar for a whole stream, on a terminal only."""
    return utils.open_bar('decoding', 'image', total=stream.shape[0])
