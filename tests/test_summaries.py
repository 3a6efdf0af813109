"""TensorBoard's event files, read by TensorFlow and by a real TensorBoard; traces."""

import contextlib
import glob
import json
import os
import pathlib
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request

import numpy as np
import pytest

import input_pipeline
import summaries
import utils
from summaries import Events
from tests.conftest import (
    assert_mistake,
    assert_same_bits,
    files,
    read_checkpoint,
    read_metrics,
)
from tests.processes import Process
from tf1 import tf

SCALARS = ['accuracy', 'images_per_second', 'learning_rate', 'loss']


def read(directory):
    """All events of a run's directory, in the order of its files."""
    return [
        event
        for path in sorted(glob.glob(directory + '/events.*'))
        for event in summaries.read_events(path)
    ]


def read_scalars(directory):
    """Returns {tag: [(step, value)]}."""
    found = {}
    for event in read(directory):
        for value in event.summary.value:
            if value.HasField('simple_value'):
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def tags(directory, field):
    return {
        (event.step, value.tag)
        for event in read(directory)
        for value in event.summary.value
        if value.HasField(field)
    }


@contextlib.contextmanager
def tensorboard(logdir):
    """A real server on a free port; yields a function (path, **query) -> JSON."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    argv = ['--logdir', logdir, '--host', '127.0.0.1', '--port', str(port)]
    argv += ['--reload_interval', '1']
    with open('tensorboard.log', 'w') as log:
        server = subprocess.Popen(
            [sys.executable, '-m', 'tensorboard.main'] + argv, stdout=log, stderr=log
        )

    def get(path, **query):
        url = 'http://127.0.0.1:%d/data/%s?%s' % (
            port,
            path,
            urllib.parse.urlencode(query),
        )
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.loads(answer.read().decode())

    try:
        deadline = time.time() + 60
        while True:
            told = pathlib.Path('tensorboard.log').read_text()
            assert server.poll() is None and time.time() < deadline, told
            with contextlib.suppress(OSError):
                if get('runs'):
                    break
            time.sleep(0.2)
        yield get
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=30)


def wait_for(ask, wanted):
    """Asks till the answer is what is wanted: a server reads files in its own time."""
    deadline = time.time() + 30
    while ask() != wanted and time.time() < deadline:
        time.sleep(0.2)
    assert ask() == wanted


def over_http(get, run):
    """Returns {tag: [(step, value)]} as TensorBoard serves it."""
    tags = get('plugin/scalars/tags').get(run, {})
    return {
        tag: [
            (step, value)
            for _, step, value in get('plugin/scalars/scalars', run=run, tag=tag)
        ]
        for tag in tags
    }


def without_speed(scalars):
    return {tag: points for tag, points in scalars.items() if 'per_second' not in tag}


def test_tensorboard_shows_one_curve_over_a_kill(main, flags):
    flags += ['--num_gpus', '2', '--epochs', '2', '--summary_steps', '1']
    assert main('train_multi_gpu.py', '--model_dir', 'whole', *flags).status == 0
    flags += ['--model_dir', 'm']
    first = main('train_multi_gpu.py', '--max_steps', '20', *flags)
    assert first.status == 0
    with tensorboard('m') as get:
        wait_for(lambda: get_steps(get), list(range(1, 21)))
        # A live server has seen the steps that are lost with the kill.
        kill_after_step(45, *flags)
        lost = max(step for step, _ in read_scalars('m/train')['loss'])
        wait_for(lambda: get_steps(get), list(range(1, lost + 1)))
        done = main('train_multi_gpu.py', *flags)
        assert done.status == 0 and 'continues from m/model.ckpt-1-31' in done.out
        wait_for(lambda: get_steps(get), list(range(1, 63)))
        live = over_http(get, 'train')
    expected = without_speed(read_scalars('whole/train'))
    assert sorted(expected) == ['accuracy', 'learning_rate', 'loss']
    assert [step for step, _ in expected['loss']] == list(range(1, 63))
    assert without_speed(read_scalars('m/train')) == expected
    assert without_speed(live) == expected
    with tensorboard('m') as get:
        wait_for(lambda: get_steps(get), list(range(1, 63)))
        assert without_speed(over_http(get, 'train')) == expected
        valid = over_http(get, 'valid')
    # The run of 20 steps ended with an evaluation of its own.
    valid = {tag: [p for p in points if p[0] != 20] for tag, points in valid.items()}
    assert valid == read_scalars('whole/valid')


def get_steps(get):
    return [step for step, _ in over_http(get, 'train').get('loss', [])]


# Slow enough for the kill to come before the next checkpoint.
SLOW = """
import sys, time
import stopping, train_multi_gpu, utils
find_stop = stopping.find_stop
stopping.find_stop = lambda *args: time.sleep(0.05) or find_stop(*args)
sys.exit(utils.run_main(train_multi_gpu.main))
"""


def kill_after_step(step, *argv):
    """Trains in a process of its own and kills it once it has written that step."""
    run = Process('-c', argv, SLOW)
    deadline = time.time() + 60
    while not any(event.step >= step for event in read('m/train')):
        assert run.poll() is None and time.time() < deadline
        time.sleep(0.02)
    run.send_signal(signal.SIGKILL)
    assert run.end().status == -signal.SIGKILL


def test_tags_are_the_same_for_any_number_of_towers_and_values_their_mean(main, flags):
    found = {}
    flags += ['--epochs', '2', '--summary_steps', '5', '--dropout', '0']
    flags += ['--optimizer', 'sgd', '--learning_rate', '0.01']
    for towers in (1, 2, 4):
        model_dir = 'm%d' % towers
        argv = ['--num_gpus', str(towers), '--batch_size', str(80 // towers)]
        argv += ['--model_dir', model_dir]
        assert main('train_multi_gpu.py', *argv, *flags).status == 0
        train, valid = (read_scalars('%s/%s' % (model_dir, n)) for n in Events._fields)
        assert sorted(train) == SCALARS and sorted(valid) == ['accuracy', 'loss']
        assert [step for step, _ in train['loss']] == list(range(5, 51, 5))
        # The first ten steps of a process count for no speed.
        speeds = train['images_per_second']
        assert [step for step, _ in speeds] == list(range(15, 51, 5))
        rows = read_metrics(model_dir)
        for tag, key in (('loss', 'valid_loss'), ('accuracy', 'valid_acc')):
            assert valid[tag] == [(row['step'], np.float32(row[key])) for row in rows]
        found[towers] = train
    for towers in (2, 4):
        # Rounding may decide what one of the 80 images is taken for.
        for tag, least in (('loss', 0), ('accuracy', 0.0126), ('learning_rate', 0)):
            one, many = (np.array(found[n][tag]) for n in (1, towers))
            np.testing.assert_allclose(one, many, rtol=1e-3, atol=least)


def test_samples_come_once_and_histograms_once_per_epoch(main, flags, small):
    flags += ['--batch_size', '200', '--histograms', '--model_dir', 'm']
    assert main('train.py', '--epochs', '1', *flags).status == 0
    assert main('train.py', '--epochs', '3', *flags).status == 0
    names = ['samples/image/%d' % i for i in range(8)]
    assert tags('m/train', 'image') == {(1, name) for name in names}
    variables = ['%s/%s' % (layer, part) for layer in LAYERS for part in PARTS]
    assert tags('m/train', 'histo') == {
        (step, '%s/%s' % (what, name))
        for step in (10, 20, 30)
        for what in ('weights', 'gradients')
        for name in variables
    }
    values = {
        (event.step, value.tag): value
        for event in read('m/train')
        for value in event.summary.value
    }
    kernel = read_checkpoint('m/model.ckpt-3-30')['conv2/kernel']
    shown = values[30, 'weights/conv2/kernel'].histo
    assert shown.num == kernel.size
    assert shown.sum == pytest.approx(kernel.sum(dtype=np.float64), abs=1e-4)
    assert shown.min == kernel.min() and shown.max == kernel.max()
    gradient = values[30, 'gradients/conv2/kernel'].histo
    assert gradient.num == kernel.size and gradient.sum_squares > 0
    picture = values[1, 'samples/image/0'].image
    with tf.Session() as session:
        pixels = session.run(tf.image.decode_png(picture.encoded_image_string))
        order = session.run(input_pipeline.epoch_order(2000, 0, 0))
    # TensorBoard's samples are the first images that a tower sees.
    assert (pixels == small.train.images[order[0]]).all()


LAYERS = ('conv1', 'conv2', 'conv3', 'dense1', 'dense2')
PARTS = ('kernel', 'bias')


def test_what_is_recorded_changes_no_bit(main, flags):
    flags += ['--num_gpus', '2', '--epochs', '1']
    recorded = ['--histograms', '--trace', '7', '--summary_steps', '1']
    recorded += ['--model_dir', 'recorded']
    assert main('train_multi_gpu.py', *recorded, *flags).status == 0
    plain = ['--summary_steps', '0', '--model_dir', 'plain']
    assert main('train_multi_gpu.py', *plain, *flags).status == 0
    name = '/model.ckpt-1-31'
    assert_same_bits(
        read_checkpoint('recorded' + name), read_checkpoint('plain' + name)
    )
    assert not [name for name in files('plain') if 'tfevents' in name]


def test_a_trace_has_a_group_of_rows_per_tower(main, flags):
    flags += ['--num_gpus', '3', '--model_dir', 'm', '--max_steps', '9']
    done = main('train_multi_gpu.py', '--trace', '8', *flags)
    assert done.status == 0 and 'trace of the step: m/trace-8.json' in done.out
    with open('m/trace-8.json') as file:
        events = json.load(file)['traceEvents']
    names = {e['pid']: e['args']['name'] for e in events if e['ph'] == 'M'}
    assert len(names) == 3
    ran = {}
    for event in events:
        if event['ph'] == 'X':
            ran.setdefault(names[event['pid']], []).append(event['args']['name'])
    for tower in range(3):
        (device,) = [name for name in ran if 'device:CPU:%d' % tower in name]
        assert 'tower_%d/conv1/Conv2D' % tower in ' '.join(ran[device])
        others = [op for op in ran[device] if re.match(r'tower_(?!%d/)' % tower, op)]
        assert not others


@pytest.mark.parametrize('traced', [1, 2, 10, 11])
def test_a_trace_takes_the_place_of_nothing(main, flags, traced):
    flags += ['--batch_size', '200', '--epochs', '2', '--model_dir', 'm']
    done = main('train.py', '--histograms', '--trace', str(traced), *flags)
    assert done.status == 0 and done.err == ''
    assert os.path.exists('m/trace-%d.json' % traced)
    assert {step for step, _ in tags('m/train', 'image')} == {1}
    assert {step for step, _ in tags('m/train', 'histo')} == {10, 20}
    assert len(tags('m/train', 'histo')) == 2 * 2 * len(LAYERS) * len(PARTS)


def test_histograms_without_event_files_are_a_mistake(main, flags):
    done = main('train.py', '--histograms', '--summary_steps', '0', *flags)
    assert_mistake(done, '--histograms go to the event files')
    assert os.listdir('.') == []


def test_a_trace_that_never_came_is_told(main, flags):
    done = main('train.py', '--max_steps', '3', '--trace', '4', *flags)
    assert done.status == 0
    assert done.err == 'WARNING: --trace 4: this run had no such step\n'
    flags += ['--model_dir', 'm', '--trace', '2']
    assert main('train.py', '--max_steps', '2', *flags).err == ''
    done = main('train.py', '--max_steps', '4', *flags)
    assert 'WARNING: --trace 2: that step is done already\n' in done.err


def test_events_that_can_not_be_written_cost_a_line_and_no_training(main, flags):
    os.mkdir('m')
    with open('m/train', 'w'):
        pass
    done = main('train.py', '--epochs', '1', '--model_dir', 'm', *flags)
    assert done.status == 0
    (line,) = done.err.splitlines()
    assert line == 'ERROR: m/train: no more events: File exists'
    assert len(read_metrics('m')) == 1


def test_a_disk_that_fills_up_costs_one_line(capfd):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    utils.set_up_logging()
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with summaries.open_events('m', 0) as events:
        events.train(1, summaries.scalars(loss=1.0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, limit[1]))
        try:
            for step in range(2, 100):
                events.train(step, summaries.scalars(loss=1.0))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
            signal.signal(signal.SIGXFSZ, before)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith('ERROR: m/train/events.out.tfevents.')
    assert line.endswith(': no more events: File too large')
    assert [step for step, _ in read_scalars('m/train')['loss']][:2] == [1, 2]


def test_a_file_cut_short_is_read_up_to_there_and_later_steps_go():
    for start in (0, 3):
        with summaries.open_events('m', start) as events:
            for step in range(start + 1, start + 6):
                events.train(step, summaries.scalars(loss=step))
    assert [step for step, _ in read_scalars('m/train')['loss']] == [
        *(1, 2, 3, 4, 5, 6, 7, 8)
    ]
    (path,) = glob.glob('m/train/*.1') or sorted(glob.glob('m/train/*'))[1:]
    with open(path, 'r+b') as file:
        file.truncate(os.path.getsize(path) - 5)
    assert read_scalars('m/train')['loss'][-1] == (7, 7.0)
    summaries.remove_later_events('m/train', 2)
    assert read_scalars('m/train')['loss'] == [(1, 1.0), (2, 2.0)]
    assert all('tfevents' in name for name in files('m'))
