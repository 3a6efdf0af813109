"""What benchmark.py makes of its rounds: figures, tables, advice, a picture."""

import collections
import operator
import platform
import statistics

import numpy as np

import utils
from utils import log

# More towers with less than this times the images per second have gained nothing.
GAIN = 1.1


def summarise(training, towers, peers, answers, machines=(), left_out=()):
    """Returns what --json writes, from the answers of all rounds.

    Args:
      training: flags of train_multi_gpu.py.
      towers, peers, machines: lists of `benchmark.Measured`.
      answers: {name: list of the answers}.
      left_out: names of flags that have no meaning here.
    """
    per_towers = collections.OrderedDict()
    for one in towers:
        rounds = answers[one.name]
        # Neighbouring slices are compared: both had the same share of the machine.
        pairs = [pair for answer in rounds for pair in answer['rates']]
        per_towers[one.name] = {
            'global_batch': one.num_gpus * training.batch_size * training.accumulate,
            **_rate(rounds),
            'limit_images_per_second': statistics.median(limit for _, limit in pairs),
            'limit_share': statistics.median(rate / limit for rate, limit in pairs),
            'overhead_microseconds_per_image': statistics.median(
                1e6 / rate - 1e6 / limit for rate, limit in pairs
            ),
            'input_wait_share': statistics.median(
                answer['input_wait_share'] for answer in rounds
            ),
            'graph_seconds': one.ready['graph_seconds'],
            'threads': one.ready['threads'],
        }
    smallest = towers[0]
    for one in towers:
        gain = (
            per_towers[one.name]['images_per_second']
            / per_towers[smallest.name]['images_per_second']
        )
        per_towers[one.name]['efficiency'] = gain * smallest.num_gpus / one.num_gpus
    per_peer = collections.OrderedDict()
    for one in peers:
        ours = map(_round_rate, answers[str(one.num_gpus)])
        theirs = map(_round_rate, answers[one.name])
        per_peer[one.name] = {
            'num_gpus': one.num_gpus,
            **_rate(answers[one.name]),
            # Of each round: both were slowed by the same other work.
            'towers_times_as_fast': statistics.median(
                map(operator.truediv, ours, theirs)
            ),
            'version': one.ready.get('version'),
        }
    return {
        'towers': per_towers,
        'machines': _summarise_machines(training, machines, answers),
        'peers': per_peer,
        'flags': {k: v for k, v in vars(training).items() if k not in left_out},
        'rounds': len(answers[smallest.name]),
        'devices': {
            'towers': towers[-1].ready['towers'],
            'cores': utils.count_cores(),
        },
        'threads': {one.name: one.ready['threads'] for one in towers},
        'versions': {
            'python': platform.python_version(),
            'tensorflow': towers[-1].ready['tensorflow'],
            'numpy': np.__version__,
        },
    }


def _summarise_machines(training, machines, answers):
    """Returns {label: figures}, against as many towers of one machine in each round."""
    per_label = collections.OrderedDict()
    for one in machines:
        batch = one.num_gpus * training.batch_size * training.accumulate
        pairs = list(
            zip(
                map(_round_rate, answers[one.name]),
                map(_round_rate, answers[str(one.num_gpus)]),
            )
        )
        alone = [answer['all_reduce_seconds'] for answer in answers[one.name]]
        per_label[one.name] = {
            'num_gpus': one.num_gpus,
            **_rate(answers[one.name]),
            'share_of_one_machine': statistics.median(a / b for a, b in pairs),
            'step_milliseconds': statistics.median(1e3 * batch / a for a, _ in pairs),
            'overhead_milliseconds': statistics.median(
                1e3 * batch / a - 1e3 * batch / b for a, b in pairs
            ),
            'all_reduce_milliseconds': 1e3 * statistics.median(alone),
            'all_reduce_share': statistics.median(
                seconds * a / batch for seconds, (a, _) in zip(alone, pairs)
            ),
        }
    return per_label


def _round_rate(answer):
    """Returns the images per second of one round of towers or of a peer."""
    if 'rates' in answer:
        return statistics.median(rate for rate, _ in answer['rates'])
    return answer['images_per_second']


def _rate(rounds):
    """Returns the median over rounds, and how far they are apart as a share of it."""
    rates = list(map(_round_rate, rounds))
    median = statistics.median(rates)
    return {'images_per_second': median, 'spread': (max(rates) - min(rates)) / median}


def show(result, towers, peers, machines=()):
    """Prints the tables, and advice where more towers gain nothing."""
    log.info(
        'TensorFlow %s on %s, model %s: medians of %d rounds',
        result['versions']['tensorflow'],
        ' '.join(result['devices']['towers']),
        result['flags']['model'],
        result['rounds'],
    )
    _show_towers(result['towers'], towers)
    if machines:
        _show_machines(result['machines'], machines)
    if peers:
        _show_peers(result['peers'], peers)
    for sentence in advise(result):
        log.info('')
        log.info(sentence)


def _show_towers(result, towers):
    head = '%6s %7s %7s %9s %6s %10s %8s %9s %6s'
    row = '%6d %7s %7d %9s %5.0f%% %9.0f%% %7.1f%% %6.2f us %5.1f%%'
    log.info('')
    log.info(head, '', '', 'global', '', '', '', 'of', 'overhead', 'input')
    log.info(
        head,
        *('towers', 'threads', 'batch', 'images/s', 'spread', 'efficiency', 'limit'),
        *('per image', 'wait'),
    )
    for one in towers:
        figures = result[one.name]
        log.info(
            row,
            one.num_gpus,
            '%d + %d' % tuple(figures['threads']),
            figures['global_batch'],
            '{:,.0f}'.format(figures['images_per_second']),
            100 * figures['spread'],
            100 * figures['efficiency'],
            100 * figures['limit_share'],
            figures['overhead_microseconds_per_image'],
            100 * figures['input_wait_share'],
        )


def _show_machines(result, machines):
    log.info('')
    log.info(
        '%-22s %10s %7s %14s %9s %12s  %s',
        *('over loopback', 'images/s', 'spread', 'of one machine', 'step'),
        *('longer by', 'all-reduce alone'),
    )
    for one in machines:
        figures = result[one.name]
        log.info(
            '%-22s %10s %6.0f%% %13.0f%% %6.2f ms %9.2f ms  %.2f ms, %.0f %% of a step',
            one.label,
            '{:,.0f}'.format(figures['images_per_second']),
            100 * figures['spread'],
            100 * figures['share_of_one_machine'],
            figures['step_milliseconds'],
            figures['overhead_milliseconds'],
            figures['all_reduce_milliseconds'],
            100 * figures['all_reduce_share'],
        )


def _show_peers(result, peers):
    log.info('')
    log.info('%-22s %10s %7s   %s', 'against', 'images/s', 'spread', 'towers are')
    for one in peers:
        figures = result[one.name]
        log.info(
            '%-22s %10s %6.0f%%   %.2f times as fast',
            one.label,
            '{:,.0f}'.format(figures['images_per_second']),
            100 * figures['spread'],
            figures['towers_times_as_fast'],
        )


def advise(result):
    """Returns a sentence for each number of towers that gains nothing."""
    sentences = []
    rates = [(int(n), f['images_per_second']) for n, f in result['towers'].items()]
    on_cpu = 'cpu' in result['devices']['towers'][0]
    cores = result['devices']['cores']
    for (fewer, before), (more, after) in zip(rates, rates[1:]):
        if after >= GAIN * before:
            continue
        if on_cpu and more > cores:
            why = 'they share %s' % utils.count(cores, 'core')
        else:
            why = (
                'give each tower more to do in a step, such as --batch_size %d or a '
                'larger network' % (8 * result['flags']['batch_size'])
            )
        sentences.append(
            '%s gain nothing over %d here (%.2f times the images per second): %s.'
            % (utils.count(more, 'tower'), fewer, after / before, why)
        )
    return sentences


def plot(result, path):
    """Draws images per second as bars, and the limits as lines across them."""
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4))
    labels = [utils.count(int(n), 'tower') for n in result['towers']]
    rates = [figures['images_per_second'] for figures in result['towers'].values()]
    limits = [f['limit_images_per_second'] for f in result['towers'].values()]
    peers = [figures['images_per_second'] for figures in result['peers'].values()]
    names = labels + [name.replace('_', ' ') for name in result['peers']]
    axes.bar(names[: len(rates)], rates, label='towers')
    axes.bar(names[len(rates) :], peers, label='peers', color='grey')
    axes.plot(names[: len(rates)], limits, 'k_', markersize=40, label='limit')
    axes.set_ylabel('images/s')
    axes.set_title('TensorFlow %s' % result['versions']['tensorflow'])
    axes.set_ylim(0, 1.3 * max(rates + limits + peers))
    axes.legend(markerscale=0.3, ncol=3)
    figure.autofmt_xdate()
    figure.savefig(path, dpi=120, bbox_inches='tight')
    pyplot.close(figure)
