"""benchmark.py: what it measures, what it says of it, what it refuses."""

import json
import os
import sys
import time

import numpy as np
import pytest

import benchmark
import benchmark_results
import benchmark_rounds
import benchmark_towers
import input_pipeline
import train_multi_gpu
import training
import utils
from tests.conftest import ROOT, THREADS, command, files, make_flags, start
from tests.test_placement import gpu_build, has_gpu_kernel, on_gpu  # noqa: F401
from tf1 import tf
from utils import RunFailed, UserError

# A whole run


def test_a_run_measures_towers_and_peers_and_writes_json(small_dir):
    quick = ['--rounds', '5', '--seconds', '0.1']
    done = command(
        'benchmark.py',
        *('--num_gpus', '2', '1', '--device', 'cpu', '--xla', 'off', '--peers'),
        *('--data_dir', small_dir, '--batch_size', '10', '--json', 'b.json'),
        *('--against', '--dropout 0', '--machines', '2'),
        *quick,
    )
    assert done.status == 0, done.err
    with open('b.json') as file:
        result = json.load(file)
    assert list(result['towers']) == ['1', '2']
    for towers, figures in result['towers'].items():
        assert figures['global_batch'] == 10 * int(towers)
        assert figures['images_per_second'] > 0
        assert figures['limit_images_per_second'] > 0
        assert figures['limit_share'] > 0
        assert 0 <= figures['input_wait_share'] < 1
        assert figures['spread'] >= 0
        assert figures['graph_seconds'] > 0
    peers = result['peers']
    against = {'1 --dropout 0', '2 --dropout 0'}
    assert against | {'keras_fit_1', 'mirroredstrategy_2'} <= set(peers)
    assert all(peer['images_per_second'] > 0 for peer in peers.values())
    assert list(result['machines']) == ['2 machines x 1 tower']
    machines = result['machines']['2 machines x 1 tower']
    assert machines['num_gpus'] == 2 and machines['images_per_second'] > 0
    assert machines['all_reduce_milliseconds'] > 0
    (line,) = [x for x in done.out.splitlines() if x.startswith('2 machines x 1 tower')]
    assert '{:,.0f}'.format(machines['images_per_second']) in line
    assert result['versions']['tensorflow'] == tf.version.VERSION
    assert result['devices']['towers'] == ['/cpu:0', '/cpu:1']
    assert result['rounds'] == 5
    threads = utils.choose_threads(make_flags('--xla', 'off'), ['/cpu:0', '/cpu:1'])
    assert result['threads'] == {'1': list(threads), '2': list(threads)}
    assert result['flags']['batch_size'] == 10 and result['flags']['xla'] == 'off'
    # What is printed is what is written.
    rows = [line.split() for line in done.out.splitlines()]
    rate = '{:,.0f}'.format(result['towers']['2']['images_per_second'])
    assert ['2'] + '{} + {} 20'.format(*threads).split() + [rate] in [
        row[:6] for row in rows
    ]
    for peer, label in (
        ('keras_fit_1', 'Keras fit, 1'),
        ('1 --dropout 0', '1 tower -'),
    ):
        (line,) = [line for line in done.out.splitlines() if line.startswith(label)]
        assert '%.2f times as fast' % peers[peer]['towers_times_as_fast'] in line
    for line in done.err.splitlines():  # PyTorch may be missing
        assert line.startswith('WARNING: '), done.err
    assert files() == ['b.json']


# Figures


def make_result(rates, cores=2, device='/cpu:', rounds=5):
    """What `summarise` makes of `rates`: {towers: [(loop, limit)]}."""
    measured = [
        benchmark.Measured(
            str(n),
            utils.count(n, 'tower'),
            n,
            None,
            {
                'towers': [device + str(i) for i in range(n)],
                'threads': [1, 2],
                'tensorflow': '1.15.0',
                'graph_seconds': 0.5,
            },
        )
        for n in rates
    ]
    answers = {
        str(n): [{'rates': [pair], 'input_wait_share': 0.01 * n} for pair in pairs]
        for n, pairs in rates.items()
    }
    result = benchmark_results.summarise(make_flags(), measured, [], answers)
    result['devices']['cores'] = cores
    return result


def test_a_peer_is_compared_within_each_round():
    ours = [{'rates': [(rate, 1)], 'input_wait_share': 0} for rate in (100, 10, 60)]
    theirs = [{'images_per_second': rate} for rate in (50, 5, 10)]
    tower = benchmark.Measured(
        *('1', '1 tower', 1, None),
        {'towers': ['/cpu:0'], 'threads': [1, 2], 'tensorflow': '', 'graph_seconds': 0},
    )
    peer = benchmark.Measured('keras_fit_1', 'Keras fit, 1', 1, None, {'version': '3'})
    result = benchmark_results.summarise(
        make_flags(), [tower], [peer], {'1': ours, 'keras_fit_1': theirs}
    )
    figures = result['peers']['keras_fit_1']
    assert figures['images_per_second'] == 10
    assert figures['towers_times_as_fast'] == 2
    assert figures['spread'] == 4.5


@pytest.mark.parametrize('argv', [[], ['--batch_size', '16', '--accumulate', '2']])
def test_machines_are_compared_with_as_many_towers_in_each_round(argv):
    ours = [
        {'images_per_second': rate, 'all_reduce_seconds': 0.008} for rate in (320, 400)
    ]
    theirs = [{'rates': [(rate, 1)], 'input_wait_share': 0} for rate in (400, 640)]
    tower = benchmark.Measured(
        *('2', '2 towers', 2, None),
        {'towers': ['/cpu:0'], 'threads': [1, 2], 'tensorflow': '', 'graph_seconds': 0},
    )
    machines = benchmark.Measured('2 x 1', '2 x 1', 2, None, {})
    result = benchmark_results.summarise(
        *(make_flags(*argv), [tower], [], {'2': theirs, '2 x 1': ours}, [machines])
    )
    assert result['towers']['2']['global_batch'] == 64
    figures = result['machines']['2 x 1']
    # A step has 64 images: 200 and 160 ms, against 160 and 100 ms.
    assert figures['share_of_one_machine'] == pytest.approx((0.8 + 0.625) / 2)
    assert figures['step_milliseconds'] == pytest.approx(180)
    assert figures['overhead_milliseconds'] == pytest.approx((40 + 60) / 2)
    assert figures['all_reduce_milliseconds'] == pytest.approx(8)
    assert figures['all_reduce_share'] == pytest.approx((8 / 200 + 8 / 160) / 2)


def test_figures_by_value():
    result = make_result(
        {
            1: [(100, 100), (90, 100), (80, 100)],
            4: [(200, 250), (300, 400), (160, 200)],
        }
    )
    one, four = result['towers']['1'], result['towers']['4']
    assert one['images_per_second'] == 90 and four['images_per_second'] == 200
    assert one['spread'] == pytest.approx(20 / 90)
    assert one['efficiency'] == 1
    assert four['efficiency'] == pytest.approx(200 / 90 / 4)
    # The median of each slice's own share, not the share of medians.
    assert one['limit_share'] == 0.9 and four['limit_share'] == 0.8
    assert four['limit_images_per_second'] == 250
    assert four['overhead_microseconds_per_image'] == pytest.approx(1e6 / 1000)
    assert four['input_wait_share'] == pytest.approx(0.04)
    assert four['global_batch'] == 128 and result['rounds'] == 3


@pytest.mark.parametrize(
    'rates, cores, device, advice',
    [
        ({1: 100, 2: 190}, 2, '/cpu:', []),
        (
            {1: 100, 2: 105},
            2,
            '/gpu:',
            ['2 towers gain nothing over 1', '--batch_size'],
        ),
        ({1: 100, 2: 105}, 2, '/cpu:', ['1.05 times', '--batch_size 256']),
        ({2: 100, 4: 90}, 2, '/cpu:', ['4 towers gain nothing over 2', '2 cores']),
        ({2: 100, 4: 90}, 8, '/cpu:', ['--batch_size']),
    ],
)
def test_advice_where_more_towers_gain_nothing(rates, cores, device, advice):
    rates = {n: [(rate, rate)] for n, rate in rates.items()}
    sentences = benchmark_results.advise(make_result(rates, cores, device))
    assert len(sentences) == bool(advice)
    for part in advice:
        assert part in sentences[0]


# What is measured


def slow_input(seconds):
    """In place of `input_pipeline.build`: a constant batch, each after `seconds`."""

    def build(examples, batch_size, num_towers, *settings):
        del settings
        wait = tf.py_func(lambda: time.sleep(seconds), [], [], stateful=True)
        with tf.control_dependencies([wait] if wait else []):
            batches = [
                [tf.identity(tf.constant(a[:batch_size])) for a in examples]
                for _ in range(num_towers)
            ]
        nothing = tf.no_op()
        size = len(examples.labels)
        pipeline = input_pipeline.Pipeline(
            batches, nothing, nothing, [], None, size, global_batch=20
        )
        return pipeline, {}

    return build


@pytest.mark.parametrize('staging', [[], ['--staging']])
def test_waiting_for_input_is_what_the_step_waits(small, monkeypatch, staging):
    # Longer than a step computes on a busy machine.
    monkeypatch.setattr(input_pipeline, 'build', slow_input(0.4))
    flags = ['--num_gpus', '2', '--batch_size', '10', '--xla', 'off']
    devices = utils.choose_devices('cpu', 2)
    build_input = benchmark_towers.build_timed_input
    job = train_multi_gpu.build_job(
        make_flags(*flags, *staging),
        devices.towers,
        small,
        input_pipeline.build if staging else build_input,
    )
    if staging:
        waited = benchmark_towers.build_timed_puts(job)
    else:
        (waited,) = tf.get_collection('waited')
    with start(job, devices) as session:
        session.run(job.step.train_op)  # the first one builds kernels, too
        for _ in range(3):
            seconds, _ = session.run([waited, job.step.train_op])
            # With staging a step computes first, and waits for the rest.
            assert (0.02 if staging else 0.4) <= seconds < 10


def test_the_timed_input_gives_the_same_images(small):
    devices = utils.choose_devices('cpu', 2)
    state = training.create_state()
    pipeline, feeds = benchmark_towers.build_timed_input(small.train, 10, 2, 0, state)
    order = input_pipeline.epoch_order(2000, 0, 0)
    with utils.open_session(devices, THREADS) as session:
        session.run(
            [tf.global_variables_initializer(), tf.local_variables_initializer()], feeds
        )
        session.run(pipeline.start)
        order = session.run(order)
        with training.queue_runners(session):
            for step in range(3):
                one, two = session.run(pipeline.batches)
                rows = order[20 * step : 20 * (step + 1)]
                np.testing.assert_array_equal(one[0], small.train.images[rows[:10]])
                np.testing.assert_array_equal(two[0], small.train.images[rows[10:]])


def test_the_limit_takes_the_same_batch_from_the_towers_own_device(small):
    devices = utils.choose_devices('cpu', 2)
    pipeline, _ = benchmark_towers.build_constant_input(
        devices.towers, small.train, 5, 2
    )
    assert [b[0].device[-5:] for b in pipeline.batches] == ['CPU:0', 'CPU:1']
    with utils.open_session(devices, THREADS) as session:
        session.run(pipeline.prefill)
        for _ in range(3):
            for tower, (images, labels) in enumerate(session.run(pipeline.batches)):
                rows = slice(5 * tower, 5 * tower + 5)
                np.testing.assert_array_equal(images, small.train.images[rows])
                np.testing.assert_array_equal(labels, small.train.labels[rows])


def test_the_limit_fits_on_gpus(gpu_build, small):  # noqa: F811
    devices = ['/gpu:%d' % i for i in range(4)]
    train_multi_gpu.build_job(
        make_flags(),
        devices,
        small,
        lambda *args: benchmark_towers.build_constant_input(devices, *args),
    )
    placed = [op for op in tf.get_default_graph().get_operations() if on_gpu(op)]
    assert sum(op.type == 'StagePeek' for op in placed) == 4
    wrong = ['%s (%s)' % (op.name, op.type) for op in placed if not has_gpu_kernel(op)]
    assert not wrong


# Mistakes and failures


def test_help_fits_into_80_columns_and_names_each_flag(monkeypatch, capsys):
    monkeypatch.setenv('COLUMNS', '80')
    with pytest.raises(SystemExit):
        benchmark.parse(['--help'])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    for name in vars(benchmark.parse(['--device', 'cpu'])[0]):
        assert '--%s ' % name in shown, name


@pytest.mark.parametrize(
    'argv, told',
    [
        (['--num_gpus', '0'], "argument --num_gpus: '0' is not a whole number"),
        (['--num_gpus', '1', 'two'], "'two'"),
        (
            ['--rounds', '4'],
            "argument --rounds: '4' is not a whole number of at least 5",
        ),
        (['--epochs', '3'], '--epochs has no meaning for benchmark.py: drop it'),
        (['--model_dir', 'm'], '--model_dir has no meaning for benchmark.py: drop it'),
        (['--against', '--xla maybe'], "invalid choice: 'maybe'"),
        (['--save_every_seconds', '1'], '--save_every_seconds has no meaning'),
        (['--verbose'], '--verbose has no meaning for benchmark.py: drop it'),
        (['--machines', '3'], '--machines 3 share no --num_gpus 1 2 equally: give a'),
        (['--colour', 'red'], 'unrecognized arguments: --colour red'),
        (['--batch_size', 'x'], '--batch_size'),
        (
            ['--json', 'nowhere/b.json'],
            '--json nowhere/b.json: No such file or directory',
        ),
        (['--json', '.'], '--json .: Is a directory'),
        (
            ['--plot', 'nowhere/b.png'],
            '--plot nowhere/b.png: No such file or directory',
        ),
        (['--device', 'gpu', '--num_gpus', '2'], 'sees no GPU'),
        (['--seconds=--'], 'argument --seconds: '),
    ],
)
def test_a_mistake_is_told_before_anything_is_measured(argv, told):
    with pytest.raises(UserError) as error:
        benchmark.parse(argv)
    assert told in str(error.value)
    assert files() == []


def test_plot_without_matplotlib_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, 'matplotlib', None)
    monkeypatch.setitem(sys.modules, 'matplotlib.backend_bases', None)
    with pytest.raises(UserError, match='--plot needs matplotlib: install it'):
        benchmark.parse(['--plot', 'b.png'])


@pytest.mark.parametrize(
    'visible, argv, numbers',
    [
        ([], [], [1, 2]),
        (['a'], [], [1]),
        (['a', 'b', 'c'], [], [1, 2]),
        (['a', 'b'], ['--gpus', '1'], [1]),
        (['a'], ['--device', 'cpu'], [1, 2]),
    ],
)
def test_by_default_one_and_two_towers_as_far_as_there_are_gpus(
    monkeypatch, visible, argv, numbers
):
    monkeypatch.setattr(utils, 'visible_gpus', lambda: visible)
    _, towers, _ = benchmark.parse(argv)
    assert [flags.num_gpus for flags in towers] == numbers


def test_a_peer_that_ends_on_the_way_costs_no_other_figure(monkeypatch):
    def end():
        raise benchmark_rounds.Ended(1, 'Traceback\nOutOfMemory: too much')

    warned = []
    monkeypatch.setattr(benchmark.log, 'warning', lambda *args: warned.append(args[1:]))
    ready = {'round_seconds': 1}
    tower = benchmark.Measured('1', '1 tower', 1, lambda: 5, ready)
    peer = benchmark.Measured('keras_fit_1', 'Keras fit, 1', 1, end, ready)
    flags = benchmark.parse(['--device', 'cpu'])[0]
    answers = benchmark.measure(flags, make_flags(), [tower], [peer])
    assert dict(answers) == {'1': [5] * 7}
    assert warned == [('Keras fit, 1', 'OutOfMemory: too much')]


def test_json_goes_to_whatever_kind_of_file(tmp_path):
    (tmp_path / 'old').write_text('before')
    (tmp_path / 'link').symlink_to('old')
    (tmp_path / 'dangling').symlink_to('new')
    for name in ('old', 'link', 'dangling', '/dev/null'):
        benchmark.parse(['--device', 'cpu', '--json', name])
    assert (tmp_path / 'old').read_text() == 'before'
    assert os.path.islink('dangling') and files() == ['dangling', 'link', 'old']


def test_each_number_of_towers_gets_the_first_gpus(monkeypatch):
    monkeypatch.setattr(utils, 'visible_gpus', lambda: ['a', 'b', 'c', 'd'])
    argv = ['--num_gpus', '2', '1', '--gpus', '3,1', '--against', '--xla on']
    _, towers, others = benchmark.parse(argv)
    for flags in (towers, others):
        assert [(f.num_gpus, f.gpus) for f in flags] == [(1, [3]), (2, [3, 1])]
    assert [f.xla for f in towers + others] == ['auto', 'auto', 'on', 'on']


def test_a_mistake_found_by_a_measuring_process_is_one_line(small_dir):
    done = command(
        'benchmark.py',
        *('--num_gpus', '1', '--device', 'cpu', '--data_dir', small_dir),
        *('--batch_size', '2001'),
    )
    assert done.status == 2
    assert done.err.startswith('ERROR: 2000 training images are less than one step')
    assert done.err.count('\n') == 1


ENDS = """
import sys
sys.path.insert(0, %r)
import benchmark_rounds, contextlib
@contextlib.contextmanager
def prepare(argument):
    yield {'ready': argument}, lambda: sys.exit('no more')
benchmark_rounds.serve(prepare)
"""


def test_a_process_that_ends_is_told_with_what_it_said(tmp_path):
    script = tmp_path / 'ends.py'
    script.write_text(ENDS % ROOT)
    with benchmark_rounds.start(str(script), [1, 'a']) as ask:
        assert ask() == {'ready': [1, 'a']}
        with pytest.raises(benchmark_rounds.Ended) as ended:
            ask()
    assert ended.value.status == 1 and ended.value.said.endswith('no more')
    with pytest.raises(RunFailed, match='measuring 2 towers: no more'):
        benchmark.raise_cause('2 towers', ended.value)


def test_nothing_is_left_running_after_the_block(tmp_path):
    script = tmp_path / 'waits.py'
    # Not even what the process has started itself.
    started = "__import__('subprocess').Popen(['sleep', '1000']).pid"
    script.write_text(ENDS.replace("sys.exit('no more')", started) % ROOT)
    with benchmark_rounds.start(str(script), None) as ask:
        ask()
        number = ask()
        os.kill(number, 0)
    for _ in range(100):
        with open('/proc/%d/stat' % number) as file:
            if file.read().split()[2] == 'Z':
                return
        time.sleep(0.1)
    raise AssertionError('it is still running')
