"""Memory of results: aligned as TensorFlow requires, and reused when it has no other references."""

import sys
import threading
from collections.abc import Sequence

import numpy as np

ALIGNMENT = 64
_WORTH = 1 << 16  # bytes; smaller buffers are cheaper to allocate than to find
_MOST_BYTES = 1 << 30  # total size of the pool


class Pool:
    """Pool of buffers by size. A buffer is free if only the pool refers to its memory. Thread-safe."""

    def __init__(self, most_bytes: int = _MOST_BYTES):
        self._most_bytes = most_bytes
        self._kept: dict[int, list[np.ndarray]] = {}  # size -> arrays that own the memory of views
        self._bytes = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> np.ndarray:
        """Returns an unused buffer of `[size]` bytes with undefined content."""
        if size < _WORTH:
            return _aligned_view(_memory(size), size)
        with self._lock:
            owner = _unused(self._kept.get(size, ()), _OURS)
            if owner is not None:
                return _aligned_view(owner, size)
            made = _memory(size)
            if self._bytes + size > self._most_bytes:
                self._drop_unused()
            if self._bytes + size <= self._most_bytes:
                self._kept.setdefault(size, []).append(made)
                self._bytes += size
            return _aligned_view(made, size)

    def _drop_unused(self) -> None:
        for size, owners in self._kept.items():
            while (owner := _unused(owners, _OURS)) is not None:
                place = next(i for i, other in enumerate(owners) if other is owner)
                del owners[place], owner
                self._bytes -= size


def _unused(owners: Sequence[np.ndarray], references: int) -> np.ndarray | None:
    for owner in owners:
        if sys.getrefcount(owner) <= references:
            return owner
    return None


def _references_of_unused() -> int:
    """Returns `sys.getrefcount` in `_unused` of memory that only a list refers to."""
    owners, references = [_memory(0)], 0
    while _unused(owners, references) is None:
        references += 1
    return references


def aligned(count: int, dtype: np.dtype) -> np.ndarray:
    """Returns an aligned array `[count]` of a dtype with undefined content."""
    return _pool.take(count * dtype.itemsize).view(dtype)


def _memory(size: int) -> np.ndarray:
    return np.empty(size + ALIGNMENT, np.uint8)


def _aligned_view(owner: np.ndarray, size: int) -> np.ndarray:
    start = -owner.ctypes.data % ALIGNMENT
    return owner[start : start + size]


_OURS = _references_of_unused()
_pool = Pool()
