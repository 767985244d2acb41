"""Checkpoints in memory: for tests, and for runs that roll back but need no disk."""

from ctl.checkpoints.protocol import CheckpointManager, Manifest
from ctl.checkpoints.retention import Keep
from ctl.checkpoints.tracked_state import TrackedState
from ctl.errors import CheckpointError


class MemoryCheckpoints(CheckpointManager):
    """Keeps copies of the values in this process; gone when it ends."""

    def __init__(self, *, keep: Keep = Keep(newest=1)):  # noqa: B008  frozen
        self.keep = keep
        self._kept: dict[int, tuple[Manifest, dict]] = {}

    def save(self, state: TrackedState, manifest: Manifest) -> str | None:
        """Copies every variable; returns "memory:<step>"."""
        self._kept[manifest.step] = manifest, {n: v.numpy() for n, v in state.variables.items()}
        for old in self.keep.surplus([m for m, _ in self._kept.values()]):
            del self._kept[old.step]
        return f"memory:{manifest.step}" if state.topology.is_chief else None

    @property
    def best_metric(self) -> str | None:
        return self.keep.best

    def steps(self) -> list[int]:
        """Steps of the kept states, ascending."""
        return sorted(self._kept)

    def restore(self, state: TrackedState, step: int | None = None) -> Manifest | None:
        """Assigns the kept values; see CheckpointManager."""
        if step is None and not self._kept:
            return None
        step = max(self._kept) if step is None else step
        if step not in self._kept:
            raise CheckpointError(
                f"There is no checkpoint of step {step} in memory; there are {self.steps()}."
            )
        manifest, values = self._kept[step]
        state.check_matches(manifest.variables, f"memory:{step}")
        for name, variable in state.variables.items():
            if name in values:
                variable.assign(values[name])
        return manifest
