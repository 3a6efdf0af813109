"""A run that ends before --epochs: the same epoch on every way there."""

import os

import numpy as np
import pytest

import checkpoints
import training
from tests.conftest import (
    assert_same_bits,
    files,
    read_checkpoint,
    read_files,
    read_metrics,
    without_times,
)
from tf1 import tf

# Too little to be seen in a float32 weight: the accuracy stays what it is.
STILL = ['--learning_rate', '1e-12', '--schedule', 'constant', '--batch_size', '500']


@pytest.fixture
def score(monkeypatch):
    """A function that sets the accuracies that evaluations find from then on."""

    def score(*accuracies):
        scores = iter(accuracies)
        monkeypatch.setattr(
            training.evaluation, 'make_evaluate', lambda *_: lambda: (1.0, next(scores))
        )

    return score


def read_state(prefix):
    """Returns (top_acc, stale_epochs) of a checkpoint."""
    values = read_checkpoint(prefix)
    return values['training/top_acc'], values['training/stale_epochs']


def test_epochs_since_the_best_are_counted_in_the_graph():
    state = training.create_state()
    end_of_epoch = training.build_end_of_epoch(state)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for epoch, (accuracy, top_acc, stale_epochs) in enumerate(
            [(0, 0, 0), (0.5, 0.5, 0), (0.4, 0.5, 1), (0.5, 0.5, 2), (0.6, 0.6, 0)]
        ):
            session.run(end_of_epoch.op, {end_of_epoch.accuracy: accuracy})
            found = session.run([state.epoch, state.top_acc, state.stale_epochs])
            assert found == [epoch + 1, top_acc, stale_epochs]


def test_a_run_ends_after_epochs_without_a_new_best(main, flags, score):
    score(0.5, 0.75, 0.7, 0.75, 0.8)
    flags += ['--model_dir', 'm', '--early_stopping', '2'] + STILL
    done = main('train.py', *flags)
    assert done.status == 0 and done.err == ''
    assert [row['epoch'] for row in read_metrics('m')] == [1, 2, 3, 4]
    assert (
        'valid/acc has not been above 0.7500 for 2 epochs, see --early_stopping: the '
        'run ends after this epoch\nbest: epoch 2 of 4, valid/acc: 0.7500'
    ) in done.out
    assert done.out.splitlines()[-1].endswith('evaluate.py --model_dir m')
    assert read_state('m/model.ckpt-4-16') == (0.75, 2)
    assert checkpoints.find('m/best') == ['m/best/model.ckpt-2-8']


def test_a_run_ends_once_it_is_good_enough(main, flags, score):
    score(0.5, 0.9, 0.8)
    flags += ['--model_dir', 'm', '--stop_at', '0.9'] + STILL
    done = main('train.py', *flags)
    assert done.status == 0 and done.err == ''
    told = 'valid/acc 0.9000 has reached --stop_at 0.9: the run ends after this epoch'
    assert told + '\nbest: epoch 2 of 2, ' in done.out
    assert [row['epoch'] for row in read_metrics('m')] == [1, 2]


def test_what_has_ended_is_not_trained_on_till_the_flags_change(main, flags):
    flags += ['--model_dir', 'm', '--epochs', '6', *STILL]
    early = ['--early_stopping', '1']
    assert main('train.py', *early, *flags).status == 0
    assert checkpoints.find('m')[0] == 'm/model.ckpt-2-8'
    before = read_files('m')
    again = main('train.py', *early, *flags)
    assert again.status == 0 and 'Epoch' not in again.out
    assert 'nothing left to train: 2 epochs, 8 steps are done; valid/acc has not ' in (
        again.out
    )
    after = read_files('m')
    assert {name for name in after if after[name] != before.get(name)} == {'train.log'}

    accuracy = read_metrics('m')[0]['valid_acc']
    done = main('train.py', '--stop_at', str(accuracy), *flags)
    told = 'steps are done; valid/acc %.4f has reached --stop_at' % accuracy
    assert done.status == 0 and told in done.out
    assert 'trained with' not in done.err  # neither says anything of the training

    done = main('train.py', '--early_stopping', '3', *flags)
    assert done.status == 0 and 'continues from m/model.ckpt-2-8' in done.out
    assert checkpoints.find('m')[0] == 'm/model.ckpt-4-16'
    assert main('train.py', *flags).status == 0
    assert checkpoints.find('m')[0] == 'm/model.ckpt-6-24'


@pytest.mark.parametrize('script', ['train.py', 'train_multi_gpu.py'])
def test_a_resumed_run_ends_after_the_same_epoch(main, flags, script):
    flags += ['--early_stopping', '2', '--epochs', '9', *STILL]
    assert main(script, '--model_dir', 'whole', *flags).status == 0
    assert checkpoints.find('whole')[0] == 'whole/model.ckpt-3-12'
    flags += ['--model_dir', 'm']
    for steps in ('3', '4', '8', '11'):
        assert main(script, '--max_steps', steps, *flags).status == 0
    assert main(script, *flags).status == 0
    # As a kill leaves it: the last row is written, and its checkpoint is not.
    for name in list(files('m')):
        if name.startswith('model.ckpt-3-12'):
            os.remove('m/' + name)
    assert main(script, *flags).status == 0
    for name in ('model.ckpt-3-12', 'best/model.ckpt-1-4'):
        assert_same_bits(read_checkpoint('whole/' + name), read_checkpoint('m/' + name))
    assert without_times(read_metrics('whole')) == without_times(read_metrics('m'))
    assert 'nothing left to train' in main(script, *flags).out


def test_an_evaluation_inside_an_epoch_decides_nothing(main, flags):
    flags += ['--model_dir', 'm', '--stop_at', '1e-9', *STILL]
    done = main('train.py', '--max_steps', '2', *flags)
    assert done.status == 0 and '--stop_at' not in done.out
    assert read_state('m/model.ckpt-0-2') == (-1, 0)
    done = main('train.py', *flags)
    assert done.status == 0 and 'has reached --stop_at 1e-09: the run ends' in done.out
    assert [row['epoch'] for row in read_metrics('m')] == [1]


def test_a_best_that_could_not_be_saved_counts_all_the_same(
    main, flags, score, monkeypatch
):
    score(0.5, 0.9, 0.8)
    save = checkpoints.save

    def failing_save(saver, session, directory, epochs_done, *more):
        if directory == 'm/best' and epochs_done == 2:
            return False
        return save(saver, session, directory, epochs_done, *more)

    monkeypatch.setattr(checkpoints, 'save', failing_save)
    flags += ['--model_dir', 'm', '--epochs', '3', '--early_stopping', '5', *STILL]
    assert main('train.py', *flags).status == 0
    values = read_checkpoint('m/model.ckpt-3-12')
    assert values['training/best_acc'] == 0.8  # what is in best/
    assert read_state('m/model.ckpt-3-12') == (0.9, 1)


def test_stop_at_is_exact(main, flags, score):
    score(np.float64(459) / 500, np.float64(460) / 500)
    flags += ['--model_dir', 'm', '--stop_at', '0.92', *STILL]
    assert main('train.py', *flags).status == 0
    assert [row['epoch'] for row in read_metrics('m')] == [1, 2]
