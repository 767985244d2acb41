"""Pool of result buffers. They have TensorFlow's alignment, and are reused when they are unreferenced."""

import sys
import threading
from collections.abc import Sequence

import numpy as np

ALIGNMENT = 64
_MIN_POOLED_BYTES = 1 << 16  # the allocation of a smaller buffer is cheaper than the search for one
_MAX_POOL_BYTES = 1 << 30  # total size of the pool


class Pool:
    """Pool of buffers by size. A buffer is free if only the pool references its memory. Thread-safe."""

    def __init__(self, max_bytes: int = _MAX_POOL_BYTES):
        self._max_bytes = max_bytes
        self._owners_by_size: dict[
            int, list[np.ndarray]
        ] = {}  # size -> arrays that own the memory of views
        self._bytes = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> np.ndarray:
        """Returns an unused buffer, `[size]` uint8, with undefined content."""
        if size < _MIN_POOLED_BYTES:
            return _aligned_view(_allocate(size), size)
        with self._lock:
            owner = _find_unused(self._owners_by_size.get(size, ()), _UNUSED_REFERENCES)
            if owner is not None:
                return _aligned_view(owner, size)
            new_owner = _allocate(size)
            if self._bytes + size > self._max_bytes:
                self._drop_unused()
            if self._bytes + size <= self._max_bytes:
                self._owners_by_size.setdefault(size, []).append(new_owner)
                self._bytes += size
            return _aligned_view(new_owner, size)

    def _drop_unused(self) -> None:
        for size, owners in self._owners_by_size.items():
            while (owner := _find_unused(owners, _UNUSED_REFERENCES)) is not None:
                index = next(i for i, other in enumerate(owners) if other is owner)
                del owners[index], owner
                self._bytes -= size


def _find_unused(owners: Sequence[np.ndarray], references: int) -> np.ndarray | None:
    for owner in owners:
        if sys.getrefcount(owner) <= references:
            return owner
    return None


def _count_unused_references() -> int:
    """Measures `sys.getrefcount` in `_find_unused` for memory that only a list references."""
    owners, references = [_allocate(0)], 0
    while _find_unused(owners, references) is None:
        references += 1
    return references


def allocate_aligned(count: int, dtype: np.dtype) -> np.ndarray:
    """Returns an aligned array, `[count]`, with undefined content."""
    return _pool.take(count * dtype.itemsize).view(dtype)


def _allocate(size: int) -> np.ndarray:
    return np.empty(size + ALIGNMENT, np.uint8)


def _aligned_view(owner: np.ndarray, size: int) -> np.ndarray:
    start = -owner.__array_interface__["data"][0] % ALIGNMENT
    return owner[start : start + size]


_UNUSED_REFERENCES = _count_unused_references()
_pool = Pool()
