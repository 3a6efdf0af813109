"""Files damaged at random come to the right result, or to one line that names them.

`python -m tests.fuzz --rounds 1000` does more of the same.
"""

import pytest

from tests import fuzz

# Of each kind, as many as take a few seconds.
ROUNDS = {
    'idx': 50,
    'idx_gz': 50,
    'cifar': 100,
    'npz': 60,
    'npz_packed': 60,
    'images': 200,
    'folders': 4,
    'records': 4,
    'records_gz': 4,
    'kept': 3,
    'checkpoints': 50,
    'metrics': 50,
    'config': 50,
    'edited_config': 60,
}
# Nothing that is damaged in these is to be refused.
HARMLESS = {'kept', 'metrics'}


def test_every_kind_is_tried():
    assert sorted(ROUNDS) == sorted(fuzz.KINDS)


@pytest.mark.parametrize('kind', list(ROUNDS))
def test_a_damaged_file_is_read_right_or_refused_in_one_line(kind):
    refused, faults = fuzz.fuzz(kind, ROUNDS[kind])
    assert not faults, '\n'.join(faults)
    if kind not in HARMLESS and ROUNDS[kind] >= 50:
        assert refused, 'what is damaged matters to nobody'


def test_what_is_drawn_depends_on_kind_seed_and_round_only():
    data = bytes(range(200))
    drawn = []
    for key in ('idx 0 1', 'idx 0 1', 'idx 0 2', 'idx 1 1'):
        drawn.append(fuzz.damage(data, fuzz.random.Random(key)))
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 3
    assert all(damaged != data for damaged, _ in drawn)


def test_a_wrong_result_and_a_line_without_a_file_are_faults(monkeypatch):
    def read_wrong(directory, path):
        raise AssertionError('other pixels')

    def refuse_namelessly(directory, path):
        raise fuzz.UserError('no file')

    def crash(directory, path):
        raise KeyError('deep inside')

    for use, told in (
        (read_wrong, 'AssertionError: other pixels'),
        (refuse_namelessly, 'AssertionError: names no file: no file'),
        (crash, "KeyError: 'deep inside'"),
    ):
        kind = fuzz.Kind({'data/a': b'abc'}, ['data/a'], use)
        monkeypatch.setitem(fuzz.KINDS, 'made up', lambda k=kind: opened(k))
        refused, faults = fuzz.fuzz('made up', 2)
        assert refused == 0
        assert [fault.partition('): ')[2] for fault in faults] == [told] * 2


@fuzz.contextlib.contextmanager
def opened(kind):
    yield kind
