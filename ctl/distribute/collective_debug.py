"""Debugging option that compares the collectives of all workers before they run.

TensorFlow pairs the collectives of workers by their order. If one worker runs an additional collective (a
metric that is read on the chief alone), all workers wait, or different collectives of equal shape are
paired without an error. With `--check_collectives` each worker publishes (step, name, shape, dtype) through
TensorFlow's coordination service and compares it with the values of the other workers before any data is
sent. The first difference is an error that names the line on each worker.
"""

import contextlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import tensorflow as tf
from ctl.errors import UsageError
from ctl.tensorflow_patches import announced_collectives, coordination_service

_WAIT_SECS = 120.0  # for the other workers to start their next collective
_LIBRARIES = (
    "/ctl/",
    "/tensorflow/",
    "/keras/",
    "/tf_keras/",
    "/threading.py",
    "/contextlib.py",
    "/functools.py",
    "/concurrent/",
    "<frozen",
    "/multiprocessing/",
    "/absl/",
)


class CollectiveOrder:
    """Comparison of the collectives of all workers. One object per process, see `watch_collectives`.

    Args:
      exchange: (number, text) -> the texts of all workers by rank. Raises TimeoutError with the index of a
        worker that has not published its text.
      step: () -> number of completed steps.
    """

    def __init__(self, exchange: Callable[[int, str], list[str]], step: Callable[[], int]):
        self._exchange = exchange
        self._step = step
        self._number = 0
        self._last = "none"
        self._lock = threading.Lock()

    def announce(self, name: str, shape: Any = "", dtype: str = "") -> None:
        """Publishes a collective. Raises UsageError unless all workers publish the same one."""
        with self._lock:
            collective = {"step": self._step(), "name": name, "shape": str(shape), "dtype": dtype}
            line = _line()
            text = json.dumps([collective, line])
            try:
                everyone = [json.loads(t) for t in self._exchange(self._number, text)]
            except TimeoutError as e:
                raise UsageError(
                    f"check_collectives: this worker is about to run {_described(collective)} at {line}, "
                    f"and worker {e} has not reached a collective for {_WAIT_SECS:.0f} s. The last "
                    f"collective of all workers was {self._last}."
                ) from None
            self._number += 1
            if any(other != collective for other, _ in everyone):
                lines = [
                    f"\n  worker {i}: {_described(other)} at {other_line}"
                    for i, (other, other_line) in enumerate(everyone)
                ]
                with contextlib.suppress(Exception):  # no worker may end before the other workers have read
                    self._exchange(self._number, "[]")
                raise UsageError(
                    "check_collectives: workers are about to run different collectives."
                    + "".join(lines)
                    + f"\nThe last collective of all workers was {self._last}. Run the same collectives on "
                    "all workers: do not read a metric, reduce, or create a variable on the chief only."
                )
            self._last = f"{_described(collective)} at {line}"


class _Outer:
    """User's line in the thread that has started a collective in another thread."""

    line = ""


_order: CollectiveOrder | None = None
_outer = _Outer()


def announce(name: str, shape: Any = "", dtype: str = "") -> None:
    """Calls `CollectiveOrder.announce` if `watch_collectives` has been called, else a no-op."""
    if _order is not None:
        _order.announce(name, shape, dtype)


def watch_collectives(num_workers: int, worker_index: int, step_variable: tf.Variable) -> None:
    """Checks all further collectives of this process before they run."""

    def step() -> int:
        with tf.init_scope():  # also while tracing
            return int(step_variable.numpy())

    global _order  # noqa: PLW0603  one per process, as collectives are
    if num_workers < 2:
        return
    if _order is None:
        announced_collectives.announce_collectives(announce, _line_kept)
    _order = CollectiveOrder(_through_service(num_workers, worker_index), step)


def _through_service(num_workers: int, worker_index: int) -> Callable[[int, str], list[str]]:
    service = coordination_service.coordination_client()

    def exchange(number: int, text: str) -> list[str]:
        service.set_config_key_value(f"ctl/{number}/{worker_index}", text)
        texts = []
        for i in range(num_workers):
            try:
                texts.append(service.get_config_key_value(f"ctl/{number}/{i}", int(_WAIT_SECS * 1000)))
            except tf.errors.DeadlineExceededError:
                raise TimeoutError(i) from None
        if number > 1:
            service.delete_config_key_value(f"ctl/{number - 2}/{worker_index}")
        return texts

    return exchange


@contextlib.contextmanager
def _line_kept() -> Iterator[None]:
    """Stores the user's line within the block, for collectives that other threads launch."""
    _outer.line = _line()
    try:
        yield
    finally:
        _outer.line = ""


def _described(collective: dict) -> str:
    parts = [collective["name"], collective["shape"], collective["dtype"]]
    return f"{' '.join(p for p in parts if p)} after step {collective['step']}"


def _line() -> str:
    """Returns the innermost line of the user's code as file:line, or the function that is being traced."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename.replace("\\", "/")
        if "__autograph_generated" in name and frame.f_code.co_name.startswith("tf__"):
            return f"{frame.f_code.co_name.removeprefix('tf__')}()"
        if "__autograph" not in name and not any(part in name for part in _LIBRARIES):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return _outer.line or "a line of ctl itself"
