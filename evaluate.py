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
from tf1 import tf
from utils import UserError, log

# More classes than this make no table that fits a screen.
MAX_COLUMNS = 20
# How many of the commonest confusions are listed instead.
MAX_CONFUSIONS = 20


def main():
    flags = parse()
    found = trained.find(flags)
    devices = utils.choose_devices(flags.device, flags.num_gpus, flags.gpus)
    examples = load(flags, found)
    if flags.errors:
        check_empty(flags.errors)
    log.info('%s', found.title)
    screen.warn_without_gpu(flags.device, devices, 'evaluating')
    build_model = functools.partial(
        model.model_fn, network=found.network, num_classes=found.num_classes
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
    matrix = count_pairs(examples.labels, predictions, found.num_classes)
    for line in describe(matrix):
        log.info('%s', line)
    if flags.errors:
        written = write_errors(flags.errors, examples, predictions)
        log.info('%s in %s', utils.count(written, 'misread image'), flags.errors)


def parse(argv=None):
    parser = command_line.Parser(description=__doc__, allow_abbrev=False)
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
    data_dir = flags.data_dir
    if data_dir is None:
        data_dir = found.data_dir
        if not isinstance(data_dir, str) or not os.path.isdir(data_dir):
            raise UserError(
                '%s was trained on %s, which is not there: say where with --data_dir'
                % (found.model_dir, data_dir)
            )
    examples = data_sets.load_valid(data_dir)
    shape = list(examples.images.shape[1:])
    if shape != found.image_shape or examples.labels.max() >= found.num_classes:
        raise UserError(
            '%s was trained on images of %s and %d classes; %s has %s and label %d'
            % (
                found.model_dir,
                found.image_shape,
                found.num_classes,
                data_dir,
                shape,
                examples.labels.max(),
            )
        )
    return examples


def count_pairs(labels, predictions, num_classes):
    """Counts what is taken for what: int64 [true class, predicted class]."""
    matrix = np.zeros([num_classes, num_classes], np.int64)
    np.add.at(matrix, (labels, predictions), 1)
    return matrix


def describe(matrix):
    """Yields the lines that show a confusion matrix and the accuracy of each class."""
    images, correct = matrix.sum(axis=1), matrix.diagonal()
    names = [str(name) for name in range(len(matrix))]
    width = max(5, len(str(images.max())) + 1)
    table = len(matrix) <= MAX_COLUMNS
    columns = names if table else []
    yield 'class  images  accuracy' + ('   predicted as' if table else '')
    yield ' ' * 23 + ''.join(name.rjust(width) for name in columns)
    for name, row, n, right in zip(names, matrix, images, correct):
        share = '%.2f %%' % (100 * right / n) if n else '-'
        cells = ''.join(str(cell or '.').rjust(width) for cell in row[: len(columns)])
        yield '%5s %7d %9s%s' % (name, n, share, cells)
    if not table:
        yield ''
        yield 'most often confused: true class, predicted class, images'
        wrong = matrix - np.diag(correct)
        for place in np.argsort(-wrong, axis=None, kind='stable')[:MAX_CONFUSIONS]:
            true, predicted = divmod(int(place), len(matrix))
            if wrong[true, predicted]:
                yield '%5d %5d %7d' % (true, predicted, wrong[true, predicted])


def check_empty(directory):
    """Refuses a directory that holds anything, of another run perhaps."""
    try:
        if os.path.isdir(directory) and os.listdir(directory):
            raise UserError('--errors %s is not empty: name a new one' % directory)
        utils.check_writable(directory)
    except OSError as error:
        raise UserError('--errors %s: %s' % (directory, error.strerror)) from None


def write_errors(directory, examples, predictions):
    """Writes each misread image as a PNG file; returns how many they are."""
    os.makedirs(directory, exist_ok=True)
    wrong = np.flatnonzero(predictions != examples.labels)
    with tf.Graph().as_default(), tf.device('/cpu:0'):
        pixels = tf.placeholder(tf.uint8, [None, None, None])
        png = tf.image.encode_png(pixels)
        with utils.open_session(utils.CPU, (0, 0)) as session:
            for index in wrong:
                name = '%d_%d_%d.png' % (
                    *(index, examples.labels[index], predictions[index]),
                )
                encoded = session.run(png, {pixels: examples.images[index]})
                with open(os.path.join(directory, name), 'wb') as file:
                    file.write(encoded)
    return len(wrong)


if __name__ == '__main__':
    sys.exit(utils.run_main(main, must_show=True))
