"""What a run keeps in its model_dir, as functions that the loop calls."""

import collections
import contextlib
import functools
import os

import checkpoints
import records
import summaries
from utils import log

# read_rows: (epochs done) -> the rows of metrics.jsonl so far. write_rows: (rows) ->
# whether that worked. save, save_best: (State) -> whether the checkpoint is there.
# forget_best: () -> None, once there is a better one. events: `summaries.Events`.
# special_steps: what `summaries.make_special_steps` returns.
Keeper = collections.namedtuple(
    'Keeper', 'read_rows write_rows save save_best forget_best events special_steps'
)

NOTHING = Keeper(
    read_rows=lambda epochs_done: [],
    write_rows=lambda rows: True,
    save=lambda state: True,
    save_best=lambda state: True,
    forget_best=lambda: None,
    events=summaries.NO_EVENTS,
    special_steps=lambda first, steps, ends_epoch: {},
)


@contextlib.contextmanager
def open_keeper(flags, session, saver, job, summary, model_dir, step):
    """Opens what is written to while a run goes on.

    Args:
      flags: what `command_line.parse` returned.
      session: where the variables are.
      saver: what `checkpoints.create_saver` returned.
      job: the `training.Job`.
      summary: `summaries.Summaries`.
      model_dir: the directory of the run.
      step: the global step it goes on from.

    Yields:
      A `Keeper`.
    """
    best_dir = os.path.join(model_dir, 'best')
    trace = flags.trace and summaries.find_trace(model_dir, flags.trace)
    if trace and flags.trace <= step:
        log.warning('--trace %d: that step is done already', flags.trace)

    def save(directory, keep, state):
        return checkpoints.save(
            saver, session, directory, state.epoch, state.global_step, keep
        )

    with summaries.open_events(model_dir, step, flags.summary_steps > 0) as events:
        yield Keeper(
            read_rows=functools.partial(records.read_metrics, model_dir),
            write_rows=functools.partial(records.write_metrics, model_dir),
            save=functools.partial(save, model_dir, flags.keep),
            save_best=functools.partial(save, best_dir, 2),
            forget_best=functools.partial(checkpoints.prune, best_dir, keep=1),
            events=events,
            special_steps=summaries.make_special_steps(
                session, job, summary, events.train, flags.trace, model_dir
            ),
        )
    if trace and flags.trace > step and not os.path.exists(trace):
        log.warning('--trace %d: this run had no such step', flags.trace)
