"""evaluate.py: the score of a whole data set, class by class."""

import json
import os
import re
import shutil

import numpy as np
import pytest

import checkpoints
import data_sets
import evaluate
import records
from tests.conftest import (
    ROOT,
    assert_mistake,
    command,
    files,
    read_files,
    read_metrics,
    write_data_set,
)
from tf1 import tf


def shown_score(out):
    (line,) = [line for line in out.splitlines() if line.startswith('valid/')]
    return line


def test_the_score_is_what_the_run_printed_for_any_towers_and_batch(main, trained_dir):
    best = max(read_metrics(trained_dir), key=lambda row: row['valid_acc'])
    printed = 'valid/acc: %.4f, valid/loss: %.4f' % (
        *(best['valid_acc'], best['valid_loss']),
    )
    before = read_files(trained_dir)
    for argv in ([], ['--num_gpus', '2'], ['--num_gpus', '3', '--batch_size', '7']):
        done = main('evaluate.py', '--device', 'cpu', '--model_dir', trained_dir, *argv)
        assert done.status == 0 and done.err == ''
        assert shown_score(done.out) == printed
    assert read_files(trained_dir) == before


def test_classes_and_confusions_add_up(main, trained_dir, part):
    done = main('evaluate.py', '--device', 'cpu', '--model_dir', trained_dir)
    rows = [line.split() for line in done.out.splitlines()[-10:]]
    matrix = np.array([[int(n.replace('.', '0')) for n in row[4:]] for row in rows])
    labels = part.valid.labels
    assert matrix.shape == (10, 10)
    assert matrix.sum(axis=1).tolist() == np.bincount(labels).tolist()
    assert [int(row[1]) for row in rows] == np.bincount(labels).tolist()
    for true, row in enumerate(rows):
        assert row[0] == str(true) and row[3] == '%'
        assert float(row[2]) == pytest.approx(
            100 * matrix[true, true] / matrix[true].sum(), abs=0.005
        )
    accuracy = re.search(r'valid/acc: ([\d.]+)', done.out).group(1)
    assert matrix.trace() / len(labels) == pytest.approx(float(accuracy), abs=5e-5)


def test_misread_images_are_written_as_they_are(main, trained_dir, part):
    argv = ['--device', 'cpu', '--model_dir', trained_dir, '--errors', 'new/errors']
    done = main('evaluate.py', *argv)
    names = files('new/errors')
    assert done.status == 0
    assert '%d misread images in new/errors' % len(names) in done.out
    accuracy = float(re.search(r'valid/acc: ([\d.]+)', done.out).group(1))
    assert len(names) == round(500 * (1 - accuracy)) > 0
    with tf.Session() as session:
        for name in names[:20]:
            index, true, predicted = map(int, name[: -len('.png')].split('_'))
            assert part.valid.labels[index] == true != predicted
            with open('new/errors/' + name, 'rb') as file:
                pixels = session.run(tf.image.decode_png(file.read()))
            assert (pixels == part.valid.images[index]).all()
    again = main('evaluate.py', *argv)
    assert_mistake(again, '--errors new/errors is not empty')


def test_a_class_may_have_a_name_that_no_file_can_have(small):
    examples = small.valid._replace(labels=small.valid.labels % 2)
    wrong = examples.labels.copy()
    wrong[7] = 1 - wrong[7]
    names = ['cat/dog', 'bird']
    assert evaluate.write_errors('errors', examples, wrong, names) == 1
    one, other = ('cat_dog', 'bird')[:: 1 - 2 * examples.labels[7]]
    assert files('errors') == ['7_%s_%s.png' % (one, other)]


def test_many_classes_are_listed_by_their_confusions():
    matrix = np.diag(np.arange(100, 200))
    matrix[42, 17] = 9
    matrix[3, 99] = 4
    lines = list(evaluate.describe(matrix, range(100)))
    assert all(len(line) < 80 for line in lines)
    assert '   42     151   94.04 %' in lines
    assert lines[-2:] == ['   42    17       9', '    3    99       4']


def test_a_class_without_images_has_no_accuracy():
    lines = list(evaluate.describe(np.array([[3, 1], [0, 0]]), [0, 1]))
    assert lines[2:] == [
        '    0       4   75.00 %    3    1',
        '    1       0         -    .    .',
    ]


def test_the_newest_run_is_taken_and_named(main, flags):
    flags += ['--max_steps', '1']
    for name in ('runs/one', 'runs/two', 'runs/empty'):
        assert main('train.py', '--model_dir', name, *flags).status == 0
    for name in checkpoints.find('runs/empty'):
        os.remove(name + '.index')
    os.utime(checkpoints.find('runs/one')[0] + '.index')
    done = main('evaluate.py', '--device', 'cpu')
    assert done.out.splitlines()[0] == (
        'model cnn of runs/one/model.ckpt-0-1 (the newest run)'
    )


def test_the_checkpoint_is_the_one_that_is_asked_for(main, trained_dir):
    best = checkpoints.find(trained_dir + '/best')[0]
    newest, *_, oldest = checkpoints.find(trained_dir)
    for choice, prefix in (
        ('best', best),
        ('last', newest),
        (oldest, oldest),
        (oldest + '.index', oldest),
    ):
        argv = ['--model_dir', trained_dir, '--checkpoint', choice]
        done = main('evaluate.py', '--device', 'cpu', *argv)
        assert done.out.splitlines()[0] == 'model cnn of ' + prefix
        epoch = int(re.search(r'ckpt-(\d+)', prefix).group(1))
        row = read_metrics(trained_dir)[epoch - 1]
        assert shown_score(done.out).startswith('valid/acc: %.4f' % row['valid_acc'])
    done = main('evaluate.py', '--device', 'cpu', '--checkpoint', best)
    assert done.out.splitlines()[0] == 'model cnn of ' + best


def test_other_test_images_can_be_given_without_training_images(
    main, trained_dir, mnist, tmp_path
):
    other = mnist._replace(
        train=data_sets.Examples(*(a[:50] for a in mnist.train)),
        valid=data_sets.Examples(*(a[500:531] for a in mnist.valid)),
    )
    write_data_set(tmp_path / 'other', other)
    for path in (tmp_path / 'other').glob('train*'):
        path.unlink()
    argv = ['--model_dir', trained_dir, '--data_dir', 'other']
    done = main('evaluate.py', '--device', 'cpu', *argv)
    rows = [line.split() for line in done.out.splitlines()[-10:]]
    assert sum(int(row[1]) for row in rows) == 31


def test_a_run_is_evaluated_from_anywhere(main, flags, part_dir, monkeypatch):
    os.symlink(part_dir, 'data')
    flags[flags.index('--data_dir') + 1] = 'data'
    flags += ['--max_steps', '1', '--model_dir', 'runs/m']
    assert main('train.py', *flags).status == 0
    os.mkdir('elsewhere')
    monkeypatch.chdir('elsewhere')
    argv = ['--device', 'cpu', '--model_dir', '../runs/m']
    assert main('evaluate.py', *argv).status == 0
    monkeypatch.chdir('../runs/m')
    done = main('evaluate.py', '--device', 'cpu', '--checkpoint', 'model.ckpt-0-1')
    assert done.status == 0, done.err
    os.remove('../../data')
    told = 'data, which is not there: say where with --data_dir'
    assert_mistake(main('evaluate.py', '--device', 'cpu', '--model_dir', '.'), told)


@pytest.mark.parametrize(
    'change',
    [
        {'data': None},
        {'data': {}},
        {'data': {'image_shape': [28, 28], 'num_classes': 10}},
        {'data': {'image_shape': [28, 28, 'x'], 'num_classes': 10}},
        {'data': {'image_shape': [28, 28, 1], 'num_classes': 0}},
        {'flags': {}},
        {'flags': {'model': ['cnn']}},
        {'flags': {'model': 'cnn', 'data_dir': 7}},
        {'flags': {'model': 'cnn', 'data_dir': '\ud800'}},
        {'threads': 'x'},
    ],
)
def test_a_damaged_config_costs_one_line(main, trained_dir, change):
    shutil.copytree(trained_dir, 'm')
    config = dict(records.read_config('m'), **change)
    records.write_whole('m/config.json', json.dumps(config))
    assert_mistake(main('evaluate.py', '--device', 'cpu', '--model_dir', 'm'), '')


@pytest.mark.parametrize('name', ['m[1]', 'm*', 'a?b', '\udcff'])
def test_a_name_that_tensorflow_would_not_find_is_refused(main, flags, name):
    assert_mistake(main('train.py', '--model_dir', name, *flags), 'name another')
    assert os.listdir('.') == []
    os.mkdir(name)
    assert_mistake(main('evaluate.py', '--model_dir', name), 'name another')


def test_the_cpu_is_never_taken_silently(trained_dir):
    env = {'CUDA_VISIBLE_DEVICES': ''}
    done = command('evaluate.py', '--model_dir', trained_dir, env=env)
    assert done.status == 0
    assert done.err.startswith('WARNING: TensorFlow sees no GPU: evaluating on the CPU')
    assert done.err.count('\n') == 1


@pytest.mark.parametrize(
    'argv, told',
    [
        (['--model_dir', '/no/such'], '--model_dir /no/such is not a directory'),
        (['--model_dir', '.'], '. has no config.json'),
        ([], 'no run in runs/ has saved anything'),
        (['--model_dir', 'TRAINED', '--checkpoint', 'x/y'], 'there is no x/y.index'),
        (['--checkpoint', 'x/y'], '--model_dir x is not a directory'),
        (['--model_dir', 'TRAINED', '--data_dir', '/no'], '--data_dir /no is not a'),
        (['--model_dir', 'TRAINED', '--batch_size', '0'], '--batch_size'),
        (['--model_dir', 'TRAINED', '--errors', ROOT], ROOT + ' is not empty'),
        (['--model_dir', 'TRAINED', '--errors', '/proc/x'], '--errors /proc/x: '),
        (['--model_dir', 'TRAINED', '--errors', ROOT + '/train.py'], 'Not a directory'),
        (['--stray'], '--stray'),
    ],
)
def test_a_mistake_gets_one_line(main, trained_dir, argv, told):
    argv = [trained_dir if word == 'TRAINED' else word for word in argv]
    assert_mistake(main('evaluate.py', '--device', 'cpu', *argv), told)


def test_damage_and_foreign_models_get_one_line(main, flags, trained_dir, monkeypatch):
    flags += ['--max_steps', '1', '--model_dir', 'm']
    assert main('train.py', *flags).status == 0
    argv = ['--device', 'cpu', '--model_dir', 'm']
    done = main('evaluate.py', '--checkpoint', 'best', *argv)
    assert_mistake(done, 'm has no best checkpoint')
    os.truncate('m/model.ckpt-0-1.data-00000-of-00001', 1000)
    done = main('evaluate.py', '--checkpoint', 'm/model.ckpt-0-1', *argv)
    assert_mistake(done, 'm/model.ckpt-0-1 is damaged (')
    done = main('evaluate.py', *argv)
    assert done.status == 2 and 'no checkpoint in it can be read' in done.err

    monkeypatch.setitem(evaluate.model.NETWORKS, 'cnn', other_network)
    done = main('evaluate.py', '--device', 'cpu', '--model_dir', trained_dir)
    assert done.status == 2
    assert 'is of another model: other/bias is absent there and [10] here' in done.err
    monkeypatch.delitem(evaluate.model.NETWORKS, 'cnn')
    done = main('evaluate.py', '--device', 'cpu', '--model_dir', trained_dir)
    assert_mistake(done, 'trained with --model cnn: there is no such network: name ')


def other_network(images, training, num_classes, dropout):
    del training, dropout
    return evaluate.model.dense(evaluate.model.flatten(images), num_classes, 'other')


def test_a_config_that_names_no_format_is_one_line(main, trained_dir):
    shutil.copytree(trained_dir, 'odd')
    config = records.read_config('odd')
    config['flags']['format'] = 7
    records.write_whole('odd/config.json', json.dumps(config))
    done = main('evaluate.py', '--device', 'cpu', '--model_dir', 'odd')
    assert_mistake(done, 'odd/config.json: "format" is 7, none of idx, cifar, npz')
