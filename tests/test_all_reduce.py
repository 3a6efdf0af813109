"""The all-reduce between machines, in real processes over loopback."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.conftest import ROOT, find_addresses

# What each machine runs; what it prints last is JSON.
PROGRAM = """
import json, os, sys
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
    with tf.device('/cpu:1'):
        scaled = a * 2.0
    sums = all_reduce.add_up([scaled, d], len(addresses), key=1)
    broadcast = all_reduce.build_broadcast([a, b, c, d], index, len(addresses), key=2)
    fingerprints = all_reduce.build_fingerprints([a, b, c, d], index, len(addresses), 9)
    spoil = a[3, 1].assign(a[3, 1] + 1e-6)
    connections = cluster.meet(machines, {}, 60)
    config = utils.session_config(devices, (1, 2))
    target = cluster.start_server(machines, config)
    cluster.go_together(machines, connections, 60)
    with tf.Session(target, config=config) as session:
        session.run(tf.global_variables_initializer())
        found = {'own': session.run(a).tolist()}
        found['sum'], found['d'] = (x.tolist() for x in session.run(sums))
        found['different'] = session.run(fingerprints).tolist()
        session.run(broadcast)
        found['equal'] = session.run(fingerprints).tolist()
        values = session.run([a, b, c, d])
        found['bits'] = [value.tobytes().hex() for value in values]
        if index == 1:
            session.run(spoil)
        found['spoilt'] = session.run(fingerprints).tolist()
    print(json.dumps(found), flush=True)
os._exit(0)
"""


@pytest.fixture(scope='module', params=[2, 3])
def machines(request):
    """What two and three machines found, a dict each."""
    addresses = find_addresses(request.param)
    processes = [
        subprocess.Popen(
            [sys.executable, '-c', PROGRAM, str(index)] + addresses,
            env=dict(os.environ, PYTHONPATH=ROOT),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            universal_newlines=True,
        )
        for index in range(request.param)
    ]
    found = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0 and err == '', err
            found.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
    return found


def test_sums_are_over_all_machines_and_the_same_bits(machines):
    expected = 2 * sum(np.array(machine['own'], np.float32) for machine in machines)
    for machine in machines:
        assert machine['sum'] == machines[0]['sum']
        assert machine['d'] == sum(range(len(machines)))
    np.testing.assert_allclose(machines[0]['sum'], expected, rtol=1e-5, atol=1e-6)


def test_a_broadcast_gives_all_machine_0s_bits(machines):
    own = np.array(machines[0]['own'], np.float32)
    assert machines[0]['bits'][0] == own.tobytes().hex()
    assert machines[0]['bits'][2] == np.int64(2**60).tobytes().hex()
    for machine in machines:
        assert machine['bits'] == machines[0]['bits']


def test_fingerprints_tell_equal_from_different_variables(machines):
    for machine in machines:
        assert len(set(machine['different'])) == len(machines)
        assert len(set(machine['equal'])) == 1
        # One value in the last bits, on machine 1.
        first, spoilt, *others = machine['spoilt']
        assert spoilt != first and all(other == first for other in others)
        assert machine['spoilt'] == machines[0]['spoilt']
