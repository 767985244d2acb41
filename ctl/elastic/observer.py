"""Observer of the training loop that takes snapshots and ends a loop before workers join or leave."""

import contextlib
import time
from collections.abc import Callable, Sequence

from ctl.checkpoints.protocol import Manifest
from ctl.elastic import membership, recovery
from ctl.elastic.membership import WorkerGroup
from ctl.elastic.recovery import WorkersChangeError
from ctl.elastic.snapshots import Snapshots
from ctl.profiling.loop_observer import NO_CONTEXT, LoopObserver, ObserverInputs
from ctl.supervision import heartbeat

_SNAPSHOT_SECS = 0.4  # shortest interval; the workers vote every 0.5 s


class SnapshotObserver(LoopObserver):
    """Takes a snapshot after votes of the workers, when the actions of the step are complete.

    Args:
      group: Group of this worker.
      snapshots: Snapshots of this worker.
      manifest: Returns the manifest of the state after a step. Collective.
      run_no_step: Compiles the traced graph.
    """

    def __init__(
        self,
        group: WorkerGroup,
        snapshots: Snapshots,
        manifest: Callable[[int], Manifest],
        run_no_step: Callable[[], object],
    ):
        self._group, self._snapshots, self._manifest = group, snapshots, manifest
        self._run_no_step = run_no_step
        self._is_due, self._ends = not snapshots.has_shared, False
        self._taken_secs = -float("inf")  # time.monotonic

    def around(self, step: int) -> contextlib.AbstractContextManager[bool]:
        """Takes a due snapshot. Raises WorkersChangeError on all workers if the group will change.

        A new worker raises it before its first step, and joins a group.
        """
        if not self._group.has_joined:
            with heartbeat.current.enter_phase(heartbeat.COMPILING):
                self._run_no_step()
            raise WorkersChangeError("this worker joins the group.")
        is_alone = self._group.ranks.size == 1  # no vote
        self._ends |= is_alone and self._group.will_change
        if self._is_due or self._ends:
            self._snapshots.take(self._manifest(step))
            self._is_due, self._taken_secs = False, time.monotonic()
        if self._ends:
            raise WorkersChangeError("the group of workers changes.")
        return NO_CONTEXT

    def values_to_sum(self) -> Sequence[float]:
        """Returns two flags for the vote: a pending change of the group, and a due snapshot.

        The clock of the chief determines the snapshots.
        """
        is_due = self._group.ranks.rank == 0 and time.monotonic() >= self._taken_secs + _SNAPSHOT_SECS
        return [float(self._group.will_change), float(is_due)]

    def take_sums(self, sums: Sequence[float]) -> None:
        """Confirms the newest snapshot, which all workers have taken before the vote."""
        self._ends = sums[0] > 0
        self._is_due = self._ends or sums[1] > 0
        if self._is_due:
            self._snapshots.confirm()


def create_observer(inputs: ObserverInputs) -> SnapshotObserver | None:
    """Creates the observer of an elastic job."""
    group, snapshots = membership.group_of(inputs.world.strategy), recovery.snapshots_of(inputs.world)
    if group is None or snapshots is None:
        return None
    return SnapshotObserver(group, snapshots, inputs.manifest, inputs.run_no_step)
