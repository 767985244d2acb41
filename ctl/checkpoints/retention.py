"""Which checkpoints stay: the newest, the best by a metric of the evaluation, and every k-th step's."""

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass

from ctl.callbacks.best_value import smaller_is_better
from ctl.checkpoints.protocol import Manifest
from ctl.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Keep:
    """What to keep.

    Attributes:
      newest: so many of the newest; 0 keeps all.
      best: name of a metric of `eval_step`; the checkpoint with its best value stays as well. NaN
        never wins. With it, a checkpoint is also saved after every evaluation.
      mode: "max", "min", or "auto": "min" for names that contain loss, error, ...
      every: checkpoints whose step is a multiple of this stay for good; None: none.
    """

    newest: int = 5
    best: str | None = None
    mode: str = "auto"
    every: int | None = None

    def __post_init__(self) -> None:
        if not _is_whole(self.newest, 0):
            raise UsageError(
                f"keep newest is {self.newest!r}; expected a whole number of checkpoints, or 0 to keep all."
            )
        if self.mode not in ("auto", "max", "min"):
            raise UsageError(f"keep mode is {self.mode!r}; expected 'max', 'min' or 'auto'.")
        if self.every is not None and not _is_whole(self.every, 1):
            raise UsageError(f"keep every is {self.every!r}; expected a whole number of steps >= 1.")

    @staticmethod
    def parse(text: str) -> "Keep":
        """`5`, `0`, `3,best=accuracy`, `3,best=loss,mode=min` or `5,every=1000`."""
        values: dict = {}
        for i, part in enumerate(str(text).split(",")):
            key, eq, value = part.strip().partition("=")
            key, value = key.strip(), value.strip()
            if not eq and i == 0 and _is_number(key):
                values["newest"] = int(key)
            elif eq and key in ("best", "mode") and value and key not in values:
                values[key] = value
            elif eq and key == "every" and _is_number(value) and key not in values:
                values[key] = int(value)
            else:
                raise UsageError(
                    f"keep is {text!r}; expected a number of checkpoints, optionally with the best "
                    "by a metric and every k-th step's: 5, 3,best=accuracy or 5,every=1000."
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
        if self.every is not None:
            stay |= {m.step for m in ordered if m.step % self.every == 0}
        return [m for m in ordered if m.step not in stay]


def _is_whole(value: object, least: int) -> bool:
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return whole and int(value) >= least  # type: ignore[call-overload]


def _is_number(text: str) -> bool:
    """True for digits that `int` reads as a number of steps or files."""
    return text.isascii() and text.isdigit() and len(text) <= 18
