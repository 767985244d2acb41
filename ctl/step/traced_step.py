"""The step that the current thread traces: its context, its record and its reducer."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf
from ctl.errors import UsageError
from ctl.step import replica_assignments
from ctl.step.context import StepContext
from ctl.step.gradient_settings import Gradients
from ctl.step.record import StepRecord
from ctl.step.reducers.reducer import GradientReducer
from ctl.step.reducers.sum import SumReducer
from ctl.step.update import apply_update
from ctl.step.update_request import UpdateRequest


@dataclass(frozen=True)
class TracedStep:
    """A step of one replica while it is traced, or a call of its methods outside of a step.

    Attributes:
      context: Inputs of the trace.
      record: Outputs of the trace.
      reducer: Reducer of the gradients.
      graph: Graph of the trace. None outside of a step.
    """

    context: StepContext = field(default_factory=StepContext)
    record: StepRecord = field(default_factory=StepRecord)
    reducer: GradientReducer = field(default_factory=SumReducer)
    graph: Any = None

    def check_graph(self, method: str, fix: str) -> None:
        """Raises UsageError for a call within a condition, a loop or a function that the step traces."""
        if self.graph is not None and tf.compat.v1.get_default_graph() is not self.graph:
            raise UsageError(
                f"{method} is called within a condition or loop on tensors (`if`, `while`, `for`), or in a "
                f"tf.function of the step's own; expected a call in every step. {fix}"
            )

    def update(self, request: UpdateRequest) -> None:
        """Applies an update, or keeps it until the end of the step."""
        self.check_graph(
            "minimize()",
            "Write self.minimize(loss, tape, when=step % 2 == 0) in place of `if step % 2 == 0: ...`.",
        )
        self.reducer.check_request(request)
        if self.context.defers_updates:
            self.record.deferred.append(request)
        else:
            self.apply(request)

    def apply(self, request: UpdateRequest) -> None:
        """Applies an update now and records its outcome."""
        with replica_assignments.allowed():
            outcome = apply_update(request, self.context, self.reducer)
        self.record.add_outcome(request.label, outcome)

    def log(self, name: str, value: Any, reduce: str, num_replicas: int) -> None:
        """Records a value until the step returns; see `StepRecord.log`."""
        if self.graph is None:
            raise UsageError(f"log({name!r}) within a tf.function that is not a step; call it outside.")
        self.check_graph(
            f"log({name!r})", "Log the value in every step, e.g. tf.where(condition, value, 0.0)."
        )
        num_shares = num_replicas * self.context.num_parts
        self.record.log(name, value, reduce, num_shares=num_shares, is_empty=self.context.is_empty)


_current: ContextVar[TracedStep | None] = ContextVar("traced_step", default=None)


def traced_step(settings: Gradients | None = None) -> TracedStep:
    """Returns the step that this thread traces; outside of a step a new one with the given settings."""
    return _current.get() or TracedStep(StepContext(settings=settings or Gradients()))


@contextlib.contextmanager
def tracing(context: StepContext, reducer: GradientReducer) -> Iterator[TracedStep]:
    """Within the block, the methods of the trainer act on a new traced step, in this thread."""
    step = TracedStep(context, StepRecord(), reducer, tf.compat.v1.get_default_graph())
    token = _current.set(step)
    try:
        yield step
    finally:
        _current.reset(token)
