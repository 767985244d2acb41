"""Continuation of a training in the same process after its workers have changed.

    for attempt in attempts(prepared):
        with attempt:
            return train()

If a worker is lost, the other workers discard the steps since a snapshot that all of them have, and form a
new group, which continues after that step.
"""

import contextlib
import logging
import time
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

from ctl.checkpoints.protocol import Manifest
from ctl.checkpoints.tracked_state import TrackedState
from ctl.collectives import graph_errors
from ctl.collectives.errors import HorovodInternalError
from ctl.distribute.communication import PEER_ERRORS
from ctl.distribute.world import World
from ctl.elastic import membership
from ctl.elastic.membership import WorkerGroup
from ctl.elastic.snapshots import Snapshots
from ctl.errors import EXIT_RETRY, CtlError, UsageError
from ctl.hvd import elastic_line
from ctl.metrics.protocol import RunEnd

_snapshots: weakref.WeakKeyDictionary[Any, Snapshots] = weakref.WeakKeyDictionary()  # by strategy
_MAX_FAILURES = 20  # consecutive, without a new step: the same error would occur again
_log = logging.getLogger("ctl")


class WorkersChangeError(CtlError):
    """Raised on all workers after the same step, before a group with other workers forms."""

    exit_code = EXIT_RETRY


class _Checkpointing(Protocol):
    """Part of `training.checkpointing.Checkpointing`."""

    saved_step: int

    def record_saved(self, step: int) -> None:
        """Sets the step of the newest checkpoint."""


class Resumable(Protocol):
    """Part of `training.prepared.PreparedTrainer`."""

    @property
    def world(self) -> World:
        """Processes of the job."""

    @property
    def state(self) -> TrackedState:
        """Variables of the trainer."""

    @property
    def checkpointing(self) -> _Checkpointing:
        """Checkpoints of the trainer."""

    @property
    def step(self) -> int:
        """Number of completed steps."""

    def resume(self, manifest: Manifest) -> None:
        """Continues from a restored state."""


def attempts(prepared: Resumable) -> Iterator[contextlib.AbstractContextManager[None]]:
    """Yields contexts in which to train from the current state of the trainer to the end.

    An error within such a context that a change of the workers has caused is suppressed. The next context
    follows when the workers have formed a group and restored their newest common state. Without elastic
    training there is one context, which suppresses no error.

    Args:
      prepared: Trainer.

    Raises:
      PeerLostError: If the launcher cannot form a group in time.
      UsageError: If `Trainer.train` is called again in an elastic job.
    """
    strategy = prepared.world.strategy
    group = membership.group_of(strategy)
    if group is None:
        yield contextlib.nullcontext()
        return
    if strategy in _snapshots:
        raise UsageError(
            "Trainer.train was called again in an elastic job; expected one call, because a worker that "
            "joins later begins with the first one. Train all steps in one call."
        )
    snapshots, attempt = Snapshots(prepared.state, group), _Attempt(prepared)
    _snapshots[strategy] = snapshots
    if group.has_joined:
        with attempt:
            _share(prepared, snapshots)
    if not attempt.has_failed:  # a new worker traces its functions, and fails before its first step
        yield attempt
    while True:
        with attempt:
            _join(prepared, group)
            _share(prepared, snapshots)
        if not attempt.has_failed:
            yield attempt


class _Attempt:
    """A context that suppresses errors that a change of the workers has caused.

    Attributes:
      has_failed: True if the newest block has ended with such an error.
    """

    def __init__(self, prepared: Resumable):
        self._prepared, self._failures = prepared, _FailureCount()
        self.has_failed = False

    def __enter__(self) -> None:
        self.has_failed = False

    def __exit__(self, error_type: object, error: BaseException | None, traceback: object) -> bool:
        cause = _cause_of(error) if isinstance(error, Exception) else None
        self.has_failed = cause is not None
        if cause is None or self._failures.is_last(self._prepared.step):
            return False
        _log.info("Step %d: %s", self._prepared.step, cause)
        return True


class _FailureCount:
    """Number of consecutive changes of the workers without progress."""

    def __init__(self) -> None:
        self._step, self._count = -1, 0

    def is_last(self, step: int) -> bool:
        """Records a change after `step`. Returns True after too many changes."""
        self._count = 1 if step > self._step else self._count + 1
        self._step = max(step, self._step)
        return self._count > _MAX_FAILURES


def _join(prepared: Resumable, group: WorkerGroup) -> None:
    start = time.monotonic()
    group.join()
    membership.use_group(prepared.world.strategy)
    if prepared.world.is_chief:
        _log.warning(
            "Group %d has %d workers; it formed in %.2f s.",
            group.ranks.generation,
            group.ranks.size,
            time.monotonic() - start,
        )


def _share(prepared: Resumable, snapshots: Snapshots) -> None:
    """Restores the newest common state of the group."""
    manifest = snapshots.share()
    elastic_line.report_synced()
    if manifest is None:
        return
    checkpointing = prepared.checkpointing
    saved_step = checkpointing.saved_step
    prepared.resume(manifest)
    checkpointing.record_saved(saved_step)  # the snapshot is not on disk
    if prepared.world.is_chief:
        _log.info("Training continues from step %d.", manifest.step)


def snapshots_of(world: World) -> Snapshots | None:
    """Returns the snapshots of the current training, or None if the job is not elastic."""
    return _snapshots.get(world.strategy) if world.topology.is_elastic else None


def outcome_of(error: BaseException, world: World) -> RunEnd:
    """Returns the cause of the end of a run for an error: WORKERS_CHANGED if the training continues."""
    continues = world.topology.is_elastic and is_change_of_workers(error)
    return RunEnd.WORKERS_CHANGED if continues else RunEnd.FAILED


def is_change_of_workers(error: BaseException) -> bool:
    """Returns True if a change of the workers has caused an error."""
    return _cause_of(error) is not None


def _cause_of(error: BaseException) -> BaseException | None:
    """Returns the error of the lost or changed group in a chain of errors, or None."""
    cause: BaseException | None = error
    while cause is not None:
        original = graph_errors.restore_error_type(cause) if isinstance(cause, Exception) else cause
        if isinstance(original, (WorkersChangeError, HorovodInternalError, *PEER_ERRORS)):
            return original
        cause = cause.__cause__ or cause.__context__
    return None
