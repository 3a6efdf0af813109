"""Several machines: TF_CONFIG, how they meet, strangers, and what is gone."""

import json
import random
import socket
import struct
import time

import pytest

import cluster
import messages
from cluster import ONE, Machines
from tests.conftest import Machine, find_addresses
from utils import RunFailed, UserError


def config(kind, index, **jobs):
    return json.dumps({'cluster': jobs, 'task': {'type': kind, 'index': index}})


AB = ['a:1', 'b:2']


@pytest.mark.parametrize(
    'text, expected',
    [
        (None, ONE),
        ('', ONE),
        ('{}', ONE),
        (config('worker', 0, worker=['a:1']), ONE),
        (config('chief', 0, chief=['a:1']), ONE),
        (config('worker', 1, worker=AB), Machines(AB, 1)),
        (config('chief', 0, chief=['c:3'], worker=AB), Machines(['c:3'] + AB, 0)),
        (config('worker', 1, chief=['c:3'], worker=AB), Machines(['c:3'] + AB, 2)),
        (
            config('worker', 0, worker=['[::1]:5', 'b:2']),
            Machines(['[::1]:5', 'b:2'], 0),
        ),
    ],
)
def test_tf_config_names_the_machines(text, expected):
    assert cluster.read_machines(text) == expected


@pytest.mark.parametrize(
    'text, told',
    [
        ('{', 'is no JSON'),
        ('7', 'has no "cluster"'),
        ('{"task": {}}', 'has no "cluster"'),
        ('{"cluster": {"worker": ["a:1", "b:1"]}}', 'has no "task"'),
        (config('worker', 2, worker=AB), 'task index 2: "worker" has 2, from 0 on'),
        (config('worker', -1, worker=AB), 'task index -1'),
        (config('worker', True, worker=AB), 'task index True'),
        ('[' * 100000, 'is no JSON'),
        (config('worker', 0, worker=['a:1', 'http://b:1']), 'is no list of'),
        (config('worker', 0, worker=['a:1', 'b:\u00b2']), 'is no list of'),
        (config('worker', '0', worker=AB), "task index '0'"),
        (config('master', 0, worker=AB), "task type 'master' is not in"),
        (config(['x'], 0, worker=AB), 'is not in "cluster"'),
        (config('ps', 0, worker=AB, ps=['c:1']), 'type "ps"; every worker holds'),
        (config('worker', 0, worker=AB, ps=['c:1']), 'type "ps"'),
        (config('evaluator', 0, worker=AB), 'type "evaluator"; the workers'),
        (config('worker', 0, worker=AB, boss=['c:1']), 'unknown job "boss"'),
        (
            config('worker', 0, worker=['a:1', 'b']),
            '"worker" is no list of "host:port"',
        ),
        (config('worker', 0, worker=['a:1', 'b:x']), 'is no list of'),
        (config('worker', 0, worker=['a:1', 'b:70000']), 'is no list of'),
        (config('worker', 0, worker='a:1'), 'is no list of'),
        (config('worker', 0, worker=['a:1', 'a:1']), 'names a:1 twice'),
        (config('chief', 0, chief=AB, worker=['c:1']), 'has 2 chiefs'),
    ],
)
def test_a_mistake_in_tf_config_is_one_line(text, told):
    with pytest.raises(UserError) as caught:
        cluster.read_machines(text)
    assert str(caught.value).startswith('TF_CONFIG ')
    assert told in str(caught.value) and '\n' not in str(caught.value)


def connect(address):
    host, _, port = address.rpartition(':')
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection((host, int(port)), 10)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.parametrize('order', [(0, 1, 2), (2, 1, 0)])
def test_machines_meet_in_any_order(addresses, order):
    machines = []
    for index in order:
        machines.append(Machine(addresses, index))
        time.sleep(0.2)
    for machine in machines:
        connections = machine.wait()
        assert machine.news == [1, 2]
        others = [1, 2] if machine.machines.index == 0 else [0]
        assert sorted(connections) == others
    # The ports are free for TensorFlow's servers.
    for index in range(3):
        cluster.bind(Machines(addresses, index)).close()


def test_a_late_one_is_waited_for_by_name(addresses, monkeypatch, caplog):
    monkeypatch.setattr(cluster, 'TELL_SECONDS', 0.3)
    monkeypatch.setattr(cluster.log, 'propagate', True)
    caplog.set_level('INFO')
    zero, two = Machine(addresses, 0), Machine(addresses, 2)
    time.sleep(1.5)
    one = Machine(addresses, 1)
    assert all(isinstance(m.wait(), dict) for m in (zero, one, two))
    waiting = {record.getMessage() for record in caplog.records}
    assert 'waiting for machine 1 (%s)' % addresses[1] in waiting
    assert not any('machine 0' in line for line in waiting)


def test_a_missing_one_ends_all_by_name(addresses):
    zero = Machine(addresses, 0, start_timeout=2)
    two = Machine(addresses, 2, start_timeout=2)
    told = 'gave up: machine 1 (%s) did not come' % addresses[1]
    for machine in (zero, two):
        outcome = machine.wait()
        assert isinstance(outcome, RunFailed) and str(outcome) == told
    lonely = Machine(addresses, 1, start_timeout=1).wait()
    told = 'gave up: machine 0 (%s) did not come (Connection refused)'
    assert str(lonely) == told % addresses[0]


def test_what_differs_is_told_on_every_machine(addresses):
    facts = {'--seed': 0, 'TensorFlow': '2.21.0'}
    machines = [
        Machine(addresses, 0, facts),
        Machine(addresses, 1, facts),
        Machine(addresses, 2, dict(facts, TensorFlow='1.15.0')),
    ]
    for machine in machines:
        outcome = machine.wait()
        assert isinstance(outcome, UserError)
        assert str(outcome) == (
            'machine 2 (%s) has TensorFlow 1.15.0, machine 0 2.21.0: make them equal'
            % addresses[2]
        )


def test_a_taken_port_is_one_line(addresses):
    with socket.socket() as taken:
        host, _, port = addresses[1].rpartition(':')
        taken.bind(('', int(port)))
        taken.listen(1)
        outcome = Machine(addresses, 1).wait()
        assert isinstance(outcome, UserError)
        assert 'port %s of machine 1' % port in str(outcome)
        assert 'Address already in use' in str(outcome)


def test_ipv6_addresses(monkeypatch):
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(('::1', 0))
        except OSError:
            pytest.skip('no IPv6 here')
    ports = [address.rpartition(':')[2] for address in find_addresses(2)]
    machines = [Machine(['[::1]:' + port for port in ports], i) for i in (0, 1)]
    assert all(isinstance(machine.wait(), dict) for machine in machines)


def test_a_machine_of_a_larger_cluster_is_told(addresses):
    zero = Machine(addresses[:2], 0)
    stranger = Machine(addresses, 2)
    told = "machine 0's TF_CONFIG names 2 machines: make them equal"
    assert str(stranger.wait()) == told
    assert isinstance(Machine(addresses[:2], 1).wait(), dict)
    assert isinstance(zero.wait(), dict)


def test_the_same_machine_twice_is_refused(addresses):
    zero, one = Machine(addresses, 0), Machine(addresses, 1)
    time.sleep(1)
    with connect(addresses[0]) as again:
        messages.send(again, index=1, facts={'--seed': 0})
        answer = messages.receive(again, 5)
    assert answer == {'mistake': 'machine 1 (%s) is there already' % addresses[1]}
    two = Machine(addresses, 2)
    assert all(isinstance(m.wait(), dict) for m in (zero, one, two))


def test_one_that_is_killed_while_it_waits_may_come_again(addresses):
    zero = Machine(addresses, 0)
    with connect(addresses[0]) as killed:
        messages.send(killed, index=1, facts={'--seed': 0})
        time.sleep(0.5)
    time.sleep(1)
    one, two = Machine(addresses, 1), Machine(addresses, 2)
    assert all(isinstance(m.wait(), dict) for m in (zero, one, two))


STRANGERS = [
    b'',
    b'GET / HTTP/1.1\r\n\r\n',
    random.Random(0).getrandbits(80000).to_bytes(10000, 'little'),
    messages.MAGIC,
    messages.MAGIC + struct.pack('>I', 1 << 31) + b'x' * 1000,
    messages.MAGIC + struct.pack('>I', 5) + b'\xff\xff\xff\xff\xff',
    messages.MAGIC + struct.pack('>I', 60000) + b'[' * 60000,
]
STRANGERS += [
    messages.MAGIC + struct.pack('>I', len(text)) + text
    for text in (
        b'7',
        b'{}',
        b'{"index": 99, "facts": {}}',
        b'{"index": 0, "facts": {}}',
        b'{"index": [1], "facts": {}}',
        b'{"index": 1, "facts": 3}',
    )
]


def test_strangers_do_no_harm(addresses):
    zero = Machine(addresses, 0)
    open_ones = []
    for words in STRANGERS:
        stranger = connect(addresses[0])
        stranger.sendall(words)
        open_ones.append(stranger)
    one, two = Machine(addresses, 1), Machine(addresses, 2)
    assert all(isinstance(m.wait(), dict) for m in (zero, one, two))
    for stranger in open_ones:
        stranger.close()


def test_more_silent_strangers_than_room_delay_but_do_not_block(addresses, monkeypatch):
    monkeypatch.setattr(cluster, 'HELLO_SECONDS', 1.0)
    zero = Machine(addresses, 0)
    silent = [connect(addresses[0]) for _ in range(cluster.MAX_STRANGERS + 5)]
    one, two = Machine(addresses, 1), Machine(addresses, 2)
    assert all(isinstance(m.wait(), dict) for m in (zero, one, two))
    for stranger in silent:
        stranger.close()
