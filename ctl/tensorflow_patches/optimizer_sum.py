"""Updates of a Keras 3 optimizer without its sum of gradients over replicas.

Purpose: `ctl` sums and clips the gradients itself. Keras 3 has no argument that turns off its sum. Keras
  also cannot trace the periodic assignment of moving averages on several replicas. In a graph, Keras
  3.12 raises NotImplementedError for an unknown variable.
Replaces: `_all_reduce_sum_gradients` and `ema_overwrite_frequency` of single optimizers, within a block.
Versions: Keras 3 with optimizers that sum; checked with 3.3.0 and 3.15.1.
Upstream issue: https://github.com/keras-team/keras/issues/19308
Switch: `optimizer_sum`. Without the patch gradients are summed twice on several replicas.
"""

import contextlib
import threading
import traceback
from collections.abc import Iterator
from typing import Any

from ctl.tensorflow_patches import switches

_patch_lock = threading.Lock()
_patched: dict[int, list] = {}  # id of an optimizer -> [number of blocks, its overwrite frequency]


@contextlib.contextmanager
def summed_already(optimizer: Any) -> Iterator[int | None]:
    """Disables the sum and the assignment of averages within the block.

    Yields the frequency of the assignment (steps), or None. Traces of several replicas interleave in
    threads, so blocks are counted.
    """
    if not switches.is_enabled("optimizer_sum"):
        yield None
        return
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    with _patch_lock:
        entry = _patched.setdefault(id(inner), [0, getattr(inner, "ema_overwrite_frequency", None)])
        entry[0] += 1
        object.__setattr__(inner, "_all_reduce_sum_gradients", list)
        object.__setattr__(inner, "ema_overwrite_frequency", None)
    try:
        yield entry[1]
    except NotImplementedError as e:
        calls = [frame.name for frame in traceback.extract_tb(e.__traceback__)]
        if "_check_variables_are_known" not in calls:
            raise
        raise ValueError("Unknown variable: the optimizer was built with others.") from e
    finally:
        with _patch_lock:
            entry[0] -= 1
            if not entry[0]:
                inner.__dict__.pop("_all_reduce_sum_gradients", None)
                object.__setattr__(inner, "ema_overwrite_frequency", entry[1])
                del _patched[id(inner)]
