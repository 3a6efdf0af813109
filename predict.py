"""Says what class an image file is of: PNG, JPEG, BMP or GIF of any size.

An image is made what the network was trained on. Transparency becomes white. For a
network of grey images colours become grey, and the image is inverted if its border is
light where the border of the training images is dark, or the reverse. It keeps its
proportions: what it lacks to those of the training images is filled in the border's
mean colour. Then it is scaled by area.
"""

import json
import os
import sys

import numpy as np

import command_line
import model
import trained
import utils
from tf1 import tf
from utils import RunFailed, UserError, log

ENDINGS = ('.png', '.jpg', '.jpeg', '.bmp', '.gif')
# Parts of red, green and blue in grey. Source: ITU-R BT.601.
LUMINANCE = np.array([0.299, 0.587, 0.114], np.float32)


def main():
    flags = parse()
    found = trained.find(flags)
    if not flags.json:
        log.info('%s', found.title)
    with tf.Graph().as_default(), tf.device('/cpu:0'):
        contents, decoded = build_decoder()
        pixels, outputs = build_network(found)
        with utils.open_session(utils.CPU, found.threads) as session:
            trained.restore(session, found)
            decode = session.make_callable(decoded, [contents])
            predict = session.make_callable(outputs, [pixels])
            seen = failed = 0
            for path in find_files(flags.files):
                seen += 1
                try:
                    image = prepare(decode(read(path)), found.image_shape, found.border)
                except (OSError, tf.errors.OpError) as error:
                    log.error('%s: %s', path, explain(error))
                    failed += 1
                    continue
                log.info('%s', format_line(path, *predict(image), as_json=flags.json))
    if not seen:
        raise UserError('no file was named')
    if failed:
        raise RunFailed('%d of %s failed' % (failed, utils.count(seen, 'file')))


def parse(argv=None):
    parser = command_line.Parser(
        description='Says what class each image is of.', allow_abbrev=False
    )
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


def find_files(words, stdin=None):
    """Yields the files that the words of the command line stand for, in order."""
    for word in words:
        if word == '-':
            lines = (line.rstrip('\n') for line in stdin or sys.stdin)
            yield from find_files(line for line in lines if line not in ('', '-'))
        elif os.path.isdir(word):
            found = sorted(
                os.path.join(parent, name)
                for parent, _, names in os.walk(word)
                for name in names
                if name.lower().endswith(ENDINGS)
            )
            yield from found or [word]
        else:
            yield word


def read(path):
    """Returns a file's bytes."""
    if os.path.isdir(path):
        raise OSError(0, 'no image file is in this directory')
    with open(path, 'rb') as file:
        return file.read()


def explain(error):
    """Returns in one line why a file gave no image."""
    if isinstance(error, OSError):
        return error.strerror
    return 'no PNG, JPEG, BMP or GIF, or a damaged one'


def build_decoder():
    """Builds: contents, a string placeholder -> uint8 [height, width, channels].

    Of an animation it takes the first image. There are as many channels as the file
    has: 1, grey; 3, colour; 2 and 4, the same with transparency.
    """
    contents = tf.placeholder(tf.string, [])
    return contents, tf.image.decode_image(contents, expand_animations=False)


def build_network(found):
    """Builds: pixels, a float32 placeholder [1, h, w, c] -> (classes, probabilities).

    Both outputs are of the two most probable classes, [2].
    """
    height, width, channels = found.image_shape
    pixels = tf.placeholder(tf.float32, [1, None, None, channels])
    image = tf.image.resize_area(pixels, [height, width])
    logits = model.infer(image, found.network, found.num_classes)
    top = tf.nn.top_k(tf.nn.softmax(logits[0]), 2)
    return pixels, (top.indices, top.values)


def prepare(image, shape, border):
    """Makes a decoded image what the network was trained on, but for its size.

    Args:
      image: uint8 [height, width, 1 to 4 channels].
      shape: the height, width and channels that the network takes.
      border: mean brightness of the training images' border, 0 to 255.

    Returns:
      float32 [1, h, w, channels], 0 to 255, of the proportions of `shape`.
    """
    pixels = image.astype(np.float32)
    if image.shape[2] in (2, 4):
        opaque = pixels[..., -1:] / 255
        pixels = pixels[..., :-1] * opaque + 255 * (1 - opaque)
    if shape[2] == 1:
        if pixels.shape[2] == 3:
            pixels = pixels.dot(LUMINANCE)[..., np.newaxis]
        if (edge(pixels).mean() > 127.5) != (border > 127.5):
            pixels = 255 - pixels
    elif pixels.shape[2] == 1:
        pixels = np.repeat(pixels, shape[2], axis=2)
    return pad(pixels, shape)[np.newaxis]


def edge(pixels):
    """Returns the outermost pixels of an image [h, w, c]: [n, c]."""
    sides = [pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]]
    return np.concatenate(sides)


def pad(pixels, shape):
    """Centres an image [h, w, c] on its border's mean colour, as wide and high as
    the proportions of `shape` ask for."""
    height, width, channels = pixels.shape
    high = max(height, -(-width * shape[0] // shape[1]))
    wide = max(width, -(-height * shape[1] // shape[0]))
    canvas = np.empty([high, wide, channels], np.float32)
    canvas[:] = edge(pixels).mean(axis=0)
    top, left = (high - height) // 2, (wide - width) // 2
    canvas[top : top + height, left : left + width] = pixels
    return canvas


def format_line(path, classes, probabilities, as_json):
    """Returns a file's line: its class and the runner-up, with their probabilities."""
    first, second = classes.tolist()
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
    return '%s: %d (%.2f %%), then %d (%.2f %%)' % (
        *(path, first, shares[0], second, shares[1]),
    )


if __name__ == '__main__':
    sys.exit(utils.run_main(main))
