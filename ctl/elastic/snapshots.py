"""Copies of the state of a run in the memory of a worker, and their exchange between workers."""

from typing import NamedTuple

import numpy as np
import tensorflow as tf
from ctl.checkpoints.protocol import Manifest
from ctl.checkpoints.tracked_state import TrackedState
from ctl.elastic.membership import WorkerGroup

_NONE = -1  # step of a missing snapshot


class _Snapshot(NamedTuple):
    manifest: Manifest
    values: dict[str, np.ndarray]


class _Row(NamedTuple):
    """Facts about the snapshots of one worker, as numbers that workers exchange.

    Attributes:
      newest: Step of the newest snapshot, -1 without one.
      confirmed: Step of the newest snapshot that all workers of the group have taken, or -1.
      is_chief: 1 for the worker that was the chief when the snapshots were taken.
    """

    newest: float = _NONE
    confirmed: float = _NONE
    is_chief: float = 0.0


class Snapshots:
    """The two newest snapshots of this worker.

    All workers take a snapshot after the same step. When they vote later, all of them have it: then it is
    confirmed, and the chief has written the metrics up to its step.

    Args:
      state: Variables of the trainer.
      group: Group of this worker.
    """

    def __init__(self, state: TrackedState, group: WorkerGroup):
        self._state, self._group = state, group
        self._snapshot_by_step: dict[int, _Snapshot] = {}
        self._confirmed = _NONE
        self._was_chief = self._has_shared = False

    @property
    def has_shared(self) -> bool:
        """True if the newest snapshot is that of `share`, so that the variables have its values."""
        return self._has_shared

    def take(self, manifest: Manifest) -> None:
        """Copies all variables. All workers call it after the same step."""
        values = {name: np.array(v.numpy()) for name, v in self._state.variables.items()}  # collective
        previous_step = max(self._snapshot_by_step, default=manifest.step)
        new_snapshot = _Snapshot(manifest, values)
        previous_snapshot = self._snapshot_by_step.get(previous_step, new_snapshot)
        self._snapshot_by_step = {previous_step: previous_snapshot, manifest.step: new_snapshot}
        self._has_shared = False
        self._was_chief = self._group.ranks.rank == 0

    def confirm(self) -> None:
        """Records that all workers have the newest snapshot. Called after a vote."""
        self._confirmed = max(self._snapshot_by_step, default=_NONE)

    def share(self) -> Manifest | None:
        """Assigns the newest snapshot that the group can use to the variables of all workers. Collective.

        If the chief has left, this is a confirmed snapshot. Before the first one, rank 0 broadcasts its
        variables.

        Returns:
          The manifest of the snapshot, or None before the first one.
        """
        newest = max(self._snapshot_by_step, default=_NONE)
        row = _Row(newest, self._confirmed, float(self._was_chief))
        rows = [_Row(*values) for values in self._group.exchange(row)]
        owners = [rank for rank, row in enumerate(rows) if row.newest != _NONE]
        if not owners:
            self._broadcast_initial_values()
            return None
        has_chief = any(row.is_chief for row in rows)
        steps = [rows[rank].newest for rank in owners]
        step = int(min(steps) if has_chief else max(row.confirmed for row in rows))
        step = int(min(steps)) if step == _NONE else step
        snapshot = self._snapshot_by_step.get(step)
        if len(owners) < len(rows):
            snapshot = self._broadcast(snapshot, owners[0])
        assert snapshot is not None
        self._assign(snapshot)
        self._snapshot_by_step, self._confirmed = {step: snapshot}, step
        self._has_shared = True
        self._was_chief = self._group.ranks.rank == 0
        return snapshot.manifest

    def _broadcast_initial_values(self) -> None:
        """Broadcasts the variables of rank 0, because `build` may initialize them differently."""
        for name, variable in self._state.variables.items():
            if not _is_summed(variable):
                value = np.array(variable.numpy())
                variable.assign(self._group.broadcast(name, value, 0))

    def _broadcast(self, snapshot: _Snapshot | None, root: int) -> _Snapshot:
        """Returns the snapshot of rank `root`."""
        text = snapshot.manifest.to_json().encode() if snapshot is not None else b""
        is_root = self._group.ranks.rank == root
        size = int(self._group.exchange([len(text) if is_root else 0])[root, 0])
        data = np.frombuffer(text.ljust(size), np.uint8) if is_root else np.zeros(size, np.uint8)
        text = self._group.broadcast("manifest", data, root).tobytes()
        values = {}
        for name, variable in self._state.variables.items():
            dtype = variable.dtype.as_numpy_dtype
            value = np.zeros(variable.shape, dtype) if snapshot is None else snapshot.values[name]
            values[name] = self._group.broadcast(name, value, root)
        return _Snapshot(Manifest.from_json(text.decode(), "the state of another worker"), values)

    def _assign(self, snapshot: _Snapshot) -> None:
        for name, variable in self._state.variables.items():
            value = snapshot.values[name]
            if not _is_summed(variable):
                variable.assign(value)
                continue
            is_sum = variable.aggregation == tf.VariableAggregation.SUM
            is_first = self._group.ranks.rank == 0
            (part,) = variable.values
            part.assign(value if is_first or not is_sum else np.zeros_like(value))


def _is_summed(variable: tf.Variable) -> bool:
    """Returns True if each worker has its own value, and a read combines them."""
    return variable.synchronization == tf.VariableSynchronization.ON_READ
