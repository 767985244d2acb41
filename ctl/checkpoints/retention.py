"""Which checkpoints stay: the newest, and the best by a metric of the evaluation."""

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass

from ctl.checkpoints.protocol import Manifest
from ctl.errors import UsageError
from ctl.watchers import smaller_is_better


@dataclass(frozen=True, kw_only=True)
class Keep:
    """What to keep.

    Attributes:
      newest: so many of the newest; 0 keeps all.
      best: name of a metric of `eval_step`; the checkpoint with its best value stays as well. NaN
        never wins. With it, a checkpoint is also saved after every evaluation.
      mode: "max", "min", or "auto": "min" for names that contain loss, error, ...
    """

    newest: int = 5
    best: str | None = None
    mode: str = "auto"

    def __post_init__(self):
        whole = isinstance(self.newest, numbers.Integral) and not isinstance(self.newest, bool)
        if not whole or self.newest < 0:
            raise UsageError(
                f"keep newest is {self.newest!r}; expected a whole number of checkpoints, or 0 to "
                "keep all."
            )
        if self.mode not in ("auto", "max", "min"):
            raise UsageError(f"keep mode is {self.mode!r}; expected 'max', 'min' or 'auto'.")

    @staticmethod
    def parse(text: str) -> "Keep":
        """`5`, `0`, `3,best=accuracy` or `3,best=loss,mode=min`."""
        values: dict = {}
        for i, part in enumerate(str(text).split(",")):
            key, eq, value = part.strip().partition("=")
            if not eq and i == 0 and key.isdigit():
                values["newest"] = int(key)
            elif eq and key in ("best", "mode") and value:
                values[key] = value
            else:
                raise UsageError(
                    f"keep is {text!r}; expected a number of checkpoints, optionally with the best "
                    "by a metric: 5, or 3,best=accuracy."
                )
        return Keep(**values)

    def best_of(self, manifests: Sequence[Manifest]) -> Manifest | None:
        """The best by the metric; of equals the newest; None if no checkpoint has a number for it."""
        name = self.best
        if name is None:
            return None
        candidates = [m for m in manifests if not math.isnan(m.metrics.get(name, math.nan))]
        sign = -1.0 if smaller_is_better(name, self.mode) else 1.0
        return max(candidates, key=lambda m: (sign * m.metrics[name], m.step), default=None)

    def surplus(self, manifests: Sequence[Manifest]) -> list[Manifest]:
        """Those that may go; never the newest one."""
        if self.newest == 0:
            return []
        ordered = sorted(manifests, key=lambda m: m.step)
        stay = {m.step for m in ordered[-self.newest :]}
        best = self.best_of(ordered)
        if best is not None:
            stay.add(best.step)
        return [m for m in ordered if m.step not in stay]
