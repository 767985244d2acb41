"""Checkpoints in memory, for tests and for runs that roll back without a disk."""

from ctl.checkpoints.protocol import CheckpointManager, Manifest
from ctl.checkpoints.retention import Keep
from ctl.checkpoints.tracked_state import TrackedState
from ctl.errors import CheckpointError
from ctl.setting_values import check_type


class MemoryCheckpoints(CheckpointManager):
    """A manager that keeps copies of the variables in this process. They are lost when it ends.

    Args:
      keep: The states to keep.
    """

    def __init__(self, *, keep: Keep = Keep(newest=1)):  # noqa: B008  frozen
        check_type("keep", keep, Keep)
        self.keep = keep
        self._saved_by_step: dict[int, tuple[Manifest, dict]] = {}

    def save(self, state: TrackedState, manifest: Manifest) -> str | None:
        """Copies every variable. Returns "memory:<step>" on the chief, None on the other workers."""
        values = {name: variable.numpy() for name, variable in state.variables.items()}
        self._saved_by_step[manifest.step] = manifest, values
        for surplus in self.keep.surplus([m for m, _ in self._saved_by_step.values()]):
            del self._saved_by_step[surplus.step]
        return f"memory:{manifest.step}" if state.topology.is_chief else None

    @property
    def best_metric(self) -> str | None:
        """Name of the metric by which the best state is kept, or None."""
        return self.keep.best

    def is_better(self, value: float, other: float) -> bool:
        """Compares values as `keep` does."""
        return self.keep.is_better(value, other)

    def steps(self) -> list[int]:
        """Returns the steps of the saved states, ascending."""
        return sorted(self._saved_by_step)

    def restore(self, state: TrackedState, step: int | None = None) -> Manifest | None:
        """Assigns the saved values; see `CheckpointManager.restore`."""
        if step is None and not self._saved_by_step:
            return None
        step = max(self._saved_by_step) if step is None else step
        if step not in self._saved_by_step:
            raise CheckpointError(
                f"There is no checkpoint of step {step} in memory; available steps: {self.steps()}."
            )
        manifest, values = self._saved_by_step[step]
        state.check_matches(manifest.variables, f"memory:{step}")
        for name, variable in state.variables.items():
            if name in values:
                variable.assign(values[name])
        return manifest
