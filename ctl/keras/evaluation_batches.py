"""Calls of `on_test_batch_begin` and `on_test_batch_end` of Keras callbacks."""

from collections.abc import Callable, Mapping
from typing import Any

from ctl.training.evaluation_observer import EvaluationObserver


class EvaluationBatches(EvaluationObserver):
    """An observer that calls Keras callbacks at each batch of an evaluation, as `Model.evaluate` does.

    Args:
      model: Model of the callbacks. If one of them sets `model.stop_evaluating`, the evaluation ends.
      begin: Called before the first batch of each evaluation. Returns a `CallbackList`, or None to call no
        callback.
    """

    def __init__(self, model: Any, begin: Callable[[], Any]):
        super().__init__(int(getattr(model, "steps_per_execution", 1) or 1))
        self._model, self._begin = model, begin
        self._callbacks: Any = None

    def batch_begins(self, batch: int) -> None:
        """Calls `on_test_batch_begin`."""
        if batch == 0:
            self._model.stop_evaluating = False
            self._callbacks = self._begin()
        if self._callbacks is not None:
            self._callbacks.on_test_batch_begin(batch)

    def batch_ends(self, batch: int, means: Mapping[str, float]) -> bool:
        """Calls `on_test_batch_end`. Returns True if a callback has ended the evaluation."""
        if self._callbacks is not None:
            self._callbacks.on_test_batch_end(batch, dict(means))
        return bool(self._model.stop_evaluating)
