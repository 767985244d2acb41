"""Temporary replacement of methods of single objects, by several threads at the same time.

TensorFlow traces each replica in a thread of its own, and the traces interleave. A method is replaced when
the first block is entered and restored when the last one is left.
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
def replaced(things: Iterable[Any], name: str, wrap: Callable[[Any, Callable], Callable]) -> Iterator[None]:
    """Within the block, `thing.name` is `wrap(thing, original method)` for each of `things`."""
    things = list(things)
    for thing in things:
        with _lock:
            entry = _replaced.get((id(thing), name))
            if entry is None:
                before = {name: vars(thing)[name]} if name in vars(thing) else {}
                entry = _replaced[id(thing), name] = _Replaced(before)
                object.__setattr__(thing, name, wrap(thing, getattr(thing, name)))
            entry.num_blocks += 1
    try:
        yield
    finally:
        for thing in things:
            with _lock:
                entry = _replaced[id(thing), name]
                entry.num_blocks -= 1
                if not entry.num_blocks:
                    object.__delattr__(thing, name)
                    for attribute, value in entry.before.items():
                        object.__setattr__(thing, attribute, value)
                    del _replaced[id(thing), name]
