"""Fixtures that every room's tests share."""

import contextlib
import gc
import gzip
import importlib
import itertools
import json
import os
import pathlib
import signal
import socket
import sys
import threading

import numpy as np
import pytest

import cluster
import command_line
import data_sets
import input_pipeline
import model
import tf1
import train_multi_gpu
import training
import utils
from tests.processes import Finished, Process
from tf1 import tf
from utils import RunFailed, UserError

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
tf1.VERBOSE = False  # pytest --verbose is not meant
# A shell's job in the background, and so all its children, may ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
THREADS = utils.choose_threads(
    command_line.parse('', model.NETWORKS, towers=True, argv=[]), ['/cpu:0']
)


def open_thread_pools():
    """Opens the first session, whose thread pools all later ones of a process get.

    Bits depend on them: what is trained here must equal what a script trains.
    """
    one = utils.choose_devices('cpu', 1)
    with tf.Graph().as_default(), utils.open_session(one, THREADS) as session:
        session.run(tf.matmul(tf.ones([64, 64]), tf.ones([64, 64])))


def spare_collections():
    """Lets the collector pass over what the imports have left: a tenth less work."""
    if hasattr(gc, 'freeze'):  # not on Python 3.6
        gc.freeze()
    gc.set_threshold(50000, 20, 20)


spare_collections()

# No fixture: a module of tests may open a session while it is collected.
open_thread_pools()


@pytest.fixture(autouse=True)
def fresh_graph(tmp_path, monkeypatch):
    """Each test has its own graph, and its own empty directory to run in."""
    monkeypatch.chdir(tmp_path)
    with tf.Graph().as_default(), tf.device('/cpu:0'):
        yield


@pytest.fixture(scope='session')
def mnist():
    """The whole MNIST."""
    return data_sets.load(data_flags(os.path.join(ROOT, 'data', 'mnist')))


@pytest.fixture(scope='session')
def part(mnist):
    """The first 2000 training and 500 test images of MNIST."""
    return mnist._replace(
        train=data_sets.Examples(*(a[:2000] for a in mnist.train)),
        valid=data_sets.Examples(*(a[:500] for a in mnist.valid)),
    )


@pytest.fixture(scope='session')
def small(part):
    """`part`, its images half as high and wide: 14 x 14, half the work."""

    def halve(examples):
        images = examples.images.reshape(-1, 14, 2, 14, 2, 1).mean((2, 4))
        return examples._replace(images=images.astype(np.uint8))

    return part._replace(train=halve(part.train), valid=halve(part.valid))


def data_flags(data_dir, **changes):
    """The flags that `data_sets.load` takes."""
    flags = command_line.default_data_flags()
    vars(flags).update(changes, data_dir=str(data_dir), model_dir=None)
    return flags


def write_idx(path, array):
    """Writes a uint8 array as an IDX file, gzip if the name says so."""
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, '>u4').tobytes()
    opener = gzip.open if str(path).endswith('.gz') else open
    with opener(str(path), 'wb') as file:
        file.write(header + array.astype(np.uint8).tobytes())


def write_data_set(directory, data):
    """Writes the four IDX files of a `DataSet`; returns the directory as a string."""
    directory.mkdir(exist_ok=True)
    for prefix, examples in (('train', data.train), ('t10k', data.valid)):
        write_idx(directory / (prefix + '-images-idx3-ubyte'), examples.images[..., 0])
        write_idx(directory / (prefix + '-labels-idx1-ubyte'), examples.labels)
    return str(directory)


def make_examples(number, *shape, classes=3, seed=0):
    """Noise, brighter or darker by class: [number, *shape], labels 0, 1, 2, 0, ..."""
    random = np.random.RandomState(seed)
    labels = np.arange(number, dtype=np.int64) % classes
    bright = (labels + 1) * 200 // classes
    noise = random.randint(0, 56, (number,) + shape)
    images = noise + bright.reshape((-1,) + (1,) * len(shape))
    return data_sets.Examples(images.astype(np.uint8), labels)


def write_npz(path, train, valid, **changes):
    """Writes two `Examples` as an npz file; a change replaces an array, None leaves it.

    Returns:
      Its path as a string.
    """
    arrays = dict(
        x_train=train.images,
        y_train=train.labels,
        x_test=valid.images,
        y_test=valid.labels,
    )
    arrays.update(changes)
    np.savez(str(path), **{k: v for k, v in arrays.items() if v is not None})
    return str(path)


def encode_pngs(images):
    """Returns the PNG files of uint8 images, each [height, width, channels]."""
    with tf.Graph().as_default(), tf.Session() as session:
        pixels = tf.placeholder(tf.uint8, [None, None, None])
        encode = session.make_callable(tf.image.encode_png(pixels), [pixels])
        return [encode(image) for image in images]


def write_folders(directory, names, **splits):
    """Writes `Examples` as SPLIT/CLASS/001.png; returns the directory as a string."""
    for split, (images, labels) in splits.items():
        for number, data in enumerate(encode_pngs(images)):
            path = directory / split / names[labels[number]] / ('%03d.png' % number)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return str(directory)


def write_records(directory, **splits):
    """Writes `Examples` as two TFRecord files each; returns the directory as a string.

    The file is SPLIT-00000-of-00002.
    """
    directory.mkdir(exist_ok=True)
    for split, (images, labels) in splits.items():
        for part in range(2):
            path = directory / ('%s-%05d-of-00002' % (split, part))
            with tf.python_io.TFRecordWriter(str(path)) as writer:
                for data, label in zip(encode_pngs(images[part::2]), labels[part::2]):
                    writer.write(make_record(data, label))
    return str(directory)


def make_record(image, label, **more):
    """Returns a serialised tf.train.Example; `more` are images of other names."""
    images = dict(more, **{'image/encoded': image})
    features = {
        name: tf.train.Feature(bytes_list=tf.train.BytesList(value=[data]))
        for name, data in images.items()
    }
    number = tf.train.Int64List(value=[int(label)])
    features['image/class/label'] = tf.train.Feature(int64_list=number)
    example = tf.train.Example(features=tf.train.Features(feature=features))
    return example.SerializeToString(deterministic=True)


@pytest.fixture(scope='session')
def small_dir(small, tmp_path_factory):
    """The directory that holds `small`."""
    return write_data_set(tmp_path_factory.mktemp('data') / 'small', small)


@pytest.fixture(scope='session')
def part_dir(part, tmp_path_factory):
    """The directory that holds `part`."""
    return write_data_set(tmp_path_factory.mktemp('data') / 'part', part)


@pytest.fixture
def flags(small_dir):
    """Flags of a short run on `small`: 62 steps per epoch with one tower."""
    return ['--device', 'cpu', '--xla', 'off', '--data_dir', small_dir]


def make_flags(*argv):
    """The flags of train_multi_gpu.py."""
    return command_line.parse('', model.NETWORKS, towers=True, argv=list(argv))


@pytest.fixture
def run_steps(small):
    """A function that trains in this process and returns {variable name: value}."""

    def run_steps(steps, *argv, script=train_multi_gpu, data=small):
        # Compiling takes longer than the few steps of a test.
        flags = make_flags('--device', 'cpu', '--xla', 'off', *argv)
        devices = utils.choose_devices('cpu', flags.num_gpus)
        with tf.Graph().as_default(), tf.device('/cpu:0'):
            towers = devices.towers if script is train_multi_gpu else '/cpu:0'
            job = script.build_job(flags, towers, data)
            with start(job, devices) as session:
                step = training.make_step(session, job)
                for _ in range(steps):
                    step()
                return {v.op.name: session.run(v) for v in tf.global_variables()}

    return run_steps


@pytest.fixture
def small_graphs(monkeypatch):
    """Decodes and augments fewer images at once: to build a graph takes longest."""
    monkeypatch.setattr(input_pipeline, 'STEPS_PER_ENQUEUE', 2)


@contextlib.contextmanager
def start(job, devices, place=()):
    """A session in which the job's queues are being fed; runs `place` before that."""
    with utils.open_session(devices, THREADS) as session:
        session.run(
            [tf.global_variables_initializer(), tf.local_variables_initializer()],
            job.feeds,
        )
        session.run(place)
        session.run([job.replicas.copy, job.pipeline.start])
        with training.queue_runners(session):
            session.run(job.pipeline.prefill)
            yield session


@pytest.fixture
def main(monkeypatch, capfd):
    """A function that runs a script's main() here, as the command line would."""

    def main(script, *argv):
        monkeypatch.setattr(sys, 'argv', [script] + list(argv))
        capfd.readouterr()
        module = importlib.import_module(script[: -len('.py')])
        status = utils.run_main(module.main)
        return Finished(status, *capfd.readouterr())

    return main


def command(script, *argv, **options):
    """Runs a script in a process of its own; `options` are those of `Process`."""
    return Process(script, argv, **options).end(300)


# Not what the system gives out: a connection of another test may be given that, too,
# before it is listened to. Each process begins somewhere else.
PORTS = itertools.cycle(range(10000, 32000))
for _ in range(os.getpid() * 97 % 22000):
    next(PORTS)


def find_addresses(number):
    """Returns so many addresses on loopback whose ports are free."""
    found = []
    while len(found) < number:
        port = next(PORTS)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(('127.0.0.1', port))
            found.append('127.0.0.1:%d' % port)
    return found


@pytest.fixture
def addresses():
    """Of three machines on loopback."""
    return find_addresses(3)


class Machine(threading.Thread):
    """Meets the others in a thread; `outcome` is what came of it."""

    def __init__(self, addresses, index, facts=None, start_timeout=20):
        super().__init__(daemon=True)
        self.machines = cluster.Machines(addresses, index)
        self.facts = facts or {'--seed': 0}
        self.start_timeout = start_timeout
        self.outcome = None
        self.start()

    def run(self):
        try:
            self.outcome, self.news = cluster.meet(
                self.machines, self.facts, self.start_timeout, news=[1, 2]
            )
        except (UserError, RunFailed) as error:
            self.outcome = error

    def wait(self):
        self.join(30)
        assert not self.is_alive(), 'machine %d still waits' % self.machines.index
        return self.outcome


def read_checkpoint(prefix):
    """Returns {name: value} of a checkpoint's tensors."""
    reader = tf.train.NewCheckpointReader(str(prefix))
    return {
        name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()
    }


def assert_same_bits(one, other):
    """Two {name: value} hold the same names and the same bits."""
    assert sorted(one) == sorted(other)
    differing = [n for n in one if one[n].tobytes() != other[n].tobytes()]
    assert not differing, 'these differ: %s' % differing


def read_metrics(model_dir):
    """Returns the rows of metrics.jsonl."""
    with open(os.path.join(str(model_dir), 'metrics.jsonl')) as file:
        return [json.loads(line) for line in file]


def without_times(rows):
    """The rows of metrics.jsonl without what no two runs share."""
    timed = ('seconds', 'images_per_second')
    return [{k: v for k, v in row.items() if k not in timed} for row in rows]


def files(directory='.'):
    """Returns the paths of all files below a directory, relative to it."""
    return sorted(
        os.path.relpath(os.path.join(parent, name), str(directory))
        for parent, _, names in os.walk(str(directory))
        for name in names
    )


def read_files(directory):
    """Returns {path: bytes} of all files below a directory."""
    return {
        name: pathlib.Path(directory, name).read_bytes() for name in files(directory)
    }


@pytest.fixture(scope='session')
def trained_dir(part_dir, tmp_path_factory):
    """A run of three epochs on `part` with two towers; not to be written to."""
    model_dir = str(tmp_path_factory.mktemp('trained') / 'run')
    flags = ['--device', 'cpu', '--xla', 'off', '--data_dir', part_dir]
    flags += ['--epochs', '3', '--num_gpus', '2', '--model_dir', model_dir]
    done = command('train_multi_gpu.py', *flags)
    assert done.status == 0, done.err
    return model_dir


def assert_mistake(done, told):
    """A mistake of the user's: one line on stderr, nothing on stdout, exit 2."""
    assert done.status == 2, done
    assert done.out == ''
    assert done.err.startswith('ERROR: ') and told in done.err, done.err
    assert done.err.count('\n') == 1 and done.err.endswith('\n')
