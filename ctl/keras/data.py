"""Data arguments of `ctl.fit` and `ctl.evaluate`: arrays, datasets, PyDatasets and generators."""

import inspect
import logging
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from ctl.callbacks.schedule import EpochLength, Every, Intervals
from ctl.data import dataset_checks, python_batches, sources
from ctl.data.array_like import as_arrays, is_array_like
from ctl.data.arrays import from_arrays
from ctl.data.grain_batches import is_grain_map_dataset
from ctl.data.indexed import IndexedData
from ctl.data.python_batches import Generated, example_batch, generated_batches, is_generator, is_py_dataset
from ctl.distribute.row_partition import num_rows
from ctl.errors import UsageError
from ctl.setting_values import check_integer
from ctl.tensorflow_patches.dataset_attributes import batch_size_setting, pipeline_parts

_log = logging.getLogger("ctl")
_EXPECTED = (
    "arrays, a tf.data.Dataset of batches, ctl.from_source(...), a keras.utils.PyDataset, a Grain dataset, "
    "or a generator"
)
_ENDLESS = 2**53  # more batches than this: a dataset that repeats itself without end


class Epochs(NamedTuple):
    """The epochs of one call of `ctl.fit`.

    Attributes:
      steps: Number of steps per epoch.
      first: Number of the first epoch, counted from 0.
      end: Number of the last epoch plus 1.
      validation_freq: Number of epochs between two evaluations, 0 for none; or the epochs to evaluate,
        counted from 1.
    """

    steps: int
    first: int
    end: int
    validation_freq: int | frozenset[int]

    def is_evaluated(self, epoch: int) -> bool:
        """Returns True if there is an evaluation after epoch number `epoch`, counted from 0."""
        if isinstance(self.validation_freq, frozenset):
            return epoch + 1 in self.validation_freq
        return self.validation_freq > 0 and (epoch + 1) % self.validation_freq == 0

    def ended_by(self, step: int) -> int | None:
        """Returns the number of the epoch that ends with `step` completed steps, or None."""
        return None if not step or step % self.steps else self.first + step // self.steps - 1


@dataclass(frozen=True, kw_only=True)
class EndOfEvaluatedEpochs(Every):
    """An interval that ends at the last step of each evaluated epoch.

    >>> EndOfEvaluatedEpochs(plan=Epochs(10, first=0, end=3, validation_freq=2)).next_mark(0)
    20
    """

    plan: Epochs

    def __post_init__(self) -> None:
        """Overrides the check of units, of which this interval has none."""

    def next_mark(self, step: int, steps_per_epoch: float | None = None) -> int | None:
        """Returns the first such step after `step`, or None if there is none."""
        plan, passed = self.plan, step // self.plan.steps
        for epoch in range(plan.first + passed, plan.end):
            if plan.is_evaluated(epoch):
                return (epoch - plan.first + 1) * plan.steps
        return None


@dataclass(frozen=True, kw_only=True)
class EpochIntervals(Intervals):
    """Intervals of a training with the epochs of `plan`."""

    plan: Epochs

    def epoch_length(self, steps_per_epoch: float | None) -> EpochLength:
        """Returns the length of an epoch of the plan, which may differ from a pass over the data."""
        return EpochLength(self.plan.steps, self.plan.first)


class Source(NamedTuple):
    """Training data of `ctl.fit`.

    Attributes:
      data: Arrays, a dataset, `IndexedData`, a PyDataset or `Generated` batches.
      validation: Arrays that `validation_split` removes from the end of the data, or None.
      batch_size: Number of examples per global batch.
      steps: Number of steps per epoch.
    """

    data: Any
    validation: Any
    batch_size: int
    steps: int

    @property
    def is_generator(self) -> bool:
        """True if the data come from a Python generator."""
        return isinstance(self.data, Generated)

    def within_one_pass(self) -> "Source":
        """Returns the source with an epoch of at most one pass over data of finite length."""
        try:
            return self._replace(steps=min(self.steps, _steps_of_epoch(self.data, self.batch_size, None)))
        except UsageError:
            return self


def training_source(
    arrays: tuple[Any, Any, Any], split: float, batch_size: int | None, steps_per_epoch: int | None
) -> Source:
    """Returns the training data. Raises UsageError for data that `ctl.fit` does not support.

    Args:
      arrays: The arguments x, y and sample_weight.
      split: Fraction of the examples for validation, from the end; 0.0 for none.
      batch_size: The argument of `ctl.fit`, or None.
      steps_per_epoch: The argument of `ctl.fit`, or None.
    """
    x = arrays[0]
    if is_generator(x) and steps_per_epoch is None:
        raise UsageError("x is a generator, whose length is unknown; give steps_per_epoch.")
    data, validation = _source(*arrays, split)
    size = _batch_size(data, batch_size, steps_per_epoch)
    return Source(data, validation, size, _steps_of_epoch(data, size, steps_per_epoch))


def _source(x: Any, y: Any, weight: Any, split: float) -> tuple[Any, Any]:
    """Returns batches or a tuple of arrays, and the arrays of the validation split or None."""
    if sources.is_dataset(x) or is_grain_map_dataset(x):
        if y is not None or weight is not None or split:
            raise UsageError(
                f"x is a {_called(x)}, which contains the targets and weights; y, sample_weight and "
                "validation_split are for arrays only."
            )
        return (generated_batches(x) if is_generator(x) else _readable(x, "x")), None
    if x is None or not all(map(is_array_like, tf.nest.flatten(x))):
        raise UsageError(f"x is a {type(x).__name__}; expected {_EXPECTED}.{_hint(x)}")
    parts = {"x": x, "y": y, "sample_weight": weight}
    arrays = tuple(_rows(name, part) for name, part in parts.items() if part is not None)
    if not split:
        return arrays, None
    if not 0 < split < 1:
        raise UsageError(f"validation_split is {split!r}; expected a number >= 0 and < 1.")
    count = tf.nest.flatten(arrays)[0].shape[0]
    at = math.floor(count * (1.0 - split))
    return _cut(arrays, 0, at), _cut(arrays, at, count)


def _rows(name: str, value: Any) -> Any:
    """Returns nested arrays `[n, ...]`. Raises UsageError for scalars and empty collections."""
    arrays = as_arrays(value)
    parts = tf.nest.flatten(arrays)
    scalars = [part for part in parts if len(part.shape) == 0]
    if scalars or not parts:
        received = f"contains {scalars[0]}" if scalars and tf.nest.is_nested(value) else f"is {value!r:.80}"
        raise UsageError(f"{name} {received}; expected arrays with one row per example.")
    return arrays


def single_pass(x: Any, y: Any, weight: Any, batch_size: int | None, steps: int | None) -> Source:
    """Returns one pass over x, y and weights, or its first `steps` batches, for one evaluation."""
    data, _ = _source(x, y, weight, 0.0)
    source = Source(data, None, _batch_size(data, batch_size, steps), steps or 1)
    if isinstance(source.data, Generated):
        data = source.data.dataset
        return source._replace(data=data if steps is None else data.take(steps))
    return source._replace(data=validation_source(source.data, source.batch_size, steps))


def _readable(data: Any, name: str) -> Any:
    """Returns a Grain pipeline or a PyTorch DataLoader as a dataset. Other data do not change."""
    if is_grain_map_dataset(data):
        count, data = len(data), data.to_iter_dataset()
        count = count if count < _ENDLESS else tf.data.INFINITE_CARDINALITY
        dataset = sources.as_source(data, name, 0, shuffle=False).dataset
        return dataset.apply(tf.data.experimental.assert_cardinality(count))
    if sources.is_iterable_of_batches(data):
        return sources.as_source(data, name, 0, shuffle=False).dataset
    return data


def _called(x: Any) -> str:
    if isinstance(x, IndexedData):
        return f"result of ctl.{_function_of(x)}"
    return "dataset" if isinstance(x, tf.data.Dataset) else type(x).__name__


def _function_of(data: IndexedData) -> str:
    return "from_arrays" if data.is_in_memory else "from_source"


def _hint(x: Any) -> str:
    if inspect.isgeneratorfunction(x):
        return f" Call the function: {x.__name__}()."
    if hasattr(x, "__getitem__") and hasattr(x, "__len__") and not isinstance(x, (list, tuple, dict, str)):
        return " A sequence of batches has to be a subclass of keras.utils.PyDataset."
    return ""


def _cut(arrays: Any, low: int, high: int) -> Any:
    return tf.nest.map_structure(lambda a: a[low:high], arrays)


def _batch_size(source: Any, batch_size: int | None, steps: int | None) -> int:
    """Returns the number of rows of a batch. Arrays without a `batch_size` are divided into `steps`."""
    if isinstance(source, (tf.data.Dataset, Generated)) or is_py_dataset(source):
        if batch_size is not None:
            _log.warning("batch_size=%s is ignored: x is already batched.", batch_size)
        return _rows_of_batches(source)
    if isinstance(source, IndexedData):
        return _own_batch_size(source, "batch_size", batch_size)
    if batch_size is not None:
        return batch_size
    num_examples = tf.nest.flatten(source)[0].shape[0]
    return 32 if steps is None else max(1, math.ceil(num_examples / steps))


def _own_batch_size(data: IndexedData, name: str, value: int | None) -> int:
    """Returns the batch size of the data. Raises UsageError if the argument `name` has another value."""
    if value not in (None, data.batch_size):
        raise UsageError(
            f"{name} is {value!r}; expected None or {data.batch_size}, the batch size in "
            f"ctl.{_function_of(data)}(...). Leave it out."
        )
    return data.batch_size


def batch_size_of_validation(data: Any, validation_batch_size: int | None, batch_size: int | None) -> Any:
    """Returns the number of examples per batch of an evaluation, or None for the default."""
    return validation_batch_size or (None if isinstance(data, IndexedData) else batch_size)


def _rows_of_batches(source: Any) -> int:
    if isinstance(source, Generated):
        return source.rows
    if is_py_dataset(source):
        return python_batches.batch_size_of(source)
    _check_batched(source)
    for spec in tf.nest.flatten(source.element_spec):
        if spec.shape.rank and spec.shape[0] is not None:
            return int(spec.shape[0])
    for part in pipeline_parts(source):  # reading a batch would change the order of a shuffle
        size = batch_size_setting(part)
        if size is not None and "Batch" in type(part).__name__:
            return int(size)
    first = next(iter(tf.nest.flatten(example_batch(source))))
    if first is not None and first.shape.rank:
        return int(tf.shape(first)[0])
    raise UsageError("x is an empty dataset, or not batched; expected dataset.batch(n).")


def _check_batched(dataset: tf.data.Dataset) -> None:
    """Raises UsageError for a dataset of slices of tensors that was not batched."""
    slices = any(type(part).__name__ == "_TensorSliceDataset" for part in pipeline_parts(dataset))
    if slices and not dataset_checks.is_batched(dataset):
        raise UsageError(
            f"x is not batched: its elements are {dataset_checks.describe_element(dataset.element_spec)}. "
            "Write dataset.batch(batch_size)."
        )


def check_shares(source: Source, replicas: int) -> None:
    """Raises UsageError for batches that cannot be split among the replicas."""
    if replicas > 1 and isinstance(source.data, tf.data.Dataset):
        _check_equal_rows(source.data, replicas)
    if source.batch_size % replicas and isinstance(source.data, (tf.data.Dataset, Generated)):
        rows = max(replicas, source.batch_size // replicas * replicas)
        raise UsageError(
            f"batches of x have {source.batch_size} rows, which {replicas} replicas cannot split evenly. "
            f"Make batches of a multiple of {replicas}, e.g. with dataset.batch({rows})."
        )


def _check_equal_rows(data: tf.data.Dataset, replicas: int) -> None:
    """Raises UsageError if inputs and targets of a batch have unequal numbers of rows.

    Batches without a static number of rows are checked later, when they are read.
    """
    specs = tf.nest.flatten(data.element_spec)
    rows = [spec.shape[0] if spec.shape.rank else None for spec in specs]
    if None in rows and not any("Batch" in type(part).__name__ for part in pipeline_parts(data)):
        batch = example_batch(data)
        rows = [] if batch is None else [num_rows(part) for part in tf.nest.flatten(batch)]
    row_counts = {int(n) for n in rows if n is not None}
    if len(row_counts) > 1:
        counts = ", ".join(map(str, sorted(row_counts)))
        raise UsageError(
            f"inputs and targets of a batch have {counts} rows, and each of "
            f"{replicas} replicas gets its part of the rows of both. Train on one device, or make batches "
            "with one row per example, e.g. with padded_batch."
        )


def _steps_of_epoch(source: Any, batch_size: int, steps_per_epoch: int | None) -> int:
    if steps_per_epoch is not None:
        return steps_per_epoch
    if is_py_dataset(source):
        if source.num_batches is None:
            raise UsageError(f"x is a {type(source).__name__} without a length; give steps_per_epoch.")
        return int(source.num_batches)
    if isinstance(source, Generated):
        raise UsageError("x is a generator, whose length is unknown; give steps_per_epoch.")
    if isinstance(source, IndexedData):
        return int(source.with_epochs_apart().steps_per_epoch)
    if not isinstance(source, tf.data.Dataset):
        return max(1, math.ceil(tf.nest.flatten(source)[0].shape[0] / batch_size))
    count = int(source.cardinality())
    if count == tf.data.INFINITE_CARDINALITY:
        raise UsageError("x is an endless dataset; give steps_per_epoch.")
    if count == tf.data.UNKNOWN_CARDINALITY:  # count the batches in one pass
        count = int(source.reduce(np.int64(0), lambda n, *_: n + 1))
    return max(1, count)


def validation_epochs(validation_freq: Any) -> int | frozenset[int]:
    """Returns `validation_freq` as a number >= 1 or as a set of epochs, counted from 1."""
    if isinstance(validation_freq, Collection) and not isinstance(validation_freq, (str, bytes)):
        return frozenset(check_integer("an epoch of validation_freq", n, 1) for n in validation_freq)
    return check_integer("validation_freq", validation_freq, 1)


def repeated(source: Source, plan: Epochs, shuffle: bool | str, seed: int) -> Any:
    """Returns the data of all epochs.

    Args:
      source: Training data.
      plan: The epochs.
      shuffle: True shuffles arrays and the batches of a PyDataset. "batch" shuffles only the latter: for
        arrays, Keras then changes the order within each batch, on which no mean depends.
      seed: Seed of the orders. Results of `from_arrays` and `from_source` have their own.
    """
    data = source.data
    if isinstance(data, Generated):
        return data.dataset
    if is_py_dataset(data):
        epochs, seed_of_order = max(1, plan.end - plan.first), seed if shuffle else None
        return python_batches.training_batches(data, epochs=epochs, steps=plan.steps, seed=seed_of_order)
    if isinstance(data, tf.data.Dataset):
        endless = data.cardinality() == tf.data.INFINITE_CARDINALITY
        return data if endless else data.repeat()
    is_in_order = not shuffle or isinstance(shuffle, str)
    if isinstance(data, IndexedData):
        return (data.in_order() if is_in_order else data).with_epochs_apart()
    return from_arrays(data, source.batch_size, shuffle=not is_in_order, epochs_apart=True)


def validation_source(data: Any, batch_size: int | None, steps: int | None) -> Any:
    """Returns one pass over the examples to evaluate, or its first `steps` batches.

    Args:
      data: The argument `validation_data`.
      batch_size: Number of examples per global batch, for arrays. None: as in `Model.evaluate`.
      steps: Number of batches, or None for all. A generator requires it.
    """
    if isinstance(data, IndexedData):
        size = _own_batch_size(data, "validation_batch_size", batch_size)
        return data if steps is None else data.first_examples(steps * size)
    if data is None:
        return None
    if is_generator(data):
        if steps is None:
            raise UsageError(
                "the validation data are a generator, whose length is unknown; give validation_steps, the "
                "number of batches to evaluate."
            )
        return python_batches.read_first(data, steps)
    if is_py_dataset(data):
        return python_batches.validation_batches(data, steps)
    data = _readable(data, "the validation data")
    if isinstance(data, tf.data.Dataset):
        return data if steps is None else data.take(steps)
    is_tuple = isinstance(data, (tuple, list))
    arrays = _rows("validation_data", tuple(a for a in data if a is not None) if is_tuple else data)
    arrays = arrays if is_tuple else (arrays,)
    size = _batch_size(arrays, batch_size, steps)
    if steps is not None:
        arrays = _cut(arrays, 0, steps * size)
    return from_arrays(arrays, size, shuffle=False)
