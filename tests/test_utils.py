"""Flags and devices: what is refused, and in which words."""

import os
import subprocess
import sys
import threading

import pytest

import tf1
import utils
from tests.conftest import ROOT, make_flags
from tf1 import tf
from utils import UserError

# Flags


@pytest.mark.parametrize(
    'argv, told',
    [
        (['--epochs', '0'], "--epochs: '0' is not a whole number of at least 1"),
        (['--epochs', '-3'], '--epochs'),
        (['--epochs', '1.5'], '--epochs'),
        (['--epochs', '10000000'], 'at most 100000'),
        (['--batch_size', '0'], '--batch_size'),
        (['--batch_size', '1000000'], '--batch_size'),
        (['--num_gpus', '0'], '--num_gpus'),
        (['--inter_op_threads', '1'], "'1' is not a whole number of at least 2"),
        (['--gradient_packs', '-1'], '--gradient_packs'),
        (['--variable_device', 'tpu'], '--variable_device'),
        (['--num_gpus', '-1'], '--num_gpus'),
        (['--num_gpus', '65'], '--num_gpus'),
        (['--num_gpus', 'two'], '--num_gpus'),
        (['--learning_rate', '0'], "--learning_rate: '0' is not a number above 0"),
        (['--learning_rate', 'nan'], '--learning_rate'),
        (['--learning_rate', 'inf'], '--learning_rate'),
        (['--learning_rate', '-1'], '--learning_rate'),
        (['--dropout', '1'], '--dropout'),
        (['--dropout', '-0.1'], '--dropout'),
        (['--dropout', 'nan'], '--dropout'),
        (['--seed', '-1'], '--seed'),
        (['--seed', '2147483648'], '--seed'),
        (['--max_steps', '0'], '--max_steps'),
        (['--optimizer', 'adagrad'], "invalid choice: 'adagrad'"),
        (['--schedule', 'linear'], "invalid choice: 'linear'"),
        (['--weight_decay', '-0.1'], '--weight_decay'),
        (['--clip_norm', '0'], "--clip_norm: '0' is not a number above 0"),
        (['--label_smoothing', '1'], '--label_smoothing'),
        (['--early_stopping', '0'], '--early_stopping'),
        (['--stop_at', '0'], "--stop_at: '0' is not a number above 0"),
        (['--stop_at', '99'], '--stop_at'),
        (['--warmup_epochs', '-1'], '--warmup_epochs'),
        (['--warmup_epochs', 'nan'], '--warmup_epochs'),
        (['--model', 'vgg'], '--model'),
        (['--device', 'tpu'], '--device'),
        (['--gpus', ''], '--gpus'),
        (['--gpus', '0,0'], '--gpus'),
        (['--gpus', '0,-1'], '--gpus'),
        (['--gpus', '0;1'], '--gpus'),
        (['--gpus', '0,00'], '--gpus'),
        (['--gpus', '\u00b2'], 'is not a list of different GPU numbers'),
        (['--epoch', '3'], 'unrecognized arguments: --epoch 3'),
        (['--no_progress', 'yes'], 'unrecognized arguments: yes'),
        (['stray'], 'stray'),
        (['--epochs'], '--epochs'),
    ],
)
def test_a_wrong_flag_is_refused_by_name(argv, told):
    with pytest.raises(UserError) as error:
        make_flags(*argv)
    assert told in str(error.value)
    assert '\n' not in str(error.value)


def test_the_defaults():
    flags = make_flags()
    assert (flags.epochs, flags.batch_size, flags.learning_rate) == (10, 32, 0.001)
    assert (flags.optimizer, flags.model, flags.dropout) == ('adam', 'cnn', 0.4)
    assert (flags.device, flags.num_gpus, flags.gpus) == ('auto', None, None)
    assert flags.xla == 'auto'
    assert (flags.seed, flags.max_steps, flags.model_dir) == (0, None, None)
    assert not flags.no_progress and not flags.verbose


def test_help_names_every_flag_on_lines_of_80_columns():
    of_towers = {'num_gpus', 'variables', 'variable_device', 'gradient_packs'}
    of_towers |= {'start_timeout', 'step_timeout', 'check', 'sync_batch_norm'}
    for script in ('train.py', 'train_multi_gpu.py'):
        shown = subprocess.check_output(
            [sys.executable, ROOT + '/' + script, '--help'],
            universal_newlines=True,
            env={'COLUMNS': '80', 'PATH': '/usr/bin:/bin'},
        )
        assert max(map(len, shown.splitlines())) <= 80
        for name in vars(make_flags()):
            expected = script != 'train.py' or name not in of_towers
            assert ('--%s ' % name in shown) == expected, name


# Devices


def gpus(count):
    return lambda: ['/physical_device:GPU:%d' % i for i in range(count)]


@pytest.mark.parametrize(
    'asked, visible, towers, numbers',
    [
        (dict(device='auto'), 0, ['/cpu:0'], []),
        (dict(device='auto', num_gpus=2), 0, ['/cpu:0', '/cpu:1'], []),
        (dict(device='auto'), 2, ['/gpu:0', '/gpu:1'], [0, 1]),
        (dict(device='gpu'), 2, ['/gpu:0', '/gpu:1'], [0, 1]),
        (dict(device='auto', num_gpus=1), 4, ['/gpu:0'], [0]),
        (dict(device='auto', gpus=[2, 0]), 4, ['/gpu:0', '/gpu:1'], [2, 0]),
        (dict(device='auto', gpus=[3], num_gpus=1), 4, ['/gpu:0'], [3]),
        (dict(device='cpu'), 4, ['/cpu:0'], []),
        (dict(device='cpu', num_gpus=3), 4, ['/cpu:0', '/cpu:1', '/cpu:2'], []),
    ],
)
def test_devices_chosen(asked, visible, towers, numbers):
    assert utils.choose_devices(find_gpus=gpus(visible), **asked) == (towers, numbers)


@pytest.mark.parametrize(
    'asked, visible, told',
    [
        (dict(device='auto', num_gpus=4), 2, 'asked for 4 GPUs, TensorFlow sees 2 ('),
        (dict(device='gpu', num_gpus=4), 2, 'asked for 4 GPUs, TensorFlow sees 2 ('),
        (dict(device='gpu'), 0, '--device gpu: TensorFlow'),
        (dict(device='auto', gpus=[0]), 0, '--gpus: TensorFlow'),
        (dict(device='auto', gpus=[0, 5]), 2, 'asked for GPU 5, TensorFlow sees 2 ('),
        (dict(device='auto', gpus=[0, 1], num_gpus=1), 2, '--gpus names 2 GPUs'),
        (dict(device='cpu', gpus=[0]), 2, 'not with --device cpu'),
    ],
)
def test_devices_refused(asked, visible, told):
    with pytest.raises(UserError) as error:
        utils.choose_devices(find_gpus=gpus(visible), **asked)
    assert told in str(error.value)
    assert '\n' not in str(error.value)


def test_cpu_towers_do_not_look_for_gpus():
    def must_not_look():
        raise AssertionError('looked for GPUs')

    utils.choose_devices('cpu', 2, find_gpus=must_not_look)


def test_only_the_gpus_in_use_are_opened():
    config = utils.session_config(utils.Devices(['/gpu:0', '/gpu:1'], [2, 0]), (0, 0))
    assert config.gpu_options.visible_device_list == '2,0'
    assert config.gpu_options.allow_growth
    assert not config.allow_soft_placement
    config = utils.session_config(utils.Devices(['/cpu:0', '/cpu:1'], []), (1, 2))
    assert dict(config.device_count) == {'GPU': 0, 'CPU': 2}
    assert not config.allow_soft_placement


@pytest.mark.parametrize(
    'argv, towers, on_1_15, on_2',
    [
        (['--xla', 'off'], ['/cpu:0'], (4, 4), (1, 4)),
        (['--xla', 'off'], ['/cpu:0', '/cpu:1'], (4, 4), (1, 4)),
        ([], ['/cpu:0'], (4, 4), (1, 4)),
        ([], ['/cpu:0', '/cpu:1'], (2, 4), (1, 4)),
        ([], ['/cpu:%d' % i for i in range(8)], (1, 4), (1, 4)),
        ([], ['/gpu:0', '/gpu:1'], (0, 0), (0, 0)),
        (['--intra_op_threads', '0'], ['/cpu:0'], (0, 4), (0, 4)),
        (['--inter_op_threads', '7'], ['/gpu:0'], (0, 7), (0, 7)),
    ],
)
def test_threads_by_line_and_towers(monkeypatch, argv, towers, on_1_15, on_2):
    monkeypatch.setattr(utils, 'count_cores', lambda: 4)
    tensorflow_1 = tf.version.VERSION.startswith('1.')
    found = utils.choose_threads(make_flags(*argv), towers)
    assert found == (on_1_15 if tensorflow_1 else on_2)
    asked = make_flags('--intra_op_threads', '9')
    assert utils.choose_threads(asked, towers, before=[5, 6]) == (9, 6)


@pytest.mark.parametrize('choice', ['gpu', 'spread'])
def test_variables_that_gpus_have_no_kernel_for_stay_on_the_cpu(choice):
    place = utils.place_variables(choice, ['/gpu:0', '/gpu:1'])
    with utils.on_tower('/gpu:0', reuse=False, place_variable=place):
        counter = tf.get_variable('counter', [], tf.int32)
        weight = tf.get_variable('weight', [])
    assert 'cpu:0' in counter.device.lower() and 'gpu:0' in weight.device.lower()


def test_stderr_is_brought_back_while_it_is_coming_back(monkeypatch):
    taken, closed, errors = threading.Event(), threading.Event(), []

    class Aside(list):
        def __getitem__(self, which):
            found = super().__getitem__(which)
            taken.set()
            closed.wait(0.5)
            return found

    def show():
        try:
            tf1.show_stderr()
        except OSError as error:
            errors.append(error)

    monkeypatch.setattr(tf1, '_aside', Aside())
    thread = threading.Thread(target=show)
    with tf1.quiet_stderr():
        thread.start()
        assert taken.wait(5)
    closed.set()
    thread.join()
    assert not errors


def test_half_precision_says_nothing_on_a_cpu_that_has_none():
    # oneDNN would, once per process, where the CPU lacks instructions for it.
    code = """
import utils
from tf1 import tf
with tf.Graph().as_default(), utils.open_session(utils.CPU, (1, 2)) as session:
    half = tf.placeholder(tf.float16, [2, 2])
    print(session.run(tf.matmul(half, half), {half: [[1, 2], [3, 4]]}).tolist())
"""
    # An interpreter of its own: forked ones have TensorFlow's errors switched off.
    done = subprocess.run(
        [sys.executable, '-c', code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
        env=dict(os.environ, PYTHONPATH=ROOT),
    )
    assert done.stdout == '[[7.0, 10.0], [15.0, 22.0]]\n'


def test_xla_is_given_whole_towers():
    devices = utils.Devices(['/cpu:0'], [])
    for xla, remapping in ((False, 0), (True, 2)):
        config = utils.session_config(devices, (1, 2), xla)
        assert config.graph_options.rewrite_options.remapping == remapping


def test_xla_is_used_where_it_pays():
    tensorflow_1 = tf.version.VERSION.startswith('1.')
    assert utils.use_xla('auto', ['/cpu:0', '/cpu:1']) == tensorflow_1
    assert not utils.use_xla('auto', ['/gpu:0'])
    for towers in (['/cpu:0'], ['/gpu:0']):
        assert utils.use_xla('on', towers)
        assert not utils.use_xla('off', towers)


def test_the_variable_placer_knows_ref_and_resource_variables():
    with utils.on_tower('/gpu:3', reuse=False):
        ref = tf.get_variable('ref', [2], use_resource=False)
        resource = tf.get_variable('resource', [2], use_resource=True)
        total = tf.add(ref, resource)
    assert 'cpu:0' in ref.device.lower()
    assert 'cpu:0' in resource.device.lower()
    assert 'gpu:3' in total.device.lower()


def test_the_cause_of_a_failed_op_comes_first_on_both_lines():
    index = tf.placeholder(tf.int32, [])
    one, other = tf.gather([1, 2], index), tf.gather([3, 4], index)
    with tf.Session() as session:
        for fetches in (one, [one, other], one * other):
            with pytest.raises(tf.errors.InvalidArgumentError) as caught:
                session.run(fetches, {index: 5})
            assert 'indices = 5 is not in [0, 2)' in utils.find_cause(caught.value)
    # As a server tells it.
    told = 'From /job:worker/replica:0/task:1:\nindices = 5\n\t [[{{node Gather}}]]'
    roots = '2 root error(s) found.\n  (0) Invalid argument: ' + told
    assert utils.find_cause(ValueError(told)) == 'indices = 5'
    assert utils.find_cause(ValueError(roots)) == 'Invalid argument: indices = 5'
    assert utils.find_cause(ValueError('this\nthat')) == 'this'
    assert utils.find_cause(ValueError()) == '(no message)'
