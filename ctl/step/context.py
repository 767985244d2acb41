"""Inputs of the trace of a step on one replica."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from ctl.step.gradient_settings import Gradients
from ctl.step.mask_counts import MaskCounts
from ctl.step.step_times import StepTimes


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """Inputs of one trace of a step on one replica.

    Attributes:
      settings: Gradient settings of the trainer.
      num_parts: Number of parts into which the batch of the replica is split (`accumulate_steps`).
      is_empty: `[]` bool, True where the replica has no example. None if it always has one.
      is_compiled: True if forward and backward are one XLA program, in which no collective can run.
      is_in_compiled_loop: True if the loop around the step is an XLA program too, in which no operation can
        raise an error or print.
      has_even_shapes: True if static shapes are equal on all replicas.
      num_local_workers: Number of workers that train independently of each other in this step. 0 if
        gradients are reduced over all replicas.
      timer: Sums of the waiting times of this worker, or None.
      mask_counts: Counts of the masks in all parts of the batch, or None if there is one part.
      exclusive_updates: Returns a context in which no other worker updates variables.
    """

    settings: Gradients = field(default_factory=Gradients)
    num_parts: int = 1
    is_empty: Any = None
    is_compiled: bool = False
    is_in_compiled_loop: bool = False
    has_even_shapes: bool = False
    num_local_workers: int = 0
    timer: StepTimes | None = None
    mask_counts: MaskCounts | None = None
    exclusive_updates: Callable[[], AbstractContextManager[Any]] = nullcontext

    @property
    def defers_updates(self) -> bool:
        """True if updates are applied after the last part of the batch, or after the XLA program."""
        return self.num_parts > 1 or self.is_compiled
