"""Encoded images: what their first bytes say, and the pixels that come out of them."""

import collections
import os
import struct

import numpy as np
import pytest

import decoding
import image_headers
import predict
from data_sets import Examples
from image_headers import BMP8, BMP24, BMP32, CLEAR, GIF, PLAIN, Header, Incomplete
from tests.images import (
    GREYS,
    bmp,
    chunk,
    gif,
    jpeg,
    png,
    segment,
    write,
)
from tf1 import tf
from utils import UserError

SIZE = HEIGHT, WIDTH = 9, 7
RANDOM = np.random.RandomState(0)


def draw(channels, most=255):
    """A random image, uint8."""
    size = SIZE + (channels,)
    return RANDOM.randint(0, most + 1, size).astype(np.uint8)


GREY, COLOUR, COLOURS = draw(1), draw(3), draw(3, 3) * 85
CLEAR_GREY, CLEAR_COLOUR = draw(2), draw(4)
EVEN = GREY // 2 * 2
# Red, green and blue of 256 places.
PALETTE = RANDOM.randint(0, 256, [256, 3]).astype(np.uint8)
ALPHAS = np.concatenate([np.arange(200), np.full(56, 255)]).astype(np.uint8)
BGR_PALETTE = np.insert(PALETTE[:, ::-1], 3, 0, axis=1).tobytes()


def on_white(colours, opaque):
    """Integers: no result is half way between two."""
    colours, opaque = colours.astype(int), opaque.astype(int)
    return (colours * opaque + 255 * (255 - opaque) + 127) // 255


def in_grey(colours):
    """BT.601."""
    thousands = colours.astype(int).dot([299, 587, 114])[..., np.newaxis]
    return (thousands + 500) // 1000


def decode_jpeg(data, channels):
    with tf.Graph().as_default(), tf.Session() as session:
        return session.run(tf.image.decode_jpeg(data, channels=channels))


def encode_png(image):
    with tf.Graph().as_default(), tf.Session() as session:
        return session.run(tf.image.encode_png(image))


# data: the file. header: what it is. pixels: uint8 [HEIGHT, WIDTH, 1 or 3].
Sample = collections.namedtuple('Sample', 'data kind grey pixels')


def make_samples():
    """Returns {name: `Sample`}: each way to encode an image."""
    opaque_place = np.where(GREY[0, 0] == GREY, 0, 255)
    opaque_colour = np.where((COLOUR[0, 0] == COLOUR).all(2, keepdims=True), 0, 255)
    found = {
        'grey.png': Sample(png(GREY), PLAIN, True, GREY),
        'colour.png': Sample(png(COLOUR), PLAIN, False, COLOUR),
        'tensorflow.png': Sample(encode_png(COLOUR), PLAIN, False, COLOUR),
        'palette.png': Sample(
            png(GREY, palette=PALETTE.tobytes()), PLAIN, False, PALETTE[GREY[..., 0]]
        ),
        'few_colours.png': Sample(
            png(GREY % 4, 2, palette=PALETTE[:4].tobytes()),
            *(PLAIN, False, PALETTE[GREY[..., 0] % 4]),
        ),
        'interlaced.png': Sample(png(COLOUR, interlaced=True), PLAIN, False, COLOUR),
        'grey_16.png': Sample(png(GREY.astype(int) * 257, 16), PLAIN, True, GREY),
        'colour_16.png': Sample(
            png(COLOUR.astype(int) * 257, 16), PLAIN, False, COLOUR
        ),
        'grey_1.png': Sample(png(GREY % 2, 1), PLAIN, True, GREY % 2 * 255),
        'grey_4.png': Sample(png(GREY % 16, 4), PLAIN, True, GREY % 16 * 17),
        'clear_grey.png': Sample(
            png(CLEAR_GREY),
            *(CLEAR, True, on_white(CLEAR_GREY[..., :1], CLEAR_GREY[..., 1:])),
        ),
        'clear_colour.png': Sample(
            png(CLEAR_COLOUR),
            *(CLEAR, False, on_white(CLEAR_COLOUR[..., :3], CLEAR_COLOUR[..., 3:])),
        ),
        'clear_16.png': Sample(
            png(CLEAR_COLOUR.astype(int) * 257, 16, interlaced=True),
            *(CLEAR, False, on_white(CLEAR_COLOUR[..., :3], CLEAR_COLOUR[..., 3:])),
        ),
        'grey_trns.png': Sample(
            png(GREY, clear=b'\0' + GREY[0, 0].tobytes()),
            *(CLEAR, True, on_white(GREY, opaque_place)),
        ),
        'colour_trns.png': Sample(
            png(COLOUR, clear=b''.join(b'\0%c' % v for v in COLOUR[0, 0].tolist())),
            *(CLEAR, False, on_white(COLOUR, opaque_colour)),
        ),
        'palette_trns.png': Sample(
            png(GREY, palette=PALETTE.tobytes(), clear=ALPHAS[:200].tobytes()),
            *(CLEAR, False, on_white(PALETTE[GREY[..., 0]], ALPHAS[GREY])),
        ),
        'first_frame.gif': Sample(
            gif(EVEN, 254 - EVEN), GIF, False, EVEN.repeat(3, axis=2)
        ),
        'colour.bmp': Sample(bmp(COLOUR), BMP24, False, COLOUR),
        'top_down.bmp': Sample(bmp(COLOUR, top_down=True), BMP24, False, COLOUR),
        'grey.bmp': Sample(bmp(GREY, 8, GREYS), BMP8, True, GREY),
        'inverted.bmp': Sample(bmp(GREY, 8, GREYS[::-1]), BMP8, True, 255 - GREY),
        'palette.bmp': Sample(
            bmp(GREY, 8, BGR_PALETTE), BMP8, False, PALETTE[GREY[..., 0]]
        ),
        'few_colours.bmp': Sample(
            bmp(GREY % 4, 8, BGR_PALETTE[:16]),
            *(BMP8, False, PALETTE[GREY[..., 0] % 4]),
        ),
        'gap.bmp': Sample(bmp(GREY, 8, GREYS, gap=b'ab'), BMP8, True, GREY),
        'long_header.bmp': Sample(
            bmp(GREY, 8, BGR_PALETTE, top_down=True, info_size=124),
            *(BMP8, False, PALETTE[GREY[..., 0]]),
        ),
        'unused.bmp': Sample(bmp(COLOUR, 32), BMP32, False, COLOUR),
        'clear.bmp': Sample(
            bmp(CLEAR_COLOUR, 32),
            *(BMP32, False, on_white(CLEAR_COLOUR[..., :3], CLEAR_COLOUR[..., 3:])),
        ),
        'clear_top_down.bmp': Sample(
            bmp(CLEAR_COLOUR, 32, top_down=True, info_size=108),
            *(BMP32, False, on_white(CLEAR_COLOUR[..., :3], CLEAR_COLOUR[..., 3:])),
        ),
    }
    for name, data in (
        ('grey.jpg', jpeg(GREY)),
        ('colour.jpg', jpeg(COLOUR)),
        ('progressive.jpg', jpeg(COLOUR, progressive=True)),
        ('exif.jpg', insert(jpeg(COLOUR), segment(60000))),
    ):
        grey = name == 'grey.jpg'
        pixels = decode_jpeg(data, 1 if grey else 3)
        found[name] = Sample(data, PLAIN, grey, pixels)
    return found


def insert(data, more):
    """A JPEG with something before its first segment."""
    return data[:2] + more + data[2:]


@pytest.fixture(scope='module')
def samples():
    return make_samples()


NAMES = [
    'clear.bmp',
    'clear_16.png',
    'clear_colour.png',
    'clear_grey.png',
    'clear_top_down.bmp',
    'colour.bmp',
    'colour.jpg',
    'colour.png',
    'colour_16.png',
    'colour_trns.png',
    'exif.jpg',
    'few_colours.bmp',
    'few_colours.png',
    'first_frame.gif',
    'gap.bmp',
    'grey.bmp',
    'grey.jpg',
    'grey.png',
    'grey_1.png',
    'grey_16.png',
    'grey_4.png',
    'grey_trns.png',
    'interlaced.png',
    'inverted.bmp',
    'long_header.bmp',
    'palette.bmp',
    'palette.png',
    'palette_trns.png',
    'progressive.jpg',
    'tensorflow.png',
    'top_down.bmp',
    'unused.bmp',
]


# Headers


def test_all_samples_are_tested(samples):
    assert sorted(samples) == NAMES


@pytest.mark.parametrize('name', NAMES)
def test_the_header_of_each_kind(samples, name):
    sample = samples[name]
    expected = Header(sample.kind, HEIGHT, WIDTH, sample.grey)
    assert image_headers.read_header(sample.data) == expected


@pytest.mark.parametrize('name', NAMES)
def test_a_header_that_goes_on_is_incomplete_and_never_another(samples, name):
    data = samples[name].data
    whole = image_headers.read_header(data)
    few = 8 if name.endswith('.png') else 4
    for length in [*range(few, 200), len(data) - 1]:
        try:
            found = image_headers.read_header(data[:length])
        except Incomplete:
            continue
        assert found == whole, 'of the first %d bytes' % length
    with pytest.raises(Incomplete):
        image_headers.read_header(data[:9])


@pytest.mark.parametrize(
    'data',
    [
        insert(jpeg(COLOUR), segment(60000)),
        insert(jpeg(COLOUR), b''.join(segment(20000, 0xE0 + i) for i in range(15))),
        png(COLOUR, more=b'x' * 20000),
    ],
    ids=['one segment', 'all segments', 'a chunk'],
)
def test_a_long_header_is_read_to_its_end(data):
    kind = Header(PLAIN, HEIGHT, WIDTH, False)
    with pytest.raises(Incomplete):
        image_headers.read_header(data[: image_headers.FIRST_BYTES])
    assert image_headers.read_header(data) == kind


def test_markers_of_a_jpeg_may_have_fill_bytes_before_them():
    for more in (b'\xff', b'\xff' * 100, segment(9) + b'\xff\xff'):
        data = insert(jpeg(GREY), more)
        expected = Header(PLAIN, HEIGHT, WIDTH, True)
        assert image_headers.read_header(data) == expected, more


def resized(data, place, form, *size):
    """A file with another size in its header."""
    packed = struct.pack(form, *size)
    return data[:place] + packed + data[place + len(packed) :]


@pytest.mark.parametrize(
    'data, told',
    [
        (b'', 'empty'),
        (b'hello', 'no PNG, JPEG, GIF or BMP: starts with bytes 68656c6c'),
        (b'\xff', 'no PNG, JPEG, GIF or BMP: starts with bytes ff'),
        (png(GREY)[:7], 'no PNG, JPEG, GIF or BMP: starts with bytes 89504e47'),
        (b'\xff\xd8' + bytes(20), 'a damaged JPEG: no marker at byte 2'),
        (insert(jpeg(GREY), b'\xff\xe1\0\x09' + bytes(20)), 'no marker at byte 13'),
        (b'\xff\xd8\xff\xd9' + bytes(20), 'no frame before its data'),
        (insert(jpeg(GREY), b'\xff\xda\0\x08'), 'no frame before its data'),
        (resized(png(GREY), 16, '>II', 0, 5), '5 x 0 pixels'),
        (resized(png(GREY), 16, '>II', 2**32 - 1, 5), '5 x 4294967295 pixels'),
        (png(GREY)[:8] + chunk(b'CgBI', b'1234') + png(GREY)[8:], "chunk b'CgBI'"),
        (resized(gif(GREY), 6, '<HH', 5, 0), '0 x 5 pixels'),
        (resized(bmp(GREY), 18, '<ii', -5, 3), '3 x -5 pixels'),
        (resized(bmp(GREY), 18, '<ii', 5, -(2**31)), '2147483648 x 5 pixels'),
        (resized(bmp(GREY), 14, '<I', 12), 'not decoded: header of 12'),
        (resized(bmp(GREY), 28, '<H', 4), 'not decoded: 4 bits, compression 0'),
        (resized(bmp(GREY), 30, '<I', 1), 'not decoded: 24 bits, compression 1'),
    ],
)
def test_what_is_no_image_is_told(data, told):
    with pytest.raises(ValueError) as error:
        image_headers.read_header(data)
    assert told in str(error.value)


def test_damaged_transparency_is_no_transparency_left_out():
    clear = png(GREY, clear=b'\0\7')
    assert image_headers.read_header(clear).kind == CLEAR
    place = clear.index(b'tRNS')
    for damaged in (place, place + 5):  # its name, what it says
        data = bytearray(clear)
        data[damaged] ^= 32
        with pytest.raises(ValueError, match='has another checksum'):
            image_headers.read_header(bytes(data))


@pytest.mark.parametrize(
    'data, told',
    [
        (resized(bmp(COLOUR), 10, '<i', -1000), 'in bytes 4294966296 to 4294966509'),
        (resized(bmp(COLOUR), 10, '<i', 53), 'pixels are in bytes 53 to'),
        (resized(bmp(COLOUR), 18, '<ii', 2**29, 9), 'to 14495514678'),
        (resized(bmp(GREY, 8, GREYS), 14, '<I', 65576), 'in bytes 1078 to'),
        (bmp(COLOUR)[:-9], 'in bytes 54 to 267'),
    ],
)
def test_pixels_that_are_not_in_a_bmp_are_not_read_elsewhere(data, told):
    # TensorFlow 1.15 would end the process.
    with pytest.raises(ValueError, match='a damaged BMP: ') as error:
        image_headers.read_header(data, len(data))
    assert told in str(error.value)


def test_padding_after_a_bmps_last_row_may_be_missing():
    data = bmp(COLOUR)
    assert data.endswith(b'\0\0\0')
    assert image_headers.read_header(data[:-3], len(data) - 3).kind == BMP24


# Decoding


def make_stream(directory, files, shape):
    """Writes files, a list of bytes; returns the `decoding.Stream` of them."""
    paths = [str(directory / ('%03d' % number)) for number in range(len(files))]
    for path, data in zip(paths, files):
        write(path, data)
    headers = [image_headers.read_header(data) for data in files]
    count = len(files)
    return decoding.Stream(
        paths=list(map(os.fsencode, paths)),
        names=None,
        file=np.arange(count, dtype=np.int32),
        offset=None,
        length=np.array(list(map(len, files))),
        number=np.zeros(count, np.int64),
        kind=np.array([header.kind for header in headers], np.uint8),
        size=np.array([header[1:3] for header in headers], np.int32),
        grey=np.array([header.grey for header in headers]),
        shape=(count,) + tuple(shape),
    )


def read(stream, rows, config=None):
    """Reads rows of a stream as training does; returns (images, labels)."""
    labels = np.arange(stream.shape[0]) + 7
    with tf.Graph().as_default(), tf.device('/cpu:0'):
        reader = decoding.build_reader(Examples(stream, labels))
        rows = np.array(rows, np.int32)
        encoded = tf.constant(decoding.read_all(reader.read_bytes, rows))
        batch = reader.decode(tf.constant(rows), encoded)
        with tf.Session(config=config) as session:
            session.run(tf.local_variables_initializer(), reader.feeds)
            return session.run(batch)


def assert_equal(images, expected, names):
    """Names each image that differs, and by how much."""
    assert images.dtype == np.uint8
    assert images.shape == expected.shape
    differences = np.abs(images.astype(int) - expected).max(axis=(1, 2, 3))
    wrong = {n: d for n, d in zip(names, differences.tolist()) if d}
    assert not wrong, 'pixels differ by up to: %s' % wrong


def in_colour(pixels):
    return pixels if pixels.shape[2] == 3 else pixels.repeat(3, axis=2)


@pytest.mark.parametrize('name', NAMES)
def test_each_kind_alone_in_a_set_of_colour_images(tmp_path, samples, name):
    sample = samples[name]
    stream = make_stream(tmp_path, [sample.data], SIZE + (3,))
    images, labels = read(stream, [0])
    assert_equal(images, in_colour(sample.pixels)[np.newaxis], [name])
    assert labels.tolist() == [7]


@pytest.mark.parametrize('name', NAMES)
def test_each_kind_alone_in_a_set_of_grey_images(tmp_path, samples, name):
    sample = samples[name]
    stream = make_stream(tmp_path, [sample.data], SIZE + (1,))
    grey = sample.pixels if sample.grey else in_grey(in_colour(sample.pixels))
    assert_equal(read(stream, [0])[0], grey[np.newaxis], [name])


@pytest.mark.parametrize('channels', [1, 3])
def test_all_kinds_in_one_set(tmp_path, samples, channels):
    files = [samples[name].data for name in NAMES]
    pixels = np.array([in_colour(samples[name].pixels) for name in NAMES])
    if channels == 1:
        pixels = np.array([in_grey(image) for image in pixels])
    stream = make_stream(tmp_path, files, SIZE + (channels,))
    images, labels = read(stream, range(len(NAMES)))
    assert_equal(images, pixels, NAMES)
    assert labels.tolist() == list(range(7, 7 + len(NAMES)))


def tagged(number):
    """An image that tells its number: plain, clear or a BMP, in turns."""
    image = np.array([number // 256, number % 256, 9], np.uint8).reshape([1, 1, 3])
    clear = np.insert(image, 3, 255, axis=2)
    return (png(image), png(clear), bmp(image))[number % 3]


@pytest.mark.parametrize('count', [1, 64, 65, 128, 150])
def test_large_reads_keep_the_order(tmp_path, count):
    stream = make_stream(tmp_path, list(map(tagged, range(300))), (1, 1, 3))
    rows = np.random.RandomState(1).permutation(300)[:count]
    images, labels = read(stream, rows)
    high, low, rest = images.reshape([count, 3]).astype(int).T
    assert (high * 256 + low).tolist() == rows.tolist()
    assert labels.tolist() == (rows + 7).tolist()
    assert (rest == 9).all()


def test_the_same_bits_with_one_thread_and_with_four(tmp_path, samples):
    files = [samples[name].data for name in NAMES] * 5
    stream = make_stream(tmp_path, files, (13, 11, 3))
    found = []
    for threads in (1, 4):
        config = tf.ConfigProto(
            use_per_session_threads=True,
            intra_op_parallelism_threads=threads,
            inter_op_parallelism_threads=threads + 1,  # one is for Python
        )
        found.append(read(stream, range(len(files)), config)[0])
    assert found[0].tobytes() == found[1].tobytes()
    halves = found[0][: len(NAMES)], found[0][len(NAMES) : 2 * len(NAMES)]
    assert (halves[0] == halves[1]).all(), 'the place in a batch changes pixels'


def test_files_that_are_not_held_in_memory_are_the_same(tmp_path, samples, monkeypatch):
    files = [samples[name].data for name in NAMES]
    stream = make_stream(tmp_path, files, SIZE + (3,))
    held, _ = read(stream, range(len(files)))
    monkeypatch.setattr(decoding, 'HELD_BYTES', 0)
    assert (read(stream, range(len(files)))[0] == held).all()
    first, second = decoding.make_read_bytes(stream), files[1]
    assert first(1) == second == first(1)
    write(stream.paths[1].decode(), second[:-1] + b'x')
    assert first(1) == second[:-1] + b'x', 'it is held'


def test_images_of_another_size_in_a_set_are_fitted_and_the_others_left(
    tmp_path, samples
):
    large = np.full([30, 14, 3], 50, np.uint8)
    large[:15] = 200
    names = ['colour.png', 'palette.bmp', 'first_frame.gif']
    files = [samples[name].data for name in names] + [png(large)]
    images, _ = read(make_stream(tmp_path, files, SIZE + (3,)), range(4))
    pixels = np.array([in_colour(samples[name].pixels) for name in names])
    assert_equal(images[:3], pixels, names)
    # 9 x 4.2 pixels, so 4 columns, and the border's mean left and right.
    border = images[3][0, 0, 0]
    assert abs(int(border) - 125) <= 1
    assert (images[3][:, [0, 5, 6]] == border).all()
    assert (images[3][:4, 1:5] == 200).all() and (images[3][5:, 1:5] == 50).all()


@pytest.mark.parametrize('shape', [(12, 12, 3), (5, 3, 3), (12, 6, 1), (6, 12, 1)])
def test_a_fitted_image_is_what_predict_makes_of_the_file(tmp_path, samples, shape):
    files = [samples[name].data for name in NAMES]
    images, _ = read(make_stream(tmp_path, files, shape), range(len(files)))
    with tf.Graph().as_default(), tf.Session() as session:
        decode = predict.make_decode(session, *predict.build_decoders())
        given = tf.placeholder(tf.float32, [None, None, shape[2]])
        fitted = decoding.fit(given, shape[:2])
        for name, data, image in zip(NAMES, files, images):
            pixels = decode(data)
            for border in (0, 255):  # grey images are inverted for one of them
                prepared = predict.prepare(pixels, shape, border)
                expected = session.run(fitted, {given: prepared})
                difference = np.abs(image - expected).max()
                if difference <= 1:
                    break
            # Transparency and grey are rounded before an image is scaled.
            assert difference <= 1, '%s differs by %.2f' % (name, difference)


def test_some_of_a_stream(tmp_path, samples):
    files = [samples[name].data for name in NAMES]
    stream = make_stream(tmp_path, files, SIZE + (3,))
    rows = np.array([5, 2, 2])
    some = decoding.take(stream, rows)
    assert some.shape == (3,) + SIZE + (3,)
    assert (read(some, range(3))[0] == read(stream, rows)[0]).all()
    assert decoding.name_image(some, 1) == str(tmp_path / '002')


# What can't be decoded


BAD = {3: 'cut.png', 6: 'cut.jpg', 7: 'crc.png'}


def make_bad_stream(directory, samples, kinds):
    """Ten images of which `BAD` are bad, behind headers that are good."""
    names = ['colour.png', 'colour.jpg', 'colour.bmp', 'clear_colour.png']
    files = [samples[names[i % kinds]].data for i in range(10)]
    data = samples['colour.png'].data
    files[3] = data[:-30]
    files[6] = samples['colour.jpg'].data[:-100]
    files[7] = data[:60] + bytes([data[60] ^ 1]) + data[61:]
    return make_stream(directory, files, SIZE + (3,))


@pytest.mark.parametrize('kinds', [1, 4])
def test_find_bad_finds_all_and_no_other(tmp_path, samples, kinds, capfd):
    stream = make_bad_stream(tmp_path, samples, kinds)
    bad = decoding.find_bad(stream, (0, 0))
    assert [row for row, _ in bad] == sorted(BAD)
    for row, why in bad:
        assert ('JPEG' if row == 6 else 'PNG') in why and '\n' not in why
    assert capfd.readouterr() == ('', ''), 'a library of a format was heard'


def test_find_bad_in_a_set_of_several_chunks(tmp_path, samples, monkeypatch):
    monkeypatch.setattr(decoding, 'CHUNK', 4)
    stream = make_bad_stream(tmp_path, samples, 4)
    assert [row for row, _ in decoding.find_bad(stream, (0, 0))] == sorted(BAD)
    good = np.array([row for row in range(10) if row not in BAD])
    stream = decoding.take(stream, good)
    assert decoding.find_bad(stream, (0, 0)) == []
    parts = list(decoding.decode_all(stream, (0, 0)))
    assert list(map(len, parts)) == [4, 3]
    assert (np.concatenate(parts) == read(stream, range(7))[0]).all()


def test_decode_all_names_the_first(tmp_path, samples):
    stream = make_bad_stream(tmp_path, samples, 4)
    with pytest.raises(UserError) as error:
        list(decoding.decode_all(stream, (0, 0)))
    told = str(error.value)
    assert told.startswith(str(tmp_path / '003') + ' can not be decoded: Invalid PNG')
    assert told.endswith('; --skip_bad leaves such images out')


def test_decode_all_tells_what_fails_and_is_well_again(tmp_path, samples, monkeypatch):
    failures = [(None, 'Input/output error')]
    try_once = decoding._try

    def fail_once(decode, rows):
        return failures.pop() if failures else try_once(decode, rows)

    monkeypatch.setattr(decoding, '_try', fail_once)
    stream = make_bad_stream(tmp_path, samples, 4)
    with pytest.raises(UserError) as error:
        list(decoding.decode_all(decoding.take(stream, [0, 1]), (0, 0)))
    assert ' can not be decoded: Input/output error; ' in str(error.value)


def test_decode_all_gives_what_is_in_memory_in_parts(monkeypatch):
    monkeypatch.setattr(decoding, 'CHUNK', 4)
    images = np.arange(10)
    parts = list(decoding.decode_all(images, (0, 0)))
    assert [part.tolist() for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize('kinds', [1, 4])
@pytest.mark.parametrize('count', [4, 80])
def test_the_culprit_of_a_read_that_fails_is_named(tmp_path, samples, kinds, count):
    stream = make_bad_stream(tmp_path, samples, kinds)
    # Of several reads, as those of training and of validation.
    for name in ('good', 'bad'):
        (tmp_path / name).mkdir()
    good = make_stream(tmp_path / 'good', [samples['colour.png'].data], SIZE + (3,))
    with tf.Graph().as_default(), tf.device('/cpu:0'):
        rows = tf.placeholder(tf.int32, [count])
        readers = [
            decoding.build_reader(Examples(s, np.zeros(s.shape[0], int)))
            for s in (good, stream)
        ]
        encoded = tf.placeholder(tf.string, [count])
        contents = decoding.read_all(readers[0].read_bytes, np.array([0]))
        first = readers[0].decode(tf.constant([0]), tf.constant(contents))
        batch = readers[1].decode(rows, encoded)

        def feed(*chosen):
            read = decoding.read_all(readers[1].read_bytes, np.array(chosen))
            return {rows: chosen, encoded: read}

        with tf.Session() as session:
            feeds = {**readers[0].feeds, **readers[1].feeds}
            session.run(tf.local_variables_initializer(), feeds)
            session.run(first)
            session.run(batch, feed(*[0] * count))
            assert decoding.find_culprit(session) is None
            for row, word in ((7, 'PNG'), (6, 'JPEG'), (3, 'PNG')):
                with pytest.raises(tf.errors.InvalidArgumentError):
                    session.run(batch[0], feed(*[0] * (count - 2), row, 1))
                told = decoding.find_culprit(session)
                name = str(tmp_path / ('%03d' % row))
                assert told.startswith(name + ' can not be decoded: '), told
                assert word in told and '\n' not in told


def test_a_gif_whose_first_frame_is_smaller_is_named(tmp_path, samples):
    small = gif(EVEN[:5, :5], screen=SIZE)
    files = [samples['first_frame.gif'].data, small]
    stream = make_stream(tmp_path, files, SIZE + (3,))
    ((row, why),) = decoding.find_bad(stream, (0, 0))
    assert row == 1 and '[5,5,3]' in why and '[9,7,3]' in why, why
    fitted = make_stream(tmp_path, files, (5, 5, 3))
    assert decoding.find_bad(fitted, (0, 0)) == []
    assert (read(fitted, [1])[0][0] == EVEN[:5, :5]).all()


def test_a_file_that_is_gone_is_named(tmp_path, samples):
    stream = make_stream(tmp_path, [samples['colour.png'].data] * 3, SIZE + (3,))
    (tmp_path / '001').unlink()
    ((row, why),) = decoding.find_bad(stream, (0, 0))
    assert row == 1 and 'No such file or directory' in why
