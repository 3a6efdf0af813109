"""Several machines, as real processes over loopback."""

import json
import os
import pathlib
import re
import signal
import socket
import time

import numpy as np
import pytest

import checkpoints
from tests.conftest import (
    assert_mistake,
    assert_same_bits,
    files,
    find_addresses,
    make_examples,
    read_checkpoint,
    read_metrics,
    without_times,
    write_data_set,
    write_folders,
)
from tests.processes import Process

PROGRAM = """
import os, signal, sys, time
import numpy as np
import all_reduce, checkpoints, cluster, evaluation, input_pipeline, model, records
import sessions, train_multi_gpu, training, updates, utils, watch
from tf1 import tf

def say(*words):
    os.write(2, (' '.join(map(str, words)) + '\\n').encode())

def add_to(module, name):
    def add(patched):
        function = getattr(module, name)
        setattr(module, name, lambda *a, **k: patched(function, *a, **k))
    return add

%s
sys.exit(utils.run_main(train_multi_gpu.main))
"""


def make_config(addresses, index, chief=False):
    jobs, task = {'worker': addresses}, {'type': 'worker', 'index': index}
    if chief:
        jobs = {'chief': addresses[:1], 'worker': addresses[1:]}
        task = {'type': 'worker', 'index': index - 1} if index else dict(task)
        task['type'] = 'worker' if index else 'chief'
    return json.dumps({'cluster': jobs, 'task': task})


class Machine(Process):
    """One machine."""

    def __init__(self, addresses, index, argv, patch='', chief=False):
        self.index = index
        self.name = 'machine %d (%s)' % (index, addresses[index])
        config = make_config(addresses, index, chief)
        super().__init__('-c', argv, PROGRAM % patch, {'TF_CONFIG': config})


@pytest.fixture
def start(flags):
    """A function that starts all machines, or those of `indices`."""
    started = []

    def start(number, *argv, patches=(), indices=None, addresses=None, **options):
        addresses = addresses or find_addresses(number)
        machines = []
        for index in range(number) if indices is None else indices:
            own = ['--model_dir', 'm'] if index == 0 else []
            patch = patches[index] if index < len(patches) else ''
            machines.append(
                Machine(addresses, index, own + flags + list(argv), patch, **options)
            )
            started.append(machines[-1])
        return machines

    yield start
    for machine in started:
        machine.send_signal(signal.SIGKILL)


def assert_all_end(machines, status, seconds=120):
    """All end with this status, one line each on the others' stdout, no traceback."""
    for machine in machines:
        found, out, err = machine.end(seconds)
        assert found == status, (machine.name, found, out, err)
        assert 'Traceback' not in err, err
        if machine.index > 0:
            assert out.count('\n') == 1 and out.startswith(machine.name), out


# Tells a checksum of all variables after each step.
TOLD_STEPS = """
import zlib

@add_to(training, 'make_calls')
def told(make_calls, session, *args):
    variables = session.make_callable(tf.global_variables())
    calls = make_calls(session, *args)
    @add_to(training, 'add_machines')
    def add(add_machines, *args):
        calls = add_machines(*args)
        def step():
            metrics = calls.step()
            checksum = 0
            for value in variables():
                checksum = zlib.crc32(np.ascontiguousarray(value), checksum)
            say('step', checksum)
            return metrics
        return calls._replace(step=step)
    return calls
"""


# Without the ties of relu and pooling: where one falls the other way, for a sum in
# another order, float32 is no longer equal.
SMOOTH = """
def smooth(images, training, num_classes, dropout):
    x = tf.tanh(model.dense(model.flatten(images), 32, 'dense1'))
    return model.dense(dropout(x), num_classes, 'dense2')
model.NETWORKS['cnn'] = smooth
"""


@pytest.mark.parametrize('number, towers, chief', [(2, 2, False), (3, 1, True)])
def test_machines_train_what_the_towers_of_one_machine_train(
    start, number, towers, chief
):
    sgd = ['--optimizer', 'sgd', '--learning_rate', '0.05', '--schedule', 'constant']
    sgd += ['--batch_size', '60', '--epochs', '1']  # 8 and 11 steps
    sgd += ['--weight_decay', '0.1', '--clip_norm', '0.5', '--label_smoothing', '0.1']
    sgd += ['--scale_lr', '--warmup_epochs', '0.5']
    patches = [SMOOTH + TOLD_STEPS] * 3
    machines = start(
        number, '--num_gpus', str(towers), *sgd, patches=patches, chief=chief
    )
    assert_all_end(machines, 0)
    steps = [re.findall('step .*', machine.read()[1]) for machine in machines]
    assert len(set(steps[0])) == len(steps[0]) == 2000 // (60 * number * towers)
    for own in steps[1:]:
        assert own == steps[0], 'the machines hold different variables'

    os.rename('m', 'several')
    sgd += ['--num_gpus', str(number * towers)]
    assert_all_end(start(1, *sgd, patches=[SMOOTH]), 0)
    prefixes = [checkpoints.find(directory)[0] for directory in ('m', 'several')]
    one, several = map(read_checkpoint, prefixes)
    assert sorted(one) == sorted(several)
    for name, value in one.items():
        limit = 1e-5 * np.abs(value).max()
        assert np.abs(several[name] - value).max() <= limit, name
    (one,), (several,) = map(read_metrics, ('m', 'several'))
    for name in ('epoch', 'step', 'train_acc', 'valid_acc', 'learning_rate'):
        assert several[name] == one[name], name
    for name in ('train_loss', 'valid_loss'):
        assert several[name] == pytest.approx(one[name], rel=1e-5)


# Its moving averages are among what the machines must agree on.
NORMED = """
import batch_norm

def normed(images, training, num_classes, dropout):
    x = model.dense(model.flatten(images), 32, 'dense1')
    x = tf.tanh(batch_norm.batch_norm(x, training))
    return model.dense(dropout(x), num_classes, 'dense2')
model.NETWORKS['cnn'] = normed
"""


@pytest.mark.parametrize('flag', [[], ['--sync_batch_norm']])
def test_batch_norm_over_all_machines_is_that_of_one_tower(start, flag):
    argv = ['--optimizer', 'sgd', '--learning_rate', '0.05', '--schedule', 'constant']
    argv += ['--epochs', '1', '--dropout', '0', '--batch_size']
    patches = [NORMED + TOLD_STEPS] * 2
    machines = start(2, '--num_gpus', '2', *argv, '60', *flag, patches=patches)
    assert_all_end(machines, 0)
    steps = [re.findall('step .*', machine.read()[1]) for machine in machines]
    assert steps[0] == steps[1] and len(set(steps[0])) == 8
    os.rename('m', 'several')
    assert_all_end(start(1, '--num_gpus', '1', *argv, '240', patches=[NORMED]), 0)
    prefixes = [checkpoints.find(directory)[0] for directory in ('m', 'several')]
    one, several = map(read_checkpoint, prefixes)
    assert sorted(one) == sorted(several)
    differences = {
        name: np.abs(several[name] - value).max() / max(np.abs(value).max(), 1e-30)
        for name, value in one.items()
        if name != 'dense1/bias'  # the batch norm takes it out again
    }
    if flag:
        assert max(differences.values()) <= 1e-4, differences
    else:
        assert differences['batch_norm/moving_variance'] > 1e-3


def test_only_the_first_keeps_and_prints_and_all_score_every_image_once(
    main, flags, start
):
    flags += ['--epochs', '1', '--num_gpus', '1', '--batch_size', '30']
    machines = start(2, *flags)
    assert_all_end(machines, 0)
    out, err = machines[0].read()
    assert err == ''
    addresses = ' '.join(m.name.split('(')[1][:-1] for m in machines)
    assert 'on each of 2 machines: %s\n' % addresses in out
    assert 'batch 30 per tower x 1 tower x 2 machines = 60; 33 steps per epoch' in out
    assert out.splitlines()[-1].endswith('evaluate.py --model_dir m')
    out, err = machines[1].read()
    line = (
        r'machine 1 \(.*\): TensorFlow .* on /cpu:0; machine 0 \(.*\) saves and prints'
    )
    assert err == '' and re.match(line + '$', out)
    kept = {name.split('/')[0] for name in files()}
    assert kept == {'m'}

    # One machine continues what two have left, and the other way round, and what
    # either finds is the same to the last digit.
    score = read_metrics('m')[0]
    again = main('train_multi_gpu.py', '--model_dir', 'm', *flags)
    assert 'm was trained on 2 machines, not 1 so far' in again.err
    assert again.status == 0 and 'nothing left to train' in again.out
    shown = 'valid/acc: %.4f, valid/loss: %.4f' % (
        score['valid_acc'],
        score['valid_loss'],
    )
    assert shown in again.out
    machines = start(2, *flags)
    assert_all_end(machines, 0)
    out, _ = machines[0].read()
    assert 'nothing left to train' in out and shown in out


def test_machines_end_early_after_the_same_epoch(start):
    # The accuracy stays what it is: the first epoch's is the best.
    argv = ['--learning_rate', '1e-12', '--batch_size', '250', '--epochs', '9']
    argv += ['--early_stopping', '2']
    machines = start(2, *argv, patches=[TOLD_STEPS] * 2)
    assert_all_end(machines, 0)
    steps = [re.findall('step .*', machine.read()[1]) for machine in machines]
    assert steps[0] == steps[1] and len(steps[0]) == 3 * 4
    assert '2 epochs, see --early_stopping: the run ends' in machines[0].read()[0]
    assert checkpoints.find('m')[0] == 'm/model.ckpt-3-12'
    machines = start(2, *argv, patches=[TOLD_STEPS] * 2)
    assert_all_end(machines, 0)
    assert 'nothing left to train: 3 epochs, 12 steps' in machines[0].read()[0]
    assert 'step' not in machines[0].read()[1] + machines[1].read()[1]


# Faults

# Where a machine says something and waits to be killed.
IN_STEP = """
@add_to(training, 'make_between')
def make(make_between, *args):
    between = make_between(*args)
    def slow(done, *rest):
        if done == 7:
            say('here')
            time.sleep(100)
        return between(done, *rest)
    return slow
"""
IN_EVALUATION = """
@add_to(evaluation, '_make_read')
def make(make_read, *args):
    read = make_read(*args)
    def slow(start):
        say('here')
        time.sleep(100)
    return slow
"""
AT_EPOCHS_END = """
@add_to(training, 'finish_epoch')
def slow(finish_epoch, *args):
    say('here')
    time.sleep(100)
"""
IN_SAVE = """
@add_to(checkpoints, 'save')
def slow(save, *args):
    saved = save(*args)
    say('here')
    time.sleep(100)
"""
AT_START = """
@add_to(cluster, '_go_together')
def slow(go, *args):
    say('here')
    time.sleep(100)
"""


def test_kill_9_of_any_machine_ends_all_by_name_and_changes_no_bit(start):
    flags = ['--num_gpus', '2', '--batch_size', '20', '--epochs', '3']  # 25 steps each
    flags += ['--save_every_seconds', '0.05']
    for killed, patch in (
        (1, IN_STEP),
        (1, AT_START),
        (0, IN_EVALUATION),
        (0, IN_SAVE),
        (1, AT_EPOCHS_END),
        (1, ''),  # nobody; one epoch is done after it
        (1, IN_EVALUATION),
        (0, IN_STEP),
    ):
        patches = [patch, ''] if killed == 0 else ['', patch]
        if not patch:
            machines = start(2, *flags, '--max_steps', '30', patches=patches)
            assert_all_end(machines, 0)
            continue
        machines = start(2, *flags, patches=patches)
        machines[killed].wait_for('here')
        machines[killed].send_signal(signal.SIGKILL)
        killed_at = time.monotonic()
        status, out, err = machines[1 - killed].end()
        assert time.monotonic() - killed_at < 30
        assert status == 1, (status, out, err)
        told = 'ERROR: %s (is gone: |left before the start )'
        assert re.match(told % re.escape(machines[killed].name), err), err
        assert err.count('\n') == 1, err
        assert not any(map(checkpoints.find_fault, checkpoints.find('m')))
    assert_all_end(start(2, *flags), 0)
    os.rename('m', 'killed')
    assert_all_end(start(2, *flags), 0)
    last = [checkpoints.find(directory)[0] for directory in ('killed', 'm')]
    assert_same_bits(*map(read_checkpoint, last))
    assert without_times(read_metrics('killed')) == without_times(read_metrics('m'))


def test_a_stopped_process_is_gone_for_all_others(start):
    short = 'watch.SILENCE_SECONDS = 4'
    machines = start(3, '--epochs', '500', patches=[short, short, IN_STEP])
    machines[2].wait_for('here')
    machines[2].send_signal(signal.SIGSTOP)
    for machine in machines[:2]:
        status, _, err = machine.end(45)
        assert status == 1 and 'ERROR: %s is gone: ' % machines[2].name in err, err


BEFORE_STEP = """
@add_to(training, 'add_machines')
def late(add_machines, *args):
    calls, steps = add_machines(*args), []
    def step():
        steps.append(1)
        if len(steps) == 9:
            time.sleep(100)
        return calls.step()
    return calls._replace(step=step)
"""
STALLED_INPUT = """
@add_to(input_pipeline, 'epoch_order')
def stall(epoch_order, num_images, seed, epoch):
    order = epoch_order(num_images, seed, epoch)
    late = lambda: tf.py_func(lambda x: time.sleep(100) or x, [order], tf.int32)
    return tf.cond(tf.equal(epoch, 0), lambda: order, late)
"""


@pytest.mark.parametrize(
    'late, patch',
    [(0, IN_STEP), (1, IN_STEP), (1, BEFORE_STEP), (1, STALLED_INPUT)],
    ids=['first after', 'other after', 'other before', 'stalled input'],
)
def test_a_step_that_does_not_end_ends_all_by_name(start, late, patch):
    patches = ['', '']
    patches[late] = patch
    machines = start(2, '--step_timeout', '4', '--epochs', '500', patches=patches)
    who = '%s is the furthest behind' % machines[late].name
    if patch is STALLED_INPUT:  # seen from outside it is in the step, as all are
        who = 'all machines are inside it: the input of one, or the network?'
    for machine in machines:
        status, _, err = machine.end()
        assert status == 1
        told = 'ERROR: a step did not end within --step_timeout 4; '
        assert err.splitlines()[-1] == told + who


def test_the_first_step_has_the_limit_of_the_start(start):
    late = BEFORE_STEP.replace('== 9', '== 1').replace('100', '5')
    argv = ['--step_timeout', '1', '--start_timeout', '60', '--max_steps', '3']
    assert_all_end(start(2, *argv, patches=['', late]), 0)


FAILING_INPUT = """
@add_to(input_pipeline, 'epoch_order')
def fail(epoch_order, num_images, seed, epoch):
    order = epoch_order(num_images, seed, epoch)
    return order + tf.where(tf.equal(epoch, 0), 0, 100000)
"""


@pytest.mark.parametrize('index', [0, 1])
def test_the_cause_of_a_failing_input_is_told_on_all(start, index):
    patches = ['', '']
    patches[index] = FAILING_INPUT
    machines = start(2, '--epochs', '500', patches=patches)
    for machine in machines:
        status, _, err = machine.end()
        assert status == 1
        other = '' if machine.index == index else machines[index].name + ': '
        first = err.splitlines()[0]
        assert first.startswith('ERROR: %sInvalidArgumentError: indices[' % other), err
        assert 'is not in [0, 2000)' in first


def test_a_machine_killed_in_a_traced_step_is_named(start):
    # What TensorFlow says meanwhile is held back, and the watch's line is not.
    late = BEFORE_STEP.replace('time.sleep(100)', "say('here') or time.sleep(100)")
    argv = ['--trace', '9', '--epochs', '500']
    machines = start(2, *argv, patches=['', late])
    machines[1].wait_for('here')
    machines[1].send_signal(signal.SIGKILL)
    status, _, err = machines[0].end()
    assert status == 1 and 'ERROR: %s is gone' % machines[1].name in err, err


BEFORE_BROADCAST = """
@add_to(sessions, 'watched')
def slow(watched, *args):
    say('here')
    time.sleep(100)
"""


def test_a_kill_before_the_first_step_leaves_no_empty_directory(start):
    machines = start(2, patches=['', BEFORE_BROADCAST])
    machines[1].wait_for('here')
    machines[1].send_signal(signal.SIGKILL)
    status, _, err = machines[0].end()
    assert status == 1 and err.startswith('ERROR: %s is gone: ' % machines[1].name)
    assert not os.path.exists('m')


NAN = """
@add_to(updates, 'check_finite')
def spoil(check_finite, grads_and_vars, spec, *settings):
    late = tf.to_float(tf.train.get_global_step()) - 3
    return check_finite(grads_and_vars, spec._replace(
        losses=spec.losses + tf.where(late < 0, 0.0, float('nan'))), *settings)
"""


@pytest.mark.parametrize('index', [0, 1])
def test_a_failure_of_one_is_told_on_all(start, index):
    patches = ['', '']
    patches[index] = NAN
    machines = start(2, '--epochs', '500', patches=patches)
    told = (
        'step 4, tower 0: the loss has NaN values; the checkpoints are from before it'
    )
    for machine in machines:
        status, _, err = machine.end()
        other = '' if machine.index == index else machines[index].name + ': '
        assert status == 1 and err == 'ERROR: %s%s\n' % (other, told)


def test_a_mistake_that_only_the_first_can_see_is_told_on_all(main, flags, start):
    done = main('train.py', '--model_dir', 'm', '--max_steps', '3', *flags)
    assert done.status == 0
    os.remove('m/model.ckpt-0-3.index')
    machines = start(2)
    for machine in machines:
        status, _, err = machine.end()
        assert status == 2, err
        assert err.splitlines()[-1].endswith('start anew in another --model_dir')
    assert 'ERROR: %s: m: no checkpoint' % machines[0].name in machines[1].read()[1]


SPOIL = """
@add_to(training, 'add_machines')
def spoil(add_machines, calls, session, *args):
    calls = add_machines(calls, session, *args)
    def evaluate():
        variable = tf.trainable_variables()[2]
        variable.load(session.run(variable) * 1.0001, session)
        return calls.evaluate()
    return calls._replace(evaluate=evaluate)
"""


def test_other_variables_on_one_machine_are_found_at_the_epochs_end(start):
    machines = start(2, patches=['', SPOIL])
    told = '%s holds other values than machine 0 of conv2/kernel: ' % machines[1].name
    for machine in machines:
        status, _, err = machine.end()
        assert status == 1 and err.startswith('ERROR: ' + told), err
        assert err.count('\n') == 1
    assert checkpoints.find('m') == [], 'what is wrong must not be saved'


# Starting


def test_a_late_one_is_waited_for_and_a_missing_one_given_up(start):
    often = 'cluster.TELL_SECONDS = 0.5'
    addresses = find_addresses(2)
    argv = ['--max_steps', '2']
    first = start(2, *argv, indices=[0], addresses=addresses, patches=[often])
    first[0].wait_for('waiting for machine 1 (%s)\n' % addresses[1])
    assert_all_end(start(2, *argv, indices=[1], addresses=addresses) + first, 0)
    for index in (0, 1):
        (lonely,) = start(
            2, '--start_timeout', '2', indices=[index], addresses=addresses
        )
        status, _, err = lonely.end()
        other = 'machine %d (%s)' % (1 - index, addresses[1 - index])
        why = '' if index == 0 else ' (Connection refused)'
        assert status == 1 and err == 'ERROR: gave up: %s did not come%s\n' % (
            other,
            why,
        )


OTHER_CODE = """
@add_to(records, 'describe_facts')
def change(describe_facts, *args):
    return dict(describe_facts(*args), **%r)
"""


@pytest.mark.parametrize(
    'what', ['flags', 'data', 'code', 'version', 'towers', 'machines']
)
def test_machines_that_differ_are_told_in_one_line_on_each(
    start, flags, small, tmp_path, what
):
    argv, patch, addresses = [], '', find_addresses(2)
    named = addresses
    if what == 'flags':
        argv, told = ['--batch_size', '64'], 'has --batch_size 64, machine 0 32'
    elif what == 'data':
        changed = small.valid.images.copy()
        changed[-1, -1, -1] += 1
        valid = small.valid._replace(images=changed)
        argv = [
            '--data_dir',
            write_data_set(tmp_path / 'd', small._replace(valid=valid)),
        ]
        told = 'has validation data with checksum '
    elif what == 'code':
        patch, told = OTHER_CODE % {'model.py': 'x'}, 'has model.py x, machine 0 with '
    elif what == 'version':
        patch = OTHER_CODE % {'TensorFlow': '1.14.0'}
        told = 'has TensorFlow 1.14.0, machine 0 '
    elif what == 'machines':
        named = addresses[:] + find_addresses(1)
        told = 'has TF_CONFIG %s, machine 0 %s' % (*map(' '.join, (named, addresses)),)
    else:
        argv, told = ['--num_gpus', '2'], 'has towers /cpu:0 /cpu:1, machine 0 /cpu:0'
    machines = start(2, indices=[0], addresses=addresses)
    machines += start(2, *argv, indices=[1], addresses=named, patches=['', patch])
    for machine in machines:
        status, out, err = machine.end()
        assert status == 2 and out == '' and err.count('\n') == 1, (out, err)
        assert err.startswith('ERROR: %s %s' % (machines[1].name, told)), err
        assert err.endswith(': make them equal\n')
    assert not os.path.exists('m')


def test_a_machine_that_cannot_be_reached_is_found_before_the_start(start):
    addresses = find_addresses(2)
    addresses[1] = addresses[1].replace('127.0.0.1', 'nobody.invalid')
    machines = start(2, addresses=addresses)
    for machine in machines:
        status, _, err = machine.end()
        told = 'ERROR: %s can not be reached: ' % machines[1].name
        assert status == 1 and err.startswith(told) and err.count('\n') == 1, err


def test_a_taken_port_is_told_in_one_line(start):
    addresses = find_addresses(2)
    with socket.socket() as taken:
        taken.bind(('', int(addresses[1].split(':')[1])))
        taken.listen(1)
        (machine,) = start(2, indices=[1], addresses=addresses)
        status, out, err = machine.end()
    assert status == 2 and out == ''
    assert err == (
        'ERROR: port %s of %s: Address already in use; end what uses it, or give '
        'another in TF_CONFIG\n' % (addresses[1].split(':')[1], machine.name)
    )


PORT_TAKEN = """
@add_to(cluster, 'meet')
def meet(meet, machines, *args, **kwargs):
    met = meet(machines, *args, **kwargs)
    meet.taken = cluster.bind(machines)
    return met
"""


def test_a_port_that_is_taken_at_the_last_moment_is_told_in_one_line(start):
    machines = start(2, patches=['', PORT_TAKEN])
    status, _, err = machines[1].end()
    assert status == 2 and err.count('\n') == 1, err
    assert 'of %s: Address already in use; ' % machines[1].name in err
    status, _, err = machines[0].end()
    told = 'ERROR: %s left before the start (' % machines[1].name
    assert status == 1 and err.startswith(told) and err.count('\n') == 1, err


@pytest.mark.parametrize(
    'text, told',
    [
        ('{"cluster": ', 'TF_CONFIG is no JSON'),
        (make_config(['a:1', 'b:1'], 2), 'task index 2: "worker" has 2, from 0 on'),
        (make_config(['a:1', 'b:1'], 0).replace('"index"', '"indices"'), 'index None'),
        (
            '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "evaluator"}}',
            'the workers evaluate themselves',
        ),
    ],
)
def test_a_mistake_in_tf_config_is_one_line(main, flags, monkeypatch, text, told):
    monkeypatch.setenv('TF_CONFIG', text)
    assert_mistake(main('train_multi_gpu.py', *flags), told)
    assert files() == []


def test_without_machines_in_tf_config_there_is_one(main, flags, monkeypatch):
    for text in ('', '{}', make_config(['nobody.invalid:1'], 0)):
        monkeypatch.setenv('TF_CONFIG', text)
        done = main('train_multi_gpu.py', '--max_steps', '2', *flags)
        assert done.status == 0 and 'machine' not in done.out + done.err


def test_the_script_for_one_gpu_refuses_several_machines(main, flags, monkeypatch):
    monkeypatch.setenv('TF_CONFIG', make_config(['a:1', 'b:1'], 0))
    told = 'TF_CONFIG names 2 machines: use train_multi_gpu.py, or unset it'
    assert_mistake(main('train.py', *flags), told)


# Stopping


@pytest.mark.parametrize('index, number', [(0, signal.SIGINT), (1, signal.SIGTERM)])
def test_a_signal_on_any_stops_all_after_the_same_step(start, index, number):
    argv = ['--epochs', '40', '--batch_size', '30']
    machines = start(3, *argv, patches=[TOLD_STEPS] * 3)
    machines[0].wait_for('Epoch 3')
    for address in (machine.name.split('(')[1][:-1] for machine in machines):
        # A port scan, and one that talks.
        host, port = address.split(':')
        with socket.create_connection((host, int(port))):
            pass
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(os.urandom(10000))
    machines[index].send_signal(number)
    assert_all_end(machines, 128 + number)
    steps = [len(re.findall('step ', machine.read()[1])) for machine in machines]
    assert len(set(steps)) == 1, steps
    out, _ = machines[0].read()
    who = '' if index == 0 else machines[index].name + ': '
    told = '%sstopped by %s: saved in epoch ' % (who, signal.Signals(number).name)
    assert told in out
    assert read_checkpoint(checkpoints.find('m')[0])['global_step'] == steps[0]
    if index == 1:
        more = argv + ['--max_steps', str(steps[0] + 20)]
        assert_all_end(start(3, *more), 0)
        os.rename('m', 'stopped')
        assert_all_end(start(3, *more), 0)
        last = [checkpoints.find(directory)[0] for directory in ('stopped', 'm')]
        assert_same_bits(*map(read_checkpoint, last))


def test_the_time_limit_stops_all(start):
    machines = start(2, '--epochs', '100000', '--max_minutes', '0.15')
    assert_all_end(machines, 0, seconds=60)
    out, _ = machines[0].read()
    assert '--max_minutes is nearly over: saved in epoch ' in out
    assert "to go on: TF_CONFIG='{" in out


# A data set of one's own

# To build a large graph takes longest.
SMALL_GRAPHS = 'input_pipeline.STEPS_PER_ENQUEUE, evaluation.decoding.PART = 2, 8\n'


def write_own(directory):
    """Writes folders of 60 and 12 images of 10 x 9 pixels; returns their path."""
    train, valid = make_examples(60, 10, 9, 3), make_examples(12, 10, 9, 3, seed=1)
    return write_folders(
        directory, ['cat', 'sea lion', 'dog'], train=train, valid=valid
    )


def test_machines_train_on_folders_what_one_machine_trains(start, tmp_path):
    argv = ['--data_dir', write_own(tmp_path / 'own'), '--augment', 'flip,brightness']
    argv += ['--standardize', '--batch_size', '3', '--epochs', '1', '--dropout', '0']
    argv += ['--optimizer', 'sgd', '--schedule', 'constant']
    patch = SMALL_GRAPHS + SMOOTH
    machines = start(2, '--num_gpus', '1', *argv, patches=[patch + TOLD_STEPS] * 2)
    assert_all_end(machines, 0)
    steps = [re.findall('step .*', machine.read()[1]) for machine in machines]
    assert steps[0] == steps[1] and len(set(steps[0])) == 10
    os.rename('m', 'several')
    assert_all_end(start(1, '--num_gpus', '2', *argv, patches=[patch]), 0)
    prefixes = [checkpoints.find(directory)[0] for directory in ('m', 'several')]
    one, several = map(read_checkpoint, prefixes)
    assert sorted(one) == sorted(several)
    for name, value in one.items():
        limit = 1e-5 * np.abs(value).max()
        assert np.abs(several[name] - value).max() <= limit, name
    for ours, theirs in zip(*map(read_metrics, ('several', 'm'))):
        for name in ('train_loss', 'valid_loss', 'train_acc', 'valid_acc'):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5), name


@pytest.mark.parametrize(
    'change, told',
    [
        ('train', 'has training data with checksum '),
        ('valid', 'has validation data with checksum '),
        ('name', 'has classes cat dog seal, machine 0 cat dog sea lion'),
    ],
)
def test_machines_whose_folders_differ_are_told_apart(start, tmp_path, change, told):
    paths = [write_own(tmp_path / name) for name in ('one', 'other')]
    if change == 'name':
        for split in ('train', 'valid'):
            folder = os.path.join(paths[1], split)
            os.rename(folder + '/sea lion', folder + '/seal')
    else:
        changed = pathlib.Path(paths[1], change, 'cat', '003.png')
        changed.write_bytes(changed.read_bytes() + b'\0')  # decoders do not see it
    argv, addresses = ['--batch_size', '3'], find_addresses(2)
    machines = []
    for index, path in enumerate(paths):
        own = dict(indices=[index], addresses=addresses, patches=[SMALL_GRAPHS] * 2)
        machines += start(2, *argv, '--data_dir', path, **own)
    for machine in machines:
        status, out, err = machine.end()
        assert status == 2 and out == '' and err.count('\n') == 1, (out, err)
        assert err.startswith('ERROR: %s %s' % (machines[1].name, told)), err
