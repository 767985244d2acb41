"""Warning about a step that updates no variable."""

import logging

from ctl.distribute.keras_objects import attribute, unwrap
from ctl.profiling.loop_observer import CompletedLoop, LoopObserver
from ctl.training.loop import GraphLoop
from ctl.training.task import Task

_log = logging.getLogger("ctl")


class UpdateCheck(LoopObserver):
    """Warns once about a step that neither calls `minimize` nor applies `self.optimizer`."""

    def __init__(self, task: Task, graph_loop: GraphLoop, *, is_chief: bool):
        self._task, self._graph_loop = task, graph_loop
        self._is_pending = task.optimizer is not None and is_chief
        self._iterations_before = self._iterations()

    def completed(self, loop: CompletedLoop) -> None:
        """Checks once, after the first loop, whether a variable has changed."""
        if not self._is_pending:
            return
        self._is_pending = False
        if self._graph_loop.calls_minimize:
            return
        iterations = self._iterations()
        if iterations is None or iterations == self._iterations_before:
            _log.warning(
                "train_step of %s does not call self.minimize(loss, tape): self.optimizer applies no "
                "update, and the weights stay as they are. Call self.minimize in train_step, or do not "
                "set self.optimizer.",
                self._task.class_name,
            )

    def _iterations(self) -> int | None:
        """Returns the number of updates that `self.optimizer` has applied, or None if it does not count."""
        iterations = attribute(self._task.optimizer, "iterations")
        return None if iterations is None else int(unwrap(iterations).numpy())
