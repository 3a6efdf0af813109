"""The flags of the training scripts."""

import argparse
import math
import os
import shlex
import sys

import augmentation
import data_sets
from networks import find_network
from utils import UserError

MAX_TOWERS = 64
OPTIMIZERS = ('adam', 'sgd', 'momentum', 'rmsprop')
SCHEDULES = ('cosine', 'constant', 'step', 'exponential')


def parse(description, networks, towers, argv=None):
    """Returns the flags of a training script as an `argparse.Namespace`.

    Args:
      description: the first line of `--help`.
      networks: {name: function}, those that need no file.
      towers: whether the script has towers, so `--num_gpus`.
      argv: a list of strings; default the command line's.

    Raises:
      UserError: a flag is unknown, malformed or out of range.
      Exception: what the code of the user's own network raises.
    """
    parser = Parser(
        description=description,
        usage='%(prog)s [flag ...]',
        epilog='@FILE stands for the flags in a file, as those in recipes/ are.',
    )
    _add_run(parser.add_argument_group('the run'))
    _add_training(parser.add_argument_group('model and training'), networks)
    _add_devices(parser.add_argument_group('devices'), towers)
    add_data(parser.add_argument_group('the data'))
    _add_saving(parser.add_argument_group('saving and stopping'))
    _add_recipe(parser.add_argument_group('recipe'), towers)
    if towers:
        _add_machines(parser.add_argument_group('several machines, as TF_CONFIG says'))
    _add_records(parser.add_argument_group('TensorBoard and trace'))
    _add_screen(parser.add_argument_group('screen'))
    flags = parser.parse_args(read_files(sys.argv[1:] if argv is None else argv))
    if flags.histograms and not flags.summary_steps:
        raise UserError(
            '--histograms go to the event files: not with --summary_steps 0'
        )
    if flags.warmup_epochs >= flags.epochs:
        raise UserError(
            '--warmup_epochs %g: give fewer than --epochs %d'
            % (flags.warmup_epochs, flags.epochs)
        )
    if not towers:
        flags.num_gpus = 1
    elif flags.variables == 'replicated':
        _check_replicated(flags)
    find_network(flags.model, networks)
    return flags


def _check_replicated(flags):
    for name, plain in (('variable_device', 'cpu'), ('gradient_packs', 0)):
        if getattr(flags, name) != plain:
            raise UserError(
                '--variables replicated has each variable on each tower and its '
                'gradients in one buffer: drop --%s' % name
            )


def read_files(words, inside=()):
    """Returns the words of a command line, those of a file in place of each @FILE.

    Args:
      words: list of strings.
      inside: paths of the files that they are from, one within the other.

    Raises:
      UserError: a file can't be read as flags.
    """
    found = []
    for word in words:
        path = os.path.realpath(word[1:])
        if not word.startswith('@'):
            found.append(word)
        elif path in inside:
            raise UserError('%s: this file of flags stands for itself' % word)
        else:
            found += read_files(_read_file(word), inside + (path,))
    return found


def _read_file(word):
    """Returns the words of the file that @FILE names; `#` begins a comment."""
    try:
        with open(word[1:], encoding='utf-8-sig') as file:
            lines = file.read().splitlines()
    except OSError as error:
        raise UserError('%s, a file of flags: %s' % (word, error.strerror)) from None
    except UnicodeDecodeError:
        raise UserError('%s, a file of flags, is not UTF-8' % word) from None
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            if '\0' in line:
                raise ValueError('a zero byte is no text')
            found += shlex.split(line, comments=True)
        except ValueError as error:
            raise UserError('%s, line %d: %s' % (word, number, error)) from None
    if '--verbose' in found:
        # TensorFlow is imported, and silent, before any file is read.
        raise UserError('%s: --verbose has its place on the command line' % word)
    return found


class Help(argparse.RawDescriptionHelpFormatter):
    """What `--help` shows: every default, and short names for values."""

    def _get_help_string(self, action):
        if '(default: ' in action.help or not action.option_strings:
            return action.help
        if action.default is None:
            return action.help + ' (default: none)'
        return action.help + (' (default: off)' if action.default is False else '')

    def _get_default_metavar_for_optional(self, action):
        return 'DIR' if action.dest.endswith('_dir') else 'N'


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake costs one line instead of the whole usage."""

    def __init__(self, **settings):
        super().__init__(allow_abbrev=False, formatter_class=Help, **settings)

    def parse_known_args(self, args=None, namespace=None):
        flags, rest = super().parse_known_args(args, namespace)
        for name, value in vars(flags).items():
            # What argparse makes of `--epochs=--`.
            if value == [] and self.get_default(name) != []:
                self.error('argument --%s: expected one argument' % name)
        return flags, rest

    def error(self, message):
        raise UserError('%s (see --help)' % message)


def number(kind, low, high, above=False):
    """Returns an argparse type: a finite `kind` in [low, high], or above `low`."""

    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or (above and value == low):
            raise argparse.ArgumentTypeError(
                '%r is not %s %s %s and at most %s'
                % (
                    text,
                    {int: 'a whole number', float: 'a number'}[kind],
                    'above' if above else 'of at least',
                    low,
                    high,
                )
            )
        return value

    return parse


def _gpu_list(text):
    try:
        numbers = [int(number) for number in text.split(',')]
    except ValueError:
        numbers = [-1]
    if min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(
            '%r is not a list of different GPU numbers such as 0,2' % text
        )
    return numbers


def _image_size(text):
    """Parses '64' or '48x64' as [height, width]."""
    numbers = text.split('x')
    if len(numbers) > 2 or not all(n.isdigit() and 0 < int(n) < 9999 for n in numbers):
        raise argparse.ArgumentTypeError(
            '%r is no size such as 64, or 48x64 for height x width' % text
        )
    return [int(numbers[0]), int(numbers[-1])]


def _augmentations(text):
    kinds = text.split(',')
    wrong = [kind for kind in kinds if kind not in augmentation.KINDS]
    if wrong or len(set(kinds)) < len(kinds):
        raise argparse.ArgumentTypeError(
            '%r is not a list of some of %s' % (text, ','.join(augmentation.KINDS))
        )
    return kinds


def default_data_flags():
    """Returns the flags of `add_data` as they are by default."""
    parser = Parser()
    add_data(parser)
    return parser.parse_args([])


def add_data(group):
    """Adds the flags that `data_sets.load` takes."""
    group.add_argument(
        '--data_dir',
        default=os.path.join(os.path.dirname(os.path.abspath(__file__)), 'data/mnist'),
        help='the data set: a directory (default: the data/mnist beside this script)',
    )
    group.add_argument(
        '--format',
        choices=list(data_sets.FORMATS),
        help='idx: files named as those of MNIST; cifar: CIFAR-10 or -100, binary; '
        'npz: x_train, y_train, x_test, y_test; folders: train/CLASS/ and valid/CLASS/ '
        'of image files; tfrecord: train*.tfrecord and valid*.tfrecord (default: told '
        'by what --data_dir holds)',
    )
    group.add_argument(
        '--image_size',
        type=_image_size,
        metavar='SIZE',
        help='bring images of folders and tfrecord to this size, 64 or 48x64 '
        '(default: all have the same)',
    )
    group.add_argument(
        '--valid_fraction',
        type=number(float, 0, 0.9, above=True),
        help='share of each class of folders and tfrecord that is held out for '
        'validation where there is no valid/; which images depends on their names only '
        '(default: 0.1)',
    )
    group.add_argument(
        '--image_feature',
        default='image/encoded',
        metavar='NAME',
        help="the images' name in tfrecord (default: image/encoded)",
    )
    group.add_argument(
        '--label_feature',
        default='image/class/label',
        metavar='NAME',
        help="the labels' name in tfrecord (default: image/class/label)",
    )
    group.add_argument(
        '--skip_bad',
        action='store_true',
        help='leave out images that can not be decoded, and count them; all are '
        'decoded once to find them (default: the first one ends the run)',
    )
    group.add_argument(
        '--cache',
        action='store_true',
        help='decode the images of folders and tfrecord once and hold them in memory, '
        'if they fit',
    )
    group.add_argument(
        '--standardize',
        action='store_true',
        help='scale images by the mean and the standard deviation of each channel of '
        'the training images, not from 0..255 to -1..1',
    )
    group.add_argument(
        '--augment',
        type=_augmentations,
        default=[],
        metavar='KINDS',
        help='change training images at random, each epoch anew: a list of some of %s '
        '(default: none)' % ','.join(augmentation.KINDS),
    )


def _add_run(group):
    group.add_argument(
        '--model_dir',
        help='where results go; one that holds a checkpoint is continued '
        '(default: a new runs/<date>-<time>-<model>-<towers>)',
    )
    group.add_argument(
        '--epochs',
        type=number(int, 1, 100000),
        default=10,
        help='epochs in all, those of a continued run included (default: 10)',
    )
    group.add_argument(
        '--max_steps',
        type=number(int, 1, 2**31 - 1),
        help='stop after this many steps in all; the learning rate still follows '
        '--epochs (default: no limit)',
    )
    group.add_argument(
        '--seed',
        type=number(int, 0, 2**31 - 1),
        default=0,
        help='of initial weights, order of images, augmentation and dropout '
        '(default: 0)',
    )


def _add_saving(group):
    group.add_argument(
        '--early_stopping',
        type=number(int, 1, 100000),
        metavar='PATIENCE',
        help='end after so many epochs without a new best validation accuracy '
        '(default: never)',
    )
    group.add_argument(
        '--stop_at',
        type=number(float, 0, 1, above=True),
        metavar='ACCURACY',
        help='end after the epoch that reaches this validation accuracy, such as 0.99 '
        '(default: never)',
    )
    group.add_argument(
        '--max_minutes',
        type=number(float, 0, 1e6, above=True),
        help='save and stop before the process is this old (default: no limit)',
    )
    group.add_argument(
        '--save_every_seconds',
        type=number(float, 0, 1e9, above=True),
        default=300,
        help='save this often within an epoch too (default: 300)',
    )
    group.add_argument(
        '--keep',
        type=number(int, 1, 100000),
        default=3,
        help='how many of the last checkpoints stay (default: 3)',
    )


def _add_training(group, networks):
    group.add_argument(
        '--model',
        metavar='NETWORK',
        default='cnn',
        help='%s, or a function of your own, as path/file.py:function or '
        'package.module:function (default: cnn)' % ', '.join(sorted(networks)),
    )
    group.add_argument(
        '--dropout',
        type=number(float, 0, 0.99),
        default=0.4,
        help='share of units dropped before dense layers (default: 0.4)',
    )
    group.add_argument(
        '--batch_size',
        type=number(int, 1, 65536),
        default=32,
        help='images per tower and step (default: 32)',
    )
    group.add_argument(
        '--optimizer',
        choices=OPTIMIZERS,
        default='adam',
        help='update rule (default: adam)',
    )
    group.add_argument(
        '--learning_rate',
        type=number(float, 0, 100, above=True),
        default=0.001,
        help='what the schedule starts from (default: 0.001)',
    )
    group.add_argument(
        '--schedule',
        choices=SCHEDULES,
        default='cosine',
        help='over --epochs the learning rate falls to 0 as a cosine; by steps, to a '
        'tenth at 50%% and again at 75%%; evenly to 1%% (exponential); or stays '
        '(default: cosine)',
    )


def _add_recipe(group, towers):
    group.add_argument(
        '--weight_decay',
        type=number(float, 0, 100),
        default=0,
        metavar='D',
        help='each step takes the learning rate x D of every kernel off it, with any '
        'optimizer (default: 0)',
    )
    group.add_argument(
        '--clip_norm',
        type=number(float, 0, 1e9, above=True),
        metavar='C',
        help='scale the gradients, averaged over all towers, down to this global norm '
        '(default: no limit)',
    )
    group.add_argument(
        '--label_smoothing',
        type=number(float, 0, 0.99),
        default=0,
        metavar='S',
        help='in training, share S of each label goes to all classes alike '
        '(default: 0)',
    )
    group.add_argument(
        '--warmup_epochs',
        type=number(float, 0, 100000),
        default=0,
        metavar='N',
        help='over the first N epochs, such as 0.5, the learning rate rises to what '
        '--schedule says (default: 0)',
    )
    group.add_argument(
        '--scale_lr',
        action='store_true',
        help='multiply --learning_rate by the images per step / --batch_size: by '
        'towers x machines x micro-steps',
    )
    group.add_argument(
        '--accumulate',
        type=number(int, 1, 65536),
        default=1,
        metavar='K',
        help='a step has K times the images, which take K turns on the GPU (default: '
        '1)',
    )
    group.add_argument(
        '--ema',
        type=number(float, 0, 0.999999),
        default=0,
        metavar='DECAY',
        help='evaluate, and choose and export the best, with a moving average of the '
        'weights, such as 0.999; 0: with the weights (default: 0)',
    )
    group.add_argument(
        '--fp16',
        action='store_true',
        help='train in float16, weights in float32, with a loss scale that adapts; a '
        'step that overflows updates nothing (evaluation stays in float32)',
    )
    if towers:
        group.add_argument(
            '--sync_batch_norm',
            action='store_true',
            help='batch norm over the batches of all towers, not of each tower alone',
        )


def add_device_choice(group, towers=True):
    """Adds the flags that `utils.choose_devices` takes."""
    if towers:
        group.add_argument(
            '--num_gpus',
            type=number(int, 1, MAX_TOWERS),
            help='towers, one per GPU (default: all visible GPUs, or 1)',
        )
    group.add_argument(
        '--gpus',
        type=_gpu_list,
        metavar='LIST',
        help='which of the visible GPUs to use, such as 0,2 (default: the first ones)',
    )
    group.add_argument(
        '--device',
        choices=('auto', 'gpu', 'cpu'),
        default='auto',
        help='auto: GPUs, or the CPU with a warning if there is none; gpu and cpu '
        'never use the other (default: auto)',
    )


def _add_devices(group, towers):
    add_device_choice(group, towers)
    if towers:
        group.add_argument(
            '--variables',
            choices=('shared', 'replicated'),
            default='shared',
            help='one set for all towers, or a copy on each tower (default: shared)',
        )
        group.add_argument(
            '--variable_device',
            choices=('cpu', 'gpu', 'spread'),
            default='cpu',
            help='where the shared variables are: on the CPU, on the first GPU, or on '
            'all GPUs, about as many bytes on each (default: cpu)',
        )
        group.add_argument(
            '--check',
            action='store_true',
            help='before training, compare a step of these towers with one of a single '
            'tower, and end with status 1 if they differ by more than rounding',
        )
        group.add_argument(
            '--gradient_packs',
            type=number(int, 0, 1024),
            default=0,
            help='join the gradients of a tower into this many buffers before they '
            'leave its device; 0: each goes by itself (default: 0)',
        )
    group.add_argument(
        '--staging',
        action='store_true',
        help='copy each batch to its device one step ahead',
    )
    group.add_argument(
        '--xla',
        choices=('auto', 'on', 'off'),
        default='auto',
        help='compile the towers with XLA; auto: for CPU towers on TensorFlow 1.x, '
        'where it pays (default: auto)',
    )
    add_threads(group)


def add_threads(group):
    """Adds the flags that `utils.choose_threads` takes."""
    group.add_argument(
        '--intra_op_threads',
        type=number(int, 0, 4096),
        help="threads inside an op; 0: TensorFlow's choice (default: what was fastest, "
        'or what the continued run had)',
    )
    # With a single one nothing could close the queue of a producer that is stuck.
    group.add_argument(
        '--inter_op_threads',
        type=number(int, 2, 4096),
        help='threads for ops side by side (default: what was fastest, or what the '
        'continued run had)',
    )


def _add_machines(group):
    group.add_argument(
        '--start_timeout',
        type=number(float, 0, 1e6, above=True),
        default=600,
        help='seconds to wait for the other machines, and for the first step '
        '(default: 600)',
    )
    group.add_argument(
        '--step_timeout',
        type=number(float, 0, 1e6, above=True),
        default=120,
        help='end all machines where a later step, an evaluation or a save takes more '
        'seconds (default: 120)',
    )


def _add_records(group):
    group.add_argument(
        '--summary_steps',
        type=number(int, 0, 2**31 - 1),
        default=100,
        help='write loss, accuracy, learning rate and images/s this often; 0: no event '
        'files (default: 100)',
    )
    group.add_argument(
        '--histograms',
        action='store_true',
        help='histograms of weights and gradients, once per epoch',
    )
    group.add_argument(
        '--trace',
        type=number(int, 1, 2**31 - 1),
        metavar='STEP',
        help='write when each op of this step ran, for chrome://tracing',
    )


def _add_screen(group):
    group.add_argument(
        '--no_progress', action='store_true', help='no progress bar on a terminal'
    )
    group.add_argument(
        '--verbose', action='store_true', help="TensorFlow's own messages too"
    )
