"""Several machines: which they are, and how they meet.

Each machine has one port, the one TF_CONFIG gives it. While the machines meet, machine
0 listens there itself; the others connect to it, and the connections stay open for
heartbeats (watch.py). After that the port is TensorFlow's.
"""

import collections
import contextlib
import json
import os
import queue
import re
import select
import socket
import threading
import time

from messages import receive, send
from tf1 import quiet_stderr, tf
from utils import RunFailed, UserError, log

# Seconds that a connection has to say who it is.
HELLO_SECONDS = 10.0
MAX_STRANGERS = 64
DIAL_SECONDS = 5.0
TELL_SECONDS = 10.0
RETRY_SECONDS = 0.5

# addresses: 'host:port' of every machine, in the order of their indices. index: which
# of them this is.
Machines = collections.namedtuple('Machines', 'addresses index')
ADDRESS = re.compile(r'(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}$')
# Without TF_CONFIG.
ONE = Machines(['localhost'], 0)


# TF_CONFIG


def read_machines(text):
    """Returns the `Machines` that TF_CONFIG names, `ONE` if it is one machine.

    Args:
      text: the variable's value, or None.

    Raises:
      UserError: says what is wrong with it.

    Source: the TF_CONFIG of TensorFlow's estimators and of Kubeflow's TFJob.
    """
    try:
        config = json.loads(text or '{}')
    except (ValueError, RecursionError) as error:
        raise _mistake('is no JSON: %s' % error) from None
    if config == {}:
        return ONE
    if not isinstance(config, dict) or not isinstance(config.get('cluster'), dict):
        raise _mistake('has no "cluster"')
    task = config.get('task')
    if not isinstance(task, dict):
        raise _mistake('has no "task"')
    jobs = dict(config['cluster'])
    for other, instead in (
        ('ps', 'every worker holds all variables: make it a worker'),
        ('evaluator', 'the workers evaluate themselves: leave it out'),
    ):
        if other in jobs or other == task.get('type'):
            raise _mistake('has a task of type "%s"; %s' % (other, instead))
    unknown = set(jobs) - {'chief', 'worker'}
    if unknown:
        raise _mistake('has the unknown job "%s"' % sorted(unknown)[0])
    for name, addresses in jobs.items():
        if not isinstance(addresses, list) or not all(map(_is_address, addresses)):
            raise _mistake('"%s" is no list of "host:port"' % name)
    kind, index = task.get('type'), task.get('index')
    if not isinstance(kind, str) or kind not in jobs:
        raise _mistake('task type %r is not in "cluster"' % (kind,))
    if type(index) is not int or not 0 <= index < len(jobs[kind]):
        raise _mistake(
            'task index %r: "%s" has %d, from 0 on' % (index, kind, len(jobs[kind]))
        )
    chiefs = jobs.get('chief', [])
    if len(chiefs) > 1:
        raise _mistake('has %d chiefs, not one' % len(chiefs))
    addresses = chiefs + jobs.get('worker', [])
    twice = [address for address in addresses if addresses.count(address) > 1]
    if twice:
        raise _mistake('names %s twice' % twice[0])
    if len(addresses) == 1:
        return ONE
    return Machines(addresses, index if kind == 'chief' else index + len(chiefs))


def check_alone(text):
    """Raises a UserError where TF_CONFIG names several machines."""
    number = len(read_machines(text).addresses)
    if number > 1:
        raise _mistake(
            'names %d machines: use train_multi_gpu.py, or unset it' % number
        )


def _mistake(what):
    return UserError('TF_CONFIG %s' % what)


def _is_address(value):
    if not isinstance(value, str) or not ADDRESS.match(value):
        return False
    return 0 < _split(value)[1] < 65536


def _split(address):
    """Returns (host, port) of 'host:port' or '[host]:port'."""
    host, _, port = address.rpartition(':')
    return host.strip('[]'), int(port)


def name_machine(machines, index):
    """Returns 'machine 1 (host:port)'."""
    return 'machine %d (%s)' % (index, machines.addresses[index])


# How the machines meet


def bind(machines):
    """Returns a socket bound to this machine's own port.

    Raises:
      UserError: the port is taken. (TensorFlow's own words for that are a riddle.)
    """
    host, port = _split(machines.addresses[machines.index])
    family = socket.AF_INET6 if ':' in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(('', port))
        # Two sockets may be bound, and only one may listen.
        listener.listen(MAX_STRANGERS)
    except OSError as error:
        listener.close()
        raise UserError(
            'port %d of %s: %s; end what uses it, or give another in TF_CONFIG'
            % (port, name_machine(machines, machines.index), error.strerror)
        ) from None
    return listener


def meet(machines, facts, start_timeout, news=None):
    """Waits until all machines are there, and refuses if they differ.

    Args:
      machines: the `Machines`.
      facts: {name: value} that must be equal everywhere, of JSON's types.
      start_timeout: seconds to wait at most.
      news: what machine 0 tells the others, of JSON's types.

    Returns:
      (connections, news): {index: connection}, machine 0's to each other one and the
      others' to machine 0; and machine 0's news. The own port is free again.

    Raises:
      UserError: the port is taken, or another machine has other facts. All are told.
      RunFailed: a machine was not there in time.
    """
    deadline = time.monotonic() + start_timeout
    with contextlib.closing(bind(machines)) as listener:
        if machines.index == 0:
            connections = _gather(machines, facts, listener, deadline, news)
        else:
            connection, news = _report(machines, facts, deadline)
            connections = {0: connection}
    for connection in connections.values():
        # Or what is told right after a beat waits until that is acknowledged, and is
        # lost where the process ends first: so would be why it ends.
        with contextlib.suppress(OSError):  # it may be gone already
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connections, news


def _gather(machines, facts, listener, deadline, news):
    """Machine 0's part of `meet`."""
    found, hellos = {}, queue.Queue()
    greeting = threading.Semaphore(MAX_STRANGERS)
    listener.settimeout(RETRY_SECONDS)
    tell_at = time.monotonic() + TELL_SECONDS
    while True:
        with contextlib.suppress(socket.timeout):
            connection, _ = listener.accept()
            connection.settimeout(HELLO_SECONDS)
            if greeting.acquire(blocking=False):
                threading.Thread(
                    target=_greet, args=(connection, hellos, greeting), daemon=True
                ).start()
            else:
                connection.close()
        while not hellos.empty():
            _welcome(machines, found, *hellos.get())
        for index in [i for i, (peer, _) in found.items() if _is_closed(peer)]:
            del found[index]
        missing = sorted(set(range(1, len(machines.addresses))) - set(found))
        if not missing:
            break
        names = ', '.join(name_machine(machines, index) for index in missing)
        now = time.monotonic()
        if now >= deadline:
            _tell(found, failed='gave up: %s did not come' % names)
            raise RunFailed('gave up: %s did not come' % names)
        if now >= tell_at:
            log.info('waiting for %s', names)
            _tell(found, waiting=names)
            tell_at = now + TELL_SECONDS
    for index, (_, theirs) in sorted(found.items()):
        difference = _compare(machines, index, theirs, facts)
        if difference:
            _tell(found, mistake=difference)
            raise UserError(difference)
    for index in sorted(found):
        error = _find_no_way(machines, index)
        if error:
            name = name_machine(machines, index)
            _tell(found, failed='%s can not be reached: %s' % (name, error))
            raise RunFailed('%s can not be reached: %s' % (name, error))
    _tell(found, met=news)
    return {index: connection for index, (connection, _) in found.items()}


def _find_no_way(machines, index):
    """Returns why a machine, which listens, can't be reached, or None."""
    address = _split(machines.addresses[index])
    try:
        socket.create_connection(address, DIAL_SECONDS).close()
    except OSError as error:
        return _explain(error)
    return None


def _explain(error):
    return getattr(error, 'strerror', None) or str(error)


def _greet(connection, hellos, greeting):
    """Hands over who is at the other end; drops a stranger."""
    try:
        hello = receive(connection, HELLO_SECONDS)
        hellos.put((connection, hello.get('index'), hello.get('facts')))
    except (OSError, ValueError):
        connection.close()
    finally:
        greeting.release()


def _welcome(machines, found, connection, index, facts):
    number = len(machines.addresses)
    if type(index) is not int or index <= 0 or not isinstance(facts, dict):
        connection.close()
    elif index >= number:
        mistake = "machine 0's TF_CONFIG names %d machines: make them equal" % number
        _tell({index: (connection, facts)}, mistake=mistake)
        connection.close()
    elif index in found and not _is_closed(found[index][0]):
        mistake = '%s is there already' % name_machine(machines, index)
        _tell({index: (connection, facts)}, mistake=mistake)
        connection.close()
    else:
        found[index] = connection, facts


def _is_closed(connection):
    # A peer says nothing before it is told something.
    if not select.select([connection], [], [], 0)[0]:
        return False
    try:
        return connection.recv(1, socket.MSG_PEEK) == b''
    except OSError:
        return True


def _tell(found, **message):
    for connection, _ in found.values():
        with contextlib.suppress(OSError):
            send(connection, **message)


def _compare(machines, index, theirs, ours):
    """Returns a line that says what another machine has otherwise, or None."""
    for name in sorted(set(theirs) | set(ours)):
        if theirs.get(name) != ours.get(name):
            return '%s has %s %s, machine 0 %s: make them equal' % (
                name_machine(machines, index),
                *(name, theirs.get(name), ours.get(name)),
            )
    return None


def _report(machines, facts, deadline):
    """The other machines' part of `meet`."""
    first = name_machine(machines, 0)
    tell_at = time.monotonic() + TELL_SECONDS
    while True:
        try:
            address = _split(machines.addresses[0])
            connection = socket.create_connection(address, HELLO_SECONDS)
            return _introduce(connection, machines, facts, deadline)
        except (OSError, ValueError) as error:
            now = time.monotonic()
            if now >= deadline:
                raise RunFailed(
                    'gave up: %s did not come (%s)' % (first, _explain(error))
                ) from None
            if now >= tell_at:
                log.info('waiting for %s (%s)', first, _explain(error))
                tell_at = now + TELL_SECONDS
            time.sleep(RETRY_SECONDS)


def _introduce(connection, machines, facts, deadline):
    """Says hello to machine 0; returns the connection and its news."""
    try:
        send(connection, index=machines.index, facts=facts)
        while True:
            # Machine 0 gives up first, and says who is missing.
            answer = receive(connection, deadline + HELLO_SECONDS - time.monotonic())
            if 'met' in answer:
                return connection, answer['met']
            if 'mistake' in answer:
                raise UserError(str(answer['mistake']))
            if 'failed' in answer:
                raise RunFailed(str(answer['failed']))
            log.info('waiting for %s', answer.get('waiting'))
    except BaseException:
        connection.close()
        raise


def _go_together(machines, connections, start_timeout):
    """Waits until every machine has come so far, each having called this.

    Raises:
      RunFailed: one of them is gone, or is not there in time.
    """
    try:
        if machines.index == 0:
            for index, connection in sorted(connections.items()):
                at_fault = index
                _expect(connection, 'up', start_timeout)
            for index, connection in sorted(connections.items()):
                at_fault = index
                send(connection, go=True)
        else:
            at_fault = 0
            send(connections[0], up=True)
            _expect(connections[0], 'go', start_timeout + HELLO_SECONDS)
    except (OSError, ValueError) as error:
        raise RunFailed(
            '%s left before the start (%s)' % (name_machine(machines, at_fault), error)
        ) from None


def _expect(connection, name, seconds):
    message = receive(connection, seconds)
    if name not in message:
        raise ValueError(message.get('failed') or 'it said something else')


def start_server(machines, connections, start_timeout, config):
    """Starts TensorFlow's server on this machine's port; returns a session's target.

    It may be called once in a process: servers can't be stopped.

    Args:
      machines: the `Machines`.
      connections: what `meet` returned.
      start_timeout: seconds to wait for the others' servers at most.
      config: the `tf.ConfigProto` that the session must have, too. It is given who
        leads the all-reduce, and what lets a session start without the others.

    Raises:
      UserError: the port was taken meanwhile.
      RunFailed: the server did not start, or another machine is gone.
    """
    config.experimental.collective_group_leader = '/job:worker/replica:0/task:0'
    config.device_filters.append('/job:worker/task:%d' % machines.index)
    hosts = {_split(address)[0] for address in machines.addresses}
    for name in ('no_proxy', 'NO_PROXY'):
        # TensorFlow's channels would otherwise go through a web proxy.
        listed = [host for host in os.environ.get(name, '').split(',') if host]
        os.environ[name] = ','.join(listed + sorted(hosts - set(listed)))
    server = None
    with quiet_stderr(), contextlib.suppress(tf.errors.UnknownError):
        server = tf.train.Server(
            tf.train.ClusterSpec({'worker': machines.addresses}),
            job_name='worker',
            task_index=machines.index,
            config=config,
        )
    if server is None:
        bind(machines).close()  # says so if the port has been taken
        raise RunFailed("TensorFlow's server did not start: --verbose shows why")
    _go_together(machines, connections, start_timeout)
    return server.target
