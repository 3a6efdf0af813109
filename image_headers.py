"""What an encoded image is, told by its first bytes: PNG, JPEG, GIF or BMP."""

import collections
import functools
import struct
import zlib

# Kinds, by what TensorFlow needs to decode them all alike on both lines.
# PLAIN: JPEG, and PNG without transparency. CLEAR: PNG with transparency.
KINDS = PLAIN, CLEAR, GIF, BMP8, BMP24, BMP32 = range(6)

# kind: one of `KINDS`. grey: whether it has no colours.
Header = collections.namedtuple('Header', 'kind height width grey')

# Enough of a file for the headers of nearly all.
FIRST_BYTES = 16384

# JPEG's start-of-frame markers, all ways of coding.
FRAMES = set(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


class Incomplete(Exception):
    """More bytes are needed."""


def read_header(data, length=None):
    """Returns the `Header` of an image.

    Args:
      data: its first bytes.
      length: how many it has in all, where that is known.

    Raises:
      ValueError: it is none that can be decoded; the text says why.
      Incomplete: the header goes on after `data`.

    Source: the formats' specifications: ITU-T T.81 annex B, W3C PNG, GIF89a, and
    Microsoft's bitmap structures.
    """
    for magic, read in (
        (b'\xff\xd8', _read_jpeg),
        (b'\x89PNG\r\n\x1a\n', _read_png),
        (b'GIF8', _read_gif),
        (b'BM', functools.partial(_read_bmp, length=length)),
    ):
        if data.startswith(magic):
            header = read(data)
            if not 0 < min(header[1:3]) <= max(header[1:3]) < 2**31:
                raise ValueError('%d x %d pixels' % (header.height, header.width))
            return header
    if not data:
        raise ValueError('empty')
    raise ValueError('no PNG, JPEG, GIF or BMP: starts with bytes %s' % data[:4].hex())


def _unpack(form, data, start):
    if len(data) < start + struct.calcsize(form):
        raise Incomplete
    return struct.unpack_from(form, data, start)


def _read_jpeg(data):
    place = 2
    while True:
        fill, marker = _unpack('>BB', data, place)
        if fill != 0xFF:
            raise ValueError('a damaged JPEG: no marker at byte %d' % place)
        if marker == 0xFF:  # markers may have fill bytes before them
            place += 1
        elif marker in FRAMES:
            height, width, components = _unpack('>HHB', data, place + 5)
            return Header(PLAIN, height, width, components == 1)
        elif marker in (0xD9, 0xDA):
            raise ValueError('a damaged JPEG: no frame before its data')
        else:
            place += 2 + _unpack('>H', data, place + 2)[0]


def _read_png(data):
    first, width, height, _, colour = _unpack('>4sIIBB', data, 12)
    if first != b'IHDR':
        raise ValueError('a damaged PNG: starts with a chunk %r' % first)
    clear = colour in (4, 6)
    place = 33  # after IHDR, which has 13 bytes and 12 around them
    while not clear:
        size, name = _unpack('>I4s', data, place)
        if name in (b'IDAT', b'IEND'):
            break
        # The decoder does without a damaged tRNS, and its image is opaque.
        (checksum,) = _unpack('>I', data, place + 8 + size)
        if checksum != zlib.crc32(data[place + 4 : place + 8 + size]):
            raise ValueError('a damaged PNG: chunk %r has another checksum' % name)
        clear = name == b'tRNS'
        place += 12 + size
    return Header(CLEAR if clear else PLAIN, height, width, colour in (0, 4))


def _read_gif(data):
    width, height = _unpack('<HH', data, 6)
    return Header(GIF, height, width, False)


def _read_bmp(data, length):
    (size,) = _unpack('<I', data, 14)
    if size < 40:
        raise ValueError('a BMP of a kind that is not decoded: header of %d' % size)
    width, height, _, bits, compression = _unpack('<iiHHI', data, 18)
    kind = {8: BMP8, 24: BMP24, 32: BMP32}.get(bits)
    if kind is None or compression not in (0, 3):
        raise ValueError(
            'a BMP of a kind that is not decoded: %d bits, compression %d'
            % (bits, compression)
        )
    (pixels,) = _unpack('<I', data, 10)
    row = (width * bits // 8 + 3) // 4 * 4
    end = pixels + row * (abs(height) - 1) + width * bits // 8
    # TensorFlow 1.15 would read from wherever in memory that is.
    if pixels < 14 + size or (length is not None and end > length):
        raise ValueError(
            'a damaged BMP: its header says pixels are in bytes %d to %d'
            % (pixels, end)
        )
    grey = False
    if kind == BMP8:
        if len(data) < pixels:
            raise Incomplete
        palette = data[14 + size : pixels]
        palette = palette[: min(len(palette) // 4, 256) * 4]  # there may be a gap
        grey = palette[0::4] == palette[1::4] == palette[2::4]
    return Header(kind, abs(height), width, grey)
