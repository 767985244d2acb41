"""Keras 3 loss objects divide by the number of replicas, and say nothing: in a step that is an error.

A loss object with its default reduction gives a scalar that is this replica's mean, divided by the
number of replicas: half of the loss on two. Here such a call is refused while a step is traced.
"""

import functools
import sys
import threading
from typing import Any

from ctl.errors import UsageError

_MODULE = "keras.src.losses.loss"
_tracing = threading.local()  # .replicas: how many, while a step is traced in this thread


def refuse_division(num_replicas: int) -> None:
    """From here on in this thread; with one replica there is nothing to divide by."""
    _install()
    _tracing.replicas = num_replicas


def allow_division() -> None:
    """Ends `refuse_division`."""
    _tracing.replicas = 1


def _install() -> None:
    module: Any = sys.modules.get(_MODULE)
    original = getattr(module, "scale_loss_for_distribution", None)
    if original is None or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def checked(value):
        replicas = getattr(_tracing, "replicas", 1)
        if replicas > 1:
            raise UsageError(
                "The step called a Keras loss object that averages by itself: it would give the mean "
                f"of one replica's examples, divided by {replicas} replicas. Make the loss with "
                "reduction=None, e.g. keras.losses.SparseCategoricalCrossentropy(reduction=None), and "
                "give what it returns, one number per example, to self.average()."
            )
        return original(value)

    module.scale_loss_for_distribution = checked
