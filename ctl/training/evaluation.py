"""One pass over the evaluation data, in graph calls of about half a second.

Between two of them workers agree on signals and on errors, so an evaluation can be interrupted, and an
error on one worker ends it on all of them at the same batch.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from ctl.data.batches import Batches
from ctl.distribute.communication import PEER_ERRORS
from ctl.distribute.host_allreduce import HostAllReduce
from ctl.supervision import heartbeat
from ctl.supervision.signals import Signals
from ctl.training.loop import FailedElsewhere, Interrupted
from ctl.training.loop_length import Pace


def run(
    loop: Any, batches: Batches, agreement: HostAllReduce, *, is_chief: bool, signals: Signals | None
) -> tuple[Any, int]:
    """All batches of an open source; returns (packed totals of this worker, batches that were run).

    Raises Interrupted, on every worker, after a signal to one of them; CtlError where another worker's
    part failed.
    """
    pace, packed, done = Pace("auto"), loop.totals.zeros(), 0
    left = 2**62 if batches.steps is None else batches.steps
    with together(agreement):
        loop.trace(batches)
    try:
        while left > 0:
            asked, ran, error = min(pace.length, left), 0, None
            has_run, start = loop.has_run, time.perf_counter()
            try:
                packed, ran = loop.run(batches, asked, packed)
            except PEER_ERRORS:
                raise
            except Exception as e:
                if agreement.num_workers == 1 or loop.communicates(batches):
                    raise  # the others wait within their graph call
                error = e
            if has_run:
                pace.took(steps=ran, secs=time.perf_counter() - start)
            heartbeat.here.progressed()
            done, left = done + ran, left - ran
            _agree(agreement, pace, is_chief, signals, error)
            if ran < asked:
                break
    finally:
        loop.release()
    return packed, done


@contextlib.contextmanager
def together(agreement: HostAllReduce) -> Iterator[None]:
    """What one worker fails at within the block, all fail at; nothing in it may communicate."""
    error = None
    try:
        yield
    except PEER_ERRORS:
        raise
    except Exception as e:
        error = e
    failed = agreement.sum([float(error is not None)])[0]
    if error is not None:
        raise error
    if failed:
        raise FailedElsewhere


def _agree(
    agreement: HostAllReduce, pace: Pace, is_chief: bool, signals: Signals | None, error: Exception | None
) -> None:
    """Workers compare notes: the chief's pace holds, anybody's signal or error ends the evaluation."""
    wishes = signals.wishes() if signals else [0.0, 0.0]
    leads = is_chief or agreement.num_workers == 1  # an evaluator is alone, and no chief
    mine = [float(pace.proposed) if leads else 0.0, float(error is not None), *wishes]
    length, failed, *wishes = agreement.sum(mine)
    pace.length = int(length)
    if error is not None:
        raise error
    if failed:
        raise FailedElsewhere
    if signals is not None and signals.agree(wishes):
        raise Interrupted
