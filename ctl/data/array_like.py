"""Conversion of array-like objects: pandas frames, SciPy matrices, text, and tensors of other libraries.

    as_arrays({"age": frame["age"], "photos": photos})     # nested arrays, ragged tensors and `SparseRows`

pandas and SciPy are recognised by the modules of their classes, so that they need not be installed.
"""

import collections
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf
from ctl.distribute.row_partition import take_rows
from ctl.errors import UsageError


class SparseRows:
    """Rows of a sparse tensor.

    Args:
      tensor: The sparse tensor `[n, ...]`, of rank 2 or more.
    """

    def __init__(self, tensor: tf.SparseTensor):
        self._tensor = tensor = tf.sparse.reorder(tensor)
        self.shape, self.dtype = tensor.shape, tensor.dtype
        row_numbers, num_rows = tensor.indices[:, 0], tensor.dense_shape[0]
        by_row = tf.RaggedTensor.from_value_rowids
        self._indices = by_row(tensor.indices[:, 1:], row_numbers, nrows=num_rows)
        self._values = by_row(tensor.values, row_numbers, nrows=num_rows)

    def __getitem__(self, rows: slice) -> "SparseRows":
        low, high, _ = rows.indices(self.shape[0])
        return SparseRows(take_rows(self._tensor, low, high))

    def gather(self, numbers: Any) -> tf.SparseTensor:
        """Returns the rows with these numbers, int64 `[b]`, as a sparse tensor `[b, ...]`."""
        indices, values = tf.gather(self._indices, numbers), tf.gather(self._values, numbers)
        rows = tf.cast(values.value_rowids(), tf.int64)[:, tf.newaxis]
        shape = [tf.size(numbers, tf.int64), *self.shape[1:]]
        return tf.SparseTensor(tf.concat([rows, indices.values], axis=1), values.values, shape)


def is_array_like(value: Any) -> bool:
    """Returns True for an array, a tensor (also ragged or sparse), a pandas frame, or a SciPy matrix."""
    if isinstance(value, (np.ndarray, tf.Tensor, tf.RaggedTensor, tf.SparseTensor, SparseRows)):
        return True
    return _is_of(value, "pandas") or _is_of(value, "scipy") or hasattr(value, "__array__")


def as_arrays(values: Any) -> Any:
    """Converts nested array-like objects; lists become tuples. Raises UsageError for an unsuitable one."""
    if isinstance(values, collections.defaultdict):  # its constructor has other arguments
        return {key: as_arrays(value) for key, value in values.items()}
    if isinstance(values, dict):
        return type(values)((key, as_arrays(value)) for key, value in values.items())
    if isinstance(values, (list, tuple)) and not hasattr(values, "_fields"):
        return tuple(map(as_arrays, values))  # tf.data would stack a list into one tensor
    return tf.nest.map_structure(_as_array, values)


def as_tensor(value: Any) -> Any:
    """Converts one array-like object to an array, or to a dense, ragged or sparse tensor."""
    if isinstance(value, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor, SparseRows)):
        return value
    if _is_of(value, "scipy") and hasattr(value, "tocoo"):
        matrix = value.tocoo()
        indices = np.stack([matrix.row, matrix.col], axis=1).astype(np.int64)
        return tf.sparse.reorder(tf.SparseTensor(indices, matrix.data, matrix.shape))
    return _text_as_bytes(_frame_values(value) if _is_of(value, "pandas") else np.asarray(value))


def _as_array(value: Any) -> Any:
    array = as_tensor(value)
    return SparseRows(array) if isinstance(array, tf.SparseTensor) else array


def _is_of(value: Any, library: str) -> bool:
    return type(value).__module__.split(".")[0] == library


def _frame_values(frame: Any) -> np.ndarray:
    """Returns the values of a pandas Series `[n]` or DataFrame `[n, columns]`; floats as float32."""
    columns = [frame] if frame.ndim == 1 else [frame.iloc[:, i] for i in range(frame.shape[1])]
    if not columns:
        raise UsageError("a DataFrame has no columns; expected at least one.")
    other_names = [str(column.name) for column in columns if _numpy_dtype(column).kind not in "biuf"]
    if 0 < len(other_names) < len(columns):
        raise UsageError(
            f"a DataFrame has columns of numbers and columns of other types ({', '.join(other_names)}), "
            "which have no common array. Write dict(frame), which gives the model one array per column, or "
            "select columns: frame[[...]]."
        )
    if other_names:
        for column in columns:
            _check_text(column)
        return frame.to_numpy(dtype=object)
    dtype = np.result_type(*map(_numpy_dtype, columns))
    for column in columns:
        if dtype.kind != "f" and column.isna().any():
            _raise_missing(column, dtype.name)
    values = frame.to_numpy(dtype=dtype)
    return values.astype(np.float32) if dtype.kind == "f" else values


def _check_text(column: Any) -> None:
    """Raises UsageError unless all values of a pandas column are text."""
    if all(isinstance(value, (str, bytes)) for value in column.to_numpy(dtype=object)):
        return
    if column.isna().any() and all(isinstance(value, (str, bytes)) for value in column.dropna()):
        _raise_missing(column, "text")
    is_date = getattr(column.dtype, "kind", "") in ("m", "M")
    advice = f"for example {_expression(column)}.astype('int64')" if is_date else "or leave it out"
    raise UsageError(
        f"{_described(column)} has values of {column.dtype}; expected numbers or text. "
        f"Convert it, {advice}."
    )


def _raise_missing(column: Any, type_name: str) -> NoReturn:
    raise UsageError(
        f"{_described(column)} has missing values in a column of {type_name}. Write "
        f"{_expression(column)}.fillna(...) first."
    )


def _described(column: Any) -> str:
    return "a Series" if column.name is None else f"column {column.name} of a DataFrame"


def _expression(column: Any) -> str:
    return "series" if column.name is None else f"frame[{column.name!r}]"


def _numpy_dtype(column: Any) -> np.dtype:
    """Returns the dtype of a pandas column; that of the values for the types that allow missing values."""
    dtype = getattr(column.dtype, "numpy_dtype", column.dtype)
    return dtype if isinstance(dtype, np.dtype) else np.dtype(object)


def _text_as_bytes(array: np.ndarray) -> np.ndarray:
    """Converts an array of Python strings to a bytes dtype. Other arrays do not change."""
    is_of_objects = array.dtype == object and array.size
    if not is_of_objects or not all(isinstance(text, (str, bytes)) for text in array.flat):
        return array
    encoded = [text.encode() if isinstance(text, str) else text for text in array.flat]
    return np.array(encoded).reshape(array.shape)
