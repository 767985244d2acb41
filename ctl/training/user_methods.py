"""Methods of a trainer that a user writes, with their defaults."""

import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
_MODULES = (__name__, "ctl.trainer")  # they define the defaults


class UserMethods:
    """Base class of `ctl.Trainer` with the methods that a subclass may define.

    Required for training: `build`, `train_data` (or `train_data_fn`) and `train_step`. Required for
    evaluation: `eval_data` and `eval_step`. The hooks `before_training`, `after_loop`, `after_epoch` and
    `after_evaluation` run on all workers, outside of graphs. They may return a `ctl.Decision` (not
    `after_loop`), True to stop, or None.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Replaces defaults by methods of a mixin that follows the trainer in the list of base classes."""
        super().__init_subclass__(**options)
        for name, default in vars(UserMethods).items():
            if name.startswith("_") or inspect.getattr_static(cls, name) is not default:
                continue
            mixins = [base for base in cls.__mro__ if name in vars(base) and base is not UserMethods]
            if mixins:
                setattr(cls, name, vars(mixins[0])[name])

    def build(self) -> None:
        """Sets `self.model` and `self.optimizer`. Called once, inside `strategy.scope()`."""
        raise NotImplementedError

    def train_data(self, batch_size: int) -> Any:
        """Returns a `tf.data.Dataset` of global batches, `ctl.from_arrays(...)`, or arrays.

        Also `ctl.from_source(...)`, or a PyDataset, Grain pipeline or generator (docs/sources.md).
        `ctl.example_numbers(batch_size)` is for a step that creates its own data. `train_data_fn` replaces
        this method.
        """
        raise NotImplementedError

    def eval_data(self, batch_size: int) -> Any:
        """Returns one pass over the examples to evaluate, in batches of any size."""
        raise NotImplementedError

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        """Updates the model on one replica's batch. Called while tracing.

        Returns name -> `[b]`, one number per example; or `[]`; or a pair (parts of a sum, parts of its
        count), e.g. (token_loss * mask, mask); or a Keras metric that the step has updated.
        """
        raise NotImplementedError

    def eval_step(self, batch: Any) -> Mapping[str, Any]:
        """Returns name -> `[b]`, as `train_step`. Each example counts once in the mean."""
        raise NotImplementedError

    def after_loop(self, step: int, means: dict[str, float]) -> Any:
        """Called on every worker after each loop; returns True to stop.

        `means` are those of the steps of the loop, which are fetched after each loop.
        """

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


def any_signature(method: Callable[..., T]) -> Callable[..., T]:
    """Marks a method for type checkers: a subclass may define it with other arguments."""
    return method


def is_defined_by_user(trainer: object, method: str) -> bool:
    """Returns True if a subclass of `ctl.Trainer`, or the object itself, defines `method`."""
    definition = inspect.getattr_static(trainer, method, None)
    is_default = isinstance(definition, types.FunctionType) and definition.__module__ in _MODULES
    return definition is not None and not is_default
