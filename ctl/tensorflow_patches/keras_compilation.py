"""No automatic XLA compilation of Keras 3 models on several ranks.

Purpose: On a machine with a GPU, `jit_compile="auto"`, the default of Keras, means True. The exchange of
  gradients between ranks calls Python, which XLA does not support. `jit_compile=True` is unchanged.
Replaces: `_resolve_auto_jit_compile` of `keras.src.trainers.trainer.Trainer`.
Versions: Keras 3.0 and later; a no-op if the method does not exist.
Upstream issue: https://github.com/horovod/horovod/issues/2590 (the same limitation of Horovod)
Switch: `keras_compilation`. Without the patch Keras compiles, and the step raises an error.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

from ctl.tensorflow_patches import switches

_TRAINER = "keras.src.trainers.trainer"


def install_compilation_check(has_peers: Callable[[], bool]) -> None:
    """Installs the patch, which is active while this process has peers. A no-op without Keras 3."""
    module = sys.modules.get(_TRAINER)
    trainer = getattr(module, "Trainer", None)
    resolve = getattr(trainer, "_resolve_auto_jit_compile", None)
    if trainer is None or resolve is None or hasattr(resolve, "__wrapped__"):
        return
    if not switches.is_enabled("keras_compilation"):
        return

    @functools.wraps(resolve)
    def without_xla(self: Any) -> Any:
        return False if has_peers() else resolve(self)

    trainer._resolve_auto_jit_compile = without_xla
