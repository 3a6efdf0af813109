"""How a machine learns that another is gone, and how all stop together."""

import argparse
import os
import socket
import threading
import time

import pytest

import watch
from messages import receive, send
from tests.conftest import Machine
from tf1 import tf
from utils import RunFailed, RunStopped, UserError
from watch import AllStopped, Watch, watched


class Team:
    """Three machines that watch each other, and what ended each."""

    def __init__(self, addresses):
        self.addresses = addresses
        machines = [Machine(addresses, index) for index in range(3)]
        self.connections = [machine.wait() for machine in machines]
        self.ends = [[], [], []]
        self.wishes = [None, None, None]
        self.flags = argparse.Namespace(step_timeout=1.5, start_timeout=3.0)
        self.watches = [
            Watch(
                machine.machines,
                machine.outcome,
                self.flags,
                lambda index=index: self.wishes[index],
                end=self.ends[index].append,
            )
            for index, machine in enumerate(machines)
        ]

    def name(self, index):
        return 'machine %d (%s)' % (index, self.addresses[index])


@pytest.fixture
def team(addresses, monkeypatch):
    monkeypatch.setattr(watch, 'BEAT_SECONDS', 0.05)
    monkeypatch.setattr(watch, 'SILENCE_SECONDS', 3.0)
    team = Team(addresses)
    yield team
    for one in team.watches:
        one.close()


def wait_until(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


def go_on(team, seconds, indices=(0, 1, 2)):
    """Lets steps end on some machines for a while."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for index in indices:
            team.watches[index].hear([0, 0, 0])
        time.sleep(0.05)


def test_heartbeats_keep_quiet_machines_together(team):
    go_on(team, 4.5)
    assert team.ends == [[], [], []]


def test_what_is_told_last_arrives_though_the_connection_is_reset(addresses):
    machines = [Machine(addresses[:2], index) for index in range(2)]
    ours, theirs = (machine.wait()[1 - i] for i, machine in enumerate(machines))
    for _ in range(3):  # until acknowledgements are put off, as with beats
        send(ours, place=1)
        receive(theirs, 5)
        send(theirs, place=1)
        receive(ours, 5)
        time.sleep(0.3)
    send(theirs, place=2)
    time.sleep(0.05)
    send(ours, place=3)
    send(ours, failed='why')
    ours.close()  # a message unread, as by a process that ends
    assert receive(theirs, 5) == {'place': 3}
    assert receive(theirs, 5) == {'failed': 'why'}


@pytest.mark.parametrize('gone', [0, 1, 2])
def test_a_machine_that_is_gone_ends_the_others_by_name(team, gone):
    team.watches[gone].close()  # it says nothing any more: it was killed
    for connection in team.connections[gone].values():
        connection.shutdown(socket.SHUT_RDWR)
    others = [index for index in range(3) if index != gone]
    wait_until(lambda: all(team.ends[index] for index in others))
    for index in others:
        (error,) = team.ends[index]
        assert isinstance(error, RunFailed)
        assert str(error).startswith('%s is gone' % team.name(gone))


def test_a_machine_that_is_silent_is_gone(team):
    team.flags.start_timeout = 60.0  # else both limits are reached at once
    team.watches[1].close()  # as after SIGSTOP: its connection stays open
    wait_until(lambda: team.ends[0] and team.ends[2])
    for index in (0, 2):
        assert str(team.ends[index][0]).startswith('%s is gone' % team.name(1))


def test_a_step_that_does_not_end_names_who_is_behind(team):
    time.sleep(1)  # the first, which compiles, may take longer
    assert team.ends == [[], [], []]
    go_on(team, 0.2)
    go_on(team, 0.2, indices=(0, 1))
    wait_until(lambda: all(team.ends))
    told = 'a step did not end within --step_timeout 1.5; %s is the' % team.name(2)
    assert all(str(end[0]).startswith(told) for end in team.ends), team.ends


def test_a_first_step_that_does_not_end_has_its_limit_too(team):
    wait_until(lambda: all(team.ends))
    told = 'a step did not end within --start_timeout 3; '
    assert all(str(end[0]).startswith(told) for end in team.ends), team.ends


def test_all_hear_who_wishes_to_stop_and_how(team):
    made = [[], [], []]
    for own, one in zip(made, team.watches):
        one.make_wish = own.append
        one.wish()
    assert made == [[], [], []]
    team.wishes[1] = RunStopped('stopped by SIGTERM', 143)
    team.wishes[2] = RunStopped('--max_minutes is nearly over', 0)
    for one in team.watches * 2:
        one.wish()
    assert made == [[], [144], [1]], 'each wishes once'
    assert team.watches[0].hear([0.0, 0.0, 0.0]) is None
    heard = [one.hear([0.0, 144.0, 1.0]) for one in team.watches]
    assert all(isinstance(stop, AllStopped) and stop.status == 143 for stop in heard)
    assert str(heard[0]) == '%s: stopped by SIGTERM' % team.name(1)
    assert str(heard[1]) == 'stopped by SIGTERM'
    late = team.watches[0].hear([0.0, 0.0, 1.0])
    assert late.status == 0
    assert str(late) == '%s: --max_minutes is nearly over' % team.name(2)


def run(team, index, what):
    """Runs `what` inside `watched` in a thread of its own."""

    def inside():
        try:
            with watched(team.watches[index]):
                what()
        except BaseException as error:
            raised.append(error)

    raised = []
    thread = threading.Thread(target=inside, daemon=True)
    thread.raised = raised
    thread.start()
    return thread


def stop():
    raise AllStopped('stopped by SIGINT', 130)


@pytest.mark.parametrize('what', [lambda: None, stop])
def test_no_machine_leaves_before_the_others_are_done(team, what):
    first = [run(team, index, what) for index in (0, 1)]
    time.sleep(0.3)
    assert all(thread.is_alive() for thread in first)
    last = run(team, 2, what)
    for thread in first + [last]:
        thread.join(5)
        assert not thread.is_alive()
        assert [type(error) for error in thread.raised] == [AllStopped] * (what is stop)
    for connections in team.connections:
        for connection in connections.values():
            connection.close()
    time.sleep(0.3)
    assert team.ends == [[], [], []]


@pytest.mark.parametrize(
    'error, kind, told',
    [
        (
            UserError('no checkpoint can be read'),
            UserError,
            'no checkpoint can be read',
        ),
        (RunFailed('step 5 has nan values'), RunFailed, 'step 5 has nan values'),
        (OSError(28, 'No space left'), RunFailed, 'OSError: [Errno 28] No space left'),
        (RunStopped('stopped by SIGTERM', 143), RunFailed, 'stopped by SIGTERM'),
        (KeyboardInterrupt(), RunFailed, 'stopped by SIGINT'),
    ],
    ids=str,
)
@pytest.mark.parametrize('index', [0, 2])
def test_a_failure_is_told_to_all_with_its_cause(team, index, error, kind, told):
    def fail():
        raise error

    run(team, index, fail).join(5)
    wait_until(lambda: all(team.ends))
    for other, end in enumerate(team.ends):
        if other == index:
            assert end == [error]
        else:
            assert type(end[0]) is kind and len(end) == 1
            assert str(end[0]) == '%s: %s' % (team.name(index), told)


@pytest.mark.parametrize(
    'echo',
    [
        tf.errors.UnavailableError(None, None, 'Socket closed'),
        tf.errors.InvalidArgumentError(
            None, None, 'NaN [[all_reduce/CollectiveReduce]]'
        ),
    ],
    ids=['lost', 'handed on'],
)
def test_what_tensorflow_says_of_another_machine_waits_for_its_name(team, echo):
    def fail():
        raise echo

    thread = run(team, 0, fail)
    time.sleep(0.3)
    assert team.ends == [[], [], []]
    team.watches[1].close()
    for connection in team.connections[1].values():
        connection.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: team.ends[0] and team.ends[2])
    thread.join(5)
    assert len(team.ends[0]) == 1
    assert str(team.ends[0][0]).startswith('%s is gone' % team.name(1))


def test_a_stranger_in_place_of_a_machine_is_gone(team):
    team.connections[1][0].sendall(os.urandom(1000))
    wait_until(lambda: team.ends[0] and team.ends[2])
    assert str(team.ends[2][0]).startswith('%s is gone' % team.name(1))
