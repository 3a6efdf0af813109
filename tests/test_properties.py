"""What holds for any numbers, flags and shapes, not only for those of the other tests.

The examples are drawn the same way each time.
"""

import json
import shlex

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import array_files
import cluster
import command_line
import data_sets
import gradient_packs
import input_pipeline
import model
import training
import updates
from cluster import Machines
from tests.test_input_pipeline import read_steps
from tf1 import tf
from train_multi_gpu import average_gradients
from utils import UserError


def examples(number):
    return hypothesis.settings(
        max_examples=number,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


# The order of images


@st.composite
def draw_runs(draw):
    """A part of an epoch done with one batch, the rest with another."""
    towers, machines = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    micro_steps, batch = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    step = batch * towers * machines * micro_steps
    num_images = draw(st.integers(step, max(step, 200)))
    before = draw(st.integers(1, num_images))  # images of a step before the resume
    consumed = before * draw(st.integers(0, num_images // before))
    return {
        'num_images': num_images,
        'batch': batch,
        'num_towers': towers,
        'machines': machines,
        'micro_steps': micro_steps,
        'consumed': consumed,
        'seed': draw(st.integers(0, 2**31 - 1)),
        'epoch': draw(st.integers(0, 10**6)),
    }


@examples(10)
@hypothesis.given(draw_runs())
def test_any_towers_take_up_the_order_of_one_at_the_very_image(run):
    addresses = ['host:%d' % port for port in range(1, run.pop('machines') + 1)]
    num_images, consumed = run['num_images'], run['consumed']
    batch, towers, micro_steps = run['batch'], run['num_towers'], run['micro_steps']
    all_batch = batch * towers * len(addresses)
    pipeline = input_pipeline.Pipeline(
        *[None] * 5, num_images=num_images, global_batch=all_batch * micro_steps
    )
    _, steps = input_pipeline.count_steps(pipeline, consumed)
    rest = num_images - consumed - steps * pipeline.global_batch
    assert 0 <= rest < pipeline.global_batch, 'a whole step is left out'
    _, whole = input_pipeline.count_steps(pipeline, 0)
    # This epoch's runs of the towers, and the first of the next epoch.
    now, then = steps * micro_steps, whole * micro_steps
    read = np.concatenate(
        [
            read_steps(steps=now + 1, machines=Machines(addresses, index), **run)
            for index in range(len(addresses))
        ],
        axis=1,
    )
    assert then, 'the next epoch has a step'
    epoch, next_epoch = read[:now].ravel(), read[now].ravel()
    with tf.Graph().as_default(), tf.Session() as session:
        numbers = [tf.constant(run['epoch'] + later, tf.int64) for later in (0, 1)]
        orders = session.run(
            [input_pipeline.epoch_order(num_images, run['seed'], n) for n in numbers]
        )
    for order in orders:
        assert sorted(order) == list(range(num_images)), 'not each image once'
    expected = orders[0][consumed : consumed + now * all_batch]
    assert epoch.tolist() == expected.tolist(), 'not the images of one tower'
    assert next_epoch.tolist() == orders[1][:all_batch].tolist()
    if num_images > 20:  # few have few orders
        assert orders[0].tolist() != orders[1].tolist(), 'the same order again'


# Flags


def find_parser():
    """Returns the parser of `command_line.parse`, which keeps it to itself."""
    found = []

    class Seen(command_line.Parser):
        def parse_args(self, *args, **more):
            found.append(self)
            return super().parse_args(*args, **more)

    before, command_line.Parser = command_line.Parser, Seen
    try:
        parse([])
    finally:
        command_line.Parser = before
    return found[0]


def parse(argv):
    return command_line.parse('', model.NETWORKS, towers=True, argv=argv)


ACTIONS = {
    action.option_strings[0]: action
    for action in find_parser()._actions
    if action.option_strings[0] != '-h'
}
TEXTS = st.one_of(
    st.integers(-(10**12), 10**12).map(str),
    st.floats().map(repr),
    st.text(max_size=6).filter(lambda text: '\0' not in text),
    st.sampled_from(
        ['', ' ', '-', '--', '0', '1', '-1', '1e400', 'nan', '0,2', '48x64', '\n', '²']
        + [
            '1_0',
            '0x10',
            '٣',
            '\udc80',
            'cpu',
            'flip,shift',
            'x:y',
            'x.py:f',
            '.py',
            ':',
        ]
        + ['@missing', '@latin_1', '@quote', '@itself', '@.', '--help']
    ),
)


# The least and the largest of whole numbers.
WHOLE = {
    'epochs': (1, 100000),
    'max_steps': (1, 2**31 - 1),
    'seed': (0, 2**31 - 1),
    'batch_size': (1, 65536),
    'accumulate': (1, 65536),
    'num_gpus': (1, 64),
    'keep': (1, 100000),
    'gradient_packs': (0, 1024),
    'summary_steps': (0, 2**31 - 1),
    'trace': (1, 2**31 - 1),
    'early_stopping': (1, 100000),
    'intra_op_threads': (0, 4096),
    'inter_op_threads': (2, 4096),
}
# The largest of numbers from 0 on, and of numbers above 0.
FROM_ZERO = {
    'dropout': 0.99,
    'label_smoothing': 0.99,
    'ema': 0.999999,
    'weight_decay': 100,
    'warmup_epochs': 100000,
}
ABOVE_ZERO = {
    'learning_rate': 100,
    'clip_norm': 1e9,
    'stop_at': 1,
    'valid_fraction': 0.9,
    'max_minutes': 1e6,
    'save_every_seconds': 1e9,
    'start_timeout': 1e6,
    'step_timeout': 1e6,
}


def good_texts(action):
    """Texts that the help of a flag lets one write, and numbers just beyond."""
    if action.dest in WHOLE:
        low, high = WHOLE[action.dest]
        numbers = [low - 1, low, low + 1, (low + high) // 2, high, high + 1]
        return st.sampled_from(numbers).map(str)
    if action.dest in FROM_ZERO or action.dest in ABOVE_ZERO:
        high = FROM_ZERO.get(action.dest) or ABOVE_ZERO[action.dest]
        numbers = [-1e-9, 0, 1e-9, high / 2, high, high * 1.001]
        return st.sampled_from(numbers).map(repr)
    if action.choices:
        return st.sampled_from(sorted(action.choices))
    if action.dest in GOOD:
        return GOOD[action.dest]
    return st.text('abc/.', min_size=1, max_size=5)


GOOD = {
    'gpus': st.sampled_from(['0', '0,2', '3,1,2']),
    'image_size': st.sampled_from(['64', '48x64']),
    'augment': st.sampled_from(['flip', 'flip,shift']),
    'model': st.sampled_from(sorted(model.NETWORKS)),
}


@st.composite
def draw_flag(draw):
    name = draw(st.sampled_from(sorted(ACTIONS)))
    action = ACTIONS[name]
    if action.nargs == 0:
        return draw(st.sampled_from([[name], [name], [name], [name + '=1']]))
    value = draw(st.one_of(*[good_texts(action)] * 6, TEXTS))
    return draw(st.sampled_from([[name, value], [name + '=' + value]]))


# A list of flags, and at times what is none.
FLAGS = st.lists(
    st.one_of(
        draw_flag(), draw_flag(), draw_flag(), draw_flag(), TEXTS.map(lambda t: [t])
    ),
    max_size=4,
).map(lambda parts: [word for part in parts for word in part])


def format_flags(flags):
    """Returns the words that say what a Namespace holds."""
    words = []
    for name, action in ACTIONS.items():
        value = getattr(flags, action.dest)
        if action.nargs == 0:
            words += [name] if value else []
        elif value not in (None, []):
            joint = 'x' if action.dest == 'image_size' else ','
            text = (
                joint.join(map(str, value)) if isinstance(value, list) else str(value)
            )
            words.append('%s=%s' % (name, text))
    return words


def check_bounds(flags):
    """Flags are within what `--help` and the other tests promise."""
    for name, (low, high) in WHOLE.items():
        value = getattr(flags, name)
        assert value is None or (type(value) is int and low <= value <= high), name
    for name, high in FROM_ZERO.items():
        assert 0 <= getattr(flags, name) <= high, name
    for name, high in ABOVE_ZERO.items():
        value = getattr(flags, name)
        assert value is None or 0 < value <= high, name
    assert flags.warmup_epochs < flags.epochs
    assert flags.gpus is None or min(flags.gpus) >= 0
    assert flags.image_size is None or all(0 < n < 9999 for n in flags.image_size)


def test_the_bounds_of_each_flag_belong_to_it_and_nothing_beyond():
    cases = [(n, low, high, low - 1, high + 1) for n, (low, high) in WHOLE.items()]
    cases += [(n, 0, high, -1e-9, high * 1.001) for n, high in FROM_ZERO.items()]
    cases += [(n, 1e-9, high, 0, high * 1.001) for n, high in ABOVE_ZERO.items()]
    for name, low, high, *beyond in cases:
        for value in beyond:
            with pytest.raises(UserError, match='argument --%s: ' % name):
                parse(['--%s=%r' % (name, value)])
        # Epochs are to be more than those of the warm-up.
        for value in (low, high) if name != 'warmup_epochs' else (0, 9.5):
            assert getattr(parse(['--%s=%r' % (name, value)]), name) == value
    assert parse(['--image_size', '48x64']).image_size == [48, 64]


def check_mistake(error, argv):
    """A mistake is one line that names a flag, or the word that is none."""
    text = str(error)
    assert len(text.splitlines()) == 1, repr(text)
    words = [word.split('=')[0] for word in argv if word.startswith('--')]
    words += [word[1:] for word in argv if word.startswith('@')]
    assert any(w in text for w in words + sorted(ACTIONS) + ['unrecognized']), text


@pytest.fixture(autouse=True)
def files_of_flags(fresh_graph):
    """Files that `TEXTS` name and that can not be read."""
    for name, data in (
        ('latin_1', b'--model_dir M\xfcnchen'),
        ('quote', b'--model_dir "a'),
        ('itself', b'--cache @itself'),
    ):
        with open(name, 'wb') as file:
            file.write(data)


@examples(400)
@hypothesis.given(FLAGS)
@hypothesis.example(['--epochs=--'])
@hypothesis.example(['@latin_1'])
@hypothesis.example(['@itself'])
@hypothesis.example(['--stray\nline'])
def test_any_flags_are_within_bounds_or_a_mistake_in_one_line(argv):
    try:
        flags = parse(argv)
    except UserError as error:
        check_mistake(error, argv)
    except SystemExit as done:
        assert done.code == 0 and '--help' in argv
    else:
        check_bounds(flags)
        assert parse(format_flags(flags)) == flags, 'other flags after a round trip'


@examples(60)
@hypothesis.given(FLAGS)
def test_flags_in_a_file_are_those_on_the_command_line(argv):
    hypothesis.assume(all(word.splitlines() in ([], [word]) for word in argv))
    hypothesis.assume(not any('\udc80' in word or word[:1] == '@' for word in argv))
    with open('flags.txt', 'w', encoding='utf-8') as file:
        file.write('# what comes of them\n')
        file.writelines(shlex.quote(word) + '\n' for word in argv)
    outcomes = []
    for words in (argv, ['@flags.txt']):
        try:
            outcomes.append(parse(words))
        except (UserError, SystemExit) as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]


# TF_CONFIG


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats()
    | st.sampled_from(
        ['a:1', 'b:2', 'b:0', 'b:65536', 'worker', 'chief', 'x\ny', '\ud800']
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ['cluster', 'task', 'type', 'index', 'worker', 'chief', 'ps', 'o']
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)
ADDRESSES = st.lists(st.sampled_from(['a:1', 'b:2', '[::1]:3']), max_size=3)
TF_CONFIGS = st.one_of(
    st.fixed_dictionaries(
        {
            'cluster': st.one_of(
                JSON,
                st.fixed_dictionaries({'worker': ADDRESSES}),
                st.just({'worker': ['a:1', 'b:2'], 'chief': ['c:3']}),
            ),
            'task': st.one_of(
                JSON,
                st.fixed_dictionaries(
                    {
                        'type': st.sampled_from(['worker', 'chief', 'ps']),
                        'index': st.integers(-1, 3),
                    }
                ),
            ),
        }
    ),
    JSON,
).map(json.dumps)


@examples(300)
@hypothesis.given(st.one_of(TF_CONFIGS, TF_CONFIGS, st.text(max_size=9)))
def test_any_tf_config_names_machines_or_is_a_mistake_in_one_line(text):
    try:
        machines = cluster.read_machines(text)
    except UserError as error:
        assert str(error).startswith('TF_CONFIG ')
        assert len(str(error).splitlines()) == 1, repr(str(error))
        return
    addresses, index = machines
    assert 0 <= index < len(addresses) == len(set(addresses))
    assert machines == cluster.ONE or len(addresses) > 1


# The learning rate


# Where training stands: epochs done, images of the next one consumed.
PLACES = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 300)), min_size=2, max_size=6
)


@examples(60)
@hypothesis.given(
    st.sampled_from(command_line.SCHEDULES),
    st.integers(1, 20),
    st.sampled_from([0, 0, 0.5, 1, 3]),
    st.integers(1, 300),
    PLACES,
    st.data(),
)
def test_the_rate_is_one_of_images_seen_and_falls_once_warm(
    schedule, epochs, warmup, num_images, places, data
):
    hypothesis.assume(warmup < epochs)
    batch = data.draw(st.integers(1, num_images))
    flags = parse(['--schedule', schedule, '--epochs=%d' % epochs])
    flags.warmup_epochs = warmup
    # What stands for the same images seen: all of an epoch, or none of the next one.
    places += [(0, epochs * num_images * part // 8) for part in range(9)]
    places += [(1, 0), (0, num_images)]
    seen = [epoch * num_images + images for epoch, images in places]
    rates = find_rates(flags, num_images, batch, places)
    assert rates[-1] == rates[-2], 'not a function of images seen'
    base = np.float32(flags.learning_rate)
    assert min(rates) >= 0 and max(rates) <= base * 1.000001
    # Past --epochs a cosine would rise again: nothing is trained there.
    warm = sorted(
        (images, rate)
        for images, rate in zip(seen, rates)
        if warmup * num_images <= images + batch and images <= epochs * num_images
    )
    falling = [rate for _, rate in warm]
    assert falling == sorted(falling, reverse=True), 'it rises: %s' % (warm,)
    if not warmup:
        alike = find_rates(flags, num_images, num_images, places)
        assert rates == alike, 'it depends on the batch'


def find_rates(flags, num_images, batch, places):
    """Returns the learning rate at each place: (epochs done, images consumed)."""
    with tf.Graph().as_default(), tf.Session() as session:
        epoch, images = (tf.placeholder(tf.int64, []) for _ in range(2))
        state = training.State(None, epoch, images, *[None] * 5)
        pipeline = input_pipeline.Pipeline(
            *[None] * 5, num_images=num_images, global_batch=batch
        )
        rate = updates.learning_rate(flags, state, pipeline)
        return [
            float(session.run(rate, {epoch: place[0], images: place[1]}))
            for place in places
        ]


# Packs of gradients


@examples(20)
@hypothesis.given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 4), max_size=3),
            st.sampled_from(['float16', 'float32', 'float64']),
            st.sampled_from(['/cpu:0', '/cpu:1']),
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 3),
    st.integers(0, 9),
)
@hypothesis.example([([], 'float16', '/cpu:0'), ([0], 'float16', '/cpu:0')], 1, 1)
def test_packs_of_any_shapes_come_apart_as_they_went_in(kinds, num_towers, num_packs):
    random = np.random.RandomState(0)
    with tf.Graph().as_default():
        variables = []
        for number, (shape, dtype, device) in enumerate(kinds):
            with tf.device(device):
                variables.append(tf.get_variable('v%d' % number, shape, dtype))
        towers = [
            [
                (
                    tf.constant(
                        random.uniform(-1, 1, v.shape.as_list()), v.dtype.base_dtype
                    ),
                    v,
                )
                for v in variables
            ]
            for _ in range(num_towers)
        ]
        packed = gradient_packs.pack(towers, num_packs)
        places = {(dtype, device) for _, dtype, device in kinds}
        if num_packs:
            assert len(packed[0]) <= num_packs * len(places), (
                'more packs than asked for'
            )
        plain = {v: g for g, v in average_gradients(towers)}
        unpacked = gradient_packs.unpack(average_gradients(packed))
        joined = {v: g for g, v in unpacked}
        assert set(joined) == set(variables)
        config = tf.ConfigProto(device_count={'CPU': 2})
        with tf.Session(config=config) as session:
            for variable, found in session.run(joined).items():
                expected = session.run(plain[variable])
                assert found.dtype == expected.dtype and found.shape == expected.shape
                assert found.tobytes() == expected.tobytes()


# What is held out


@examples(100)
@hypothesis.given(
    st.lists(st.integers(0, 3), min_size=2, max_size=40),
    st.floats(0.001, 0.9),
    st.randoms(use_true_random=False),
)
def test_the_same_images_of_each_class_are_held_out_in_any_order(labels, fraction, rng):
    def hold_out(rows):
        half = array_files.Half(
            np.array(rows),
            np.array([labels[row] for row in rows]),
            lambda place: '/data/%d.png' % rows[place],
            [],
            {},
        )
        rest, held_out = data_sets.hold_out(half, fraction, '/data')
        assert all(
            rest.name_example(n) == '/data/%d.png' % r
            for n, r in enumerate(rest.images)
        )
        return sorted(rest.images.tolist()), sorted(held_out.images.tolist())

    rows = list(range(len(labels)))
    most = max(labels.count(label) for label in labels)
    if most == 1:
        with pytest.raises(UserError, match='too few images'):
            hold_out(rows)
        return
    rest, held_out = hold_out(rows)
    assert sorted(rest + held_out) == rows
    for label in set(labels):
        number = sum(labels[row] == label for row in held_out)
        wanted = fraction * labels.count(label)
        assert number < labels.count(label), 'none is left to train on'
        assert number or labels.count(label) == 1, 'none is held out'
        assert abs(number - wanted) <= 1
    rng.shuffle(rows)
    assert hold_out(rows) == (rest, held_out), 'the order matters'
