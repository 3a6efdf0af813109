"""A run that is stopped, by anything, goes on as if it had not been."""

import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

import checkpoints
import stopping
import tf1
import utils
from tests import soak
from tests.conftest import (
    ROOT,
    assert_same_bits,
    command,
    files,
    read_checkpoint,
    read_files,
    read_metrics,
    without_times,
)
from tests.processes import Process


@pytest.mark.parametrize('num_gpus', [1, 2])
def test_kill_9_at_any_moment_changes_no_bit(tmp_path, small_dir, num_gpus):
    more = ['--xla', 'off', '--batch_size', '20']
    if num_gpus == 2:
        more += ['--weight_decay', '0.1', '--clip_norm', '1', '--schedule', 'step']
        more += ['--label_smoothing', '0.1', '--warmup_epochs', '1.3', '--scale_lr']
    line = soak.soak(str(tmp_path), small_dir, num_gpus, kills=2, epochs=6, more=more)
    assert line.endswith('all bits and rows equal')


# Resume elsewhere and otherwise


def test_resume_in_a_moved_directory_without_its_state_file(main, flags, monkeypatch):
    flags += ['--epochs', '1']
    assert main('train.py', '--model_dir', 'whole', *flags).status == 0
    assert main('train.py', '--model_dir', 'a', '--max_steps', '9', *flags).status == 0
    os.mkdir('elsewhere')
    shutil.move('a', 'elsewhere/b')
    os.remove('elsewhere/b/checkpoint')
    monkeypatch.chdir('elsewhere')
    done = main('train.py', '--model_dir', 'b', *flags)
    assert done.status == 0 and 'continues from b/model.ckpt-0-9' in done.out
    name = 'model.ckpt-1-62'
    assert_same_bits(read_checkpoint('../whole/' + name), read_checkpoint('b/' + name))


def test_resume_on_other_towers_and_batch_goes_on_at_the_next_image(main, flags):
    flags += ['--epochs', '1', '--model_dir', 'm']
    first = ['--num_gpus', '2', '--batch_size', '10', '--max_steps', '30']
    assert main('train_multi_gpu.py', *(first + flags)).status == 0
    assert read_checkpoint(checkpoints.find('m')[0])['training/epoch_images'] == 600
    done = main('train_multi_gpu.py', '--batch_size', '35', *flags)
    assert done.status == 0
    assert 'trained with --batch_size 10, not 35 and --num_gpus 2, not ' in done.err
    # The other 1400 images, 35 at a time.
    assert [row['step'] for row in read_metrics('m')] == [30 + 1400 // 35]


def test_5_then_10_epochs_are_10_with_a_constant_schedule(main, flags):
    flags += ['--schedule', 'constant', '--batch_size', '100']
    assert main('train.py', '--epochs', '2', '--model_dir', 'a', *flags).status == 0
    assert main('train.py', '--epochs', '4', '--model_dir', 'a', *flags).status == 0
    assert main('train.py', '--epochs', '4', '--model_dir', 'b', *flags).status == 0
    a, b = (read_checkpoint(checkpoints.find(m)[0]) for m in 'ab')
    assert_same_bits(a, b)
    assert without_times(read_metrics('a')) == without_times(read_metrics('b'))
    assert [row['epoch'] for row in read_metrics('a')] == [1, 2, 3, 4]


def test_the_start_says_where_the_schedule_depends_on_the_total(main, flags):
    flags += ['--max_steps', '1', '--epochs', '7']
    assert 'over 7 epochs: with another --epochs it is another' in (
        main('train.py', *flags).out
    )
    constant = main('train.py', '--schedule', 'constant', *flags).out
    assert 'learning rate 0.001, constant' in constant and 'over 7' not in constant


def test_a_row_whose_checkpoint_was_never_written_is_written_once(main, flags):
    flags += ['--batch_size', '100', '--model_dir', 'm', '--epochs', '3']
    assert main('train.py', *flags).status == 0
    rows = without_times(read_metrics('m'))
    for path in list(files('m')):
        if 'ckpt-3-' in path:
            os.remove('m/' + path)
    assert main('train.py', *flags).status == 0
    assert without_times(read_metrics('m')) == rows
    assert checkpoints.find('m')[0] == 'm/model.ckpt-3-60'


# Signals. Real processes; what they wait on is patched into a program of its own.

PROGRAM = """
import sys, time
import numpy as np
import data_sets, evaluation, input_pipeline, model, train_multi_gpu, training
import checkpoints, utils
from tf1 import tf

def for_ever(x):
    print('stalled', flush=True)
    time.sleep(1000)
    return x

def stall(tensor):
    out = tf.py_func(for_ever, [tensor], tensor.dtype)
    out.set_shape(tensor.shape)
    return out

%s
sys.exit(utils.run_main(train_multi_gpu.main))
"""

# The permutation of the second epoch never comes.
STALLED_LATER = """
order = input_pipeline.epoch_order
input_pipeline.epoch_order = lambda n, seed, epoch: tf.cond(
    tf.equal(epoch, 0),
    lambda: order(n, seed, epoch),
    lambda: stall(order(n, seed, epoch)),
)
"""
STALLED_FIRST = """
order = input_pipeline.epoch_order
input_pipeline.epoch_order = lambda n, seed, epoch: stall(order(n, seed, epoch))
"""
STALLED_EVALUATION = """
build = evaluation.build
def stalled_build(*args, **kwargs):
    built, feeds = build(*args, **kwargs)
    return built._replace(losses=stall(built.losses)), feeds
evaluation.build = stalled_build
"""
SLOW_EVALUATION = """
make_evaluate = evaluation.make_evaluate
def slow(session, built, find_stop):
    def slow_find_stop():
        print('evaluating', flush=True)
        time.sleep(0.5)
        return find_stop()
    return make_evaluate(session, built, slow_find_stop)
evaluation.make_evaluate = slow
evaluation.BATCH = 10
"""
FAILING_SAVE = """
checkpoints.save = lambda *args: False
"""
SLOW_LOAD = """
def slow_load(*args):
    print('loading', flush=True)
    time.sleep(60)
data_sets.load = slow_load
"""
# As a destructor does with whatever is raised in it.
SWALLOW = """
import os, signal
load = data_sets.load
def swallow(*args):
    try:
        os.kill(os.getpid(), signal.%s)
        time.sleep(5)
    except BaseException:
        return load(*args)
data_sets.load = swallow
"""
SLOW_SAVE = """
save = checkpoints.save
def slow(saver, *args):
    class Slow:
        def save(self, *args, **kwargs):
            print('saving', flush=True)
            time.sleep(1.5)
            return saver.save(*args, **kwargs)
    return save(Slow(), *args)
checkpoints.save = slow
"""


def start(patch, *argv):
    """Starts train_multi_gpu.py with a patch in a process of its own."""
    return Process('-c', argv, PROGRAM % patch)


def end(process, number):
    """Sends a signal; returns (out, err) of a process that ends within 5 s."""
    process.send_signal(number)
    began = time.time()
    status, out, err = process.end()
    assert time.time() - began < 5
    assert status == 128 + number, err
    assert 'Traceback' not in err, err
    return out, err


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_training_saves_and_the_rest_is_the_same(flags, number):
    flags += ['--epochs', '40', '--num_gpus', '2', '--batch_size', '20']
    process = start('', '--model_dir', 'm', *flags)
    process.wait_for('Epoch 3')
    out, err = end(process, number)
    name = signal.Signals(number).name
    assert 'stopped by %s: saved in epoch ' % name in out
    going_on = [x for x in out.splitlines() if x.startswith('to go on: ')]
    assert len(going_on) == 1 and '--model_dir m' in going_on[0]
    step = read_checkpoint(checkpoints.find('m')[0])['global_step']
    more = ['--max_steps', str(step + 60)] + flags
    done = command('train_multi_gpu.py', '--model_dir', 'm', *more)
    assert done.status == 0 and 'continues from m/model.ckpt-' in done.out
    assert command('train_multi_gpu.py', '--model_dir', 'whole', *more).status == 0
    last = [checkpoints.find(m)[0] for m in ('m', 'whole')]
    assert_same_bits(*map(read_checkpoint, last))


@pytest.mark.parametrize(
    'patch, text, saved',
    [
        (STALLED_FIRST, 'stalled', 'model.ckpt-0-0'),
        (STALLED_LATER, 'Epoch 2', 'model.ckpt-1-80'),
        (SLOW_EVALUATION, 'evaluating', 'model.ckpt-0-80'),
        (SLOW_SAVE, 'saving', 'model.ckpt-1-80'),
    ],
    ids=['first fill', 'input stalled', 'evaluation', 'during a save'],
)
def test_a_signal_ends_the_run_at_every_moment(flags, patch, text, saved):
    flags += ['--batch_size', '25']  # 80 steps, a multiple of those moved at once
    process = start(patch, '--epochs', '5', '--model_dir', 'm', *flags)
    process.wait_for(text)
    if patch is STALLED_LATER:
        time.sleep(0.5)
    end(process, signal.SIGINT)
    found = [os.path.basename(prefix) for prefix in checkpoints.find('m')]
    assert found[0] == saved
    for prefix in checkpoints.find('m'):
        assert checkpoints.find_fault(prefix) is None
    done = command('train_multi_gpu.py', '--epochs', '2', '--model_dir', 'm', *flags)
    assert done.status == 0, done.err
    assert 'continues from m/' + found[0] in done.out
    assert [row['epoch'] for row in read_metrics('m')] == [1, 2]


def test_a_signal_after_the_last_step_lets_the_run_end_well(flags):
    process = start(SLOW_SAVE, '--epochs', '1', '--model_dir', 'm', *flags)
    process.wait_for('saving')
    process.send_signal(signal.SIGTERM)
    status, out, err = process.end()
    assert status == 0 and err == '', err
    assert out.splitlines()[-1].endswith('evaluate.py --model_dir m')


def test_a_stall_on_one_core_and_until_the_time_limit(flags):
    one_core = 'import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n'
    process = start(one_core + STALLED_FIRST, '--model_dir', 'a', *flags)
    process.wait_for('stalled')
    end(process, signal.SIGINT)
    limit = ['--max_minutes', '0.1', '--model_dir', 'b']
    process = start(STALLED_FIRST, *(limit + flags))
    status, out, err = process.end()
    assert status == 0, err
    assert '--max_minutes is nearly over: saved in epoch 1, step 0' in out


def test_a_signal_whose_save_fails_ends_with_1(flags):
    flags += ['--model_dir', 'm', '--epochs', '500', '--batch_size', '10']
    process = start(FAILING_SAVE, *flags)
    process.wait_for('Epoch 1')
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    status, _, err = process.end()
    assert status == 1
    assert 'ERROR: stopped by SIGINT, and the last save failed' in err
    assert 'Traceback' not in err


def test_a_second_signal_leaves_at_once(flags):
    process = start(STALLED_EVALUATION, '--epochs', '1', *flags)
    process.wait_for('stalled')
    process.send_signal(signal.SIGTERM)
    time.sleep(2)
    assert process.poll() is None, 'nothing but a second signal can end this one'
    end(process, signal.SIGINT)


def test_the_first_signal_after_the_time_limit_is_not_the_second():
    code = """
import os, signal, time
import stopping
with stopping.signals(lambda: None, deadline=time.monotonic() + 0.1):
    time.sleep(0.4)
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.4)
        print(stopping.find_stop().status, flush=True)
"""
    assert command('-c', code=code) == (143, '143\n', '')


def test_a_job_in_the_background_is_not_ended_by_ctrl_c_while_it_trains():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stopping.signals(lambda: None):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
            assert stopping.find_stop() is None
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
            assert stopping.find_stop().status == 143
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_before_training_is_no_traceback(flags):
    for number in (signal.SIGINT, signal.SIGTERM):
        process = start(SLOW_LOAD, '--model_dir', 'm', *flags)
        process.wait_for('loading')
        end(process, number)
        assert not os.path.exists('m')


@pytest.mark.parametrize('name', ['SIGINT', 'SIGTERM'])
def test_a_signal_that_is_swallowed_before_training_stops_it_all_the_same(flags, name):
    process = start(SWALLOW % name, '--model_dir', 'm', *flags)
    status, out, _ = process.end()
    assert status == 128 + signal.Signals[name]
    assert 'stopped by %s: saved in epoch 1, step 0\n' % name in out
    assert checkpoints.find('m') == ['m/model.ckpt-0-0']


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_is_swallowed_ends_any_script_with_its_status(number, capfd):
    def main():
        with contextlib.suppress(BaseException):
            os.kill(os.getpid(), number)
            time.sleep(5)

    assert utils.run_main(main) == 128 + number
    assert utils.run_main(lambda: None) == 0
    assert capfd.readouterr() == ('', '')


def test_max_minutes_saves_and_stops_in_time(flags):
    flags += ['--epochs', '100000', '--model_dir', 'm']
    process = Process('train.py', ['--max_minutes', '0.2'] + flags)
    began = time.time()  # what forks it may have had to start first
    done = process.end()
    assert done.status == 0, done.err
    assert time.time() - began < 12
    assert '--max_minutes is nearly over: saved in epoch ' in done.out
    assert 'to go on: ' in done.out
    step = int(checkpoints.find('m')[0].split('-')[-1])
    done = command('train.py', '--max_steps', str(step + 1), *flags)
    assert 'continues from m/model.ckpt' in done.out


# One run at a time


def test_a_second_run_on_one_model_dir_is_refused(flags):
    flags += ['--model_dir', 'm', '--epochs', '500']
    first = start('', *flags)
    first.wait_for('Epoch 2')
    second = command('train.py', *flags)
    assert second.status == 2
    assert second.out == '' and second.err.count('\n') == 1
    assert 'm is in use by another run' in second.err
    first.send_signal(signal.SIGKILL)
    first.end()
    third = command('train.py', '--max_steps', '1', *flags)
    assert third.status == 0, 'the lock of a dead run blocks: ' + third.err


def test_a_directory_that_cannot_be_written_is_found_before_the_data(main):
    done = main('train.py', '--model_dir', '/proc/x', '--data_dir', '/no/such')
    assert done.status == 2 and '--model_dir /proc/x can not be written' in done.err


def test_a_mistake_leaves_an_existing_directory_as_it_was(main, flags):
    assert main('train.py', '--model_dir', 'm', '--max_steps', '3', *flags).status == 0
    before = read_files('m')
    for mistake in (['--batch_size', '3000'], ['--data_dir', '/no/such']):
        done = main('train.py', '--model_dir', 'm', *(flags + mistake))
        assert done.status == 2, done.err
        assert read_files('m') == before


def test_the_scripts_that_leave_at_once_are_those_that_listen_later():
    found = set()
    for path in pathlib.Path(ROOT).glob('*.py'):
        if re.search(
            r'\n    sys\.exit\(.*run_main\(', path.read_text(encoding='utf-8')
        ):
            found.add(path.name)
    assert set(tf1.SCRIPTS) == found


@pytest.mark.parametrize('library', ['tensorflow', 'tqdm'])
@pytest.mark.parametrize('script', ['train.py', 'model.py'])
def test_ctrl_c_while_libraries_are_imported_is_no_traceback(script, library):
    # What stands for it is slow and swallows a KeyboardInterrupt.
    os.mkdir(library)
    with open(library + '/__init__.py', 'w') as file:
        file.write(
            'import time\n'
            'try:\n'
            "    print('importing', flush=True)\n"
            '    time.sleep(60)\n'
            'except BaseException:\n'
            '    time.sleep(60)\n'
        )
    process = subprocess.Popen(
        [sys.executable, os.path.join(ROOT, script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
        env=dict(os.environ, PYTHONPATH=os.getcwd()),
    )
    assert process.stdout.readline() == 'importing\n'
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=5) == ('', '')
    assert process.returncode == 128 + signal.SIGINT


def test_who_imports_the_rooms_keeps_ctrl_c():
    code = (
        'import signal, training\n'
        'assert signal.getsignal(signal.SIGINT) == signal.default_int_handler\n'
    )
    with open('own.py', 'w') as file:
        file.write(code)
    for argv in (['-c', code], ['own.py']):
        done = subprocess.run(
            [sys.executable] + argv,
            stderr=subprocess.PIPE,
            universal_newlines=True,
            env=dict(os.environ, PYTHONPATH=ROOT),
        )
        assert done.returncode == 0, done.stderr


def test_after_a_script_ctrl_c_is_what_python_makes_of_it():
    code = 'import signal; print(signal.getsignal(signal.SIGINT).__name__)'
    done = subprocess.run(
        [sys.executable, '-i', os.path.join(ROOT, 'model.py')],
        input=code + '\n',
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
    )
    assert done.stdout.splitlines()[-1] == 'default_int_handler', done


def test_a_job_in_the_background_is_not_ended_by_ctrl_c_while_it_starts():
    def ignore():
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    process = subprocess.Popen(
        [sys.executable, os.path.join(ROOT, 'model.py')],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
        preexec_fn=ignore,
    )
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    out, err = process.communicate()
    assert process.returncode == 0 and out.startswith('network '), err
