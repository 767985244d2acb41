"""Replacement of methods of single objects, also by several threads at the same time.

TensorFlow traces each replica in a separate thread, and the traces interleave. A method is replaced when
the first block is entered and restored when the last one is left.

Purpose: `ctl.fit` averages over replicas in the methods `apply`, `call`, `update_state` and
  `predict_on_batch` of the user's Keras objects, and records their arguments. On several workers, it
  replaces `Model.evaluate` by a method that raises an error. If the class of a model overrides `fit`,
  `evaluate` or `predict`, `ctl` executes the call of the method of `keras.Model` in the override.
Replaces: these public methods of single objects; `fit`, `evaluate` and `predict` of `keras.Model` during a
  call of `ctl.fit`, `ctl.evaluate` or `ctl.predict`, for one model.
Versions: Keras 3.0 and later.
Upstream issue: none known.
Switch: none; `ctl.fit` would have wrong results on several replicas.
"""

import contextlib
import functools
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


@contextlib.contextmanager
def replaced_in_base_class(model: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Within the block, a call of `keras.Model.name` for `model` in this thread calls `method` instead."""
    classes = [c for c in type(model).__mro__ if c.__module__.startswith("keras.") and name in vars(c)]
    owner, original, thread = classes[0], vars(classes[0])[name], threading.get_ident()

    @functools.wraps(original)
    def dispatch(self: Any, *arguments: Any, **named: Any) -> Any:
        if self is model and threading.get_ident() == thread:
            return method(*arguments, **named)
        return original(self, *arguments, **named)

    setattr(owner, name, dispatch)
    try:
        yield
    finally:
        setattr(owner, name, original)


def replace_method(instance: Any, name: str, method: Callable[..., Any]) -> None:
    """Replaces a method of an object permanently."""
    object.__setattr__(instance, name, method)
