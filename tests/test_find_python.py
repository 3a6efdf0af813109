"""find_python.sh: which interpreter `make` takes."""

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

WORKING = '#!/bin/sh\necho "$0"\n'
SHIM = '#!/bin/sh\necho "pyenv: $0: command not found" >&2\nexit 127\n'
PYENV = """#!/bin/sh
case "$1 $2" in
'whence python3.7') echo 3.7.16 ;;
'prefix 3.7.16') echo {0}/versions/3.7.16 ;;
*) exit 1 ;;
esac
"""


@pytest.fixture
def find(tmp_path):
    """A function (programs {name: text}, *versions) -> (exit status, path found)."""

    def find(programs, *versions, machine='Linux x86_64'):
        programs = dict(programs, uname='#!/bin/sh\necho %s\n' % machine)
        for name, text in programs.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.format(tmp_path))
            path.chmod(0o755)
        os.symlink('/bin/sh', str(tmp_path / 'sh'))
        os.symlink('/usr/bin/sort', str(tmp_path / 'sort'))
        done = subprocess.run(
            [str(tmp_path / 'sh'), ROOT + '/find_python.sh'] + list(versions),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            universal_newlines=True,
            env={'PATH': str(tmp_path)},
        )
        return done.returncode, done.stdout.strip().replace(str(tmp_path) + '/', '')

    return find


def test_a_working_37_comes_first(find):
    programs = {'python3.7': WORKING, 'python3.6': WORKING, 'python3': WORKING}
    assert find(programs) == (0, 'python3.7')


def test_36_comes_before_python3(find):
    assert find({'python3.6': WORKING, 'python3': WORKING}) == (0, 'python3.6')


def test_a_shim_that_does_not_work_asks_its_version_manager(find):
    programs = {
        'python3.7': SHIM,
        'python3': WORKING,
        'pyenv': PYENV,
        'versions/3.7.16/bin/python3.7': WORKING,
    }
    assert find(programs) == (0, 'versions/3.7.16/bin/python3.7')


def test_a_shim_without_its_version_manager_is_passed_over(find):
    assert find({'python3.7': SHIM, 'python3': WORKING}) == (0, 'python3')


def test_where_tensorflow_1_has_no_wheels_python3_is_taken(find):
    programs = {'python3.7': WORKING, 'python3': WORKING}
    assert find(programs, machine='Darwin arm64') == (0, 'python3')


def test_a_version_asked_for_is_found_or_is_an_error(find):
    assert find({'python3.11': WORKING, 'python3.7': WORKING}, '3.11') == (
        0,
        'python3.11',
    )


def test_nothing_that_works_is_an_error(find):
    assert find({'python3.7': SHIM, 'python3': SHIM}) == (1, '')


def test_the_interpreter_found_for_real_runs():
    found = subprocess.check_output(
        ['sh', ROOT + '/find_python.sh', '%d.%d' % sys.version_info[:2]],
        universal_newlines=True,
    ).strip()
    version = subprocess.check_output([found, '-c', 'import sys; print(sys.version)'])
    assert version.decode().startswith('%d.%d.' % sys.version_info[:2])
