"""Measures images per second: the whole training loop, and its limit.

Flags of train_multi_gpu.py say what is trained: --model, --batch_size, --device
and so on. Nothing is saved but what --json and --plot name.
"""

import collections
import concurrent.futures
import contextlib
import itertools
import json
import os
import shlex
import socket
import sys
import tempfile

import numpy as np

import benchmark_results
import benchmark_rounds
import command_line
import data_sets
import decoding
import model
import screen
import utils
from utils import RunFailed, UserError, log

HERE = os.path.dirname(os.path.abspath(__file__))
# Flags of training that have no meaning here.
MEANINGLESS = (
    'epochs',
    'keep',
    'max_minutes',
    'max_steps',
    'model_dir',
    'save_every_seconds',
    'step_timeout',
    'verbose',
)
# The networks that the peers have, too.
PEERS_MODELS = ('cnn',)

# What is measured in a process of its own. name: for the JSON. label: for the screen.
# ask: see `benchmark_rounds.start`. ready: its first answer.
Measured = collections.namedtuple('Measured', 'name label num_gpus ask ready')


def main():
    flags, training, others = parse()
    devices = utils.choose_devices(training[0].device, 1)
    if training[0].device == 'auto' and not devices.gpus:
        log.warning('TensorFlow sees no GPU: the towers are on the CPU')
    with contextlib.ExitStack() as stack:
        towers = [start_towers(stack, flags, one) for one in training]
        machines = [
            start_machines(stack, flags, one, towers)
            for one in training
            if flags.machines and one.num_gpus % flags.machines == 0
        ]
        peers = [start_towers(stack, flags, one, flags.against) for one in others]
        peers += start_peers(stack, flags, training) if flags.peers else []
        answers = measure(flags, training[0], towers + machines, peers)
    peers = [one for one in peers if one.name in answers]
    result = benchmark_results.summarise(
        training[0], towers, peers, answers, machines, left_out=MEANINGLESS
    )
    benchmark_results.show(result, towers, peers, machines)
    if flags.json:
        with open(flags.json, 'w') as file:
            file.write(json.dumps(result, indent=2) + '\n')
    if flags.plot:
        benchmark_results.plot(result, flags.plot)


# Flags


def parse(argv=None):
    """Returns (flags, training, others): benchmark.py's own, and train_multi_gpu.py's.

    The latter once per number of towers, ascending, each with `argv`, a list of
    strings that gives them; `others` with the flags of `--against` added.

    Raises:
      UserError: a flag is unknown, malformed, out of range, or has no meaning here.
    """
    flags, rest = _create_parser().parse_known_args(argv)
    numbers = sorted(set(flags.num_gpus or _default_numbers(rest)))
    if flags.machines and all(number % flags.machines for number in numbers):
        raise UserError(
            '--machines %d share no --num_gpus %s equally: give a multiple'
            % (flags.machines, ' '.join(map(str, numbers)))
        )
    training = [_parse_training(rest, n) for n in numbers]
    others = []
    if flags.against:
        changed = rest + shlex.split(flags.against)
        others = [_parse_training(changed, n) for n in numbers]
    for name in ('json', 'plot'):
        _check_writable(name, getattr(flags, name))
    if flags.plot:
        _check_plot(flags)
    if flags.peers and training[0].model not in PEERS_MODELS:
        raise UserError(
            '--peers have no --model %s, only %s: drop one'
            % (training[0].model, ' and '.join(PEERS_MODELS))
        )
    return flags, training, others


def _create_parser():
    parser = command_line.Parser(description=__doc__)
    parser.add_argument(
        '--num_gpus',
        type=command_line.number(int, 1, command_line.MAX_TOWERS),
        nargs='+',
        metavar='N',
        help='numbers of towers (default: 1 2; 1 where there is one GPU)',
    )
    parser.add_argument(
        '--peers',
        action='store_true',
        help='measure Keras, MirroredStrategy and, where it is installed, PyTorch too',
    )
    parser.add_argument(
        '--machines',
        type=command_line.number(int, 2, command_line.MAX_TOWERS),
        metavar='M',
        help='spread the towers over so many processes too, which add up over loopback '
        'as machines do over a network',
    )
    parser.add_argument(
        '--against',
        metavar='FLAGS',
        help='measure the same towers with these flags added or changed too, written '
        "as --against='--xla off'",
    )
    parser.add_argument(
        '--rounds',
        type=command_line.number(int, 5, 1000),
        default=7,
        help='how often each has its turn (default: 7)',
    )
    parser.add_argument(
        '--seconds',
        type=command_line.number(float, 0.1, 3600),
        default=3,
        help='about how long a turn is (default: 3)',
    )
    parser.add_argument('--json', metavar='FILE', help='write the figures there')
    parser.add_argument(
        '--plot', metavar='FILE', help='draw them there (needs matplotlib)'
    )
    return parser


def _default_numbers(argv):
    """Returns 1 and 2, as far as there are GPUs; on the CPU there are always towers."""
    flags = command_line.parse('', model.NETWORKS, True, argv)
    gpus = [] if flags.device == 'cpu' else flags.gpus or utils.visible_gpus()
    return [1] if len(gpus) == 1 else [1, 2]


def _parse_training(argv, num_gpus):
    argv = argv + ['--num_gpus', str(num_gpus)]
    flags = command_line.parse('', model.NETWORKS, True, argv)
    defaults = command_line.parse('', model.NETWORKS, True, [])
    for name in MEANINGLESS:
        if getattr(flags, name) != getattr(defaults, name):
            raise UserError('--%s has no meaning for benchmark.py: drop it' % name)
    if flags.gpus:
        flags.gpus = flags.gpus[:num_gpus]
        argv += ['--gpus', ','.join(map(str, flags.gpus))]
    utils.choose_devices(flags.device, num_gpus, flags.gpus)
    flags.argv = argv
    return flags


def _check_writable(name, path):
    """Refuses, before anything is measured, what could not be written after it."""
    if path is None:
        return
    made = not os.path.lexists(path)
    if not made and not os.path.isfile(path) and not os.path.isdir(path):
        return  # a device or a pipe: to open it would already be something
    try:
        with open(path, 'a'):
            pass
        if made:
            os.remove(path)
    except OSError as error:
        raise UserError('--%s %s: %s' % (name, path, error.strerror)) from None


def _check_plot(flags):
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise UserError('--plot needs matplotlib: install it first') from None
    kind = os.path.splitext(flags.plot)[1][1:]
    if kind not in FigureCanvasBase.get_supported_filetypes():
        raise UserError('--plot %s: name a .png, .svg or .pdf file' % flags.plot)
    if flags.plot == flags.json:
        raise UserError('--json and --plot name one file: name two')


# Measuring


def start_towers(stack, flags, training, against=''):
    """Starts the process for one number of towers; returns a `Measured`."""
    argument = {'training': training.argv, 'seconds': flags.seconds}
    script = os.path.join(HERE, 'benchmark_towers.py')
    ask = stack.enter_context(benchmark_rounds.start(script, argument))
    label = ' '.join(filter(None, [utils.count(training.num_gpus, 'tower'), against]))
    name = ' '.join(filter(None, [str(training.num_gpus), against]))
    return Measured(name, label, training.num_gpus, ask, get_ready(label, ask))


def get_ready(label, ask):
    """Returns the first answer of a process; what ends it instead ends all."""
    log.info('preparing %s', label)
    try:
        return ask()
    except benchmark_rounds.Ended as ended:
        raise_cause(label, ended)


def start_machines(stack, flags, training, towers):
    """Starts the processes that share one number of towers; returns a `Measured`."""
    each = training.num_gpus // flags.machines
    (alone,) = [one for one in towers if one.num_gpus == training.num_gpus]
    gpus = utils.choose_devices(training.device, training.num_gpus, training.gpus).gpus
    addresses = ['127.0.0.1:%d' % _free_port() for _ in range(flags.machines)]
    label = '%d machines x %s' % (flags.machines, utils.count(each, 'tower'))
    # Before the processes, which so are ended first: its threads wait for them.
    pool = concurrent.futures.ThreadPoolExecutor(flags.machines)
    stack.enter_context(pool)
    asks = []
    for index in range(flags.machines):
        argv = training.argv + ['--num_gpus', str(each)]
        if gpus:
            own = gpus[index * each : (index + 1) * each]
            argv += ['--gpus', ','.join(map(str, own))]
        argument = {
            'training': argv,
            'addresses': addresses,
            'index': index,
            'steps': alone.ready['steps'],
        }
        script = os.path.join(HERE, 'benchmark_machines.py')
        asks.append(stack.enter_context(benchmark_rounds.start(script, argument)))

    def ask():
        return list(pool.map(lambda ask: ask(), asks))[0]

    return Measured(label, label, training.num_gpus, ask, get_ready(label, ask))


def find_cause(ended):
    """Returns the line that tells why a process ended."""
    lines = ended.said.splitlines() or ['it ended with status %d' % ended.status]
    errors = [line[len('ERROR: ') :] for line in lines if line.startswith('ERROR: ')]
    return (errors or lines[-1:])[0]


def raise_cause(label, ended):
    """Raises what ended a process: a `UserError` with its line, or `RunFailed`."""
    if ended.status == 2:
        raise UserError(find_cause(ended)) from None
    raise RunFailed('measuring %s: %s' % (label, find_cause(ended))) from None


def start_peers(stack, flags, training):
    """Starts the processes of the peers; returns a list of `Measured`."""
    data = data_sets.load(training[0])
    scratch = stack.enter_context(tempfile.TemporaryDirectory())
    examples = os.path.join(scratch, 'examples.npz')
    images = np.concatenate(list(decoding.decode_all(data.train.images, (0, 0))))
    np.savez(examples, images=images, labels=data.train.labels)
    peers = []
    for peer, one in itertools.product(('keras', 'torch'), training):
        alone = one.num_gpus == 1
        kind = {
            'keras': 'Keras fit' if alone else 'MirroredStrategy',
            'torch': 'PyTorch' if alone else 'PyTorch DDP',
        }[peer]
        label = '%s, %d' % (kind, one.num_gpus)
        argument = {
            'peer': peer,
            'num_gpus': one.num_gpus,
            'gpus': utils.choose_devices(one.device, one.num_gpus, one.gpus).gpus,
            'examples': examples,
            'num_classes': len(data.classes),
            'batch_size': one.batch_size,
            'dropout': one.dropout,
            'optimizer': one.optimizer,
            'learning_rate': one.learning_rate,
            'seconds': flags.seconds,
            'port': _free_port(),
        }
        script = os.path.join(HERE, 'benchmark_peers.py')
        ask = stack.enter_context(benchmark_rounds.start(script, argument))
        log.info('preparing %s', label)
        try:
            ready = ask()
        except benchmark_rounds.Ended as ended:
            ready = {'missing': find_cause(ended)}
        if 'missing' in ready:
            log.warning('%s is left out: %s', label, ready['missing'])
            continue
        name = label.lower().replace(', ', '_').replace(' ', '_')
        peers.append(Measured(name, label, one.num_gpus, ask, ready))
    return peers


def _free_port():
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]


def measure(flags, training, towers, peers):
    """Gives each its turns.

    Returns:
      {name: list of its answers}; a peer that ends on the way is left out.
    """
    measured = towers + peers
    seconds = sum(one.ready['round_seconds'] for one in measured)
    log.info('%d rounds of about %d s', flags.rounds, seconds)
    answers = collections.OrderedDict((one.name, []) for one in measured)
    with screen.open_bar(training, 0, flags.rounds * len(measured)) as bar:
        for _, one in itertools.product(range(flags.rounds), measured):
            bar.update()
            if one.name not in answers:
                continue
            try:
                answers[one.name].append(one.ask())
            except benchmark_rounds.Ended as ended:
                if one not in peers:
                    raise_cause(one.label, ended)
                log.warning('%s is left out: %s', one.label, find_cause(ended))
                del answers[one.name]
    return answers


if __name__ == '__main__':
    sys.exit(utils.run_main(main))
