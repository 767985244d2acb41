"""Optional methods of a trainer, with no-op defaults."""

import inspect
import types
from collections.abc import Iterable, Mapping
from typing import Any

_MODULES = (__name__, "ctl.trainer")  # they define the defaults


class OptionalMethods:
    """Base class of `ctl.Trainer` with the methods that a subclass may define besides those of the trainer.

    The hooks `before_training`, `after_epoch` and `after_evaluation` run on all workers, outside of graphs.
    They may return a `ctl.Decision`, True to stop, or None.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Replaces defaults by methods of a mixin that follows the trainer in the list of base classes."""
        super().__init_subclass__(**options)
        for name, default in vars(OptionalMethods).items():
            if name.startswith("_") or inspect.getattr_static(cls, name) is not default:
                continue
            mixins = [base for base in cls.__mro__ if name in vars(base) and base is not OptionalMethods]
            if mixins:
                setattr(cls, name, vars(mixins[0])[name])

    def before_training(self, step: int) -> Any:
        """Called once in each `train` before its first step, at `step` completed steps."""

    def after_epoch(self, epoch: int, step: int, means: dict[str, float]) -> Any:
        """Called after each pass over finite data, with the newest logged means."""

    def after_evaluation(self, step: int, means: dict[str, float], metrics: dict[str, Any]) -> Any:
        """Called after each evaluation, with its means and its Keras metrics by name."""

    def train_data_fn(self, input_context: Any) -> Any:
        """Returns one worker's part of the data in batches of one replica; replaces `train_data`."""
        raise NotImplementedError

    def signatures(self) -> Mapping[str, Any]:
        """Returns name -> `tf.function` that an exported SavedModel serves."""
        return {}

    def moving_averages(self) -> Iterable[tuple[Any, Any]] | None:
        """Returns pairs (variable, its average) of the step; None: the averages of the optimizers."""
        return None


def is_defined_by_user(trainer: object, method: str) -> bool:
    """Returns True if a subclass of `ctl.Trainer`, or the object itself, defines `method`."""
    definition = inspect.getattr_static(trainer, method, None)
    is_default = isinstance(definition, types.FunctionType) and definition.__module__ in _MODULES
    return definition is not None and not is_default
