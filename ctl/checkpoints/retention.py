"""Checkpoint retention policies: the newest ones, the best one by a metric, and every k-th step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ctl.callbacks.best_value import smaller_is_better
from ctl.checkpoints.protocol import Manifest
from ctl.errors import UsageError
from ctl.setting_values import check_choice, check_fields, check_integer


@dataclass(frozen=True, kw_only=True)
class Keep:
    """A retention policy. A checkpoint is kept if at least one of the rules applies to it.

    Attributes:
      newest: Number of the newest checkpoints to keep; 0 keeps all.
      best: Name of a metric of `eval_step`. The checkpoint with its best value is kept; NaN is never the
        best. A checkpoint is then also saved after every evaluation.
      mode: "max", "min", or "auto": "min" for names that contain loss, error, ...
      every: Checkpoints of steps that are multiples of this are never deleted. None disables the rule.
    """

    newest: int = 5
    best: str | None = None
    mode: str = "auto"
    every: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_integer("keep newest", self.newest, 0)
        check_choice("keep mode", self.mode, ("max", "min", "auto"))
        if self.every is not None:
            check_integer("keep every", self.every, 1)

    @staticmethod
    def parse(text: str) -> "Keep":
        """Returns the policy of a text such as `5`, `0`, `3,best=accuracy,mode=max` or `5,every=1000`."""
        values: dict = {}
        for i, part in enumerate(str(text).split(",")):
            key, equals_sign, value = part.strip().partition("=")
            key, value = key.strip(), value.strip()
            if not equals_sign and i == 0 and _has_digits_only(key):
                values["newest"] = int(key)
            elif equals_sign and key in ("best", "mode") and value and key not in values:
                values[key] = value
            elif equals_sign and key == "every" and _has_digits_only(value) and key not in values:
                values[key] = int(value)
            else:
                raise UsageError(
                    f"keep is {text!r}; expected a number of checkpoints, optionally with the best "
                    "by a metric and every k-th step's: 5, 3,best=accuracy or 5,every=1000."
                )
        return Keep(**values)

    def best_of(self, manifests: Sequence[Manifest]) -> Manifest | None:
        """Returns the best by the metric, the newest of equal ones, or None if none has a value."""
        name = self.best
        if name is None:
            return None
        candidates = [m for m in manifests if not math.isnan(m.metrics.get(name, math.nan))]
        sign = -1.0 if smaller_is_better(name, self.mode) else 1.0
        return max(candidates, key=lambda m: (sign * m.metrics[name], m.step), default=None)

    def is_better(self, value: float, other: float) -> bool:
        """Returns True if a newer value of the metric `best` replaces another one, as equal ones do."""
        return value <= other if smaller_is_better(self.best or "", self.mode) else value >= other

    def surplus(self, manifests: Sequence[Manifest]) -> list[Manifest]:
        """Returns the manifests of the checkpoints to delete, ascending. The newest is never among them."""
        if self.newest == 0:
            return []
        ordered = sorted(manifests, key=lambda m: m.step)
        kept_steps = {m.step for m in ordered[-self.newest :]}
        best = self.best_of(ordered)
        if best is not None:
            kept_steps.add(best.step)
        if self.every is not None:
            kept_steps |= {m.step for m in ordered if m.step % self.every == 0}
        return [m for m in ordered if m.step not in kept_steps]


def _has_digits_only(text: str) -> bool:
    """Returns True for at most 18 ASCII digits."""
    return text.isascii() and text.isdigit() and len(text) <= 18
