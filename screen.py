"""What a run shows while it runs: its introduction and the bar of an epoch."""

import os
import sys

from tqdm import tqdm

import utils
from tf1 import tf
from utils import log


def introduce(flags, config, restored, model_dir):
    """Says in a few lines what will be trained, on what, and where results go."""
    towers, gpus = config['devices']['towers'], config['devices']['gpus']
    data = config['data']
    global_batch = flags.batch_size * len(towers)
    steps, rest = divmod(data['train_images'], global_batch)
    if flags.device == 'auto' and not gpus:
        log.warning(
            'TensorFlow sees no GPU: training on the CPU, %s on %s',
            utils.count(len(towers), 'tower'),
            utils.count(utils.count_cores(), 'core'),
        )
    log.info(
        'model %s: %d parameters, %d classes; %d training and %d validation images '
        'of %s from %s',
        flags.model,
        sum(v.shape.num_elements() for v in tf.trainable_variables()),
        data['num_classes'],
        data['train_images'],
        data['valid_images'],
        'x'.join(map(str, data['image_shape'])),
        os.path.relpath(flags.data_dir),
    )
    log.info('TensorFlow %s on %s', config['versions']['tensorflow'], ' '.join(towers))
    log.info(
        'batch %d per tower x %s = %d; %d steps per epoch of %d images%s',
        flags.batch_size,
        utils.count(len(towers), 'tower'),
        global_batch,
        steps,
        data['train_images'],
        ' (%d wait for another shuffle)' % rest if rest else '',
    )
    if flags.schedule == 'cosine':
        log.info(
            'learning rate %g, falling as a cosine to 0 over %d epochs: with another '
            '--epochs it is another',
            flags.learning_rate,
            flags.epochs,
        )
    else:
        log.info('learning rate %g, constant', flags.learning_rate)
    log.info('results go to %s', model_dir)
    if restored:
        log.info('continues from %s', restored)


def open_bar(flags, steps_done, steps_left):
    """Returns a tqdm bar of one epoch: on a terminal only, a log file gets none."""
    tqdm.monitor_interval = 0  # its thread has nothing to do: we refresh by time
    shown = sys.stderr.isatty() and not flags.no_progress
    width = shown and os.get_terminal_size(sys.stderr.fileno()).columns
    return tqdm(
        total=steps_done + steps_left,
        initial=steps_done,
        disable=not shown,
        file=sys.stderr,
        ascii=True,
        dynamic_ncols=width > 0,
        ncols=None if width else 80,  # some terminals do not say how large they are
        nrows=None if width else 24,
        miniters=1,
        mininterval=0,
    )


def refresh(bar, done, loss, accuracy):
    """Shows the epoch's score so far, after `done` steps of this run."""
    bar.set_postfix(
        train_acc='%.3f' % accuracy, train_loss='%.3f' % loss, refresh=False
    )
    bar.update(bar.initial + done - bar.n)


def log_score(name, loss, accuracy):
    """Shows a score; `name` is 'train' or 'valid'."""
    log.info('%s/acc: %.4f, %s/loss: %.4f', name, accuracy, name, loss)
