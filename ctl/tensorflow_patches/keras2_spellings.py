"""Three spellings of Keras 2 that Keras 3 refuses, for code that cannot be changed.

Purpose: Scripts for Horovod use `optimizer.variables()`, `optimizer.lr` and
  `model.compile(experimental_run_tf_function=...)`. The last argument has no effect.
Replaces: `variables` and `lr` of `keras.optimizers.Optimizer`, and `compile` of `keras.Model`.
Versions: Keras 3.0 and later.
Upstream issue: none; Keras 3 removed these spellings on purpose.
Switch: `keras2_spellings`. Without the patch such scripts raise the errors of Keras 3.
"""

import functools
from typing import Any

from ctl.tensorflow_patches import switches


class _Variables(list):
    """The variables of an optimizer, as a property and as a method."""

    def __call__(self) -> list:
        return list(self)


def install_keras2_spellings() -> None:
    """Adds the spellings to all models and optimizers of Keras 3; idempotent. A no-op for tf_keras."""
    import keras

    optimizer: Any = keras.optimizers.Optimizer
    base = next((c for c in optimizer.__mro__ if isinstance(vars(c).get("variables"), property)), None)
    if base is None or hasattr(optimizer, "lr") or not switches.is_enabled("keras2_spellings"):
        return
    read = base.variables.fget
    base.variables = property(_as_method(read), doc=base.variables.__doc__)
    optimizer.lr = property(
        lambda self: self.learning_rate,
        lambda self, value: setattr(self, "learning_rate", value),
        doc="The same as `learning_rate`.",
    )
    for cls in keras.Model.__mro__:
        if "compile" in vars(cls):
            cls.compile = _without_old_words(vars(cls)["compile"])
            break


def _as_method(read: Any) -> Any:
    @functools.wraps(read)
    def variables(self: Any) -> _Variables:
        return _Variables(read(self))

    return variables


def _without_old_words(compile_model: Any) -> Any:
    @functools.wraps(compile_model)
    def compile(self: Any, *args: Any, experimental_run_tf_function: Any = None, **kwargs: Any) -> Any:
        return compile_model(self, *args, **kwargs)

    return compile
