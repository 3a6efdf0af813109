"""Evaluates a trained model: accuracy, loss, and what it takes for what."""

import functools
import os
import sys

import numpy as np

import command_line
import data_sets
import evaluation
import model
import screen
import trained
import utils
from data_sets import read_images
from tf1 import tf
from utils import UserError, log

# A wider table fits no screen.
MAX_WIDTH = 124
# How many of the commonest confusions are listed instead.
MAX_CONFUSIONS = 20


def main():
    flags = parse()
    found = trained.find(flags)
    devices = utils.choose_devices(flags.device, flags.num_gpus, flags.gpus)
    examples = load(flags, found)
    num_classes = len(found.classes)
    if flags.errors:
        check_empty(flags.errors)
    log.info('%s', found.title)
    screen.warn_without_gpu(flags.device, devices, 'evaluating')
    build_model = functools.partial(
        model.model_fn,
        network=found.network,
        num_classes=num_classes,
        moments=found.moments,
    )
    with tf.Graph().as_default(), tf.device('/cpu:0'):
        evaluated, feeds = evaluation.build(
            examples, devices.towers, build_model, flags.batch_size, reuse=False
        )
        with utils.open_session(devices, found.threads) as session:
            session.run(tf.local_variables_initializer(), feeds)
            trained.restore(session, found)
            losses, predictions = evaluation.make_predict(session, evaluated)()
    screen.log_score('valid', *evaluation.score(losses, predictions, examples.labels))
    matrix = count_pairs(examples.labels, predictions, num_classes)
    for line in describe(matrix, found.classes):
        log.info('%s', line)
    if flags.errors:
        written = write_errors(flags.errors, examples, predictions, found.classes)
        log.info('%s in %s', utils.count(written, 'misread image'), flags.errors)


def parse(argv=None):
    parser = command_line.Parser(description=__doc__)
    trained.add_flags(parser)
    parser.add_argument(
        '--data_dir', help='the data set (default: the one it was trained on)'
    )
    parser.add_argument(
        '--errors',
        metavar='DIR',
        help='write each misread image to this new directory, as '
        '<index>_<true class>_<predicted class>.png',
    )
    parser.add_argument(
        '--batch_size',
        type=command_line.number(int, 1, 65536),
        default=evaluation.BATCH,
        help='images per tower and run (default: %(default)s)',
    )
    command_line.add_device_choice(parser)
    return parser.parse_args(argv)


def load(flags, found):
    """Loads the `Examples` to evaluate on; they must fit the model."""
    reading = command_line.default_data_flags()
    known = {k: v for k, v in found.flags.items() if k in vars(reading)}
    vars(reading).update(known, model_dir=found.model_dir)
    reading.image_size = found.image_shape[:2]  # encoded images are made so
    if flags.data_dir is not None:
        vars(reading).update(data_dir=flags.data_dir, format=None, valid_fraction=None)
    elif not isinstance(reading.data_dir, str) or not os.path.exists(reading.data_dir):
        raise UserError(
            '%s was trained on %s, which is not there: say where with --data_dir'
            % (found.model_dir, reading.data_dir)
        )
    if reading.format not in (None, *data_sets.FORMATS):
        raise UserError(
            '%s/config.json: "format" is %r, none of %s'
            % (found.model_dir, reading.format, ', '.join(data_sets.FORMATS))
        )
    shape = found.image_shape
    examples = data_sets.load_valid(reading, found.classes, shape, found.threads)
    if list(examples.images.shape[1:]) != shape:
        raise UserError(
            '%s was trained on images of %s; %s has %s'
            % (
                found.model_dir,
                shape,
                reading.data_dir,
                list(examples.images.shape[1:]),
            )
        )
    return examples


def count_pairs(labels, predictions, num_classes):
    """Counts what is taken for what: int64 [true class, predicted class]."""
    matrix = np.zeros([num_classes, num_classes], np.int64)
    np.add.at(matrix, (labels, predictions), 1)
    return matrix


def describe(matrix, classes):
    """Yields the lines that show a confusion matrix and the accuracy of each class."""
    images, correct = matrix.sum(axis=1), matrix.diagonal()
    names = [str(name) for name in classes]
    first = max(5, *map(len, names))
    width = max(5, len(str(images.max())) + 1, *(len(name) + 1 for name in names))
    table = first + 18 + width * len(matrix) <= MAX_WIDTH
    columns = names if table else []
    yield 'class'.rjust(first) + '  images  accuracy' + '   predicted as' * table
    yield ' ' * (first + 18) + ''.join(name.rjust(width) for name in columns)
    for name, row, n, right in zip(names, matrix, images, correct):
        share = '%.2f %%' % (100 * right / n) if n else '-'
        cells = ''.join(str(cell or '.').rjust(width) for cell in row[: len(columns)])
        yield '%s %7d %9s%s' % (name.rjust(first), n, share, cells)
    if not table:
        yield ''
        yield 'most often confused: true class, predicted class, images'
        wrong = matrix - np.diag(correct)
        for place in np.argsort(-wrong, axis=None, kind='stable')[:MAX_CONFUSIONS]:
            true, predicted = divmod(int(place), len(matrix))
            if wrong[true, predicted]:
                pair = ' '.join(names[n].rjust(first) for n in (true, predicted))
                yield '%s %7d' % (pair, wrong[true, predicted])


def check_empty(directory):
    """Refuses a directory that holds anything, of another run perhaps."""
    try:
        if os.path.isdir(directory) and os.listdir(directory):
            raise UserError('--errors %s is not empty: name a new one' % directory)
        utils.check_writable(directory)
    except OSError as error:
        raise UserError('--errors %s: %s' % (directory, error.strerror)) from None


def write_errors(directory, examples, predictions, classes):
    """Writes each misread image as a PNG file; returns how many they are."""
    os.makedirs(directory, exist_ok=True)
    wrong = np.flatnonzero(predictions != examples.labels)
    with tf.Graph().as_default(), tf.device('/cpu:0'):
        pixels = tf.placeholder(tf.uint8, [None, None, None])
        png = tf.image.encode_png(pixels)
        with utils.open_session(utils.CPU, (0, 0)) as session:
            for index, image in zip(wrong, read_images(examples.images, wrong)):
                pair = classes[examples.labels[index]], classes[predictions[index]]
                name = ('%d_%s_%s.png' % (index, *pair)).replace('/', '_')
                encoded = session.run(png, {pixels: image})
                with open(os.path.join(directory, name), 'wb') as file:
                    file.write(encoded)
    return len(wrong)


if __name__ == '__main__':
    sys.exit(utils.run_main(main, must_show=True))
