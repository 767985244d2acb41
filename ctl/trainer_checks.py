"""Checks of the trainer that a function of ctl receives: a new trainer, or a subclass of `ctl.Trainer`."""

from typing import Any

from ctl.errors import UsageError


def check_instance(function: str, trainer: Any) -> None:
    """Raises UsageError for a class, a Keras model, or another object that is no trainer.

    Args:
      function: Name of the public function, for the message.
      trainer: Argument of the function.
    """
    if isinstance(trainer, type):
        name = trainer.__name__
        raise UsageError(
            f"{function}() got the class {name}; expected an instance of ctl.Trainer. Write "
            f"{function}({name}(global_batch_size=...))."
        )
    if not _is_trainer(trainer):
        raise UsageError(
            f"{function}() got {_describe(trainer)}; expected an instance of ctl.Trainer."
            f"{_hint(trainer, 'ctl.KerasTrainer(model, ...)')}"
        )


def check_factory(function: str, make_trainer: Any) -> None:
    """Raises UsageError for an object that is neither a subclass of `ctl.Trainer` nor a function.

    Args:
      function: Name of the public function, for the message.
      make_trainer: Argument of the function.
    """
    expected = "expected a subclass of ctl.Trainer, or a function that returns a trainer"
    if isinstance(make_trainer, type):
        if not _is_trainer(make_trainer):
            raise UsageError(f"{function}() got the class {make_trainer.__name__}; {expected}.")
    elif _is_trainer(make_trainer):
        name = type(make_trainer).__name__
        raise UsageError(
            f"{function}() got an instance of {name}; {expected}. Write {function}({name}), with the "
            "settings as further arguments."
        )
    elif hasattr(make_trainer, "fit") or not callable(make_trainer):  # a Keras model is callable
        hint = _hint(
            make_trainer, f"{function}(lambda **settings: ctl.KerasTrainer(make_model, ..., **settings))"
        )
        raise UsageError(f"{function}() got {_describe(make_trainer)}; {expected}.{hint}")


def check_result(function: str, trainer: Any) -> None:
    """Raises UsageError if a function that makes a trainer has returned another object."""
    if isinstance(trainer, type) or not _is_trainer(trainer):
        returned = "the class " + trainer.__name__ if isinstance(trainer, type) else _describe(trainer)
        raise UsageError(
            f"{function}() got a function that returned {returned}; expected an instance of ctl.Trainer."
        )


def _is_trainer(trainer: Any) -> bool:
    return hasattr(trainer, "_prepare_trainer")


def _describe(value: Any) -> str:
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    return f"a {type(value).__name__}"


def _hint(value: Any, call: str) -> str:
    """Returns how to train a Keras model, or "" for other objects."""
    return f" Write {call}." if hasattr(value, "fit") else ""
