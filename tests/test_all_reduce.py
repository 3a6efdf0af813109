"""The all-reduce between machines, in real processes over loopback."""

import json
import re
import signal

import numpy as np
import pytest

from tests.conftest import find_addresses
from tests.processes import Process

# What each machine runs; what it prints last is JSON.
PROGRAM = """
import functools, json, os, sys
import numpy as np
import all_reduce, cluster, utils
from tf1 import tf

index, addresses = int(sys.argv[1]), sys.argv[2:]
machines = cluster.Machines(addresses, index)
devices = utils.choose_devices('cpu', 2)
with tf.Graph().as_default(), tf.device('/cpu:0'):
    random = np.random.RandomState(index)
    a = tf.get_variable('a', initializer=random.randn(40, 3).astype(np.float32))
    b = tf.get_variable('b', initializer=random.randn(7))
    c = tf.get_variable('c', initializer=np.int64(2 ** 60 + index))
    d = tf.get_variable('d', initializer=np.float32(index))
    e = tf.get_variable('e', initializer=np.float32(-0.0 if index == 0 else index))
    with tf.device('/cpu:1'):
        scaled = a * 2.0
    sums = all_reduce.add_up([scaled, d], machines, key=1)
    places = all_reduce.gather([b], machines, key=2)
    equality = all_reduce.build_equality([a, b, c, d, e], [e], machines)
    spoil = a[3, 1].assign(a[3, 1] + 1e-6)
    connections, _ = cluster.meet(machines, {}, 60)
    start_server = functools.partial(cluster.start_server, machines, connections, 60)
    with utils.open_session(devices, (1, 2), start_server=start_server) as session:
        session.run(tf.global_variables_initializer())
        found = {'own': session.run(a).tolist()}
        found['sum'], found['d'] = (x.tolist() for x in session.run(sums))
        found['b'] = session.run(b).tolist()
        found['places'] = session.run(places)[0].tolist()
        read = lambda: session.run(equality.fingerprints)
        tell = lambda: all_reduce.find_difference(read(), equality.names, machines)
        found['different'] = tell()
        session.run(equality.broadcast)
        found['equal'] = tell()
        values = session.run([a, b, c, d, e])
        found['bits'] = [value.tobytes().hex() for value in values]
        if index == 1:
            session.run(spoil)
        found['spoilt'] = tell()
    print(json.dumps(found), flush=True)
os._exit(0)
"""


@pytest.fixture(scope='module', params=[2, 3])
def machines(request):
    """What two and three machines found, a dict each."""
    addresses = find_addresses(request.param)
    processes = [
        Process('-c', [str(index)] + addresses, PROGRAM)
        for index in range(request.param)
    ]
    found = []
    try:
        for process in processes:
            status, out, err = process.end()
            assert status == 0 and err == '', err
            found.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
    return found


def test_sums_are_over_all_machines_and_the_same_bits(machines):
    expected = 2 * sum(np.array(machine['own'], np.float32) for machine in machines)
    for machine in machines:
        assert machine['sum'] == machines[0]['sum']
        assert machine['d'] == sum(range(len(machines)))
    np.testing.assert_allclose(machines[0]['sum'], expected, rtol=1e-5, atol=1e-6)


def test_each_machines_values_are_gathered_in_its_place(machines):
    for machine in machines:
        assert machine['places'] == [other['b'] for other in machines]


def test_a_broadcast_gives_all_machine_0s_bits(machines):
    own = np.array(machines[0]['own'], np.float32)
    assert machines[0]['bits'][0] == own.tobytes().hex()
    assert machines[0]['bits'][2] == np.int64(2**60).tobytes().hex()
    assert machines[0]['bits'][4] == np.float32(-0.0).tobytes().hex()
    for machine in machines:
        assert machine['bits'] == machines[0]['bits']


def test_different_variables_are_told_by_machine_and_name(machines):
    for machine in machines:
        assert re.match(
            r'machine 1 \(127.0.0.1:\d+\) holds other values than machine 0 of a, b, c '
            'and 1 more: ',
            machine['different'],
        )
        assert machine['equal'] is None
        # One value in the last bits, on machine 1.
        assert 'holds other values than machine 0 of a: ' in machine['spoilt']
