"""A data set of one's own, from training to the exported model."""

import json
import os
import pathlib
import re

import numpy as np
import pytest

import checkpoints
import data_sets
import model
import records
from data_sets import Examples
from tests.conftest import (
    assert_mistake,
    assert_same_bits,
    command,
    data_flags,
    files,
    make_examples,
    read_checkpoint,
    read_metrics,
    without_times,
    write_folders,
    write_npz,
)
from tf1 import tf

pytestmark = pytest.mark.usefixtures('small_graphs')

# 9 steps per epoch of 90 images.
RUN = ['--device', 'cpu', '--xla', 'off', '--batch_size', '10', '--summary_steps', '0']
RUN += ['--schedule', 'constant']
NAMES = ['cat', 'sea lion', 'zebra']
ALL_KINDS = 'shift,flip,crop,rotate,brightness'


def make_halves(*shape, values=(0, 1, 2)):
    """90 training and 31 validation examples, labels some of `values`."""
    halves = make_examples(90, *shape), make_examples(31, *shape, seed=1)
    return [half._replace(labels=np.array(values)[half.labels]) for half in halves]


def train(directory, data_dir, *argv):
    """Trains in a process of its own; returns the model_dir."""
    model_dir = str(directory / 'm')
    argv = RUN + ['--data_dir', data_dir, '--model_dir', model_dir] + list(argv)
    done = command('train_multi_gpu.py', *argv)
    assert done.status == 0 and done.err == '', done.err
    return model_dir, done.out


@pytest.fixture(scope='module')
def npz_run(tmp_path_factory):
    """(model_dir, what training said, path of the data, its halves)."""
    directory = tmp_path_factory.mktemp('npz')
    halves = make_halves(24, 20, 3, values=(5, 7, 30))
    path = write_npz(directory / 'own.npz', *halves)
    return train(directory, path, '--epochs', '2') + (path, halves)


@pytest.fixture(scope='module')
def folders_run(tmp_path_factory):
    """(model_dir, what training said, directory of the data, its halves)."""
    directory = tmp_path_factory.mktemp('folders')
    halves = make_halves(16, 12, 3)
    path = write_folders(
        directory / 'own', NAMES, **dict(zip(('train', 'valid'), halves))
    )
    return train(directory, path, '--epochs', '2') + (path, halves)


def best(model_dir):
    return checkpoints.find(os.path.join(model_dir, 'best'))[0]


def run_network(prefix, images, moments=None):
    """Returns the probabilities [n, 3] of the default network with these weights.

    Images are scaled here, by NumPy: from -1 to 1, or by the moments (mean, deviation).
    """
    pixels = images.astype(np.float32)
    scaled = pixels / np.float32(127.5) - 1
    if moments is not None:
        scaled = (pixels - moments[0]) / moments[1]
    with tf.Graph().as_default(), tf.Session() as session:
        logits = model.cnn(tf.constant(scaled), False, 3, lambda x: x)
        tf.train.Saver().restore(session, prefix)
        return session.run(tf.nn.softmax(logits))


def assert_score(out, probabilities, labels):
    """The last score shown is that of these probabilities."""
    shown = re.findall(r'valid/acc: ([\d.]+), valid/loss: ([\d.]+)', out)[-1]
    accuracy = (probabilities.argmax(axis=1) == labels).mean()
    loss = -np.log(probabilities[np.arange(len(labels)), labels]).mean()
    assert float(shown[0]) == pytest.approx(accuracy, abs=6e-5)
    assert float(shown[1]) == pytest.approx(loss, abs=6e-5)


def predict(main, model_dir, *paths):
    """Returns the objects that predict.py --json prints."""
    done = main('predict.py', '--json', '--model_dir', model_dir, *paths)
    assert done.status == 0 and done.err == 'model cnn of %s\n' % best(model_dir)
    return [json.loads(line) for line in done.out.splitlines()]


def assert_predicted(rows, probabilities, classes):
    """What predict.py says is what the network gives, by the classes' names."""
    assert len(rows) == len(probabilities) > 0
    for row, shares in zip(rows, probabilities):
        second, first = np.argsort(shares)[-2:]
        assert (row['class'], row['runner_up']) == (classes[first], classes[second])
        assert type(row['class']) is type(classes[0]), row
        assert row['probability'] == pytest.approx(shares[first], abs=1e-5)
        assert row['runner_up_probability'] == pytest.approx(shares[second], abs=1e-5)


def export(main, model_dir, images):
    """Exports both ways; returns what each gives for images, and checks the shapes."""
    argv = ['--model_dir', model_dir, '--export_dir', 'saved', '--frozen', 'frozen.pb']
    assert main('export.py', *argv).status == 0
    with tf.Graph().as_default(), tf.Session() as session:
        loaded = tf.saved_model.load(session, ['serve'], 'saved')
        signature = loaded.signature_def['serving_default']
        shapes = {
            name: [d.size for d in info.tensor_shape.dim]
            for part in (signature.inputs, signature.outputs)
            for name, info in part.items()
        }
        height, width, channels = images.shape[1:]
        assert shapes == {
            'images': [-1, height, width, channels],
            'classes': [-1],
            'probabilities': [-1, 3],
        }
        names = signature.outputs['probabilities'].name, signature.inputs['images'].name
        saved = session.run(names[0], {names[1]: images})
    graph_def = tf.GraphDef()
    graph_def.ParseFromString(pathlib.Path('frozen.pb').read_bytes())
    with tf.Graph().as_default(), tf.Session() as session:
        (shares,) = tf.import_graph_def(graph_def, None, ['probabilities:0'], '')
        return saved, session.run(shares, {'images:0': images})


# Arrays


def test_config_and_first_line_say_what_the_data_are(npz_run):
    model_dir, out, _, (train_half, _) = npz_run
    config = records.read_config(model_dir)['data']
    edges = train_half.images.astype(float)
    sides = [edges[:, 0], edges[:, -1], edges[:, :, 0], edges[:, :, -1]]
    border = np.mean([side.mean() for side in sides])
    assert config.pop('border') == pytest.approx(border, rel=1e-6)
    assert config == {
        'classes': [5, 7, 30],
        'format': 'npz',
        'held_out': None,
        'image_shape': [24, 20, 3],
        'num_classes': 3,
        'train_images': 90,
        'valid_images': 31,
    }
    line = out.splitlines()[0]
    assert re.match(r'model cnn: \d+ parameters, 3 classes \(5, 7, 30\); ', line), line
    told = '90 training and 31 validation images of 24x20x3 from '
    assert told in line and line.endswith('/own.npz'), line


def test_evaluate_shows_the_classes_as_the_data_have_them(main, npz_run):
    model_dir, out, _, (_, valid) = npz_run
    done = main('evaluate.py', '--device', 'cpu', '--model_dir', model_dir)
    assert done.status == 0 and done.err == ''
    rows = [line.split() for line in done.out.splitlines()[-4:]]
    assert rows[0] == ['5', '7', '30']
    assert [row[0] for row in rows[1:]] == ['5', '7', '30']
    assert [int(row[1]) for row in rows[1:]] == [11, 10, 10]
    probabilities = run_network(best(model_dir), valid.images)
    assert_score(done.out, probabilities, np.arange(31) % 3)


def test_predict_and_export_give_the_class_of_a_file(main, npz_run, tmp_path):
    model_dir, _, _, (_, valid) = npz_run
    given = Examples(valid.images[:9], np.zeros(9, int))
    write_folders(tmp_path, ['given'], images=given)
    probabilities = run_network(best(model_dir), valid.images)
    rows = predict(main, model_dir, 'images')
    assert_predicted(rows, probabilities[:9], [5, 7, 30])
    line = main('predict.py', '--model_dir', model_dir, rows[0]['path']).out
    assert '\n%(path)s: %(class)d (' % rows[0] in line
    for found in export(main, model_dir, valid.images):
        np.testing.assert_allclose(found, probabilities, atol=1e-5)


@pytest.mark.parametrize(
    'change, told',
    [
        ('shape', 'image_shape [24, 20, 3], not [24, 21, 3]'),
        ('grey', 'image_shape [24, 20, 3], not [24, 20, 1]'),
        ('fewer classes', 'num_classes 3, not 2'),
        ('other classes', 'class 2 being 30, not 31'),
        ('fewer images', 'train_images 90, not 89'),
    ],
)
def test_other_data_do_not_continue_a_run(main, npz_run, tmp_path, change, told):
    model_dir, _, _, halves = npz_run
    images = [half.images for half in halves]
    labels = [half.labels.copy() for half in halves]
    if change == 'shape':
        images = [np.pad(i, [(0, 0), (0, 0), (0, 1), (0, 0)], 'edge') for i in images]
    elif change == 'grey':
        images = [i[..., 0] for i in images]
    elif change == 'fewer classes':
        labels = [np.minimum(half, 7) for half in labels]
    elif change == 'other classes':
        labels = [half + (half == 30) for half in labels]
    else:
        images[0], labels[0] = images[0][:-1], labels[0][:-1]
    path = write_npz(tmp_path / 'other.npz', *map(Examples, images, labels))
    before = sorted(files(model_dir))
    argv = ['--data_dir', path, '--model_dir', model_dir, '--epochs', '3']
    done = main('train_multi_gpu.py', *RUN, *argv)
    assert_mistake(done, '%s was trained on data with %s: give ' % (model_dir, told))
    assert sorted(files(model_dir)) == before


def test_images_of_another_shape_are_not_evaluated(main, npz_run, tmp_path):
    path = write_npz(tmp_path / 'a.npz', *make_halves(24, 21, 3, values=(5, 7, 30)))
    argv = ['--device', 'cpu', '--model_dir', npz_run[0], '--data_dir', path]
    told = '%s was trained on images of [24, 20, 3]; %s has [24, 21, 3]'
    assert_mistake(main('evaluate.py', *argv), told % (npz_run[0], path))


def test_labels_that_the_model_has_not_are_not_evaluated(main, npz_run, tmp_path):
    path = write_npz(tmp_path / 'a.npz', *make_halves(24, 20, 3, values=(5, 7, 9)))
    argv = ['--device', 'cpu', '--model_dir', npz_run[0], '--data_dir', path]
    told = 'y_test: index 2: label 9; the 3 classes of the training images are 5, 7, 30'
    assert_mistake(main('evaluate.py', *argv), told)


# Folders


def test_folders_are_classes_and_their_names_are_shown(main, folders_run):
    model_dir, out, path, (_, valid) = folders_run
    assert '3 classes (cat, sea lion, zebra); 90 training and 31' in out.splitlines()[0]
    config = records.read_config(model_dir)['data']
    assert (config['classes'], config['format']) == (NAMES, 'folders')
    assert config['image_shape'] == [16, 12, 3]
    done = main('evaluate.py', '--device', 'cpu', '--model_dir', model_dir)
    assert done.status == 0 and done.err == ''
    table = done.out.splitlines()[-4:]
    assert table[0].split() == ['cat', 'sea', 'lion', 'zebra']
    for line, name, number in zip(table[1:], NAMES, (11, 10, 10)):
        assert re.match(r' *%s +%d ' % (name, number), line), line
    # Labels of the files in the order of their paths.
    order = np.argsort(valid.labels, kind='stable')
    probabilities = run_network(best(model_dir), valid.images[order])
    assert_score(done.out, probabilities, valid.labels[order])


def test_predict_says_a_folders_name_of_one_of_its_files(main, folders_run):
    model_dir, _, path, (_, valid) = folders_run
    probabilities = run_network(best(model_dir), valid.images)
    paths = [
        os.path.join(path, 'valid', NAMES[label], '%03d.png' % number)
        for number, label in enumerate(valid.labels)
    ]
    assert_predicted(predict(main, model_dir, *paths), probabilities, NAMES)
    line = main('predict.py', '--model_dir', model_dir, paths[1]).out.splitlines()[1]
    first = NAMES[probabilities[1].argmax()]
    assert line.startswith('%s: %s (' % (paths[1], first))
    for found in export(main, model_dir, valid.images):
        np.testing.assert_allclose(found, probabilities, atol=1e-5)


def test_misread_images_are_named_after_their_folders(main, folders_run, tmp_path):
    model_dir, _, path, (_, valid) = folders_run
    argv = ['--data_dir', path, '--model_dir', 'm', '--max_steps', '1']
    argv += ['--learning_rate', '1e-9']  # as it began: it can't have learned them all
    assert main('train.py', *RUN, *argv).status == 0
    done = main('evaluate.py', '--device', 'cpu', '--model_dir', 'm', '--errors', 'e')
    assert done.status == 0, done.err
    probabilities = run_network(checkpoints.find('m')[0], valid.images)
    order = np.argsort(valid.labels, kind='stable')
    labels, guesses = valid.labels[order], probabilities[order].argmax(axis=1)
    expected = {
        '%d_%s_%s.png' % (n, NAMES[labels[n]], NAMES[guesses[n]]): order[n]
        for n in np.flatnonzero(labels != guesses)
    }
    assert sorted(files('e')) == sorted(expected) != []
    assert '%d misread images in e' % len(expected) in done.out
    with tf.Session() as session:
        for name, row in expected.items():
            data = pathlib.Path('e', name).read_bytes()
            pixels = session.run(tf.image.decode_png(data))
            assert (pixels == valid.images[row]).all(), name


def test_nothing_misread_is_no_failure(main, tmp_path):
    black = np.zeros([20, 8, 8, 3], np.uint8)
    black[1::2] = 255
    examples = Examples(black, np.arange(20) % 2)
    path = write_folders(tmp_path / 'data', NAMES, train=examples, valid=examples)
    argv = ['--data_dir', path, '--model_dir', 'm', '--epochs', '20', '--dropout', '0']
    assert main('train.py', *RUN, *argv).status == 0
    assert read_metrics('m')[-1]['valid_acc'] == 1
    done = main('evaluate.py', '--device', 'cpu', '--model_dir', 'm', '--errors', 'e')
    assert done.status == 0, done.err
    assert '0 misread images in e' in done.out and files('e') == []


def test_a_second_run_continues_the_first(main, folders_run):
    _, _, path, _ = folders_run
    argv = RUN + ['--data_dir', path, '--model_dir', 'm']
    assert main('train_multi_gpu.py', *argv, '--epochs', '1').status == 0
    done = main('train_multi_gpu.py', *argv, '--epochs', '2')
    assert done.status == 0 and 'continues from m/model.ckpt-1-9' in done.out
    assert without_times(read_metrics('m')) == without_times(
        read_metrics(folders_run[0])
    )


def test_other_folders_are_evaluated_at_the_models_size(main, folders_run, tmp_path):
    model_dir, _, _, _ = folders_run
    large, small = make_examples(9, 40, 30, 3, seed=2), make_examples(9, 9, 7, seed=3)
    images = list(large.images) + [image[..., None] for image in small.images]
    labels = np.concatenate([large.labels, small.labels])
    path = write_folders(tmp_path / 'other', NAMES, test=Examples(images, labels))
    argv = ['--device', 'cpu', '--model_dir', model_dir, '--data_dir', path]
    done = main('evaluate.py', *argv)
    assert done.status == 0, done.err
    rows = done.out.splitlines()[-3:]
    assert [re.search(r'\S +(\d+) ', row).group(1) for row in rows] == ['6'] * 3

    (tmp_path / 'other' / 'test' / 'zebra').rename(tmp_path / 'other' / 'test' / 'gnu')
    told = 'label gnu; the 3 classes of the training images are cat, sea lion, zebra'
    assert_mistake(main('evaluate.py', *argv), told)


def test_images_of_many_sizes_are_trained_on_and_evaluated_as_one(main, tmp_path):
    large, small = make_examples(45, 16, 20, 3), make_examples(45, 9, 7, 3, seed=3)
    images = list(large.images) + list(small.images)
    examples = Examples(images, np.concatenate([large.labels, small.labels]))
    path = write_folders(tmp_path / 'data', NAMES, train=examples)
    argv = RUN + ['--data_dir', path, '--model_dir', 'm', '--epochs', '1']
    told = '--image_size 16x20 makes all the same'
    assert_mistake(main('train.py', *argv), told)
    done = main('train.py', *argv, '--image_size', '12x14', '--valid_fraction', '0.2')
    assert done.status == 0, done.err
    told = 'no images of their own for validation: 0.2 of each class are held out'
    assert told in done.out and '72 training and 18 validation' in done.out
    assert records.read_config('m')['data']['image_shape'] == [12, 14, 3]
    assert records.read_config('m')['data']['held_out'] == 0.2
    again = main('evaluate.py', '--device', 'cpu', '--model_dir', 'm')
    assert again.status == 0, again.err
    row = read_metrics('m')[0]
    score = row['valid_acc'], row['valid_loss']
    assert 'valid/acc: %.4f, valid/loss: %.4f' % score in again.out


def test_what_is_held_out_is_the_same_from_anywhere(main, tmp_path, monkeypatch):
    write_folders(tmp_path / 'data', NAMES, train=make_examples(90, 8, 8, 3))
    argv = ['--data_dir', 'data', '--model_dir', 'runs/m', '--epochs', '1']
    assert main('train.py', *RUN, *argv).status == 0
    row = read_metrics('runs/m')[0]
    os.mkdir('elsewhere')
    monkeypatch.chdir('elsewhere')
    (tmp_path / 'data').rename(tmp_path / 'moved')
    for seed in ('0', '7'):
        argv = ['--device', 'cpu', '--model_dir', '../runs/m', '--data_dir', '../moved']
        done = main('evaluate.py', *argv)
        score = row['valid_acc'], row['valid_loss']
        assert 'valid/acc: %.4f, valid/loss: %.4f' % score in done.out, seed


# --standardize


@pytest.fixture(scope='module', params=['npz', 'folders'])
def standardized_run(request, tmp_path_factory):
    """(model_dir, data_dir, classes, halves, their moments by NumPy)."""
    directory = tmp_path_factory.mktemp('standardized')
    halves = make_halves(12, 10, 3)
    halves[0].images[..., 1] //= 4
    if request.param == 'npz':
        path, classes = write_npz(directory / 'own.npz', *halves), [0, 1, 2]
    else:
        path = write_folders(directory / 'd', NAMES, train=halves[0], valid=halves[1])
        classes = NAMES
    argv = ['--epochs', '2', '--standardize', '--num_gpus', '2', '--batch_size', '5']
    model_dir, _ = train(directory, path, *argv)
    pixels = halves[0].images.reshape(-1, 3).astype(np.float64)
    moments = [m.astype(np.float32) for m in (pixels.mean(axis=0), pixels.std(axis=0))]
    return model_dir, path, classes, halves, moments


def test_checkpoints_hold_the_moments_untrained(standardized_run):
    model_dir, _, _, _, moments = standardized_run
    for prefix in checkpoints.find(model_dir) + [best(model_dir)]:
        held = read_checkpoint(prefix)
        names = [name for name in held if name.startswith('standardize')]
        # No optimizer's slots, and one of each for two towers.
        assert sorted(names) == ['standardize/deviation', 'standardize/mean']
        assert held['standardize/mean'].tolist() == moments[0].tolist()
        assert held['standardize/deviation'].tolist() == moments[1].tolist()


def test_all_scripts_standardize_as_training_does(main, standardized_run, tmp_path):
    model_dir, _, classes, (_, valid), moments = standardized_run
    order = (
        np.argsort(valid.labels, kind='stable') if classes == NAMES else np.arange(31)
    )
    labels, images = valid.labels[order], valid.images[order]
    probabilities = run_network(best(model_dir), images, moments)
    row = max(read_metrics(model_dir), key=lambda row: row['valid_acc'])
    told = 'valid/acc: %.4f, valid/loss: %.4f' % (row['valid_acc'], row['valid_loss'])
    assert_score(told, probabilities, labels)  # what training found
    done = main('evaluate.py', '--device', 'cpu', '--model_dir', model_dir)
    assert told in done.out
    write_folders(tmp_path, ['all'], images=Examples(images, np.zeros(31, int)))
    rows = predict(main, model_dir, 'images')
    assert_predicted(rows, probabilities, classes)
    for found in export(main, model_dir, images):
        np.testing.assert_allclose(found, probabilities, atol=1e-5)


def test_a_run_goes_on_standardized_or_not_at_all(main, standardized_run):
    model_dir, path, _, _, _ = standardized_run
    argv = RUN + ['--data_dir', path]
    told = '%s was trained with --standardize, not no --standardize: give the same'
    done = main('train_multi_gpu.py', *argv, '--model_dir', model_dir)
    assert_mistake(done, told % model_dir)
    argv += ['--max_steps', '1', '--model_dir', 'other']
    assert main('train.py', *argv).status == 0
    done = main('train.py', *argv, '--standardize')
    assert_mistake(
        done, 'other was trained with no --standardize, not --standardize: give'
    )


def test_a_run_that_goes_on_keeps_its_moments(main, tmp_path):
    halves = make_halves(8, 8, 3)
    path = write_npz(tmp_path / 'a.npz', *halves)
    argv = RUN + ['--data_dir', path, '--standardize', '--model_dir', 'm']
    assert main('train.py', *argv, '--epochs', '1').status == 0
    before = read_checkpoint(checkpoints.find('m')[0])
    write_npz(path, *[half._replace(images=half.images // 2) for half in halves])
    assert main('train.py', *argv, '--epochs', '2').status == 0
    after = read_checkpoint(checkpoints.find('m')[0])
    assert after['training/epoch'] == 2
    for name in ('standardize/mean', 'standardize/deviation'):
        assert before[name].tobytes() == after[name].tobytes(), name
    assert (before['conv1/kernel'] != after['conv1/kernel']).any()


def test_standardized_towers_train_what_one_large_batch_trains(run_steps, tmp_path):
    path = write_npz(tmp_path / 'a.npz', *make_halves(8, 8, 3))
    data = data_sets.load(data_flags(path, standardize=True))
    argv = ['--optimizer', 'sgd', '--dropout', '0', '--num_gpus']
    one = run_steps(5, *argv, '1', '--batch_size', '10', data=data)
    two = run_steps(5, *argv, '2', '--batch_size', '5', data=data)
    assert sorted(one) == sorted(two)
    for name in one:
        np.testing.assert_allclose(one[name], two[name], atol=1e-5, err_msg=name)
    assert_same_bits(
        {name: one[name] for name in one if name.startswith('standardize')},
        {'standardize/mean': data.moments[0], 'standardize/deviation': data.moments[1]},
    )


# --augment


def test_evaluation_sees_images_as_they_are(main, npz_run):
    path = npz_run[2]
    argv = RUN + ['--data_dir', path, '--model_dir', 'm', '--epochs', '1']
    assert main('train.py', *argv, '--augment', ALL_KINDS).status == 0
    row = read_metrics('m')[0]
    told = 'valid/acc: %.4f, valid/loss: %.4f' % (row['valid_acc'], row['valid_loss'])
    for more in (['--augment', ALL_KINDS], []):
        done = main('train.py', *argv, *more)
        assert done.status == 0 and 'nothing left to train' in done.out
        assert told in done.out, more
    assert told in main('evaluate.py', '--device', 'cpu', '--model_dir', 'm').out
    plain = main('train.py', *argv[:-4], '--model_dir', 'plain', '--epochs', '1')
    assert plain.status == 0
    assert read_metrics('plain')[0]['train_loss'] != row['train_loss']


@pytest.mark.parametrize('text', ['', 'flip,', 'flip,flip', 'flip,blur', 'Flip'])
def test_what_augment_does_not_know_is_refused(main, npz_run, text):
    done = main('train.py', *RUN, '--data_dir', npz_run[2], '--augment', text)
    told = '%r is not a list of some of %s' % (text, ALL_KINDS)
    assert_mistake(done, told)
