"""Three spellings of Keras 2 that Keras 3 refuses, for code that cannot be changed.

`optimizer.variables()`, `optimizer.lr`, and `model.compile(experimental_run_tf_function=...)`, which means
nothing any more.
"""

import functools
from typing import Any


class _Variables(list):
    """The variables of an optimizer, as a property and as a method."""

    def __call__(self) -> list:
        return list(self)


def install_keras2_spellings() -> None:
    """From now on, for all models and optimizers of Keras 3; nothing for tf_keras, or a second time."""
    import keras

    optimizer: Any = keras.optimizers.Optimizer
    base = next((c for c in optimizer.__mro__ if isinstance(vars(c).get("variables"), property)), None)
    if base is None or hasattr(optimizer, "lr"):
        return
    read = base.variables.fget
    base.variables = property(lambda self: _Variables(read(self)), doc=base.variables.__doc__)
    optimizer.lr = property(
        lambda self: self.learning_rate,
        lambda self, value: setattr(self, "learning_rate", value),
        doc="The same as `learning_rate`.",
    )
    for cls in keras.Model.__mro__:
        if "compile" in vars(cls):
            cls.compile = _without_old_words(vars(cls)["compile"])
            break


def _without_old_words(compile_model: Any) -> Any:
    @functools.wraps(compile_model)
    def compile(self: Any, *args: Any, experimental_run_tf_function: Any = None, **kwargs: Any) -> Any:
        return compile_model(self, *args, **kwargs)

    return compile
