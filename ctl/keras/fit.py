"""`ctl.fit` and `ctl.evaluate`: the calls of `Model.fit` and `Model.evaluate`, under any strategy."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.callbacks.protocol import Callback
from ctl.callbacks.schedule import Every, Intervals
from ctl.checkpoints.protocol import CheckpointManager
from ctl.data.arrays import ArrayData, from_arrays
from ctl.data.dataset_traits import made_of
from ctl.errors import UsageError
from ctl.keras.trainer import KerasTrainer
from ctl.metrics.console import ConsoleWriter
from ctl.metrics.console_text import short_number
from ctl.metrics.jsonl import JsonlWriter
from ctl.metrics.protocol import Event, MetricWriter
from ctl.metrics.tensorboard import TensorBoardWriter

_NOT_OF_KERAS = {"steps_per_sec", "examples_per_sec", "gradient_norm", "learning_rate"}
_COUNTERPARTS = {
    "BackupAndRestore": "checkpoints=ctl.BackupCheckpoints(backup_dir)",
    "ModelCheckpoint": "model_dir=..., with checkpoints=ctl.ChiefOnlyCheckpoints(..., keep=ctl.Keep("
    "best=...)), or callbacks=[ctl.SaveBest(metric, directory=...)]",
    "EarlyStopping": "callbacks=[ctl.EarlyStopping(metric, patience=...)]",
    "ReduceLROnPlateau": "callbacks=[ctl.ReduceOnPlateau(metric, factor=..., patience=...)]",
    "TensorBoard": "model_dir=..., which has the logs for TensorBoard",
    "CSVLogger": "model_dir=..., which has metrics.jsonl",
}


class History:
    """What `Model.fit` returns: `history` is name -> one value per epoch, `epoch` the epochs' numbers.

    It is filled on every worker alike.
    """

    everywhere = True

    def __init__(self, model: Any = None, params: Mapping[str, Any] | None = None):
        self.model = model
        self.params = dict(params or {})
        self.epoch: list[int] = []
        self.history: dict[str, list[float]] = {}
        self._steps = 0  # in an epoch
        self._first = 0  # number of the first epoch
        self._evaluated = 1  # every so many epochs

    def starts(self, steps_per_epoch: int, initial_epoch: int, evaluated: int = 1) -> None:
        """Says how steps are to be counted as epochs, and after how many there is an evaluation."""
        self._steps, self._first, self._evaluated = steps_per_epoch, initial_epoch, evaluated

    def write(self, step: int, values: Mapping[str, float], run: str = "train") -> None:
        """Numbers of a writer; those of other steps than the ends of epochs are left out."""
        whole = self._steps * (self._evaluated if run == "eval" else 1)
        if not whole or step % whole:
            return
        prefix = "val_" if run == "eval" else ""
        epoch = self._first + step // self._steps - 1
        if not prefix and epoch not in self.epoch:
            self.epoch.append(epoch)
        for name, value in values.items():
            if name not in _NOT_OF_KERAS:
                self.history.setdefault(prefix + name, []).append(value)

    def note(self, event: Event) -> None:
        pass

    def __repr__(self) -> str:
        newest = ", ".join(f"{name} {short_number(v[-1])}" for name, v in self.history.items() if v)
        epochs = f"{len(self.epoch)} epoch{'' if len(self.epoch) == 1 else 's'}"
        return f"History({epochs}{': ' if newest else ''}{newest})"


def fit(
    model: Any,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: Any = "auto",
    callbacks: Any = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: bool = True,
    class_weight: Mapping[int, float] | None = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_freq: int = 1,
    *,
    model_dir: str | None = None,
    checkpoints: CheckpointManager | None = None,
    writers: Sequence[MetricWriter] | None = None,
    seed: int = 0,
    save_every_steps: int | None = None,
) -> History:
    """Trains a compiled Keras 3 model, made in the scope of its strategy; every worker calls it alike.

    The arguments up to `validation_freq` are those of `Model.fit`. Datasets hold *global* batches, and
    `batch_size` (32 for arrays) is the global one. Arrays are shuffled every epoch; a resumed run goes on.
    Returns the `History`. Raises UsageError before any work.

    Args:
      callbacks: of `ctl`, such as `ctl.EarlyStopping`; those of Keras are refused, with what to write.
      model_dir: checkpoints, logs, metrics.jsonl. Given again, the run resumes. None: nothing on disk.
      checkpoints: where states go; by default `model_dir/checkpoints`.
      writers: metric writers; by default the console, and TensorBoard and metrics.jsonl in model_dir.
      save_every_steps: steps between checkpoints; None: once an epoch.
    """
    shown_by = _writers(writers, verbose, model_dir)
    train, split_off = _training_source(x, y, sample_weight, validation_split)
    batch_size = _batch_size(train, batch_size)
    steps = _steps_per_epoch(train, batch_size, steps_per_epoch)
    data = split_off if validation_data is None else validation_data
    history = History(model, {"verbose": verbose, "epochs": epochs, "steps": steps})
    history.starts(steps, initial_epoch, _whole("validation_freq", validation_freq))
    trainer = KerasTrainer(
        model,
        train=_endless(train, batch_size, shuffle),
        seed=seed,
        validation=_validation(data, batch_size, validation_steps),
        class_weight=class_weight,
        model_dir=model_dir,
        global_batch_size=batch_size,
        evaluate_ema=False,  # as Model.fit, see _finished
        checkpoints=checkpoints,
        intervals=_intervals(model, steps, validation_freq if data is not None else 0, save_every_steps),
        writers=[*shown_by, history],
        callbacks=_checked_callbacks(callbacks),
    )
    trainer.train(steps * max(0, epochs - initial_epoch))
    return _finished(trainer, history)


def _intervals(model: Any, steps: int, evaluate_every: int, save_every_steps: int | None) -> Intervals:
    """Everything once an epoch; `evaluate_every` epochs an evaluation, 0 for never."""
    return Intervals(
        steps_per_loop=_steps_per_loop(model),
        log=Every(steps=steps),
        save=Every(steps=steps if save_every_steps is None else save_every_steps),
        evaluate=Every(steps=steps * evaluate_every),
    )


def _finished(trainer: KerasTrainer, history: History) -> History:
    model = history.model = trainer.model
    assert trainer._session is not None
    if trainer._session.callbacks.has_best_weights:  # as Keras: they are restored after the averages
        return history
    with trainer.strategy.scope():
        model.optimizer.finalize_variable_values(model.trainable_variables)
    return history


def evaluate(
    model: Any,
    x: Any = None,
    y: Any = None,
    *,
    batch_size: int | None = None,
    sample_weight: Any = None,
    steps: int | None = None,
) -> dict[str, float]:
    """The loss and metrics of a compiled Keras 3 model; every example counts once on all workers.

    The arguments are those of `Model.evaluate(..., return_dict=True)`.
    """
    source, _ = _training_source(x, y, sample_weight, 0.0)
    batch_size = _batch_size(source, batch_size)
    data = _validation(source, batch_size, steps)
    return KerasTrainer(
        model, train=data, validation=data, global_batch_size=batch_size, writers=[]
    ).evaluate()


def _checked_callbacks(callbacks: Any) -> list[Callback]:
    """A list of callbacks of ours; raises UsageError with what to write instead of those of Keras."""
    given = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks] if callbacks else []
    names = [type(c).__name__ for c in given if not isinstance(c, Callback)]
    if names:
        instead = [f"for {n}: {_COUNTERPARTS[n]}" for n in names if n in _COUNTERPARTS]
        other = [n for n in names if n not in _COUNTERPARTS]
        if other:
            instead.append(f"for {', '.join(other)}: an object with on_metrics(step, values, run)")
        raise UsageError(f"ctl.fit takes no callbacks of Keras. Write {'; '.join(instead)}.")
    return list(given)


def _training_source(x: Any, y: Any, weight: Any, split: float) -> tuple[Any, Any]:
    """A dataset, or a tuple of arrays; and what a validation split takes off its end, or None."""
    if isinstance(x, tf.data.Dataset):
        if y is not None or weight is not None or split:
            raise UsageError(
                "x is a dataset, which has targets and weights itself; y, sample_weight and "
                "validation_split go with arrays."
            )
        return x, None
    if x is None or not all(hasattr(a, "shape") for a in tf.nest.flatten(x)):
        raise UsageError(
            f"x is a {type(x).__name__}; expected arrays or a tf.data.Dataset of batches. For a "
            "generator write tf.data.Dataset.from_generator(...).batch(n)."
        )
    arrays = tuple(a for a in (x, y, weight) if a is not None)
    if not split:
        return arrays, None
    if not 0 < split < 1:
        raise UsageError(f"validation_split is {split!r}; expected a number from 0 to 1.")
    count = tf.nest.flatten(arrays)[0].shape[0]
    at = math.floor(count * (1.0 - split))
    return _cut(arrays, 0, at), _cut(arrays, at, count)


def _cut(arrays: Any, low: int, high: int) -> Any:
    return tf.nest.map_structure(lambda a: a[low:high], arrays)


def _batch_size(source: Any, batch_size: int | None) -> int:
    if not isinstance(source, tf.data.Dataset):
        return 32 if batch_size is None else batch_size
    if batch_size is not None:
        raise UsageError("x is a dataset of batches; leave batch_size out.")
    for spec in tf.nest.flatten(source.element_spec):
        if spec.shape.rank and spec.shape[0] is not None:
            return int(spec.shape[0])
    for part in made_of(source):  # to read a batch would disturb the order of a shuffle
        size = getattr(part, "_batch_size", None)
        if size is not None and "Batch" in type(part).__name__:
            return int(size)
    for batch in source.take(1):
        first = tf.nest.flatten(batch)[0]
        if first.shape.rank:
            return int(tf.shape(first)[0])
    raise UsageError("x is an empty dataset, or not batched; expected dataset.batch(n).")


def _steps_per_epoch(source: Any, batch_size: int, given: int | None) -> int:
    if given is not None:
        return _whole("steps_per_epoch", given)
    if not isinstance(source, tf.data.Dataset):
        return max(1, math.ceil(tf.nest.flatten(source)[0].shape[0] / batch_size))
    count = int(source.cardinality())
    if count == tf.data.INFINITE_CARDINALITY:
        raise UsageError("x is an endless dataset; give steps_per_epoch.")
    if count == tf.data.UNKNOWN_CARDINALITY:  # one pass over it tells
        count = int(source.reduce(np.int64(0), lambda n, *_: n + 1))
    return max(1, count)


def _whole(name: str, value: Any) -> int:
    if not isinstance(value, (int, np.integer)) or value < 1:
        raise UsageError(f"{name} is {value!r}; expected a whole number >= 1.")
    return int(value)


def _endless(source: Any, batch_size: int, shuffle: bool) -> Any:
    if isinstance(source, tf.data.Dataset):
        endless = source.cardinality() == tf.data.INFINITE_CARDINALITY
        return source if endless else source.repeat()
    return from_arrays(source, batch_size, shuffle=shuffle, epochs_apart=True)


def _validation(data: Any, batch_size: int, steps: int | None) -> Any:
    if data is None or isinstance(data, ArrayData):
        return data
    if isinstance(data, tf.data.Dataset):
        return data if steps is None else data.take(steps)
    arrays = tuple(a for a in data if a is not None) if isinstance(data, (tuple, list)) else (data,)
    if steps is not None:
        arrays = _cut(arrays, 0, steps * batch_size)
    return from_arrays(arrays, batch_size, shuffle=False)


def _steps_per_loop(model: Any) -> int | str:
    """`auto`, unless the model was compiled for a number of steps in one call."""
    asked = getattr(model, "steps_per_execution", 1) or 1
    return int(asked) if asked > 1 else "auto"


def _writers(
    given: Sequence[MetricWriter] | None, verbose: Any, model_dir: str | None
) -> list[MetricWriter]:
    if verbose not in ("auto", 0, 1, 2):
        raise UsageError(f'verbose is {verbose!r}; expected "auto", 0 (nothing), 1 (a bar) or 2 (lines).')
    if given is not None:
        return list(given)
    writers: list[MetricWriter] = [ConsoleWriter(live=False if verbose == 2 else None)] if verbose else []
    if model_dir:
        writers += [JsonlWriter(f"{model_dir}/metrics.jsonl"), TensorBoardWriter(f"{model_dir}/logs")]
    return writers
