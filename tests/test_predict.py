"""predict.py: image files of any kind and size, made what the network expects."""

import io
import json
import os
import re
import resource
import subprocess
import sys

import numpy as np
import pytest

import decoding
import predict
from tests.conftest import ROOT, assert_mistake
from tests.images import GREYS, bmp, gif, jpeg, png, write
from tests.processes import run_python
from tf1 import tf


@pytest.fixture(scope='session')
def digits(part):
    """Ten test images, uint8 [28, 28, 1], one of each class, clear ones first."""
    images, labels = part.valid
    return [images[np.flatnonzero(labels == digit)[0]] for digit in range(10)]


def run(main, trained_dir, *argv):
    return main('predict.py', '--model_dir', trained_dir, *argv)


def read_lines(out):
    """Returns {path: (class, share, runner-up, share)} of the lines after the first."""
    pattern = r'(.*): (\d+) \(([\d.]+) %\), then (\d+) \(([\d.]+) %\)$'
    found = [re.match(pattern, line).groups() for line in out.splitlines()[1:]]
    return {
        path: (int(one), float(p), int(two), float(q)) for path, one, p, two, q in found
    }


def test_files_get_the_classes_that_evaluation_gives(main, trained_dir, part):
    argv = ['--device', 'cpu', '--model_dir', trained_dir, '--errors', 'errors']
    assert main('evaluate.py', *argv).status == 0
    wrong = {int(name.split('_')[0]): name for name in os.listdir('errors')}
    for index in range(40):
        if index not in wrong:
            label = part.valid.labels[index]
            name = 'errors/%d_%d_%d.png' % (index, label, label)
            write(name, png(part.valid.images[index]))
    done = run(main, trained_dir, 'errors')
    assert done.status == 0 and done.err == ''
    lines = read_lines(done.out)
    assert len(lines) == len(os.listdir('errors')) >= 40
    assert list(lines) == sorted(lines)
    for path, (one, p, two, q) in lines.items():
        assert path.endswith('_%d.png' % one)
        assert one != two and p >= q and p + q <= 100.01


def test_every_format_and_size_gives_the_same_class(main, trained_dir, digits):
    expected, images = {}, {}
    for digit in (0, 2, 7):
        image = digits[digit]
        grown = image.repeat(3, axis=0).repeat(3, axis=1)
        colour = np.repeat(image, 3, axis=2)
        alpha = np.full_like(image, 255)
        images.update(
            {
                'a.png': png(image),
                'a.jpg': jpeg(image),
                'a.JPEG': jpeg(colour),
                'a.bmp': bmp(image),
                # The same kernel sees every kind of BMP in one run.
                'grey.bmp': bmp(image, 8, GREYS),
                'dark_on_light.bmp': bmp(image, 8, GREYS[::-1]),
                # The fourth byte of Windows' own is nothing, not transparency.
                'unused.bmp': bmp(image, 32),
                'z.bmp': bmp(255 - image),
                'a.gif': gif(image, 255 - image),
                'large.png': png(grown),
                'inverted.png': png(255 - image),
                'inverted.jpg': jpeg(255 - grown),
                'colour.png': png(colour),
                'opaque.png': png(np.concatenate([colour, alpha], axis=2)),
                # Black ink on nothing, as a drawing program writes it.
                'ink.png': png(np.concatenate([0 * colour, image], axis=2)),
                'grey_ink.png': png(np.concatenate([0 * image, image], axis=2)),
                # Wider than high: filled up in the border's colour.
                'wide.png': png(grown[3:-3]),
                'high.jpg': jpeg(255 - grown[:, 3:-3]),
            }
        )
        os.mkdir(str(digit))
        for name, data in images.items():
            expected[write('%d/%s' % (digit, name), data)] = digit
    done = run(main, trained_dir, *(sorted(expected)))
    assert done.status == 0 and done.err == ''
    lines = read_lines(done.out)
    assert {path: line[0] for path, line in lines.items()} == expected
    for digit in (0, 2, 7):
        exact = [n for n in images if n.endswith(('.png', '.bmp'))]
        shares = {lines['%d/%s' % (digit, name)][1] for name in exact}
        assert max(shares) - min(shares) < 0.02, shares


def test_a_bad_file_costs_a_line_and_the_others_are_done(main, trained_dir, digits):
    good = write('good.png', png(digits[3]))
    bad = {
        write(
            'text.png', b'this is no image'
        ): 'no PNG, JPEG, BMP or GIF, or a damaged',
        write('empty.jpg', b''): 'no PNG, JPEG, BMP or GIF, or a damaged one',
        write('cut.png', png(digits[3])[:-30]): 'no PNG, JPEG, BMP or GIF, or a dam',
        write('cut.gif', gif(digits[3])[:-100]): 'no PNG, JPEG, BMP or GIF, or a dam',
        write('cut.bmp', bmp(digits[3])[:60]): 'no PNG, JPEG, BMP or GIF, or a damaged',
        write('cut.jpg', jpeg(digits[3])[:200]): 'no PNG, JPEG, BMP or GIF, or a damag',
        write(
            'far.bmp', bmp(digits[3])[:10] + b'\x18\xfc\xff\xff' + bmp(digits[3])[14:]
        ): ('no PNG, JPEG, BMP or GIF, or a damag'),
        'absent.png': 'No such file or directory',
        'hollow': 'no image file is in this directory',
    }
    os.mkdir('hollow')
    write('hollow/readme.txt', b'')
    done = run(main, trained_dir, *bad, good)
    assert done.status == 1
    assert list(read_lines(done.out)) == [good]
    *told, last = done.err.splitlines()
    assert last == 'ERROR: 9 of 10 files failed'
    for line, (path, cause) in zip(told, bad.items()):
        assert line.startswith('ERROR: %s: %s' % (path, cause))
    assert len(told) == len(bad)


def test_json_is_one_object_per_file_and_nothing_else(main, trained_dir, digits):
    names = [write('%d.png' % digit, png(digits[digit])) for digit in (4, 8)]
    plain = read_lines(run(main, trained_dir, *names).out)
    done = run(main, trained_dir, '--json', *names, 'absent')
    assert done.status == 1 and 'absent' in done.err
    rows = [json.loads(line) for line in done.out.splitlines()]
    assert [row['path'] for row in rows] == names
    for row in rows:
        one, p, two, q = plain[row['path']]
        assert (row['class'], row['runner_up']) == (one, two)
        assert 100 * row['probability'] == pytest.approx(p, abs=0.006)
        assert 100 * row['runner_up_probability'] == pytest.approx(q, abs=0.006)


def test_a_list_comes_from_stdin(main, trained_dir, digits, monkeypatch):
    os.mkdir('some')
    for name in ('some/b.png', 'some/a.png', 'own name.png', 'first.png'):
        write(name, png(digits[1]))
    given = io.TextIOWrapper(io.BytesIO(b'own name.png\n\nsome\n'))
    monkeypatch.setattr(sys, 'stdin', given)
    done = run(main, trained_dir, 'first.png', '-')
    assert done.status == 0
    assert list(read_lines(done.out)) == [
        *('first.png', 'own name.png', 'some/a.png', 'some/b.png')
    ]
    monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO()))
    done = run(main, trained_dir, '-')
    assert done.status == 2 and done.err == 'ERROR: no file was named\n'


def test_mistakes_get_one_line(main, trained_dir):
    assert_mistake(main('predict.py', '--model_dir', trained_dir), 'required: FILE')
    assert_mistake(main('predict.py', 'x.png'), 'no run in runs/ has saved anything')
    assert_mistake(main('predict.py', '--num', '2', 'x.png'), '--num')


def test_predicting_needs_no_gpu_and_says_nothing_of_tensorflow(trained_dir, digits):
    write('seven.png', png(digits[7]))
    done = run_python('predict.py', '--model_dir', trained_dir, 'seven.png')
    assert done.status == 0 and done.err == ''
    assert done.out.splitlines()[1].startswith('seven.png: 7 (')


def test_light_on_dark_is_told_by_the_border_of_the_training_images():
    image = np.zeros([6, 6, 1], np.uint8)
    image[2:4, 2:4] = 200
    for border, light in ((0, False), (250, True)):
        for given in (image, 255 - image):
            pixels = predict.prepare(given, [6, 6, 1], border)
            expected = 255 - image if light else image
            assert (pixels == expected).all()
    colour = np.repeat(255 - image, 3, axis=2)
    assert (predict.prepare(colour, [6, 6, 3], 0) == colour).all()


@pytest.mark.parametrize(
    'size, placed',
    [
        ((28, 14), [28, 14]),
        ((56, 28), [28, 14]),
        ((1, 1), [14, 14]),
        ((300, 1), [28, 1]),
        ((1, 60000), [1, 14]),
        ((31, 97), [4, 14]),
    ],
)
def test_an_image_keeps_its_proportions(size, placed):
    image = tf.fill(size + (1,), 9.0)
    with tf.Session() as session:
        found = session.run(decoding.find_size(size, [28, 14]))
        fitted = session.run(decoding.fit(image, (28, 14)))
    assert found.tolist() == placed
    assert fitted.shape == (28, 14, 1) and np.allclose(fitted, 9)


def test_grey_is_made_colour_for_a_network_of_colour_images():
    image = np.arange(16, dtype=np.uint8).reshape([4, 4, 1])
    pixels = predict.prepare(image, [4, 4, 3], 0)
    assert (pixels == image).all() and pixels.shape == (4, 4, 3)


def test_long_thin_images_take_no_memory(main, trained_dir):
    for name, size in (('wide.png', (1, 60000)), ('high.png', (60000, 1))):
        write(name, png(np.zeros(size + (1,), np.uint8)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    done = run(main, trained_dir, 'wide.png', 'high.png')
    assert done.status == 0 and len(read_lines(done.out)) == 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500000  # kB


def test_names_that_are_no_text_are_names(trained_dir, digits):
    name = os.fsdecode(b'sieben\xff.png')
    write(name, png(digits[7]))
    env = dict(os.environ, PYTHONIOENCODING='utf-8:strict')
    argv = [sys.executable, ROOT + '/predict.py', '--model_dir', trained_dir]
    for words, given in (([name], b''), (['-'], os.fsencode(name) + b'\n')):
        done = subprocess.run(
            argv + words,
            input=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
        )
        assert done.returncode == 0 and done.stderr == b''
        # Python 3.7 and newer can say it, 3.6 not.
        assert b'sieben\\udcff.png: 7 (' in done.stdout or sys.version_info < (3, 7)


@pytest.mark.skipif(os.getuid() == 0, reason='root may read everything')
def test_a_directory_that_can_not_be_read_is_told(main, trained_dir):
    os.makedirs('some/locked', mode=0)
    done = run(main, trained_dir, 'some')
    assert done.status == 1 and 'some/locked: Permission denied' in done.err


def test_results_that_nobody_takes_are_a_failure(trained_dir, digits):
    write('seven.png', png(digits[7]))
    for script, argv in (('predict.py', ['seven.png']), ('evaluate.py', [])):
        words = [sys.executable, os.path.join(ROOT, script)] + argv
        words += ['--model_dir', trained_dir]
        for target, status in (('/dev/full', 1), ('/dev/null', 0)):
            with open(target, 'w') as out:
                done = subprocess.run(
                    words, stdout=out, stderr=subprocess.PIPE, universal_newlines=True
                )
            assert done.returncode == status, done.stderr
            lost = 'ERROR: stdout: No space left on device\n'
            assert done.stderr.endswith(lost) == bool(status)
