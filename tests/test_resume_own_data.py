"""Runs on data of one's own that stop in the middle of an epoch lose no bit."""

import pytest

import checkpoints
import data_sets
from tests.conftest import (
    assert_same_bits,
    data_flags,
    make_examples,
    read_checkpoint,
    read_metrics,
    without_times,
    write_folders,
    write_npz,
    write_records,
)

# 9 steps per epoch of 90 images.
RUN = ['--device', 'cpu', '--xla', 'off', '--batch_size', '10', '--summary_steps', '0']
RUN += ['--augment', 'shift,flip,crop,rotate,brightness', '--standardize']


pytestmark = pytest.mark.usefixtures('small_graphs')


def write_form(directory, form):
    """Writes the same images as a data set of this form; returns its path."""
    halves = dict(
        train=make_examples(90, 12, 10, 3), valid=make_examples(30, 12, 10, 3, seed=1)
    )
    if form == 'npz':
        return write_npz(directory / 'own.npz', **halves)
    if form == 'folders':
        return write_folders(directory / 'own', 'abc', **halves)
    return write_records(directory / 'own', **halves)


@pytest.mark.parametrize('num_gpus', ['1', '2'])
@pytest.mark.parametrize('form', ['npz', 'folders', 'tfrecord'])
def test_a_run_that_stops_in_an_epoch_loses_no_bit(main, tmp_path, form, num_gpus):
    batch = str(10 // int(num_gpus))
    argv = RUN + ['--data_dir', write_form(tmp_path, form), '--epochs', '2']
    argv += ['--num_gpus', num_gpus, '--batch_size', batch]
    assert main('train_multi_gpu.py', *argv, '--model_dir', 'whole').status == 0
    for stop in ('4', '9', '13'):
        done = main(
            'train_multi_gpu.py', *argv, '--model_dir', 'm', '--max_steps', stop
        )
        assert done.status == 0, done.err
    done = main('train_multi_gpu.py', *argv, '--model_dir', 'm')
    assert done.status == 0 and 'continues from m/model.ckpt-1-13\n' in done.out
    last = [checkpoints.find(directory)[0] for directory in ('whole', 'm')]
    assert_same_bits(*map(read_checkpoint, last))
    rows = [without_times(read_metrics(directory)) for directory in ('whole', 'm')]
    assert rows[0] == rows[1]


@pytest.mark.parametrize('form', ['folders', 'tfrecord'])
def test_decoded_once_or_each_time_and_held_as_arrays_are_the_same(
    main, tmp_path, form
):
    argv = RUN + ['--epochs', '1']
    path = write_form(tmp_path, form)
    more = ['--data_dir', path, '--model_dir']
    for name, flags in (('each', []), ('once', ['--cache'])):
        assert main('train.py', *argv, *more, name, *flags).status == 0
    data = data_sets.load(data_flags(path, cache=True))
    arrays = write_npz(tmp_path / 'arrays.npz', data.train, data.valid)
    done = main('train.py', *argv, '--data_dir', arrays, '--model_dir', 'arrays')
    assert done.status == 0, done.err
    each, once, held = (
        read_checkpoint(checkpoints.find(name)[0])
        for name in ('each', 'once', 'arrays')
    )
    assert_same_bits(each, once)
    assert_same_bits(each, held)
