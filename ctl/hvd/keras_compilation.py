"""Keras 3 compiles a model with XLA by itself on a machine with a GPU; between ranks it must not.

The exchange of gradients is a call of Python in the middle of a step, which XLA does not take. So with
`jit_compile="auto"`, Keras's default, nothing is compiled as long as there are several ranks.
`jit_compile=True` is left as it is.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

_TRAINER = "keras.src.trainers.trainer"


def install_compilation_check(has_peers: Callable[[], bool]) -> None:
    """From now on, whenever this process has peers; nothing if Keras 3 is not imported yet."""
    module = sys.modules.get(_TRAINER)
    trainer = getattr(module, "Trainer", None)
    resolve = getattr(trainer, "_resolve_auto_jit_compile", None)
    if trainer is None or resolve is None or hasattr(resolve, "__wrapped__"):
        return

    @functools.wraps(resolve)
    def without_xla(self: Any) -> Any:
        return False if has_peers() else resolve(self)

    trainer._resolve_auto_jit_compile = without_xla
