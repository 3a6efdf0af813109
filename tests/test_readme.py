"""The README's commands, run as a newcomer would: in their order, in one shell."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

import benchmark
import command_line
import data_description
import evaluate
import export
import model
import predict
from data_sets import Examples
from tests.conftest import ROOT, make_flags, write_data_set

# What is not run here, and why.
LEFT_OUT = {
    r'make test$': 'is what runs this',
    r'python benchmark\.py ': 'takes minutes; test_benchmark.py runs it',
    r'\. \.venv/\*/bin/activate$': 'PATH does it here',
}
# What it runs once it has installed.
SAME = {'make train': 'python train_multi_gpu.py --num_gpus 2'}


def read_commands(name):
    """Returns the lines of the sh blocks of a page, without comments."""
    with open(os.path.join(ROOT, name), encoding='utf-8') as file:
        blocks = re.findall(r'^```sh\n(.*?)^```$', file.read(), re.M | re.S)
    lines = [
        line.split('  #')[0].strip() for block in blocks for line in block.split('\n')
    ]
    return [line for line in lines if line]


def write_network():
    """Writes the README's network to the file that the README names."""
    (block,) = re.findall(
        r'^```python\n(.*?)^```$', read_pages()['README.md'], re.M | re.S
    )
    with open('my_network.py', 'w') as file:
        file.write(block)


def read_pages():
    pages = {}
    for name in ('README.md', 'README.ja.md'):
        with open(os.path.join(ROOT, name), encoding='utf-8') as file:
            pages[name] = file.read()
    return pages


@pytest.fixture
def copy(tmp_path, part):
    """A copy of the project with a little MNIST; the shell stands in it."""
    listed = subprocess.check_output(['git', 'ls-files'], cwd=ROOT)
    for name in listed.decode().splitlines():
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not name.startswith(('data/', 'tests/')):
            shutil.copy(os.path.join(ROOT, name), str(target))
    shutil.rmtree(str(tmp_path / 'data' / 'mnist'))
    little = part._replace(
        train=Examples(*(a[:640] for a in part.train)),
        valid=Examples(*(a[:200] for a in part.valid)),
    )
    write_data_set(tmp_path / 'data' / 'mnist', little)


def run(line):
    env = dict(os.environ, CUDA_VISIBLE_DEVICES='')
    env['PATH'] = os.path.dirname(sys.executable) + os.pathsep + env['PATH']
    return subprocess.run(
        ['sh', '-c', line],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
        timeout=300,
    )


def serve(line):
    """A command that runs till it is ended: it must answer on a port."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    program = os.path.join(os.path.dirname(sys.executable), line.split()[0])
    argv = [program] + line.split()[1:] + ['--port', str(port)]
    with open('served.log', 'w') as log:
        server = subprocess.Popen(argv, stdout=log, stderr=log)
    try:
        deadline = time.time() + 60
        while server.poll() is None and time.time() < deadline:
            with contextlib.suppress(OSError):
                url = 'http://localhost:%d/data/runs' % port
                with urllib.request.urlopen(url, timeout=10) as answer:
                    if b'/train' in answer.read():
                        return
            time.sleep(0.2)
        with open('served.log') as log:
            raise AssertionError(log.read())
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=30)


def test_every_command_of_the_readme_works_in_its_order(copy):
    write_network()
    ran = set()
    for line in read_commands('README.md'):
        line = SAME.get(line, line)
        if line in ran or any(re.match(pattern, line) for pattern in LEFT_OUT):
            continue
        ran.add(line)
        if line.startswith('tensorboard '):
            serve(line)
            continue
        done = run(line)
        if '--gpus ' in line:
            # Without a GPU, one line says so.
            assert done.returncode == 2 and 'sees no GPU' in done.stderr, done.stderr
            assert done.stderr.count('\n') == 1
        else:
            assert done.returncode == 0, '%s\n%s%s' % (line, done.stdout, done.stderr)
            assert 'Traceback' not in done.stderr
    assert len(ran) >= 11
    assert sorted(os.listdir('exported/1')) == [
        'assets.extra',
        'saved_model.pb',
        'variables',
    ]


def test_both_languages_have_the_same_commands_flags_links_and_figures():
    english, japanese = read_pages().values()
    assert read_commands('README.md') == read_commands('README.ja.md')
    fences = r'^```.*?^```$'
    blocks = [re.findall(fences, page, re.M | re.S) for page in (english, japanese)]
    assert len(blocks[0]) > 10 and blocks[0] == blocks[1]
    english, japanese = (
        re.sub(fences, '', page, flags=re.M | re.S) for page in (english, japanese)
    )
    for pattern in (
        r'^\| (`-.*?) \|',  # the table of flags
        r'`([^`\n]+)`',
        r'\]\((?!README)(.*?)\)',
        r'(\d+\.\d+) ?%',
        r'^(#+) ',
    ):
        one, other = (
            sorted(set(re.findall(pattern, page, re.M))) for page in (english, japanese)
        )
        assert one and one == other, set(one) ^ set(other)


def test_the_network_of_the_readme_is_trained_evaluated_and_exported(
    main, flags, part_dir
):
    write_network()
    flags += [
        '--data_dir',
        part_dir,
        '--max_steps',
        '20',
        '--model',
        'my_network.py:mlp',
    ]
    done = main('train_multi_gpu.py', '--num_gpus', '2', *flags)
    assert done.status == 0 and done.err == ''
    assert done.out.startswith('model my_network.py:mlp: 203530 parameters, 10 classes')
    for script, argv in (
        ('evaluate.py', ['--device', 'cpu']),
        ('export.py', ['--export_dir', 'exported']),
    ):
        done = main(script, *argv)
        assert done.status == 0 and done.err == ''
        assert done.out.startswith('model my_network.py:mlp of runs/')
    assert sorted(os.listdir('exported')) == [
        'assets.extra',
        'saved_model.pb',
        'variables',
    ]


def test_every_link_leads_to_a_file():
    pages = ['README.md', 'README.ja.md', 'CONTRIBUTING.md', 'CHANGELOG.md']
    pages += ['docs/' + n for n in os.listdir(ROOT + '/docs') if n.endswith('.md')]
    for page in pages:
        with open(os.path.join(ROOT, page), encoding='utf-8') as file:
            links = re.findall(r'\]\(([^)#]*)[^)]*\)', file.read())
        for link in links:
            if not link.startswith('http'):
                target = os.path.join(ROOT, os.path.dirname(page), link)
                assert os.path.exists(target), '%s: %s' % (page, link)


def test_pictures_are_small():
    names = os.listdir(ROOT + '/docs/pictures')
    assert len(names) >= 4
    for name in names:
        assert os.path.getsize(os.path.join(ROOT, 'docs/pictures', name)) < 200000, name


def parse_training(argv):
    command_line.parse('', model.NETWORKS, towers=True, argv=argv)


PARSERS = {
    'train_multi_gpu.py': parse_training,
    'evaluate.py': evaluate.parse,
    'predict.py': predict.parse,
    'export.py': export.parse,
    'benchmark.py': benchmark.parse,
    'input_pipeline.py': data_description.parse,
}


@pytest.fixture
def help_pages(capsys, monkeypatch):
    """{script: what its `--help` prints on 80 columns}."""
    monkeypatch.setenv('COLUMNS', '80')
    pages = {}
    for script, parse in PARSERS.items():
        with pytest.raises(SystemExit):
            parse(['--help'])
        pages[script] = capsys.readouterr().out
    return pages


def test_every_flag_of_the_readme_exists(help_pages):
    shown = ''.join(help_pages.values())
    others = {'--logdir', '--dir', '--tag_set', '--signature_def', '--kills'}
    for flag in set(re.findall(r'--[a-z_]+', read_pages()['README.md'])) - others:
        assert flag in shown, flag


@pytest.mark.parametrize('script', list(PARSERS))
def test_help_fits_80_columns_and_shows_every_default(help_pages, script):
    page = help_pages[script]
    long = [line for line in page.split('\n') if len(line) > 80]
    assert not long, long
    flags = re.split(r'^  (?=--)', page, flags=re.M)[1:]
    assert len(flags) > 4
    for told in flags:
        # A line ends anywhere within the words.
        assert re.search(r'\(default:\s', told), told


def test_every_recipe_is_a_file_of_flags_and_its_result_is_in_the_readme():
    names = sorted(os.listdir(os.path.join(ROOT, 'recipes')))
    assert 'mnist.txt' in names
    for name in names:
        flags = make_flags('@' + os.path.join(ROOT, 'recipes', name))
        assert flags.model in model.NETWORKS, name
        for page, text in read_pages().items():
            row = r'^\| .*@recipes/%s.*%% \|$' % re.escape(name)
            assert re.findall(row, text, re.M), '%s has no row of %s' % (page, name)
