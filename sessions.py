"""Opens the session of a run: on one machine, or together with the others."""

import contextlib
import logging

import cluster
import records
import screen
import utils
from utils import log
from watch import Watch, watched


@contextlib.contextmanager
def open_session(flags, devices, data, model_dir, machines, find_stop):
    """Opens the session; of several machines, once all are there and equal.

    After the block all machines end together; a failure inside it ends all.

    Args:
      flags: what `command_line.parse` returned.
      devices: `utils.Devices`.
      data: the `DataSet`.
      model_dir: the directory of the run, None on all machines but the first.
      machines: `cluster.Machines`.
      find_stop: () -> a `RunStopped` if this machine is to stop, or None.

    Yields:
      (session, threads, watch): threads as `utils.choose_threads` returns them, the
      first machine's; watch is the `Watch` over the others, None without any.

    Raises:
      UserError: another machine differs from the first.
      RunFailed: another machine did not come.
    """
    threads = records.choose_threads(flags, devices, model_dir)
    xla = utils.use_xla(flags.xla, devices.towers)
    if machines == cluster.ONE:
        with utils.open_session(devices, threads, xla) as session:
            yield session, threads, None
        return
    # Bits depend on threads, and only the first machine knows those of earlier runs.
    connections, threads = cluster.meet(
        machines,
        records.describe_facts(flags, devices, data, machines),
        flags.start_timeout,
        news=threads,
    )
    if machines.index > 0:
        screen.introduce_other(flags, devices, machines)
        log.setLevel(logging.WARNING)

    def start_server(config):
        if not devices.gpus:
            # While a machine waits for another, threads that spin would take the cores
            # of those that read what it sends.
            config.experimental.disable_thread_spinning = True
        return cluster.start_server(machines, connections, flags.start_timeout, config)

    with utils.open_session(devices, threads, xla, start_server) as session:
        watch = Watch(machines, connections, flags, find_stop, screen.leave)
        with watched(watch):
            yield session, tuple(threads), watch
