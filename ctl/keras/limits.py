"""Limits of `keras.config.set_max_epochs` and `set_max_steps_per_epoch`, for short test runs."""

import logging

import keras

_log = logging.getLogger("ctl")


def limit_epochs(epochs: int) -> int:
    """Returns `epochs` or the limit of `keras.config.set_max_epochs`, with a warning if it is smaller."""
    limit = _limit("max_epochs")
    if not limit or limit >= epochs:
        return epochs
    _log.warning("epochs=%d is limited to %d by keras.config.set_max_epochs.", epochs, limit)
    return limit


def limit_steps(steps: int | None) -> int | None:
    """Returns `steps` or the limit of `set_max_steps_per_epoch`, with a warning if it is smaller.

    Args:
      steps: Number of batches per epoch or evaluation. None: all.
    """
    limit = _limit("max_steps_per_epoch")
    if not limit or (steps and steps <= limit):
        return steps
    _log.warning("Passes over data are limited to %d steps by keras.config.set_max_steps_per_epoch.", limit)
    return limit


def _limit(name: str) -> int | None:
    """Returns a setting of `keras.config`, or None in versions of Keras that do not have it."""
    setting = getattr(keras.config, name, None)
    return None if setting is None else setting()
