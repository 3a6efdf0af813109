"""Says what class an image file is of: PNG, JPEG, BMP or GIF of any size.

An image is made what the network was trained on. Transparency becomes white. For a
network of grey images colours become grey, and the image is inverted if its border is
light where the border of the training images is dark, or the reverse. It is scaled by
area in its proportions; what it then lacks in width or height is filled in its border's
mean colour.
"""

import json
import os
import sys

import numpy as np

import command_line
import decoding
import encoded_files
import image_headers
import model
import trained
import utils
from tf1 import quiet_stderr, tf
from utils import RunFailed, UserError, log

DAMAGED = 'no PNG, JPEG, BMP or GIF, or a damaged one'


def main():
    flags = parse()
    found = trained.find(flags)
    if flags.json:
        print(found.title, file=sys.stderr)
    else:
        log.info('%s', found.title)
    with tf.Graph().as_default(), tf.device('/cpu:0'):
        decoders = build_decoders()
        inputs, outputs = build_network(found)
        with utils.open_session(utils.CPU, found.threads) as session:
            trained.restore(session, found)
            decode = make_decode(session, *decoders)
            predict = session.make_callable(outputs, inputs)
            seen = failed = 0
            for path in find_files(flags.files):
                seen += 1
                try:
                    image = prepare(decode(read(path)), found.image_shape, found.border)
                    classes, probabilities = predict(image)
                except (OSError, MemoryError, tf.errors.OpError) as error:
                    log.error('%s: %s', path, explain(error))
                    failed += 1
                else:
                    log.info(
                        '%s',
                        format_line(
                            path,
                            [found.classes[place] for place in classes],
                            probabilities,
                            flags.json,
                        ),
                    )
    if not seen:
        raise UserError('no file was named')
    if failed:
        raise RunFailed('%d of %s failed' % (failed, utils.count(seen, 'file')))


def parse(argv=None):
    parser = command_line.Parser(description='Says what class each image is of.')
    trained.add_flags(parser)
    parser.add_argument(
        '--json', action='store_true', help='print one JSON object per file'
    )
    parser.add_argument(
        'files',
        metavar='FILE',
        nargs='+',
        help='PNG, JPEG, BMP or GIF file; a directory of them; or - for a list of '
        'files from stdin',
    )
    return parser.parse_args(argv)


def find_files(words):
    """Yields the files that the words of the command line stand for, in order."""
    for word in words:
        if word == '-':
            lines = (os.fsdecode(line.rstrip(b'\n')) for line in sys.stdin.buffer)
            yield from find_files(line for line in lines if line not in ('', '-'))
        elif os.path.isdir(word):
            errors = []
            found = [
                os.path.join(parent, name)
                for parent, _, names in os.walk(word, onerror=errors.append)
                for name in names
                if name.lower().endswith(encoded_files.ENDINGS)
            ]
            found += [error.filename for error in errors]
            yield from sorted(found) or [word]
        else:
            yield word


def read(path):
    """Returns a file's bytes."""
    if os.path.isdir(path):
        os.listdir(path)
        raise OSError(0, 'no image file is in this directory')
    with open(path, 'rb') as file:
        return file.read()


def explain(error):
    """Returns in one line why a file gave no class."""
    if isinstance(error, OSError):
        return error.strerror
    if isinstance(error, tf.errors.OpError):
        return DAMAGED
    return 'too large for the memory'


def build_decoders():
    """Builds: contents, a string placeholder -> uint8 [height, width, 1 or 3].

    Returns:
      (contents, decoders): an op for each of `image_headers.KINDS`. That of an
      animation takes its first image.
    """
    contents = tf.placeholder(tf.string, [])
    decoders = {k: build() for k, build in decoding.list_decoders(contents).items()}
    # Grey stays grey: its border is asked for. It tells GIF from the others itself.
    image = tf.image.decode_image(contents, expand_animations=False)
    decoders[image_headers.PLAIN] = decoders[image_headers.GIF] = image
    return contents, decoders


def make_decode(session, contents, decoders):
    """Returns a function (a file's bytes) -> uint8 [height, width, 1 or 3].

    It says nothing on stderr, as libraries of formats do of a damaged file.
    """
    calls = {
        kind: session.make_callable(decoder, [contents])
        for kind, decoder in decoders.items()
    }

    def decode(data):
        call = calls[find_kind(data)]
        failure = None
        with quiet_stderr():
            try:
                image = call(data)
            except tf.errors.OpError as error:
                failure = error
        if failure is not None:
            raise failure
        return image

    return decode


def find_kind(data):
    """Returns which of `image_headers.KINDS` an image is.

    Raises:
      OSError: it is a PNG or BMP whose damage the decoders do not see.
    """
    try:
        return image_headers.read_header(data, len(data)).kind
    except (ValueError, image_headers.Incomplete):
        if data[:2] in (b'BM', b'\x89P'):
            raise OSError(0, DAMAGED) from None
        return image_headers.PLAIN


def build_network(found):
    """Builds the network for one image.

    Returns:
      (inputs, outputs): a placeholder for what `prepare` returns; and the classes and
      probabilities of the two most probable ones, [2].
    """
    height, width, channels = found.image_shape
    pixels = tf.placeholder(tf.float32, [None, None, channels])
    image = decoding.fit(pixels, (height, width))[tf.newaxis]
    image.set_shape([1, height, width, channels])
    logits = model.infer(
        image, found.network, len(found.classes), moments=found.moments
    )
    best = tf.nn.top_k(tf.nn.softmax(logits[0]), 2)
    return [pixels], [best.indices, best.values]


def prepare(image, shape, border):
    """Makes a decoded image what the network was trained on, but for its size.

    Args:
      image: uint8 [height, width, 1 or 3].
      shape: the height, width and channels that the network takes.
      border: mean brightness of the training images' border, 0 to 255.

    Returns:
      float32 [height, width, channels], 0 to 255.
    """
    pixels = image.astype(np.float32)
    if shape[2] == 1:
        if pixels.shape[2] == 3:
            pixels = pixels.dot(decoding.LUMINANCE)[..., np.newaxis]
        if (edge(pixels).mean() > 127.5) != (border > 127.5):
            pixels = 255 - pixels
    elif pixels.shape[2] == 1:
        pixels = np.repeat(pixels, shape[2], axis=2)
    return pixels


def edge(pixels):
    """Returns the outermost pixels of an image [h, w, c]: [n, c]."""
    sides = [pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]]
    return np.concatenate(sides)


def format_line(path, classes, probabilities, as_json):
    """Returns a file's line: its class and the runner-up, with their probabilities."""
    first, second = classes
    if as_json:
        return json.dumps(
            {
                'path': path,
                'class': first,
                'probability': float(probabilities[0]),
                'runner_up': second,
                'runner_up_probability': float(probabilities[1]),
            }
        )
    shares = 100 * probabilities
    return '%s: %s (%.2f %%), then %s (%.2f %%)' % (
        *(path, first, shares[0], second, shares[1]),
    )


if __name__ == '__main__':
    sys.exit(utils.run_main(main, must_show=True))
