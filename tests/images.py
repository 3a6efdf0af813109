"""Encoded images made by hand: what no encoder at hand writes, and the rest."""

import struct
import zlib

import numpy as np

from tf1 import tf

# PNG's colour types, by channels.
GREY, GREY_CLEAR, COLOUR, COLOUR_CLEAR = 0, 4, 2, 6
PALETTE = 3


def write(name, data):
    with open(str(name), 'wb') as file:
        file.write(data)
    return name


def png(image, depth=8, palette=b'', clear=b'', interlaced=False, more=b''):
    """A PNG of an image [height, width, channels].

    Args:
      image: of whole numbers of `depth` bits; with a palette, of places in it.
      depth: 1, 2, 4, 8 or 16 bits.
      palette: red, green and blue of each place.
      clear: what the chunk tRNS holds; none if empty.
      interlaced: by Adam7.
      more: bytes of a chunk before the pixels that no decoder needs.
    """
    height, width, channels = image.shape
    colour = (GREY, GREY_CLEAR, COLOUR, COLOUR_CLEAR)[channels - 1]
    colour = PALETTE if palette else colour
    head = struct.pack('>IIBBBBB', width, height, depth, colour, 0, 0, int(interlaced))
    chunks = [(b'IHDR', head), (b'teXt', more), (b'PLTE', palette), (b'tRNS', clear)]
    parts = [image]
    if interlaced:
        parts = [image[y::dy, x::dx] for y, x, dy, dx in ADAM7]
    rows = b''.join(png_rows(part, depth) for part in parts if part.size)
    chunks += [(b'IDAT', zlib.compress(rows)), (b'IEND', b'')]
    needed = (b'IHDR', b'IDAT', b'IEND')
    return b'\x89PNG\r\n\x1a\n' + b''.join(
        chunk(name, data) for name, data in chunks if data or name in needed
    )


# First row and column, and steps to the next, of each pass.
# Source: W3C PNG, 8.2.
ADAM7 = (
    (0, 0, 8, 8),
    (0, 4, 8, 8),
    (4, 0, 8, 4),
    (0, 2, 4, 4),
    (2, 0, 4, 2),
    (0, 1, 2, 2),
    (1, 0, 2, 1),
)


def png_rows(image, depth):
    """The rows of a PNG, not filtered."""
    rows = image.reshape([len(image), -1])
    bits = (rows[..., np.newaxis] >> np.arange(depth)[::-1]) & 1
    packed = np.packbits(bits.reshape([len(image), -1]).astype(np.uint8), axis=1)
    return b''.join(b'\0' + row.tobytes() for row in packed)


def chunk(name, data):
    checksum = zlib.crc32(name + data)
    return struct.pack('>I', len(data)) + name + data + struct.pack('>I', checksum)


def jpeg(image, **options):
    options = dict(dict(quality=100), **options)
    with tf.Graph().as_default(), tf.Session() as session:
        return session.run(tf.image.encode_jpeg(image, **options))


def segment(size, marker=0xE1):
    """A segment of a JPEG, EXIF's if the marker is not given."""
    return struct.pack('>BBH', 0xFF, marker, size + 2) + b'\xff' * size


def bmp(image, bits=24, palette=b'', top_down=False, gap=b'', info_size=40):
    """A BMP of 8 (an index), 24 or 32 bits per pixel, rows from below.

    Args:
      image: [height, width, 1, 3 or 4 channels]; a fourth one is 0 if it has none.
      bits: per pixel.
      palette: blue, green, red and nothing of each place.
      top_down: whether rows are from above.
      gap: bytes before the pixels.
      info_size: of the header, that of later versions is longer.
    """
    pixels = np.zeros(image.shape[:2] + (bits // 8,), np.uint8)
    pixels[..., :3] = image[..., 2::-1] if bits > 8 else image
    if bits == 32 and image.shape[2] == 4:
        pixels[..., 3] = image[..., 3]
    height, width, _ = pixels.shape
    padding = b'\0' * (-bits // 8 * width % 4)
    rows = pixels if top_down else pixels[::-1]
    data = b''.join(row.tobytes() + padding for row in rows)
    info = struct.pack(
        '<IiiHHIIiiII',
        info_size,
        width,
        -height if top_down else height,
        1,
        bits,
        *(0, len(data), 0, 0, len(palette) // 4, 0),
    ).ljust(info_size, b'\0')
    start = 14 + len(info) + len(palette) + len(gap)
    header = b'BM' + struct.pack('<IHHI', start + len(data), 0, 0, start)
    return header + info + palette + gap + data


# Blue, green, red and nothing for each of 256 indices.
GREYS = bytes(grey for grey in range(256) for _ in range(4))


def gif(*images, screen=None):
    """A GIF of 128 greys: codes of 8 bits, the table cleared before it grows.

    Args:
      *images: of one frame each; their grey is made even.
      screen: its (height, width), the first image's if None.
    """
    height, width = screen or images[0].shape[:2]
    greys = bytes(2 * grey for grey in range(128) for _ in range(3))
    data = b'GIF89a' + struct.pack('<HHBBB', width, height, 0xF6, 0, 0) + greys
    for image in images:
        height, width, _ = image.shape
        codes = bytearray()
        for place, grey in enumerate((image[..., 0] // 2).ravel().tolist()):
            codes += (b'\x80' if place % 100 == 0 else b'') + bytes([grey])
        codes += b'\x81'
        blocks = [codes[i : i + 255] for i in range(0, len(codes), 255)]
        data += b'\x2c' + struct.pack('<HHHHB', 0, 0, width, height, 0) + b'\x07'
        data += b''.join(bytes([len(block)]) + bytes(block) for block in blocks)
        data += b'\0'
    return data + b'\x3b'
