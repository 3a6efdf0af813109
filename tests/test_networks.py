"""`--model`: a network of your own, its mistakes, and how others find it again."""

import argparse
import json
import os
import re
import shutil
import sys

import numpy as np
import pytest

import cluster
import messages
import model
import networks
import records
import train
import utils
from tests.conftest import (
    ROOT,
    assert_mistake,
    assert_same_bits,
    files,
    read_files,
    read_metrics,
)
from tests.test_train_multi_gpu import SGD, largest_difference
from tf1 import tf

NETWORK = """
import tensorflow.compat.v1 as tf

SIZE = 3

def mlp(images, training, num_classes, dropout):
    x = tf.reshape(images, [-1, 14 * 14])
    x = tf.nn.relu(dense(x, 20, 'hidden'))
    return dense(dropout(x), num_classes, 'logits')

def dense(x, units, name):
    with tf.variable_scope(name):
        start = tf.random_uniform_initializer(-0.1, 0.1, seed=units)
        weights = tf.get_variable('weights', [x.shape[1], units], initializer=start)
        biases = tf.get_variable('biases', [units], initializer=tf.zeros_initializer())
        return tf.matmul(x, weights) + biases

def linear(images, training, num_classes):
    return dense(tf.reshape(images, [-1, 14 * 14]), num_classes, 'logits')
"""


@pytest.fixture(autouse=True)
def forget(monkeypatch, tmp_path):
    """What a test has imported from its directory is not imported any more."""
    monkeypatch.setattr(sys, 'path', list(sys.path))
    yield
    for name, module in list(sys.modules.items()):
        path = str(getattr(module, '__file__', None))
        if path.startswith(str(tmp_path)) or name == 'nets':
            del sys.modules[name]


@pytest.fixture(autouse=True)
def network(tmp_path):
    """nets/my.py in the current directory."""
    (tmp_path / 'nets').mkdir()
    (tmp_path / 'nets' / 'my.py').write_text(NETWORK)


@pytest.fixture
def brief(flags):
    """Flags of three steps of nets/my.py:mlp to m."""
    return flags + ['--max_steps', '3', '--model_dir', 'm', '--model', 'nets/my.py:mlp']


def find(name):
    return networks.find_network(name, model.NETWORKS)


# Use


def test_a_network_of_ones_own_is_trained_evaluated_and_exported(
    main, flags, small, monkeypatch
):
    flags += ['--num_gpus', '2', '--epochs', '1', '--model', 'nets/my.py:mlp']
    done = main('train_multi_gpu.py', *flags)
    assert done.status == 0 and done.err == ''
    assert done.out.startswith(
        'model my.py:mlp: 4150 parameters, 10 classes (0 to 9); '
    )
    (run,) = os.listdir('runs')
    assert re.match(r'\d{8}-\d{6}-mlp-2$', run)
    path = os.path.abspath('nets/my.py') + ':mlp'
    assert records.read_config('runs/' + run)['flags']['model'] == path
    (row,) = read_metrics('runs/' + run)

    os.mkdir('elsewhere')
    monkeypatch.chdir('elsewhere')
    run = '../runs/' + run
    title = 'model my.py:mlp of %s/best/model.ckpt-1-31' % run
    done = main('evaluate.py', '--device', 'cpu', '--model_dir', run)
    score = 'valid/acc: %.4f, valid/loss: %.4f' % (row['valid_acc'], row['valid_loss'])
    assert done.err == '' and done.out.splitlines()[:2] == [title, score]
    seven = ROOT + '/docs/pictures/seven.png'
    done = main('predict.py', '--model_dir', run, seven)
    assert done.err == '' and done.out.splitlines()[0] == title
    assert re.match(seven + r': \d \(', done.out.splitlines()[1])
    argv = ['--model_dir', run, '--export_dir', 'saved', '--frozen', 'frozen.pb']
    done = main('export.py', *argv)
    assert done.err == '' and done.out.splitlines()[0] == title
    with tf.Graph().as_default(), tf.Session() as session:
        loaded = tf.saved_model.load(session, ['serve'], 'saved')
        signature = loaded.signature_def['serving_default']
        classes = session.run(
            signature.outputs['classes'].name,
            {signature.inputs['images'].name: small.valid.images},
        )
    assert (classes == small.valid.labels).mean() == row['valid_acc']


def test_a_module_is_found_from_the_current_directory(main, flags, tmp_path):
    (tmp_path / 'nets' / '__init__.py').write_text('')
    flags += ['--max_steps', '1', '--model_dir', 'm', '--model', 'nets.my:linear']
    done = main('train.py', *flags)
    assert done.status == 0 and done.out.startswith('model nets.my:linear: 1970 param')
    assert records.read_config('m')['flags']['model'] == 'nets.my:linear'
    done = main('evaluate.py', '--device', 'cpu', '--model_dir', 'm')
    assert done.out.startswith('model nets.my:linear of m/')


def test_two_towers_make_the_updates_of_one_with_twice_the_batch(run_steps):
    flags = SGD + ['--model', 'nets/my.py:mlp']
    one = run_steps(10, '--num_gpus', '1', '--batch_size', '8', *flags)
    two = run_steps(10, '--num_gpus', '2', '--batch_size', '4', *flags)
    assert {n for n in one if n.startswith('hidden/')} == {
        'hidden/weights',
        'hidden/biases',
    }
    assert largest_difference(one, two) <= 1e-5
    alone = run_steps(10, '--batch_size', '8', *flags, script=train)
    assert_same_bits(alone, one)


def test_it_may_be_called_as_our_files_are_and_its_imports_work(tmp_path):
    (tmp_path / 'nets' / 'model.py').write_text(
        'import helper\nimport utils\nfrom model import NETWORKS, cnn\n'
        'def f(images, training, num_classes, dropout):\n'
        '    return helper.help(cnn(images, training, num_classes, dropout))\n'
    )
    (tmp_path / 'nets' / 'helper.py').write_text('def help(x):\n    return 2 * x\n')
    (tmp_path / 'nets' / 'utils.py').write_text('1 / 0')
    ours = dict(sys.modules)
    logits = find('nets/model.py:f')(tf.zeros([2, 28, 28, 1]), False, 10, lambda x: x)
    assert logits.shape.as_list() == [2, 10]
    assert sys.modules['model'] is model is ours['model']
    assert sys.modules['utils'] is utils
    assert sys.path[-1] == str(tmp_path / 'nets')


def test_a_file_is_run_once_however_it_is_named(tmp_path):
    (tmp_path / 'nets' / 'my.py').write_text(
        NETWORK + "\nwith open('ran', 'a') as file:\n    file.write('.')\n"
    )
    find('nets/my.py:mlp')
    find(str(tmp_path / 'nets' / '..' / 'nets' / 'my.py:linear'))
    find('./nets/my.py:mlp')
    assert (tmp_path / 'ran').read_text() == '.'
    # Another file of the same name is another network.
    shutil.copytree('nets', 'other')
    find('other/my.py:mlp')
    assert (tmp_path / 'ran').read_text() == '..'


def test_it_is_given_what_built_in_networks_are(tmp_path):
    (tmp_path / 'nets' / 'my.py').write_text(
        'seen = []\n'
        'class Net:\n'
        '    def __call__(self, x, is_training, classes, width=1, dropout=None):\n'
        '        seen.append((x, is_training, classes, width, dropout))\n'
        '        return x\n'
        'net = Net()\n'
        'def plain(x, is_training, classes, **more):\n'
        '    seen.append((x, is_training, classes, more))\n'
        '    return x\n'
    )
    x = tf.zeros([2, 10])
    tf.get_variable('weight', [])  # something to train
    find('nets/my.py:net')(x, True, 10, abs)
    find('nets/my.py:plain')(x, False, 10, abs)
    (module,) = [m for name, m in sys.modules.items() if name.endswith('nets/my py')]
    assert module.seen == [(x, True, 10, 1, abs), (x, False, 10, {})]


@pytest.mark.parametrize('dtype', [tf.float16, tf.bfloat16, tf.float64])
def test_other_floats_become_float32(tmp_path, dtype):
    (tmp_path / 'nets' / 'my.py').write_text(
        'import tensorflow.compat.v1 as tf\n'
        'def f(images, training, num_classes):\n'
        '    return tf.ones([3, num_classes], %r)\n' % dtype.name
    )
    logits = find('nets/my.py:f')(tf.zeros([3, 2, 2, 1]), False, 4, None)
    assert logits.dtype == tf.float32
    with tf.Session() as session:
        assert session.run(logits).tolist() == np.ones([3, 4]).tolist()


# Going on, and being found again


def test_a_run_goes_on_from_elsewhere_and_after_its_file_moved(
    main, brief, monkeypatch
):
    whole = [word if word != 'm' else 'whole' for word in brief] + ['--max_steps', '9']
    assert main('train.py', *whole).status == 0
    assert main('train.py', *brief).status == 0
    os.mkdir('elsewhere')
    monkeypatch.chdir('elsewhere')
    brief += ['--model_dir', '../m', '--model']
    done = main('train.py', *brief, '../nets/my.py:mlp', '--max_steps', '6')
    assert done.status == 0 and done.err == ''
    assert 'continues from ../m/model.ckpt-0-3' in done.out
    os.rename('../nets/my.py', 'my.py')
    done = main('train.py', *brief, 'my.py:mlp', '--max_steps', '9')
    assert done.status == 0 and done.err == ''
    assert 'continues from ../m/model.ckpt-0-6' in done.out
    path = os.path.abspath('my.py') + ':mlp'
    assert records.read_config('../m')['flags']['model'] == path
    name = 'model.ckpt-0-9.data-00000-of-00001'
    assert read_files('../m')[name] == read_files('../whole')[name]


def test_a_run_belongs_to_one_network(main, brief):
    assert main('train.py', *brief).status == 0
    before = read_files('m')
    shutil.copy('nets/my.py', 'nets/other.py')
    for given, shown in (
        ('nets/my.py:linear', 'my.py:linear'),
        ('nets/other.py:mlp', 'other.py:mlp'),
        ('cnn', 'cnn'),
    ):
        done = main('train.py', *brief, '--model', given)
        told = 'm was trained with --model my.py:mlp, not %s: give the same' % shown
        assert_mistake(done, told)
    assert read_files('m') == before


def test_a_network_that_is_gone_is_asked_for_and_can_be_named(main, brief):
    assert main('train.py', *brief).status == 0
    os.mkdir('elsewhere')
    old = os.path.abspath('nets/my.py')
    os.rename(old, 'elsewhere/its.py')
    forget_file(old)
    picture = ROOT + '/docs/pictures/seven.png'
    for script, argv in (
        ('evaluate.py', ['--device', 'cpu']),
        ('predict.py', [picture]),
        ('export.py', ['--export_dir', 'saved']),
    ):
        argv += ['--model_dir', 'm']
        assert_mistake(
            main(script, *argv),
            'm was trained with --model %s:mlp: %s: No such file or directory; say '
            'with --model where it is now' % (old, old),
        )
        done = main(script, *argv, '--model', 'elsewhere/its.py:mlp')
        assert done.status == 0 and done.err == ''
        assert done.out.startswith('model its.py:mlp of m/model.ckpt-0-3\n')
        shutil.rmtree('saved', ignore_errors=True)
        done = main(script, *argv, '--model', 'elsewhere/its.py:linear')
        assert done.status == 2
        assert 'm/model.ckpt-0-3 is of another model: ' in done.err
        done = main(script, *argv, '--model', 'nets/my.py:mlp')
        told = '--model nets/my.py:mlp: %s: No such file or directory' % old
        assert done.err == 'ERROR: %s\n' % told


def forget_file(path):
    """As in the next process."""
    del sys.modules[networks._name_module(path)]


def test_machines_compare_what_the_network_is_not_where(small, tmp_path):
    def describe(name, data=small):
        find(name)
        devices = utils.choose_devices('cpu', 1)
        flags = argparse.Namespace(model=name, seed=0)
        return records.describe_facts(flags, devices, data, cluster.ONE)

    here = describe('nets/my.py:mlp')
    assert here['--model'] == 'my.py:mlp'
    assert here['my.py:mlp'].startswith('with checksum ')
    shutil.copytree('nets', 'there')
    assert describe(str(tmp_path / 'there' / 'my.py:mlp')) == here
    shutil.copytree('nets', 'changed')
    with open('changed/my.py', 'a') as file:
        file.write('# a change\n')
    changed = describe('changed/my.py:mlp')
    assert changed.pop('my.py:mlp') != here.pop('my.py:mlp')
    assert changed == here
    assert here['classes'] == '0 1 2 3 4 5 6 7 8 9'
    # What two machines have is told in one message.
    many = ['class %06d' % number for number in range(20000)]
    facts = [
        describe('nets/my.py:mlp', small._replace(classes=classes))
        for classes in (many, many[:-1] + ['another'])
    ]
    assert len(json.dumps(facts)) < messages.MAX_BYTES
    assert facts[0]['classes'] != facts[1]['classes']


# Mistakes: one line, exit 2, nothing written


def written_network(text):
    with open('nets/f.py', 'w') as file:
        file.write('import tensorflow.compat.v1 as tf\n' + text)


UNKNOWN = (
    'there is no such network: name one of article, cnn, lenet5, mlp, resnet20, '
    'path/file.py:function, package.module:function\n'
)


@pytest.mark.parametrize(
    'name, told',
    [
        ('nets/no.py:f', '{nets}/no.py: No such file or directory'),
        ('nets/:f', '{nets}: Is a directory'),
        ('nets/my.py:f', 'f is no function of {nets}/my.py, which has dense, linear, '),
        ('nets/my.py:SIZE', 'SIZE is no function of {nets}/my.py, which has dense, '),
        ('nets/empty.py:f', 'f is no function of {nets}/empty.py, which has none'),
        ('gone:f', 'there is no module gone, neither in {here} nor where Python looks'),
        ('gone.deep:f', 'there is no module gone.deep, neither in {here} nor where '),
        ('nets.no:f', 'there is no module nets.no, neither in {here} nor where Python'),
        ('net', UNKNOWN),
        (':f', UNKNOWN),
        ('..nets:f', UNKNOWN),
        ('', UNKNOWN),
    ],
)
@pytest.mark.parametrize('script', ['train.py', 'train_multi_gpu.py', 'benchmark.py'])
def test_a_network_that_is_not_there_costs_one_line(main, flags, script, name, told):
    open('nets/empty.py', 'w').close()
    before = files()
    told = told.format(nets=os.path.abspath('nets'), here=os.getcwd())
    done = main(script, *flags, '--model', name)
    assert_mistake(done, 'ERROR: --model %s: %s' % (name, told))
    assert files() == before and os.listdir('.') == ['nets']


@pytest.mark.parametrize('name', ['nets/my.py', 'nets/my.py:', 'nets/no.py'])
def test_a_file_without_a_function_costs_one_line(main, flags, name):
    done = main('train.py', *flags, '--model', name)
    told = '--model %s names no function: %s:FUNCTION' % (name, name.rstrip(':'))
    assert_mistake(done, told)
    assert os.listdir('.') == ['nets']


@pytest.mark.parametrize(
    'parameters, told',
    [
        ('images, training', 'too many positional arguments'),
        ('a, b, c, d', "missing a required argument: 'd'"),
        ('images, dropout, training, c', "multiple values for argument 'dropout'"),
        ('images, *, training, num_classes', 'too many positional arguments'),
    ],
)
def test_wrong_parameters_cost_one_line(main, flags, parameters, told):
    written_network('def f(%s):\n    return images\n' % parameters)
    done = main('train.py', *flags, '--model', 'nets/f.py:f')
    told = 'must take (images, training, num_classes) and may take dropout: ' + told
    assert_mistake(done, 'ERROR: --model nets/f.py:f ' + told)
    assert os.listdir('.') == ['nets']


@pytest.mark.parametrize(
    'result, told',
    [
        ('tf.zeros([32, 7])', 'float32 [32, 7]: logits must be [32, 10]'),
        ('tf.zeros([31, 10])', 'float32 [31, 10]: logits must be [32, 10]'),
        ('images', 'float32 [32, 14, 14, 1]: logits must be [32, 10]'),
        ('tf.zeros([10])', 'float32 [10]: logits must be [32, 10]'),
        ('tf.zeros([32, 10], tf.int64)', 'int64 [32, 10]: logits must be floats [32,'),
        ('tf.placeholder(tf.float32)', 'float32 of unknown shape: logits must be [32,'),
        (
            'tf.placeholder(tf.float32, [32, None])',
            'float32 [32, ?]: logits must be [32, 10]',
        ),
        ('None', 'NoneType: logits must be a tensor [32, 10]'),
        ('[[0.0] * num_classes] * 32', 'list: logits must be a tensor [32, 10]'),
        ('(images, images)', 'tuple: logits must be a tensor [32, 10]'),
    ],
)
def test_what_are_no_logits_costs_one_line(main, flags, result, told):
    written_network('def f(images, training, num_classes):\n    return %s\n' % result)
    before = files()
    done = main('train_multi_gpu.py', *flags, '--model', 'nets/f.py:f')
    assert_mistake(done, 'ERROR: --model nets/f.py:f returned ' + told)
    assert done.err.endswith('10], one per class\n')
    assert files() == before and os.listdir('.') == ['nets']


@pytest.mark.parametrize('script', ['train.py', 'train_multi_gpu.py'])
@pytest.mark.parametrize(
    'body, told',
    [
        (
            'tf.zeros([images.shape[0], num_classes])',
            'ERROR: --model nets/f.py:f has nothing to train: make its variables with '
            'tf.get_variable\n',
        ),
        (
            "tf.one_hot(tf.argmax(tf.get_variable('w', [32, 10]), 1), num_classes)",
            'ERROR: no variable has a gradient: the loss must depend on one by ops '
            'that have one\n',
        ),
    ],
)
def test_a_network_that_can_not_learn_costs_one_line(main, flags, script, body, told):
    written_network('def f(images, training, num_classes):\n    return %s\n' % body)
    done = main(script, *flags, '--model', 'nets/f.py:f')
    assert done.status == 2 and done.out == ''
    said = [line for line in done.err.splitlines(True) if 'has no gradient' not in line]
    assert said == [told]
    assert os.listdir('.') == ['nets']


def test_a_batch_that_is_not_known_may_stay_so():
    written_network('def f(images, training, num_classes):\n    return images\n')
    f = find('nets/f.py:f')
    known, unknown = tf.zeros([5, 10]), tf.placeholder(tf.float32, [None, 10])
    assert f(unknown, False, 10, None).shape.as_list() == [None, 10]
    assert f(known, False, 10, None).shape.as_list() == [5, 10]
    written_network('def f(images, *_):\n    return tf.zeros([5, 10])\n')
    forget_file('nets/f.py')
    with pytest.raises(utils.UserError) as error:
        find('nets/f.py:f')(unknown, False, 10, None)
    assert str(error.value) == (
        '--model nets/f.py:f returned float32 [5, 10]: logits must be [batch, 10], one '
        'per class'
    )


@pytest.mark.parametrize(
    'script, argv, copy',
    [
        ('train.py', [], 'evaluation'),
        ('train_multi_gpu.py', ['--num_gpus', '2'], 'tower_1'),
    ],
)
def test_variables_that_copies_would_not_share_cost_one_line(
    main, flags, script, argv, copy
):
    written_network(
        'def f(images, training, num_classes):\n'
        "    w = tf.Variable(tf.zeros([196, num_classes]), name='w')\n"
        '    return tf.matmul(tf.reshape(images, [-1, 196]), w)\n'
    )
    done = main(script, *flags, *argv, '--model', 'nets/f.py:f')
    told = (
        '--model nets/f.py:f makes %s/w anew in each copy of the network: only '
        'variables of tf.get_variable are shared' % copy
    )
    assert_mistake(done, told)
    assert os.listdir('.') == ['nets']


def test_the_benchmark_has_no_peers_of_it(main, flags):
    done = main('benchmark.py', *flags, '--peers', '--model', 'nets/my.py:mlp')
    told = '--peers have no --model nets/my.py:mlp, only cnn: drop one'
    assert_mistake(done, told)


# Failures of the user's own code: the cause, then the user's frames, exit 1


def assert_own_failure(done, cause, frames):
    assert done.status == 1 and done.out == ''
    assert done.err.splitlines()[0] == 'ERROR: ' + cause
    shown = re.findall(r'File "(.*?)", line (\d+)', done.err)
    nets = os.path.abspath('nets')
    assert [(os.path.relpath(path, nets), int(line)) for path, line in shown] == frames
    assert os.listdir('.') == ['nets']


@pytest.mark.parametrize('script', ['train.py', 'train_multi_gpu.py', 'benchmark.py'])
@pytest.mark.parametrize('as_module', [False, True])
@pytest.mark.parametrize(
    'text, cause, frames',
    [
        (
            'import nothing_such\n',
            "ModuleNotFoundError: No module named 'nothing_such'",
            [('f.py', 2)],
        ),
        (
            'import helper_of_f\n',
            'ZeroDivisionError: division by zero',
            [('f.py', 2), ('helper_of_f.py', 2)],
        ),
        ("\nraise ValueError('so')\n", 'ValueError: so', [('f.py', 3)]),
        ('\n\nx = = 1\n', 'SyntaxError: invalid syntax (f.py, line 4)', [('f.py', 4)]),
    ],
)
def test_an_error_at_import_shows_the_users_frames(
    main, flags, script, as_module, text, cause, frames, monkeypatch, tmp_path
):
    monkeypatch.setattr(sys, 'dont_write_bytecode', True)
    (tmp_path / 'nets' / 'helper_of_f.py').write_text('\n1 / 0\n')
    (tmp_path / 'nets' / '__init__.py').write_text('')
    if as_module:
        monkeypatch.syspath_prepend(str(tmp_path / 'nets'))
    written_network(text)
    name = 'nets.f:f' if as_module else 'nets/f.py:f'
    done = main(script, *flags, '--model', name)
    assert_own_failure(done, cause, frames)
    if cause.startswith('SyntaxError'):
        assert re.search(r'\n +x = = 1\n +\^\n', done.err)
    # It is not taken for loaded the next time.
    again = main(script, *flags, '--model', name)
    assert again.err == done.err


@pytest.mark.parametrize('script', ['train.py', 'train_multi_gpu.py'])
def test_an_error_while_building_shows_the_users_frames(main, flags, script):
    written_network(
        'def f(images, training, num_classes):\n'
        '    return part(images)\n'
        'def part(x):\n'
        "    raise LookupError('so')\n"
    )
    done = main(script, *flags, '--model', 'nets/f.py:f')
    assert_own_failure(done, 'LookupError: so', [('f.py', 3), ('f.py', 5)])


def test_an_error_of_tensorflow_is_traced_to_the_users_line(main, brief):
    written_network(
        'def f(images, training, num_classes):\n'
        '    x = tf.reshape(images, [-1, 196])\n'
        '    return tf.matmul(x, tf.zeros([7, num_classes]))\n'
    )
    done = main('train.py', *brief, '--model', 'nets/f.py:f')
    assert done.status == 1 and done.out == ''
    assert done.err.startswith(
        'ERROR: ValueError: Dimensions must be equal, but are 19'
    )
    own = [path for path in re.findall(r'File "(.*?)", ', done.err) if 'nets' in path]
    assert own == [os.path.abspath('nets/f.py')]
    assert os.path.join(ROOT, 'networks.py') not in done.err
    assert os.path.join(ROOT, 'train.py') not in done.err
    assert os.listdir('.') == ['nets']
