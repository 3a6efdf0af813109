"""The scripts as a person runs them: what is printed, what is written, how it ends."""

import ctypes
import fcntl
import json
import os
import pathlib
import pty
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading

import numpy as np
import pytest

import data_sets
import input_pipeline
import records
import training
import utils
from tests.conftest import (
    ROOT,
    Finished,
    assert_mistake,
    assert_same_bits,
    files,
    make_flags,
    read_checkpoint,
    read_files,
    read_metrics,
    without_times,
    write_idx,
)
from tests.processes import Process, run_python
from tf1 import tf

NO_GPU = 'WARNING: TensorFlow sees no GPU: training on the CPU, '


# A good run


def test_a_good_run_in_files(small_dir, tmp_path):
    out, err = tmp_path / 'out', tmp_path / 'err'
    with out.open('wb') as o, err.open('wb') as e:
        status = subprocess.call(
            [sys.executable, ROOT + '/train_multi_gpu.py', '--num_gpus', '2']
            + ['--data_dir', small_dir, '--epochs', '2', '--model_dir', 'here'],
            stdout=o,
            stderr=e,
            env=dict(os.environ, CUDA_VISIBLE_DEVICES=''),
        )
    out, err = out.read_text(), err.read_text()
    assert status == 0, err
    assert '\r' not in out + err
    assert err.splitlines() == [
        NO_GPU + '2 towers on %s' % utils.count(utils.count_cores(), 'core')
    ]
    lines = out.splitlines()
    assert (
        'batch 32 per tower x 2 towers = 64; 31 steps per epoch of 2000 images ' in out
    )
    assert [line.split(':')[0] for line in lines[lines.index('Epoch 1/2') :]] == [
        'Epoch 1/2',
        'train/acc',
        'valid/acc',
        'speed',
        'Epoch 2/2',
        'train/acc',
        'valid/acc',
        'speed',
        'best',
        'checkpoints',
        'next',
    ]
    events = [name for name in files('here') if 'tfevents' in name]
    assert [os.path.dirname(name) for name in events] == ['train', 'valid']
    assert [name for name in files('here') if name not in events] == [
        'best/checkpoint',
        'best/model.ckpt-2-62.data-00000-of-00001',
        'best/model.ckpt-2-62.index',
        'checkpoint',
        'config.json',
        'metrics.jsonl',
        'model.ckpt-1-31.data-00000-of-00001',
        'model.ckpt-1-31.index',
        'model.ckpt-2-62.data-00000-of-00001',
        'model.ckpt-2-62.index',
        'train.log',
    ]
    log = (tmp_path / 'here' / 'train.log').read_text()
    for line in lines + err.splitlines():
        assert line.replace('WARNING: ', 'WARNING ') in log

    metrics = (tmp_path / 'here' / 'metrics.jsonl').read_text()
    rows = [json.loads(line) for line in metrics.splitlines()]
    for row in rows:
        assert ' '.join(row) == (
            'epoch step train_loss train_acc valid_loss valid_acc learning_rate '
            'images_per_second seconds'
        )
    assert [(row['epoch'], row['step']) for row in rows] == [(1, 31), (2, 62)]
    best = (2, rows[1]['valid_acc'], rows[1]['valid_loss'])
    assert lines[-3:-1] == [
        'best: epoch %d of 2, valid/acc: %.4f, valid/loss: %.4f' % best,
        'checkpoints: here/best/model.ckpt-2-62, here/model.ckpt-2-62',
    ]
    assert lines[-1].startswith('next: ')
    assert lines[-1].endswith('%s/evaluate.py --model_dir here' % ROOT)
    shown = 'valid/acc: %.4f, valid/loss: %.4f'
    assert shown % (rows[1]['valid_acc'], rows[1]['valid_loss']) in lines
    assert 0.2 < rows[1]['valid_acc'] <= 1 and rows[1]['images_per_second'] > 10

    config = json.loads((tmp_path / 'here' / 'config.json').read_text())
    assert config['flags']['num_gpus'] == 2 and config['flags']['seed'] == 0
    assert config['versions']['tensorflow'] == tf.version.VERSION
    assert config['devices'] == {'towers': ['/cpu:0', '/cpu:1'], 'gpus': []}


def train_at_terminal(columns, *argv, stdout=None):
    """Runs train.py on a terminal that is so wide, or does not say so (0).

    Returns:
      (what was written to the terminal, what to stdout if it is a pipe).
    """
    leader, follower = pty.openpty()
    size = struct.pack('HHHH', 24, columns, 0, 0)
    fcntl.ioctl(follower, termios.TIOCSWINSZ, size)
    run = subprocess.Popen(
        [sys.executable, ROOT + '/train.py', *argv],
        stdout=stdout or follower,
        stderr=follower,
    )
    os.close(follower)
    written = b''
    while True:
        try:
            part = os.read(leader, 4096)
        except OSError:  # the other end is closed
            break
        written += part
    out, _ = run.communicate()
    assert run.returncode == 0, written
    return written.decode(), out


# An unknown width is taken for 80 columns, on which images/s have no place.
@pytest.mark.parametrize('columns', [0, 120])
def test_a_terminal_gets_one_bar_per_epoch_and_stdout_none(flags, columns):
    argv = ['--epochs', '1'] + flags
    written, out = train_at_terminal(columns, *argv, stdout=subprocess.PIPE)
    last = written.replace('\r\n', '').split('\r')[-1]
    assert last.startswith('100%|#') and ' 62/62 [' in last
    assert 'train_acc=0.' in last and 'train_loss=' in last
    assert bool(re.search(r'images/s=\d+\]', last)) == (columns == 120)
    assert last.rstrip().endswith(']') and len(last) <= (columns or 80)
    assert b'#' not in out and b'\r' not in out


def test_what_is_told_within_an_epoch_stands_above_the_bar(flags):
    argv = ['--epochs', '1', '--trace', '40', '--model_dir', 'm'] + flags
    written, _ = train_at_terminal(80, *argv)
    rows = []
    for line in written.split('\n'):
        row = ''
        for part in line.split('\r'):  # each over what the one before has left
            row = part + row[len(part) :]
        rows.append(row.rstrip())
    assert 'trace of the step: m/trace-40.json' in rows, rows
    assert rows[rows.index('Epoch 1/1') + 2].startswith('100%|#'), rows


def test_a_terminal_that_goes_away_ends_no_run(small_dir):
    leader, follower = pty.openpty()
    run = subprocess.Popen(
        [sys.executable, ROOT + '/train.py', '--device', 'cpu', '--epochs', '4']
        + ['--data_dir', small_dir, '--model_dir', 'm', '--xla', 'off'],
        stdout=subprocess.PIPE,
        stderr=follower,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    os.close(follower)
    os.read(leader, 1)  # the bar is there
    os.close(leader)
    run.communicate()
    assert run.returncode == 0
    assert len(read_metrics('m')) == 4


def test_no_progress_means_no_bar(monkeypatch, main, flags):
    monkeypatch.setattr(sys.stderr, 'isatty', lambda: True, raising=False)
    done = main('train.py', '--max_steps', '2', '--no_progress', *flags)
    assert done.status == 0 and done.err == ''


def test_no_thread_outlives_a_run(main, flags):
    before = set(threading.enumerate())
    assert main('train_multi_gpu.py', '--max_steps', '3', *flags).status == 0
    assert set(threading.enumerate()) == before


def test_each_run_has_a_directory_of_its_own(main, flags):
    for _ in range(2):
        assert main('train.py', '--max_steps', '1', *flags).status == 0
    made = os.listdir('runs')
    assert len(made) == 2 and all('-cnn-1' in name for name in made)


def test_two_runs_started_in_the_same_second_have_two_directories(flags):
    argv = ['--max_steps', '1'] + flags
    runs = [Process('train.py', argv) for _ in range(3)]
    for run in runs:
        assert run.end().status == 0
    assert len(os.listdir('runs')) == 3


@pytest.mark.parametrize('closed', ['2>&-', '>&-', '>&- 2>&- <&-', '| head -1'])
def test_closed_streams_do_not_end_a_run(flags, closed):
    argv = [sys.executable, ROOT + '/train.py', '--max_steps', '2', '--model_dir', 'm']
    words = ' '.join(map(shlex.quote, argv + flags))
    done = subprocess.run(
        ['sh', '-c', '%s %s' % (words, closed)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert done.returncode == 0 and b'Traceback' not in done.stderr
    assert files('m').count('model.ckpt-0-2.index') == 1
    with open('m/train.log') as file:
        assert file.read().endswith('evaluate.py --model_dir m\n')


def test_verbose_shows_what_tensorflow_says(flags):
    quiet = run_python('train.py', '--max_steps', '1', *flags)
    assert quiet.status == 0 and quiet.err == ''
    verbose = run_python('train.py', '--max_steps', '1', '--verbose', *flags)
    assert verbose.status == 0 and 'deprecated' in verbose.err


# The same result from both scripts and any number of towers


def checkpoint(model_dir, name):
    return read_checkpoint(os.path.join(model_dir, name))


def test_both_scripts_write_the_same_bits(small_dir):
    flags = ['--device', 'cpu', '--data_dir', small_dir]  # with XLA where that is used
    for script, model_dir in (('train.py', 'a'), ('train_multi_gpu.py', 'b')):
        done = run_python(script, '--epochs', '1', '--model_dir', model_dir, *flags)
        assert done.status == 0, done.err
    name = 'model.ckpt-1-62'
    assert_same_bits(checkpoint('a', name), checkpoint('b', name))


def test_a_checkpoint_moves_between_scripts_and_numbers_of_towers(main, flags):
    flags = ['--model_dir', 'm', '--batch_size', '20'] + flags
    for script, argv, step in (
        ('train_multi_gpu.py', ['--num_gpus', '2', '--epochs', '1'], 50),
        ('train.py', ['--epochs', '2'], 150),
        ('train_multi_gpu.py', ['--num_gpus', '3', '--epochs', '3'], 183),
    ):
        done = main(script, *(argv + flags))
        assert done.status == 0, done.err
        assert ('continues from' in done.out) == (step > 50)
        assert read_metrics('m')[-1]['step'] == step
    assert [row['epoch'] for row in read_metrics('m')] == [1, 2, 3]


def test_max_steps_inside_an_epoch_then_on_is_the_uninterrupted_run(main, flags):
    flags = ['--num_gpus', '2', '--epochs', '2'] + flags
    assert main('train_multi_gpu.py', '--model_dir', 'whole', *flags).status == 0
    for steps in ('7', '40'):
        part = ['--max_steps', steps, '--model_dir', 'parts'] + flags
        done = main('train_multi_gpu.py', *part)
        assert done.status == 0
        assert '--max_steps %s ends the run inside this epoch' % steps in done.out
    assert main('train_multi_gpu.py', '--model_dir', 'parts', *flags).status == 0
    name = 'model.ckpt-2-62'
    assert_same_bits(checkpoint('whole', name), checkpoint('parts', name))
    whole, parts = read_metrics('whole'), read_metrics('parts')
    assert without_times(whole) == without_times(parts)


def test_the_same_command_after_the_end_says_so_and_evaluates(main, flags):
    flags = ['--epochs', '1', '--model_dir', 'm'] + flags
    first = main('train.py', *flags)
    before = read_files('m')
    again = main('train.py', *flags)
    assert again.status == 0
    assert 'nothing left to train: 1 epoch, 62 steps are done' in again.out
    assert 'Epoch' not in again.out
    assert 'best: epoch 1 of 1' in again.out

    def score(out):
        return [line for line in out.splitlines() if line.startswith('valid/')]

    assert score(first.out) == score(again.out) and len(score(first.out)) == 1
    after = read_files('m')
    assert {name for name in after if after[name] != before.get(name)} == {'train.log'}


def test_a_resume_keeps_the_thread_settings_of_the_run(main, flags):
    flags = ['--model_dir', 'm'] + flags
    assert main('train.py', '--max_steps', '1', *flags).status == 0
    config = records.read_config('m')
    config['threads'] = [2, 1]
    records.write_whole('m/config.json', json.dumps(config))
    assert main('train.py', '--max_steps', '2', *flags).status == 0
    assert records.read_config('m')['threads'] == [2, 1]


def test_thread_flags_come_before_what_the_run_had(main, flags):
    flags += ['--model_dir', 'm']
    asked = ['--inter_op_threads', '3']
    assert main('train.py', '--max_steps', '1', *asked, *flags).status == 0
    inside, side_by_side = records.read_config('m')['threads']
    assert side_by_side == 3
    done = main('train.py', '--max_steps', '2', *flags)
    assert 'trained with' not in done.err
    asked = ['--intra_op_threads', str(inside + 4)]
    done = main('train.py', '--max_steps', '3', *asked, *flags)
    told = 'm was trained with threads [%d, 3], not [%d, 3] so far'
    assert done.status == 0 and told % (inside, inside + 4) in done.err
    assert records.read_config('m')['threads'] == [inside + 4, 3]


def test_a_staged_run_goes_on_where_it_stopped(main, flags):
    flags += ['--epochs', '2', '--num_gpus', '2', '--batch_size', '15', '--staging']
    assert main('train_multi_gpu.py', '--model_dir', 'whole', *flags).status == 0
    flags += ['--model_dir', 'parts']
    for steps in ('10', '70', '1000'):
        assert main('train_multi_gpu.py', '--max_steps', steps, *flags).status == 0
    name = 'model.ckpt-2-132'
    assert_same_bits(read_checkpoint('whole/' + name), read_checkpoint('parts/' + name))


def read_memory_in_use():
    """Returns the bytes that this process has allocated and not freed.

    Its resident memory is no measure of a leak: the C library keeps what is freed
    for later, and how much of it varied by 80 MB from one epoch to the next.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, 'mallinfo2'):  # since glibc 2.33
        mallinfo, number = libc.mallinfo2, ctypes.c_size_t
    else:
        mallinfo, number = libc.mallinfo, ctypes.c_uint
    names = 'arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keep'

    class Found(ctypes.Structure):
        _fields_ = [(name, number) for name in names.split()]

    mallinfo.restype = Found
    found = mallinfo()
    return found.uordblks + found.hblkhd  # in its arenas, and mapped


def test_many_epochs_add_no_node_and_no_memory(main, flags, monkeypatch):
    sizes, nodes = [], []
    finish_epoch = training.finish_epoch

    def watch(*args):
        sizes.append(read_memory_in_use())
        nodes.append(len(tf.get_default_graph().get_operations()))
        return finish_epoch(*args)

    monkeypatch.setattr(training, 'finish_epoch', watch)
    flags += ['--num_gpus', '2', '--batch_size', '128', '--epochs', '20']
    flags += ['--model', 'mlp']
    done = main('train_multi_gpu.py', *flags)
    assert done.status == 0 and len(sizes) == 20
    assert len(set(nodes)) == 1
    # A leak of one batch per step would be 12 MB. What waits to be written to the
    # event file falls back to nothing every few epochs: the largest are compared.
    assert max(sizes[12:]) - max(sizes[4:12]) < 1e6, sizes


def test_evaluation_counts_every_image_once_for_any_number_of_towers(main, mnist):
    valid = data_sets.Examples(*(a[:733] for a in mnist.valid))
    train = data_sets.Examples(*(a[:640] for a in mnist.train))
    os.mkdir('data')
    for prefix, examples in (('train', train), ('t10k', valid)):
        write_idx('data/%s-images-idx3-ubyte' % prefix, examples.images[..., 0])
        write_idx('data/%s-labels-idx1-ubyte' % prefix, examples.labels)
    flags = ['--device', 'cpu', '--data_dir', 'data', '--epochs', '1']
    flags += ['--model_dir', 'm']
    assert main('train.py', *flags).status == 0
    accuracy = read_metrics('m')[0]['valid_acc']
    assert accuracy * 733 == pytest.approx(round(accuracy * 733), abs=1e-9)
    shown = set()
    for towers in '1234':
        done = main('train_multi_gpu.py', '--num_gpus', towers, *flags)
        shown.update(n for n in done.out.splitlines() if n.startswith('valid/acc'))
    assert len(shown) == 1, shown


# Mistakes: one line, exit 2, nothing written


def assert_refused(done, told):
    assert done.status == 2
    assert done.out == ''
    assert done.err.startswith('ERROR: ') and told in done.err
    assert done.err.count('\n') == 1 and done.err.endswith('\n')
    assert os.listdir('.') == []


@pytest.mark.parametrize(
    'argv, told',
    [
        (['--num_gpus', '0'], '--num_gpus'),
        (['--epochs', 'ten'], '--epochs'),
        (['--stray'], '--stray'),
        (['--stray\nline'], 'unrecognized arguments: --stray\\nline'),
        (['--epochs=--'], 'argument --epochs: expected one argument'),
        (['--device', 'gpu'], 'sees no GPU'),
        (['--gpus', '0,1'], 'sees no GPU'),
        (['--device', 'cpu', '--gpus', '0'], '--gpus'),
        (['--data_dir', '/no/such/place'], '/no/such/place is not a directory'),
        (
            ['--data_dir', ROOT],
            'holds no data set: no train-images-idx3-ubyte (idx), no ',
        ),
        (['--batch_size', '1001', '--num_gpus', '2'], 'fits is 1000'),
        (['--model_dir', ROOT + '/train.py'], 'train.py can not be written: Not a dir'),
        (['--model_dir', ROOT + '/train.py/x'], 'can not be written: Not a directory'),
        (['--model_dir', '/proc/x'], '/proc'),
        (['--model_dir', ''], '--model_dir is empty'),
    ],
)
def test_a_mistake_gets_one_line(main, monkeypatch, small_dir, argv, told):
    monkeypatch.setattr(utils, 'visible_gpus', lambda: [])
    argv = argv + ([] if '--data_dir' in argv else ['--data_dir', small_dir])
    assert_refused(main('train_multi_gpu.py', *argv), told)


def test_a_mistake_gets_one_line_in_a_process_of_its_own():
    for script in ('train.py', 'train_multi_gpu.py'):
        done = run_python(script, '--device', 'gpu', env=no_gpus())
        assert_refused(done, '--device gpu: TensorFlow')


@pytest.mark.parametrize('script', ['train.py', 'evaluate.py'])
def test_a_current_directory_that_is_gone_costs_one_line(script):
    os.mkdir('gone')
    words = ' '.join(map(shlex.quote, [sys.executable, os.path.join(ROOT, script)]))
    done = subprocess.run(
        ['sh', '-c', 'cd gone; rmdir ../gone; exec ' + words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
    )
    told = 'the current directory: No such file or directory: cd to one that is there'
    assert_mistake(Finished(done.returncode, done.stdout, done.stderr), told)


def no_gpus():
    return dict(os.environ, CUDA_VISIBLE_DEVICES='')


@pytest.mark.parametrize(
    'content, told',
    [
        (None, '@f.txt, a file of flags: No such file or directory'),
        (b'--seed 1\n@f.txt', '@f.txt: this file of flags stands for itself'),
        (b'@./f.txt', '@./f.txt: this file of flags stands for itself'),
        (b'--seed 1 # caf\xe9', '@f.txt, a file of flags, is not UTF-8'),
        (b"--seed 1\n--model 'cnn", '@f.txt, line 2: No closing quotation'),
        (b'--model_dir a\0b', '@f.txt, line 1: a zero byte is no text'),
        (b'--verbose', '@f.txt: --verbose has its place on the command line'),
        (b'--seed one', "argument --seed: 'one' is not a whole number"),
        (b'stray', 'unrecognized arguments: stray'),
    ],
)
def test_a_file_of_flags_that_is_none_costs_one_line(main, content, told):
    if content is not None:
        pathlib.Path('f.txt').write_bytes(content)
    done = main('train_multi_gpu.py', '@f.txt')
    assert_mistake(done, 'ERROR: ' + told)
    assert files() == ([] if content is None else ['f.txt'])


def test_a_file_of_flags_stands_for_its_words():
    texts = {
        'a': "--seed 3 # it's a comment\n\n# another\n@b --epochs 5\n",
        'b': "\ufeff--epochs 4\r\n--model_dir 'a b\u00e9' --num_gpus\n2\n",
    }
    for name, text in texts.items():
        pathlib.Path(name).write_bytes(text.encode('utf-8'))
    flags = make_flags('--seed', '1', '@a', '--batch_size', '7')
    assert (flags.seed, flags.epochs, flags.num_gpus) == (3, 5, 2)
    assert (flags.model_dir, flags.batch_size) == ('a b\u00e9', 7)
    assert make_flags('@b', '@b').epochs == 4


def test_a_damaged_data_file_gets_one_line(main, small_dir, tmp_path_factory):
    damaged = tmp_path_factory.mktemp('damaged') / 'data'
    shutil.copytree(small_dir, str(damaged))
    path = damaged / 't10k-images-idx3-ubyte'
    path.write_bytes(path.read_bytes()[:-1])
    done = main('train.py', '--device', 'cpu', '--data_dir', str(damaged))
    assert_refused(done, 'found 98015')


def test_another_configurations_model_dir_is_refused_by_flag(main, flags):
    flags = ['--model_dir', 'm', '--max_steps', '1'] + flags
    assert main('train.py', *flags).status == 0
    before = files()
    done = main('train.py', '--optimizer', 'sgd', *flags)
    assert done.status == 2
    assert 'm was trained with --optimizer adam, not sgd' in done.err
    assert files() == before


# Failures: the true cause first, exit 1


def test_a_producers_own_error_ends_the_run(main, monkeypatch, flags):
    order = input_pipeline.epoch_order
    monkeypatch.setattr(
        input_pipeline, 'epoch_order', lambda *args: order(*args) + 1990
    )
    done = main('train_multi_gpu.py', '--num_gpus', '2', *flags)
    assert done.status == 1
    assert done.err.startswith('ERROR: InvalidArgumentError: ')
    assert 'is not in [0, 2000)' in done.err.splitlines()[0]
    assert 'insufficient elements' not in done.err
    assert len(threading.enumerate()) == 1


def test_a_second_run_in_one_process_works(main, flags):
    for _ in range(2):
        assert main('train_multi_gpu.py', '--max_steps', '2', *flags).status == 0


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(main, flags):
    flags = ['--model_dir', 'm'] + flags
    for steps in ('5', '9'):
        assert main('train.py', '--max_steps', steps, *flags).status == 0
    path = 'm/model.ckpt-0-9.data-00000-of-00001'
    data = np.fromfile(path, np.uint8)
    data[len(data) // 2] ^= 1
    data.tofile(path)
    done = main('train.py', '--max_steps', '12', *flags)
    assert done.status == 0
    assert 'model.ckpt-0-9 is damaged' in done.err
    assert 'continues from m/model.ckpt-0-5' in done.out
