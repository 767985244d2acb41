"""Replacement of methods of single objects, also by several threads at the same time.

TensorFlow traces each replica in a separate thread, and the traces interleave. A method is replaced when
the first block is entered and restored when the last one is left.

Purpose: `ctl.fit` averages over replicas in the methods `apply`, `call`, `update_state` and
  `predict_on_batch` of the user's Keras objects, and records their arguments. On several workers, it
  replaces `Model.evaluate` by a method that raises an error.
Replaces: these public methods of single objects.
Versions: Keras 3.0 and later.
Upstream issue: none known.
Switch: none; `ctl.fit` would have wrong results on several replicas.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

_lock = threading.Lock()


@dataclass
class _Replaced:
    before: dict[str, Any]  # the attribute of the instance, if it had one
    num_blocks: int = 0


_replaced: dict[tuple[int, str], _Replaced] = {}


@contextlib.contextmanager
def recorded_calls(objects: Iterable[Any], name: str) -> Iterator[list[tuple[Any, tuple]]]:
    """Within the block, yields a list that collects the objects with the arguments of a method's calls."""
    calls: list[tuple[Any, tuple]] = []

    def recording(instance: Any, method: Callable) -> Callable:
        def record(*arguments: Any, **named: Any) -> Any:
            calls.append((instance, arguments))
            return method(*arguments, **named)

        return record

    with replaced(objects, name, recording):
        yield calls


@contextlib.contextmanager
def replaced(
    objects: Iterable[Any], name: str, wrap: Callable[[Any, Callable], Callable]
) -> Iterator[None]:
    """Within the block, `instance.name` is `wrap(instance, original method)` for each of `objects`."""
    objects = list(objects)
    for instance in objects:
        with _lock:
            entry = _replaced.get((id(instance), name))
            if entry is None:
                before = {name: vars(instance)[name]} if name in vars(instance) else {}
                entry = _replaced[id(instance), name] = _Replaced(before)
                object.__setattr__(instance, name, wrap(instance, getattr(instance, name)))
            entry.num_blocks += 1
    try:
        yield
    finally:
        for instance in objects:
            with _lock:
                entry = _replaced[id(instance), name]
                entry.num_blocks -= 1
                if not entry.num_blocks:
                    object.__delattr__(instance, name)
                    for attribute, value in entry.before.items():
                        object.__setattr__(instance, attribute, value)
                    del _replaced[id(instance), name]


def replace_method(instance: Any, name: str, method: Callable[..., Any]) -> None:
    """Replaces a method of an object permanently."""
    object.__setattr__(instance, name, method)
