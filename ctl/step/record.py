"""Outputs of the trace of a step on one replica."""

from dataclasses import dataclass, field
from typing import Any

from ctl.errors import UsageError
from ctl.step.logged import Logged, logged
from ctl.step.update_request import UpdateRequest


@dataclass(frozen=True)
class UpdateOutcome:
    """Result of one update.

    Attributes:
      norm: Global norm `[]` of the reduced gradients before clipping, or a pair (sum, count) of norms.
      suspects: Flags of replicas with values that are not finite; see `finiteness.suspects`.
      is_valid: `[]` bool, False where the whole step is left out. None if it never is.
      may_continue: `[]` bool, False where the run ends. None if the graph raises the error.
    """

    norm: Any
    suspects: Any
    is_valid: Any = None
    may_continue: Any = None


@dataclass
class StepRecord:
    """Outputs of one trace of a step. Each trace creates a record.

    Attributes:
      deferred: Updates that are applied later.
      norms: Gradient norms of the applied updates, by name in reports.
      outcomes: Outcomes of the applied updates.
      logged: Values that the step has logged, by name.
      uses_average: True if the step has called `average`.
    """

    deferred: list[UpdateRequest] = field(default_factory=list)
    norms: dict[str, Any] = field(default_factory=dict)
    outcomes: list[UpdateOutcome] = field(default_factory=list)
    logged: dict[str, Logged] = field(default_factory=dict)
    uses_average: bool = False

    def record_average(self) -> None:
        """Records a call of `average`."""
        self.uses_average = True

    def add_outcome(self, label: str, outcome: UpdateOutcome) -> None:
        """Adds the outcome of an update by the optimizer `label`."""
        name = f"gradient_norm/{label}" if label else "gradient_norm"
        count = sum(other == name or other.startswith(f"{name}_") for other in self.norms)
        self.norms[f"{name}_{count + 1}" if count else name] = outcome.norm
        self.outcomes.append(outcome)

    def log(self, name: str, value: Any, reduce: str, *, num_shares: int, is_empty: Any) -> None:
        """Adds a logged value; see `Trainer.log`.

        Args:
          name: Name in reports.
          value: `[]` or `[b]`.
          reduce: "mean" or "sum".
          num_shares: Number of traces that form one step: replicas times parts of a batch.
          is_empty: `[]` bool, True where the replica has no example, or None.

        Raises:
          UsageError: If the name is invalid or in use, or the value is no number.
        """
        if not isinstance(name, str) or not name or name in self.logged:
            raise UsageError(
                f"log() got the name {name!r}; expected a text that the step has not logged yet."
            )
        self.logged[name] = logged(name, value, reduce, num_shares=num_shares, is_empty=is_empty)

    def validity(self) -> list[tuple[Any, Any]]:
        """Returns pairs (is_valid, suspects) of the updates that may leave the step out."""
        return [(o.is_valid, o.suspects) for o in self.outcomes if o.is_valid is not None]

    def stop_conditions(self) -> list[tuple[Any, Any]]:
        """Returns pairs (may_continue, suspects) of the updates that may end the run."""
        return [(o.may_continue, o.suspects) for o in self.outcomes if o.may_continue is not None]
