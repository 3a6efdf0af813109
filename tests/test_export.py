"""export.py: a SavedModel and a frozen graph that run anywhere."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.conftest import ROOT, assert_mistake, command, files, read_files
from tf1 import tf


@pytest.fixture(scope='module')
def exported(trained_dir, tmp_path_factory):
    """A directory with `saved`, the SavedModel, and `frozen.pb`."""
    directory = tmp_path_factory.mktemp('exported')
    argv = ['--export_dir', str(directory / 'deep' / 'saved')]
    argv += ['--frozen', str(directory / 'frozen.pb')]
    done = command('export.py', '--model_dir', trained_dir, *argv)
    assert done.status == 0 and done.err == ''
    assert done.out.splitlines()[1:] == [
        'SavedModel: %s' % argv[1],
        'frozen graph: %s' % argv[3],
    ]
    return directory


@pytest.fixture(scope='module')
def expected(trained_dir, part):
    """The class of each test image, as predictions are counted by evaluate.py."""
    done = command(
        'evaluate.py', '--device', 'cpu', '--model_dir', trained_dir, '--errors', 'e',
        cwd=os.path.dirname(trained_dir),
    )  # fmt: skip
    assert done.status == 0
    classes = part.valid.labels.copy()
    for name in os.listdir(os.path.join(os.path.dirname(trained_dir), 'e')):
        index, _, predicted = map(int, name[: -len('.png')].split('_'))
        classes[index] = predicted
    return classes


def saved_model_cli(*argv):
    """What a user without this project runs: TensorFlow's own command."""
    program = os.path.join(os.path.dirname(sys.executable), 'saved_model_cli')
    done = subprocess.run(
        [program] + list(argv),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_saved_model_cli_gives_the_classes_of_predict(exported, part, expected):
    images = part.valid.images
    np.save('bytes.npy', images[:60])
    np.save('floats.npy', images[:60].astype(np.float32))
    for signature, array in (
        ('serving_default', 'floats'),
        ('serving_default', 'bytes'),
        ('serving_uint8', 'bytes'),
    ):
        saved_model_cli(
            *('run', '--dir', str(exported / 'deep' / 'saved'), '--tag_set', 'serve'),
            *('--signature_def', signature, '--inputs', 'images=%s.npy' % array),
            *('--outdir', signature + array),
        )
        found = np.load(signature + array + '/classes.npy')
        assert found.tolist() == expected[:60].tolist()
        shares = np.load(signature + array + '/probabilities.npy')
        assert shares.shape == (60, 10) and (shares.argmax(axis=1) == found).all()
        np.testing.assert_allclose(shares.sum(axis=1), 1, rtol=1e-5)


def test_the_signature_says_what_goes_in_and_out(exported):
    shown = saved_model_cli('show', '--dir', str(exported / 'deep' / 'saved'), '--all')
    default = shown[shown.index("signature_def['serving_default']") :]
    default = default[: default.index("signature_def['serving_uint8']")]
    found = re.findall(r"\['(\w+)'\].*\n +dtype: (\w+)\n +shape: (.*)", default)
    assert sorted(found) == [
        ('classes', 'DT_INT64', '(-1)'),
        ('images', 'DT_FLOAT', '(-1, 28, 28, 1)'),
        ('probabilities', 'DT_FLOAT', '(-1, 10)'),
    ]


def strict_session():
    """Without a GPU, and without soft placement: a stray device string fails."""
    config = tf.ConfigProto(allow_soft_placement=False, device_count={'GPU': 0})
    return tf.Session(config=config)


def assert_portable(graph_def):
    nodes = list(graph_def.node)
    nodes += [node for f in graph_def.library.function for node in f.node_def]
    for node in nodes:
        assert node.device == '', node.name
        assert 'Queue' not in node.op, node.name
        assert 'Random' not in node.op or '/Initializer/' in node.name, node.name
    assert {node.name for node in nodes if node.op == 'Placeholder'} >= {'images'} or (
        any(node.name.endswith('/images') for node in nodes)
    )


def test_it_loads_with_soft_placement_off_and_takes_any_batch(exported, part, expected):
    with tf.Graph().as_default() as graph, strict_session() as session:
        loaded = tf.saved_model.load(
            session, ['serve'], str(exported / 'deep' / 'saved')
        )
        assert_portable(graph.as_graph_def())
        signature = loaded.signature_def['serving_default']
        images = signature.inputs['images'].name
        classes = signature.outputs['classes'].name
        for batch in (1, 7, 500):
            found = session.run(classes, {images: part.valid.images[:batch]})
            assert found.tolist() == expected[:batch].tolist()


def test_the_frozen_graph_stands_alone(exported, part, expected):
    graph_def = tf.GraphDef()
    with open(str(exported / 'frozen.pb'), 'rb') as file:
        graph_def.ParseFromString(file.read())
    assert_portable(graph_def)
    assert not [node for node in graph_def.node if 'Variable' in node.op]
    with tf.Graph().as_default(), strict_session() as session:
        classes, probabilities = tf.import_graph_def(
            graph_def, return_elements=['classes:0', 'probabilities:0'], name=''
        )
        found = session.run(
            [classes, probabilities], {'images:0': part.valid.images[:100]}
        )
    assert found[0].tolist() == expected[:100].tolist()
    assert found[1].shape == (100, 10)


def test_nothing_is_overwritten(main, trained_dir, exported):
    before = read_files(exported)
    argv = ['--model_dir', trained_dir]
    saved, frozen = str(exported / 'deep' / 'saved'), str(exported / 'frozen.pb')
    inside = str(exported / 'new' / 'frozen.pb')
    done = main(
        'export.py', '--export_dir', os.path.dirname(inside), '--frozen', inside
    )
    assert_mistake(done, '--export_dir and --frozen must not be in one another')
    for flags, path in (
        (['--export_dir', saved], saved),
        (['--frozen', frozen], frozen),
        (['--export_dir', 'new', '--frozen', frozen], frozen),
        (['--export_dir', ROOT], ROOT),
    ):
        done = main('export.py', *argv, *flags)
        assert_mistake(done, '%s exists: nothing is overwritten' % path)
    assert read_files(exported) == before and os.listdir('.') == []


def test_a_failed_export_leaves_nothing(main, trained_dir, monkeypatch):
    def fail(builder):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(tf.saved_model.Builder, 'save', fail)
    done = main('export.py', '--model_dir', trained_dir, '--export_dir', 'here')
    assert done.status == 1 and 'No space left on device' in done.err
    assert files() == [] and os.listdir('.') == []


def test_mistakes_get_one_line(main, trained_dir):
    argv = ['--model_dir', trained_dir]
    assert_mistake(main('export.py', *argv), '--export_dir DIR or --frozen FILE')
    for path, told in (('/proc/x/y', '/proc/x/y: '), (ROOT + '/train.py/x', 'Not a d')):
        assert_mistake(main('export.py', '--export_dir', path, *argv), told)
        flags = ['--export_dir', 'new/deep', '--frozen', path]
        assert_mistake(main('export.py', *flags, *argv), told)
    assert_mistake(main('export.py', '--frozen', 'f'), 'no run in runs/ has saved')
    assert os.listdir('.') == []
