"""Conversion of logged values to numbers and to events for metric writers."""

import math
from typing import Any

import numpy as np
from ctl.errors import UsageError
from ctl.metrics.figures import Audio, Matrix, PrCurve
from ctl.metrics.protocol import Event, HistogramLogged, TextLogged

_MAX_INTERVALS = 30  # the default of tf.summary.histogram


def number_or_event(step: int, name: str, value: Any, run: str = "train") -> float | Event:
    """Converts a value that the user logs.

    Args:
      step: Number of completed steps.
      name: Name of the value.
      value: A number `[]`, a text, an array of numbers, or an object of figures.py.
      run: "train" or "eval".

    Returns:
      A float for a number, a histogram for an array, else the event of the value.

    Raises:
      UsageError: The name is no string, or the value has another type.
    """
    if not isinstance(name, str) or not name:
        raise UsageError(f"log() got the name {name!r}; expected a text such as 'temperature'.")
    if isinstance(value, str):
        return TextLogged(step, name, value, run)
    if isinstance(value, (Matrix, Audio, PrCurve)):
        return value.event(step, name, run)
    array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
        raise UsageError(
            f"log({name!r}) got a {type(value).__name__}; expected a number, a text, an array of "
            "numbers, ctl.Matrix, ctl.Audio or ctl.PrCurve. Images are for show()."
        )
    return float(array) if array.ndim == 0 else _histogram(step, name, array, run)


def _histogram(step: int, name: str, array: np.ndarray, run: str) -> HistogramLogged:
    """Returns the histogram of the finite values, in intervals of equal width."""
    values = array.astype(np.float64).ravel()
    finite = values[np.isfinite(values)]
    if not finite.size:
        return HistogramLogged(step, name, (0.0, 0.0), (0.0,), run)
    low, high = float(np.min(finite)), float(np.max(finite))
    if math.isclose(low, high):
        return HistogramLogged(step, name, (low - 0.5, low + 0.5), (float(finite.size),), run)
    counts, edges = np.histogram(finite, _MAX_INTERVALS, (low, high))
    return HistogramLogged(step, name, tuple(map(float, edges)), tuple(map(float, counts)), run)
