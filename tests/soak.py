"""Kills training with SIGKILL over and over, and shows that it ends all the same.

    python -m tests.soak --kills 20 --num_gpus 1 2

Each number of towers is trained once without interruption. Then the same command is
killed and started again until it has been killed often enough and is let through. Both
must end with the same bits in every variable, of the last and of the best checkpoint,
and with the same rows in metrics.jsonl, times aside.
"""

import argparse
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

import checkpoints
import data_sets
from tests.conftest import (
    ROOT,
    assert_same_bits,
    data_flags,
    read_checkpoint,
    read_metrics,
    without_times,
    write_data_set,
)
from tf1 import tf


def start(argv):
    """Starts train_multi_gpu.py; returns the process."""
    return subprocess.Popen(
        [sys.executable, os.path.join(ROOT, 'train_multi_gpu.py')] + argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
    )


def wait_for_epoch(process):
    """Reads what the process prints until its first epoch begins."""
    for line in process.stdout:
        if line.startswith('Epoch'):
            return
    raise AssertionError('ended before training: %s' % process.stderr.read())


def finish(process):
    """Waits for a run that must end well; returns its seconds from here on."""
    began = time.time()
    _, err = process.communicate()
    assert process.returncode == 0, err
    return time.time() - began


def newest(model_dir):
    """Returns the name of the newest checkpoint, 'none' without any."""
    return os.path.basename((checkpoints.find(model_dir) or ['none'])[0])


def kill_often(argv, model_dir, kills, seconds, rng):
    """Kills `kills` runs of a command that needs `seconds` of training in all.

    Returns:
      The newest checkpoint after each kill.
    """
    places = []
    for _ in range(kills):
        before = newest(model_dir)
        process = start(argv)
        if rng.random() < 0.2:  # somewhere in the start
            time.sleep(rng.uniform(0, 3))
        else:  # somewhere after the first save
            wait_for_epoch(process)
            while newest(model_dir) == before and process.poll() is None:
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.6 * seconds / kills))
        process.send_signal(signal.SIGKILL)
        _, err = process.communicate()
        if process.returncode == 0:  # faster than it was alone: nothing left to kill
            break
        assert process.returncode == -signal.SIGKILL, err
        places.append(newest(model_dir))
    assert places, 'it ended before the first kill'
    return places


def compare(whole, killed):
    """The two model_dirs hold the same bits and the same rows."""
    for directory in ('', 'best'):
        one, other = (
            checkpoints.find(os.path.join(path, directory))[0]
            for path in (whole, killed)
        )
        assert os.path.basename(one) == os.path.basename(other)
        assert_same_bits(read_checkpoint(one), read_checkpoint(other))
    rows = [without_times(read_metrics(path)) for path in (whole, killed)]
    assert rows[0] == rows[1]
    return rows[0]


def soak(directory, data_dir, num_gpus, kills, epochs, seed=0, more=()):
    """Runs one comparison in `directory`; returns a line that sums it up."""
    argv = ['--data_dir', data_dir, '--device', 'cpu', '--num_gpus', str(num_gpus)]
    argv += ['--epochs', str(epochs), '--save_every_seconds', '0.2'] + list(more)
    whole, killed = (os.path.join(directory, name) for name in ('whole', 'killed'))
    process = start(argv + ['--model_dir', whole])
    wait_for_epoch(process)
    seconds = finish(process)
    argv += ['--model_dir', killed]
    places = kill_often(argv, killed, kills, seconds, random.Random(seed))
    finish(start(argv))
    rows = compare(whole, killed)
    return (
        'TensorFlow %s, %d tower(s), %d steps in %d epochs: %d kills, going on from %d '
        'different checkpoints up to %s: all bits and rows equal'
        % (
            tf.version.VERSION,
            num_gpus,
            rows[-1]['step'],
            len(rows),
            len(places),
            len(set(places) - {'none'}),
            places[-1],
        )
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--kills', type=int, default=20)
    parser.add_argument('--num_gpus', type=int, nargs='+', default=[1, 2])
    parser.add_argument('--epochs', type=int, default=20)
    parser.add_argument('--seed', type=int, default=0)
    flags = parser.parse_args()
    mnist = data_sets.load(data_flags(os.path.join(ROOT, 'data', 'mnist')))
    part = mnist._replace(
        train=data_sets.Examples(*(a[:4000] for a in mnist.train)),
        valid=data_sets.Examples(*(a[:500] for a in mnist.valid)),
    )
    with tempfile.TemporaryDirectory() as directory:
        data_dir = write_data_set(pathlib.Path(directory, 'data'), part)
        for num_gpus in flags.num_gpus:
            place = os.path.join(directory, str(num_gpus))
            print(
                soak(place, data_dir, num_gpus, flags.kills, flags.epochs, flags.seed),
                flush=True,
            )


if __name__ == '__main__':
    main()
