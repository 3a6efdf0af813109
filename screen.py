"""What a run shows while it runs: its introduction and the bar of an epoch."""

import os
import sys

from tqdm import tqdm

import checkpoints
import cluster
import data_sets
import networks
import records
import updates
import utils
from tf1 import tf
from utils import log

# A bar with all figures has no place on 80 columns.
WIDE = 96


def introduce(flags, config, restored, model_dir):
    """Says in a few lines what will be trained, on what, and where results go."""
    towers = config['devices']['towers']
    data = config['data']
    machines = config['machines']
    global_batch = flags.batch_size * len(towers) * len(machines) * flags.accumulate
    steps, rest = divmod(data['train_images'], global_batch)
    warn_without_gpu(flags.device, utils.Devices(**config['devices']), 'training')
    log.info(
        'model %s: %d parameters, %d classes (%s); %d training and %d validation '
        'images of %s from %s',
        networks.shorten(flags.model),
        sum(v.shape.num_elements() for v in tf.trainable_variables()),
        data['num_classes'],
        data_sets.list_classes(data['classes']),
        data['train_images'],
        data['valid_images'],
        'x'.join(map(str, data['image_shape'])),
        os.path.relpath(flags.data_dir),
    )
    if data['held_out']:
        log.info(
            'no images of their own for validation: %g of each class are held out, '
            'chosen by their names',
            data['held_out'],
        )
    log.info('TensorFlow %s on %s', config['versions']['tensorflow'], ' '.join(towers))
    if len(machines) > 1:
        log.info('on each of %d machines: %s', len(machines), ' '.join(machines))
    log.info(
        'batch %d per tower x %s%s%s = %d; %d steps per epoch of %d images%s',
        flags.batch_size,
        utils.count(len(towers), 'tower'),
        ' x %d machines' % len(machines) if len(machines) > 1 else '',
        ' x %d micro-steps' % flags.accumulate if flags.accumulate > 1 else '',
        global_batch,
        steps,
        data['train_images'],
        ' (%d wait for another shuffle)' % rest if rest else '',
    )
    log.info('%s', describe_rate(flags, global_batch))
    log.info('results go to %s', model_dir)
    if restored:
        log.info('continues from %s', restored)


def describe_rate(flags, global_batch):
    """Returns what the learning rate will be, in a line."""
    words = 'learning rate %g' % updates.base_rate(flags, global_batch)
    if flags.scale_lr:
        factor = global_batch // flags.batch_size
        words += ' = %g x %d, as --scale_lr says' % (flags.learning_rate, factor)
    if flags.warmup_epochs:
        number = '' if flags.warmup_epochs == 1 else '%g ' % flags.warmup_epochs
        words += ', rising over the first %sepoch%s' % (number, 's' * bool(number))
    if flags.schedule == 'constant':
        return words + ', constant'
    falling = {
        'cosine': ', falling as a cosine to 0 over %s',
        'step': ', falling to a tenth at 50 %% and again at 75 %% of %s',
        'exponential': ', falling evenly to 1 %% over %s',
    }[flags.schedule]
    words += falling % utils.count(flags.epochs, 'epoch')
    return words + ': with another --epochs it is another'


def introduce_other(flags, devices, machines):
    """Says in one line what a machine that keeps nothing does."""
    warn_without_gpu(flags.device, devices, 'training')
    log.info(
        '%s: TensorFlow %s on %s; %s saves and prints',
        cluster.name_machine(machines, machines.index),
        tf.version.VERSION,
        ' '.join(devices.towers),
        cluster.name_machine(machines, 0),
    )


def leave(error):
    """Ends the process from any thread, a line below the bar if there is one."""
    for bar in list(getattr(tqdm, '_instances', ())):
        bar.close()
    utils.leave(error)


def warn_without_gpu(asked, devices, doing):
    """Warns where `--device auto` has found no GPU."""
    if asked == 'auto' and not devices.gpus:
        log.warning(
            'TensorFlow sees no GPU: %s on the CPU, %s on %s',
            doing,
            utils.count(len(devices.towers), 'tower'),
            utils.count(utils.count_cores(), 'core'),
        )


def open_bar(flags, steps_done, steps_left):
    """Returns a tqdm bar of one epoch: on a terminal only, a log file gets none."""
    tqdm.monitor_interval = 0  # its thread has nothing to do: we refresh by time
    shown = sys.stderr.isatty() and not flags.no_progress
    width = shown and _count_columns()
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


def _count_columns():
    """Returns how wide the terminal is, 0 if it does not say so or is gone."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except OSError:
        return 0


def refresh(bar, done, images_per_second, loss, accuracy):
    """Shows the epoch's speed and score so far, after `done` steps of this run."""
    shown = {'train_acc': '%.3f' % accuracy, 'train_loss': '%.3f' % loss}
    if images_per_second and _count_columns() >= WIDE:
        shown['images/s'] = '%.0f' % images_per_second
    bar.set_postfix(shown, refresh=False)
    bar.update(bar.initial + done - bar.n)


def conclude(rows, state, model_dir):
    """Says what a run that is over has left, and what to do with it."""
    if rows:
        best = max(rows, key=lambda row: row['valid_acc'])
        log.info(
            'best: epoch %d of %d, valid/acc: %.4f, valid/loss: %.4f',
            *(best['epoch'], state.epoch, best['valid_acc'], best['valid_loss']),
        )
    elif state.best_acc >= 0:
        log.info('best: valid/acc: %.4f', state.best_acc)
    else:
        log.info('best: none yet, no epoch is done')
    last = checkpoints.find(model_dir)
    best = checkpoints.find(os.path.join(model_dir, 'best'))
    log.info('checkpoints: %s', ', '.join(best[:1] + last[:1]))
    log.info('next: %s', records.next_command('evaluate.py', model_dir))


def log_score(name, loss, accuracy):
    """Shows a score; `name` is 'train' or 'valid'."""
    log.info('%s/acc: %.4f, %s/loss: %.4f', name, accuracy, name, loss)
