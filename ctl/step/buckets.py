"""Gradients in groups that are summed one after the other, in the order in which backward makes them."""

from collections.abc import Sequence

import tensorflow as tf

_SMALL = 1 << 16  # bytes; what is smaller goes with the last bucket


def in_buckets(tensors: Sequence[tf.Tensor], bucket_bytes: int) -> list[list[int]]:
    """Places of tensors, in groups of at least `bucket_bytes` and a last one; 0: all in one group.

    Gradients come in the order of the layers, and backward makes the last one first. Tensors that are
    small or of unknown size, such as what is found out about all gradients, are in the last group.
    """
    if not bucket_bytes:
        return [list(range(len(tensors)))]
    sizes = [_bytes(tensor) for tensor in tensors]
    groups: list[list[int]] = [[]]
    filled = 0
    for i in reversed(range(len(tensors))):
        if sizes[i] <= _SMALL:
            continue
        groups[-1].append(i)
        filled += sizes[i]
        if filled >= bucket_bytes:
            groups.append([])
            filled = 0
    groups[-1] += [i for i, size in enumerate(sizes) if size <= _SMALL]
    return [sorted(group) for group in groups if group]


def _bytes(tensor: tf.Tensor) -> int:
    count: int | None = tensor.shape.num_elements()
    return 0 if count is None else count * tensor.dtype.size
