"""Several evaluation sets, if `eval_data` returns `{"clean": dataset, "noisy": dataset}`."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
from ctl.data import input_errors, sources
from ctl.errors import UsageError

UNNAMED = ""  # name of the only set of an `eval_data` that returns no dictionary of sets
_NAME = re.compile(r"[A-Za-z0-9_][\w.\-]*", re.ASCII)


def split_sets(eval_data: Callable[[int], Any], global_batch_size: int) -> dict[str, Callable[[int], Any]]:
    """Calls `eval_data`, and returns a function like it for each evaluation set, by name.

    A dictionary of arrays is a single set, with dictionaries as batches. A dictionary of datasets, or of
    results of `ctl.from_arrays`, is a set for each key.

    Args:
      eval_data: The user's function (global batch size) -> data.
      global_batch_size: Argument of `eval_data`.

    Raises:
      UsageError: If a name of a set cannot be the name of a directory, or some values are not datasets.
    """
    with input_errors.explain_missing_files("eval_data"):
        data = eval_data(global_batch_size)
    if not isinstance(data, Mapping):
        return {UNNAMED: lambda _: data}
    if not data:
        raise UsageError(
            "eval_data returned an empty dictionary; expected data, or a dataset for each set."
        )
    is_dataset = {name: sources.is_dataset(part) for name, part in data.items()}
    if not any(is_dataset.values()):
        _check_rows(data)
        return {UNNAMED: lambda _: data}
    if not all(is_dataset.values()):
        invalid_names = ", ".join(str(name) for name, value in is_dataset.items() if not value)
        raise UsageError(
            f"eval_data returned a dictionary in which {invalid_names} is not a dataset; expected a "
            "dataset or ctl.from_arrays(...) for each evaluation set."
        )
    invalid = [name for name in data if not (isinstance(name, str) and _NAME.fullmatch(name))]
    if invalid:
        raise UsageError(
            f"eval_data returned an evaluation set with the name {invalid[0]!r}; expected a string of "
            "letters, digits, '_', '-' and '.', a letter or digit first: it names a run in TensorBoard."
        )
    return {name: lambda _, part=part: part for name, part in data.items()}  # type: ignore[misc]


def _check_rows(arrays: Mapping[Any, Any]) -> None:
    """Raises UsageError for a dictionary of arrays with different numbers of rows."""
    first_shapes = {
        name: getattr(next(iter(tf.nest.flatten(part)), None), "shape", None)
        for name, part in arrays.items()
    }
    rows = {name: shape[0] for name, shape in first_shapes.items() if shape}
    if len(set(rows.values())) > 1:
        counts = ", ".join(f"{name}: {count}" for name, count in rows.items())
        raise UsageError(
            "eval_data returned a dictionary of arrays, which is one evaluation set, with different "
            f"numbers of rows ({counts}); expected equal numbers. For several sets, wrap each in "
            'ctl.from_arrays: {"clean": ctl.from_arrays((x, y), batch_size), ...}.'
        )


def data_name(set_name: str) -> str:
    """Returns the name of the data of a set for messages, such as "eval_data['clean']"."""
    return "eval_data" if set_name == UNNAMED else f"eval_data[{set_name!r}]"


def metric_name(set_name: str, name: str) -> str:
    """Returns the name of a metric of a set, such as "clean/loss"."""
    return name if set_name == UNNAMED else f"{set_name}/{name}"
