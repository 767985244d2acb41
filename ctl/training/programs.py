"""Cache of the traced programs of a trainer."""

from collections.abc import Callable
from typing import Any

from ctl.training.compiled_loop import CompiledLoop
from ctl.training.graph_loop import StepLoop
from ctl.training.loop import GraphLoop


class ProgramCache:
    """Loops and functions that are traced once per trainer."""

    def __init__(self) -> None:
        self._train_loop: GraphLoop | None = None
        self._eval_loop: StepLoop | None = None
        self._predict: tuple[Any, Any] = (None, None)  # model, function

    def train_loop(self, is_one_program: bool, create: Callable[[], GraphLoop]) -> GraphLoop:
        """Returns the loop of training steps. Creates it at first, and if `jit_compile` has changed.

        Args:
          is_one_program: True for `jit_compile="loop"`.
          create: Creates the loop.
        """
        if self._train_loop is None or isinstance(self._train_loop, CompiledLoop) != is_one_program:
            self._train_loop = create()
        return self._train_loop

    def eval_loop(self, create: Callable[[], StepLoop]) -> StepLoop:
        """Returns the loop of evaluation steps, created at first."""
        if self._eval_loop is None:
            self._eval_loop = create()
        return self._eval_loop

    def predict_function(self, model: Any, create: Callable[[], Any]) -> Any:
        """Returns the prediction function of a model. Creates it at first, and for another model."""
        if self._predict[0] is not model:
            self._predict = model, create()
        return self._predict[1]
