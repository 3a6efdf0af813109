"""Damaged, foreign and missing files; full disks; rotation and the best."""

import glob
import json
import os
import resource
import shutil
import signal
import subprocess

import numpy as np
import pytest

import checkpoints
import model
import records
import train_multi_gpu
import training
import updates
import utils
from model import ModelSpec
from tests.conftest import (
    THREADS,
    assert_same_bits,
    command,
    files,
    make_flags,
    read_checkpoint,
    read_files,
    read_metrics,
    write_data_set,
)
from tests.processes import run_python
from tf1 import tf

DATA = '.data-00000-of-00001'


@pytest.fixture(scope='session')
def trained(small_dir, tmp_path_factory):
    """A model_dir with two checkpoints, after steps 3 and 5."""
    place = str(tmp_path_factory.mktemp('trained') / 'm')
    flags = ['--device', 'cpu', '--xla', 'off', '--data_dir', small_dir]
    for steps in ('3', '5'):
        run = ['--model_dir', place, '--max_steps', steps]
        assert command('train.py', *(run + flags)).status == 0
    return place


@pytest.fixture
def two(trained):
    """A copy of `trained` as 'm'; its checkpoints, newest first."""
    shutil.copytree(trained, 'm')
    return ['m/model.ckpt-0-5', 'm/model.ckpt-0-3']


def truncate(path):
    with open(path, 'r+b') as file:
        file.truncate(os.path.getsize(path) // 2)


def empty(path):
    with open(path, 'wb'):
        pass


def flip(path):
    data = np.fromfile(path, np.uint8)
    data[len(data) // 2] ^= 4
    data.tofile(path)


DAMAGES = [
    (ending, damage)
    for ending in ('.index', DATA)
    for damage in (truncate, empty, flip, os.remove)
]


@pytest.mark.parametrize('ending, damage', DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    main, flags, two, ending, damage
):
    damage(two[0] + ending)
    done = main('train.py', '--model_dir', 'm', '--max_steps', '7', *flags)
    assert done.status == 0, done.err
    assert 'WARNING: %s ' % two[0] in done.err
    assert 'continues from ' + two[1] in done.out
    assert checkpoints.find('m') == ['m/model.ckpt-0-7', two[1]]


def test_a_damaged_checkpoints_name_can_be_saved_again(main, flags, two):
    good = read_checkpoint(two[0])
    flip(two[0] + DATA)
    assert main('train.py', '--model_dir', 'm', '--max_steps', '5', *flags).status == 0
    assert_same_bits(good, read_checkpoint(two[0]))
    assert 'unused-model.ckpt-0-5' + DATA in files('m')


@pytest.mark.parametrize('ending, damage', DAMAGES)
def test_where_none_is_good_nothing_starts_from_zero(main, flags, two, ending, damage):
    for prefix in two:
        damage(prefix + ending)
    before = read_files('m')
    done = main('train.py', '--model_dir', 'm', '--max_steps', '7', *flags)
    assert done.status == 2
    assert done.err.splitlines()[-1].startswith('ERROR: m: no checkpoint in it can be')
    assert 'Traceback' not in done.err
    assert read_files('m') == before


@pytest.mark.parametrize('damage', [empty, os.remove, truncate])
def test_the_state_file_is_not_needed(main, flags, two, damage):
    damage('m/checkpoint')
    done = main('train.py', '--model_dir', 'm', '--max_steps', '7', *flags)
    assert done.status == 0
    assert 'continues from ' + two[0] in done.out


def test_what_a_kill_leaves_is_removed(main, flags, two):
    litter = [
        'm/model.ckpt-0-6.data-00000-of-00001.tempstate123',
        'm/model.ckpt-0-6.index.tempstate123',
        'm/checkpoint.tmp123',
        'm/model.ckpt-0-6' + DATA,
    ]
    for path in litter:
        empty(path)
    assert main('train.py', '--model_dir', 'm', '--max_steps', '7', *flags).status == 0
    assert not [path for path in litter if os.path.exists(path)]


@pytest.mark.parametrize('lost', ['.index', '*'])
def test_lost_indexes_and_state_are_no_fresh_start(main, flags, lost):
    flags += ['--model_dir', 'm', '--batch_size', '500', '--epochs']
    assert main('train.py', *(flags + ['2'])).status == 0
    for path in glob.glob('m/*ckpt*' + lost) + ['m/checkpoint']:
        os.remove(path)
    before = read_files('m')
    done = main('train.py', *(flags + ['3']))
    assert done.status == 2 and 'no checkpoint in it can be read' in done.err
    assert read_files('m') == before


def test_what_a_kill_in_the_first_save_leaves_does_not_block(main, flags):
    os.mkdir('m')
    empty('m/model.ckpt-0-6' + DATA)
    done = main('train.py', '--model_dir', 'm', '--max_steps', '7', *flags)
    assert done.status == 0 and done.err == ''


# Other configurations


@pytest.mark.parametrize(
    'change, told',
    [
        (['--optimizer', 'sgd'], '--optimizer adam, not sgd'),
        (['--seed', '3'], '--seed 0, not 3'),
        (['--model', 'other'], '--model cnn, not other'),
        (
            ['--seed', '3', '--optimizer', 'momentum'],
            '--optimizer adam, not momentum and --seed 0, not 3',
        ),
    ],
)
def test_flags_that_matter_are_named(main, flags, two, change, told, monkeypatch):
    monkeypatch.setitem(model.NETWORKS, 'other', model.cnn)
    before = read_files('m')
    done = main('train.py', '--model_dir', 'm', *(change + flags))
    assert done.status == 2 and done.err.count('\n') == 1
    assert 'm was trained with %s: give the same' % told in done.err
    assert read_files('m') == before


def test_other_variables_are_named_even_without_a_config(main, flags, two, monkeypatch):
    os.remove('m/config.json')
    before = read_files('m')
    monkeypatch.setitem(
        model.NETWORKS,
        'cnn',
        lambda x, t, n, d: model.dense(model.flatten(x), n, 'dense2'),
    )
    done = main('train.py', '--model_dir', 'm', *flags)
    assert done.status == 2 and done.err.count('\n') == 1
    assert 'm/model.ckpt-0-5 is of another model: conv1/bias is [16] there' in done.err
    assert read_files('m') == before


def test_harmless_changes_go_on_and_are_listed(main, flags, two):
    change = ['--dropout', '0.2', '--learning_rate', '0.01', '--max_steps', '6']
    done = main('train.py', '--model_dir', 'm', *(change + flags))
    assert done.status == 0
    assert done.err == (
        'WARNING: m was trained with --dropout 0.4, not 0.2 and --learning_rate 0.001, '
        'not 0.01 so far\n'
    )
    with open('m/train.log') as file:
        assert 'was trained with --dropout 0.4' in file.read()


def test_flags_that_were_not_given_are_told_as_that(main, flags, two):
    flags += ['--max_steps', '6', '--model_dir', 'm']
    more = ['--clip_norm', '9', '--augment', 'shift,flip', '--scale_lr']
    assert main('train.py', *more, *flags).err == (
        'WARNING: m was trained with no --augment, not --augment shift,flip and no '
        '--clip_norm, not --clip_norm 9.0 and no --scale_lr, not --scale_lr so far\n'
    )
    more = ['--augment', 'crop', '--max_steps', '7']
    assert (
        'm was trained with --augment shift,flip, not crop and --clip_norm 9.0, not no '
        '--clip_norm and --scale_lr, not no --scale_lr so far\n'
    ) in main('train.py', *flags, *more).err


def test_other_data_is_refused_by_what_differs(main, flags, two, small, tmp_path):
    before = read_files('m')
    for name, told in (
        ('size', 'image_shape [14, 14, 1], not [13, 14, 1]'),
        ('fewer', 'train_images 2000, not 1500'),
    ):
        images = small.train.images[:1500, (name == 'size') :]
        train = small.train._replace(images=images, labels=small.train.labels[:1500])
        valid = small.valid._replace(images=small.valid.images[:, (name == 'size') :])
        other = write_data_set(
            tmp_path / name, small._replace(train=train, valid=valid)
        )
        done = main('train.py', '--model_dir', 'm', *(flags + ['--data_dir', other]))
        assert done.status == 2 and told in done.err
        assert done.err.count('\n') == 1
        assert read_files('m') == before


@pytest.mark.parametrize(
    'text',
    [
        '',
        '{',
        '[1]',
        'null',
        '{"mine": 1}',
        '{"flags": 3, "threads": [1, 2]}',
        '{"flags": {}, "threads": "abc"}',
        '{"flags": {}, "threads": [-5, 2]}',
        '{"flags": {}, "threads": [1, 2], "data": ["localhost"]}',
        '{"flags": {}, "threads": [1, 2], "data": {"classes": [[1]]}}',
        '{"flags": {}, "threads": [1, 2], "machines": 3}',
    ],
)
def test_a_damaged_config_is_told_in_one_line(main, flags, two, text):
    with open('m/config.json', 'w') as file:
        file.write(text)
    done = main('train.py', '--model_dir', 'm', *flags)
    assert done.status == 2 and done.err.count('\n') == 1
    assert 'm/config.json' in done.err


def test_a_damaged_line_of_metrics_costs_no_other(main, flags):
    flags += ['--model_dir', 'm', '--batch_size', '500']
    assert main('train.py', '--epochs', '2', *flags).status == 0
    with open('m/metrics.jsonl') as file:
        rows = file.read()
    damaged = ['{"epoch": 1, "st', 'garbage}', '{"a": 1}', '[]', '{"epoch": 1}']
    with open('m/metrics.jsonl', 'w') as file:
        file.write('\n'.join(damaged) + '\n' + rows + damaged[0])
    done = main('train.py', '--epochs', '3', *flags)
    assert done.status == 0
    for number in [*range(1, len(damaged) + 1), len(damaged) + 3]:
        assert 'm/metrics.jsonl: line %d is damaged' % number in done.err
    assert [row['epoch'] for row in read_metrics('m')] == [1, 2, 3]


def test_a_line_of_metrics_that_is_there_twice_counts_once(tmp_path):
    row = dict.fromkeys(records.NUMBERS, 1)
    rows = [row, dict(row, epoch=2), row]
    (tmp_path / 'metrics.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    assert records.read_metrics(str(tmp_path), 9) == rows[:2]


def test_a_directory_in_a_files_place_is_told_in_one_line(main, flags):
    for name in ('train.log', 'config.json'):
        os.makedirs('m-%s/%s' % (name, name))
        done = main('train.py', '--model_dir', 'm-' + name, *flags)
        assert done.status == 2 and done.err.count('\n') == 1
        assert 'm-%s/%s' % (name, name) in done.err


def test_a_disk_that_is_full_at_the_start_is_told_with_the_file(main, flags):
    # Where nothing can be written any more, a file's size is what fails.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        done = main('train.py', '--summary_steps', '0', '--model_dir', 'm', *flags)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert done.status == 2 and done.err == 'ERROR: m/config.json: File too large\n'
    assert files('m') == ['train.log']


# Rotation and the best


def test_keep_holds_over_resumes(main, flags):
    flags += ['--model_dir', 'm', '--keep', '2']
    for step in range(1, 6):
        assert main('train.py', '--max_steps', str(step), *flags).status == 0
    assert checkpoints.find('m') == ['m/model.ckpt-0-5', 'm/model.ckpt-0-4']
    assert len([name for name in files('m') if 'ckpt' in name]) == 4


def test_saves_within_an_epoch(main, flags):
    flags += ['--model_dir', 'm', '--keep', '1000', '--max_steps', '9']
    done = main('train.py', '--save_every_seconds', '1e-9', *flags)
    assert done.status == 0
    steps = [int(prefix.split('-')[-1]) for prefix in checkpoints.find('m')]
    assert steps == list(range(9, 0, -1))


def test_the_best_stays_and_its_score_is_remembered(main, flags, monkeypatch):
    scores = iter([0.5, 0.9, 0.8, 0.7, 0.9, 0.95])
    monkeypatch.setattr(
        training.evaluation,
        'make_evaluate',
        lambda *_: lambda: (1.0, next(scores)),
    )
    flags += ['--model_dir', 'm', '--batch_size', '500', '--keep', '1']
    for epochs, best in ((1, 1), (2, 2), (4, 2), (5, 2), (6, 6)):
        assert main('train.py', '--epochs', str(epochs), *flags).status == 0
        assert checkpoints.find('m/best') == [
            'm/best/model.ckpt-%d-%d' % (best, best * 4)
        ]
        assert checkpoints.find('m') == ['m/model.ckpt-%d-%d' % (epochs, epochs * 4)]
    assert read_checkpoint('m/best/model.ckpt-6-24')['training/best_acc'] == 0.95


def test_a_best_checkpoint_of_later_than_the_restored_one_is_not_taken_for_it(
    main, flags
):
    # As after a kill between the two saves at the end of epoch 2.
    flags += ['--model_dir', 'm', '--batch_size', '500']
    assert main('train.py', '--epochs', '2', *flags).status == 0
    expected = read_checkpoint('m/best/model.ckpt-2-8')
    for ending in ('.index', DATA):
        os.remove('m/model.ckpt-2-8' + ending)
    flip('m/best/model.ckpt-2-8' + DATA)  # what stands for another history
    assert main('train.py', '--epochs', '2', *flags).status == 0
    again = read_checkpoint('m/best/model.ckpt-2-8')
    assert_same_bits(expected, again)


def test_a_best_that_could_not_be_saved_is_not_taken_for_saved(
    main, flags, monkeypatch
):
    scores = iter([0.5, 0.9, 0.8])
    monkeypatch.setattr(
        training.evaluation, 'make_evaluate', lambda *_: lambda: (1.0, next(scores))
    )
    save = checkpoints.save

    def failing_save(saver, session, directory, epochs_done, *more):
        if directory == 'm/best' and epochs_done == 2:
            return False
        return save(saver, session, directory, epochs_done, *more)

    monkeypatch.setattr(checkpoints, 'save', failing_save)
    flags += ['--model_dir', 'm', '--batch_size', '500', '--epochs']
    assert main('train.py', *(flags + ['2'])).status == 1
    assert checkpoints.find('m/best') == ['m/best/model.ckpt-1-4']
    assert read_checkpoint('m/model.ckpt-2-8')['training/best_acc'] == 0.5
    assert main('train.py', *(flags + ['3'])).status == 0
    assert checkpoints.find('m/best') == ['m/best/model.ckpt-3-12']
    assert read_checkpoint('m/model.ckpt-3-12')['training/best_acc'] == 0.8


# Full disks


def limit_file_size():
    """What happens on a full disk, for files of over 1 MB."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6))


def test_a_failed_save_is_told_and_the_older_one_stays(flags, main):
    flags += ['--model_dir', 'm', '--batch_size', '100']
    assert main('train.py', '--epochs', '1', *flags).status == 0
    before = {k: v for k, v in read_files('m').items() if 'ck' in k}
    done = run_python('train.py', '--epochs', '3', *flags, preexec_fn=limit_file_size)
    assert done.status == 1
    errors = [line for line in done.err.splitlines() if line.startswith('ERROR')]
    saves = [line for line in errors if 'm/model.ckpt-' in line]
    assert len(saves) == 2 and 'is not saved' in saves[0] and 'MB free' in saves[0]
    assert errors[-1].startswith('ERROR: the last save in m failed')
    assert 'Traceback' not in done.err
    assert 'Epoch 3/3' in done.out, 'training goes on'
    assert {k: v for k, v in read_files('m').items() if 'ck' in k} == before
    assert main('train.py', '--epochs', '3', *flags).status == 0
    assert [row['epoch'] for row in read_metrics('m')] == [1, 2, 3]


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 4 MB."""
    place = tmp_path / 'disk'
    place.mkdir()
    mount = ['mount', '-t', 'tmpfs', '-o', 'size=4m', 'tmpfs', str(place)]
    try:
        subprocess.run(mount, check=True, stderr=subprocess.PIPE)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip('no permission to mount a small disk here')
    yield place
    subprocess.run(['umount', str(place)], check=True)


def test_a_full_disk(flags, small_disk):
    model_dir = str(small_disk / 'm')
    flags += ['--model_dir', model_dir, '--batch_size', '100']
    done = command('train.py', '--epochs', '3', *flags)
    assert done.status == 1
    assert 'is not saved: No space left on device (' in done.err
    assert 'Traceback' not in done.err
    assert 'Epoch 3/3' in done.out
    left = [name for name in files(model_dir) if 'temp' in name or 'tmp' in name]
    assert left == []
    for directory in (model_dir, model_dir + '/best'):
        for prefix in checkpoints.find(directory):
            assert checkpoints.find_fault(prefix) is None
    # There is room for two: the best and the last of the first epoch.
    assert checkpoints.find(model_dir) == [model_dir + '/model.ckpt-1-20']
    assert tf.train.latest_checkpoint(model_dir) == model_dir + '/model.ckpt-1-20'
    subprocess.run(['mount', '-o', 'remount,size=40m', str(small_disk)], check=True)
    assert command('train.py', '--epochs', '3', *flags).status == 0


# Numbers that are not finite


def test_a_nan_names_step_and_tower_and_updates_nothing():
    state = training.create_state()
    values = [
        tf.constant([1.0, 2.0]),
        tf.log(tf.cast(2 - state.global_step, tf.float32)),
    ]

    def build_tower(tower, value):
        w = tf.get_variable('w', [2], initializer=tf.ones_initializer())
        losses = w * value
        return ModelSpec(tf.reduce_mean(losses), losses, tf.zeros([2]), None, None)

    devices = utils.choose_devices('cpu', 2)
    rule = updates.create_sgd(0.1)
    batches = [[value] for value in values]
    specs, grads = train_multi_gpu.build_towers(
        make_flags('--xla', 'off'), devices.towers, batches, build_tower, rule
    )
    grads = train_multi_gpu.average_gradients(grads)
    step = updates.apply_gradients(rule, grads, updates.sum_up(specs), state)
    with utils.open_session(devices, THREADS) as session:
        session.run(tf.global_variables_initializer())
        session.run([step])
        session.run([step])
        before = session.run(tf.global_variables())
        with pytest.raises(tf.errors.InvalidArgumentError, match='tower 1: the '):
            session.run(step)
        after = session.run(tf.global_variables())
    assert [v.tobytes() for v in before] == [v.tobytes() for v in after]


def test_a_gradient_that_is_not_finite_is_found_where_the_loss_is():
    w = tf.get_variable('w', [1], initializer=tf.zeros_initializer())
    losses = tf.sqrt(w)  # 0, and its slope is infinite
    spec = ModelSpec(tf.reduce_mean(losses), losses, tf.zeros([1]), None, None)
    grads = updates.create_optimizer('sgd', 0.1).compute_gradients(spec.loss)
    grads, spec = updates.check_finite(grads, spec, tower=3)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        assert session.run(spec.losses) == 0
        found = 'tower 3: the gradient of w : Tensor had Inf'
        with pytest.raises(tf.errors.InvalidArgumentError, match=found):
            session.run(grads[0][0])


def test_a_diverging_run_ends_with_step_and_tower(main, flags, part_dir):
    flags += ['--optimizer', 'sgd', '--learning_rate', '100', '--num_gpus', '2']
    flags += ['--data_dir', part_dir]
    flags += ['--save_every_seconds', '1e-9', '--model_dir', 'm', '--keep', '9999']
    done = main('train_multi_gpu.py', *flags)
    assert done.status == 1
    assert done.err.count('\n') == 1, done.err
    assert done.err.startswith('ERROR: step ') and ', tower ' in done.err
    step = int(done.err.split()[2].rstrip(','))
    found = checkpoints.find('m')
    assert int(found[0].split('-')[-1]) == step - 1
    for name, value in read_checkpoint(found[0]).items():
        assert np.isfinite(value).all(), name


def test_find_fault_reads_every_tensor(main, flags, two):
    assert checkpoints.find_fault(two[0]) is None
    size = os.path.getsize(two[0] + DATA)
    with open(two[0] + DATA, 'r+b') as file:
        file.seek(size - 2)
        byte = file.read(1)
        file.seek(size - 2)
        file.write(bytes([byte[0] ^ 1]))
    assert checkpoints.find_fault(two[0]) is not None
