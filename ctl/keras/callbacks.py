"""Adapter for Keras callbacks in `ctl.fit`.

    ctl.fit(model, x, y, epochs=9, callbacks=[keras.callbacks.LearningRateScheduler(by_epoch)])

Every worker calls its callbacks with the same logs. If a callback of the chief stops the training
(`self.model.stop_training = True`) or sets `self.model.optimizer.learning_rate`, the decision applies to
all workers. A callback that changes other state, such as weights, must make the same change everywhere.
"""

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from ctl.callbacks.adapter import is_callback
from ctl.callbacks.protocol import Callback, Decision
from ctl.distribute.keras_objects import unwrap
from ctl.errors import UsageError
from ctl.keras.data import Epochs
from ctl.keras.evaluation_batches import EvaluationBatches
from ctl.keras.own_steps import has_own
from ctl.keras.trainer import KerasTrainer
from ctl.tensorflow_patches import keras_models
from ctl.training import validation

_NOT_OF_KERAS = ("steps_per_sec", "examples_per_sec", "gradient_norm", "learning_rate")
_REFUSED = {  # class name -> reason and replacement
    "SwapEMAWeights": "checkpoints between its swaps would hold the averages as weights; use "
    "ctl.KerasTrainer, which evaluates and exports with the averages",
    "ProgbarLogger": "ctl has a console of its own; write verbose=1",
    "TerminateOnNaN": "leave it out: a run ends with a NonFiniteError at a gradient that is not finite",
}
_WRITES_FILES = ("CSVLogger", "RemoteMonitor", "TensorBoard")
_OF_BATCHES = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
_OF_PREDICT_BATCHES = ("on_predict_batch_begin", "on_predict_batch_end")
_OF_TEST_BATCHES = ("on_test_batch_begin", "on_test_batch_end")


class KerasCallbacks(Callback):
    """A ctl callback that calls Keras callbacks as `Model.fit` does, for one call of `ctl.fit`.

    Args:
      params: `params` of the Keras callbacks: verbose, epochs, steps (per epoch).

    Attributes:
      epochs: Numbers of the completed epochs.
      logs: Name -> values that callbacks received or added, one per epoch.
      stopped_at: Step at which a callback stopped the run, or None.
    """

    name = "keras_callbacks"

    def __init__(
        self,
        callbacks: Sequence[Any],
        model: Any,
        plan: Epochs,
        params: Mapping[str, Any],
        *,
        is_chief: bool,
    ):
        self._given = [c for c in callbacks if is_chief or not is_of_keras(c, *_WRITES_FILES)]
        self._elsewhere = [] if is_chief else [c for c in callbacks if is_of_keras(c, "ModelCheckpoint")]
        self._model, self._params = model, dict(params)
        self._plan, self._steps = plan, plan.steps
        self._per_batch = any(map(is_of_batches, self._given))
        self._steps_per_execution = int(getattr(model, "steps_per_execution", 1) or 1)
        self.evaluation_batches = (
            EvaluationBatches(model, self._begin_evaluation) if has_test_batches(self._given) else None
        )
        self._list: Any = None
        self._open: int | None = None  # number of the epoch in progress
        self._batch = -1  # step of the batch in progress
        self._is_testing = False  # between on_test_begin and on_test_end
        self._logs: dict[str, float] = {}  # training metrics of the epoch, until its evaluation
        self._newest: dict[str, float] | None = None  # logs of the last completed epoch
        self.epochs: list[int] = []
        self.logs: dict[str, list[float]] = {}
        self.stopped_at = None

    @property
    def state(self) -> dict[str, Any]:
        """State for checkpoints: the logs and the epoch of a stop."""
        return {"logs": self._logs, "stopped_at": self.stopped_at}

    @state.setter
    def state(self, saved: Mapping[str, Any]) -> None:
        self._logs, self.stopped_at = dict(saved["logs"]), saved["stopped_at"]

    def on_begin(self, step: int, run: str) -> Decision | None:
        """Calls the methods for the begin of an evaluation, or of an epoch and its first batch.

        Returns the learning rate that the callbacks set, for a training.
        """
        self._begin_train()
        if run == "eval":
            if self._is_planned(step):
                self._begin_test()
            return None
        epoch = self._plan.first + step // self._steps
        if epoch != self._open and epoch < self._plan.end:
            self._open = epoch
            self._list.on_epoch_begin(epoch)
        self._begin_batch(step)
        return Decision(learning_rate=self._learning_rate())

    def after_batch(self, step: int, means: Mapping[str, float]) -> Decision:
        """Calls the methods for the end of a batch and the begin of the next one.

        Args:
          step: Number of completed steps.
          means: Means of the metrics since the begin of the epoch.
        """
        begin = self._batch % self._steps  # of an incomplete execution, Keras passes its planned end
        self._list.on_train_batch_end(begin + self._steps_per_execution - 1, _of_keras(means))
        if step % self._steps and not self._model.stop_training:
            self._begin_batch(step)
        return self._decision(step)

    def on_metrics(self, step: int, values: Mapping[str, float], run: str) -> Decision | None:
        """Passes the means of an epoch, or of the evaluation after it, to the callbacks."""
        epoch = self._plan.ended_by(step)
        if epoch is None or (run == "eval" and not self._is_planned(step)):
            return None
        self._begin_train()
        if run == "train":
            self._logs = _of_keras(values)
            if self._plan.is_evaluated(epoch):
                return None  # the epoch ends after its evaluation
        else:
            self._end_test(values)
        self._end_epoch(epoch)
        return self._decision(step)

    def end(
        self, step: int, means: Mapping[str, float], metrics: Mapping[str, float], *, stopped: bool
    ) -> None:
        """Calls the methods for the end of the training. An incomplete epoch ends with the newest metrics.

        An epoch without a step, because the data ended, is not recorded.

        Args:
          step: Number of completed steps.
          means: Newest means of the training.
          metrics: Newest means of the evaluation; {} if there was none.
          stopped: True if the run was stopped, on all workers.
        """
        self._begin_train()
        if self._open is not None:
            self._logs = _of_keras(means)
            if metrics and self._plan.is_evaluated(self._open):
                if not self._is_testing:
                    self._begin_test()
                self._end_test(metrics)
            recorded = list(self.epochs), {name: list(values) for name, values in self.logs.items()}
            self._end_epoch(self._open)
            if step % self._steps == 0:
                self.epochs, self.logs = recorded
        self._model.stop_training = stopped
        self._list.on_train_end(self._newest)
        for callback in self._elsewhere:
            shutil.rmtree(os.path.dirname(callback.filepath), ignore_errors=True)

    def _is_planned(self, step: int) -> bool:
        """Returns False for the final evaluation if `validation_freq` does not include the last epoch."""
        epoch = self._plan.ended_by(step)
        return epoch is None or self._plan.is_evaluated(epoch)

    def _begin_train(self) -> None:
        if self._list is not None:
            return
        from keras import callbacks as keras_callbacks

        for callback in self._elsewhere:  # reads sum variables, so all workers save; the chief keeps files
            directory = tempfile.mkdtemp(prefix="ctl-callback-")
            callback.filepath = os.path.join(directory, os.path.basename(str(callback.filepath)))
        self._history = keras_callbacks.History()  # last, so that it records logs that callbacks add
        self._list = keras_callbacks.CallbackList(
            [*self._given, self._history], model=self._model, **self._params
        )
        self._model.stop_training = False
        self._list.on_train_begin()

    def _begin_batch(self, step: int) -> None:
        if self._per_batch and self._batch != step:
            self._batch = step
            self._list.on_train_batch_begin(step % self._steps)

    def _begin_evaluation(self) -> Any:
        """Returns the callbacks of the batches of an evaluation, or None if it is not planned."""
        if not self._is_testing and self._open is not None and self._plan.is_evaluated(self._open):
            self._begin_test()  # the run was stopped within an epoch
        return self._list if self._is_testing else None

    def _begin_test(self) -> None:
        self._is_testing = True
        self._list.on_test_begin()

    def _end_test(self, values: Mapping[str, float]) -> None:
        self._is_testing = False
        self._list.on_test_end(dict(values))
        self._logs |= {f"val_{name}": value for name, value in values.items()}

    def _end_epoch(self, epoch: int) -> None:
        self._list.on_epoch_end(epoch, self._logs)
        self._open, self._newest, self._logs = None, self._logs, {}
        self.epochs, self.logs = self._history.epoch, self._history.history

    def _decision(self, step: int) -> Decision:
        if not self._model.stop_training:
            return Decision(learning_rate=self._learning_rate())
        self.stopped_at = step
        message = "a Keras callback set stop_training"
        return Decision(stop=True, learning_rate=self._learning_rate(), message=message)

    def _learning_rate(self) -> float | None:
        optimizer = self._model.optimizer
        if optimizer is None or not optimizer.built or not self._model.trainable_variables:
            return None  # unused, for example in a GAN, which has its optimizers in other attributes
        if not validation.has_variable_learning_rate(optimizer):
            return None
        return float(unwrap(optimizer.learning_rate).numpy())


class BatchCallbackTrainer(KerasTrainer):
    """A trainer that calls Keras callbacks at each batch."""

    keras_callbacks: KerasCallbacks | None = None

    def after_loop(self, step: int, means: dict[str, float]) -> bool:
        """Calls the methods of Keras callbacks for a batch. Returns True to stop."""
        assert self.keras_callbacks is not None and self._prepared_trainer is not None
        decision = self.keras_callbacks.after_batch(step, means)
        return self._prepared_trainer.callbacks.carry_out(step, [decision])


def sorted_callbacks(callbacks: Any, model: Any) -> tuple[list[Callback], list[Any]]:
    """Returns the ctl callbacks and the Keras callbacks of `callbacks`.

    Raises UsageError for other objects, and for Keras callbacks that `ctl.fit` does not support.
    """
    ours: list[Callback] = []
    theirs: list[Any] = []
    for callback in listed_callbacks(callbacks):
        if is_callback(callback):
            ours.append(callback)
        elif is_of_keras(callback, "Callback"):
            _check(callback, model)
            theirs.append(callback)
        else:
            raise UsageError(
                f"callbacks has {callback!r:.80}; expected callbacks of Keras 3, or objects with "
                "on_metrics(step, values, run)."
            )
    return ours, theirs


def listed_callbacks(callbacks: Any) -> Sequence[Any]:
    """Returns the callbacks of a list or `CallbackList`, without those that Keras adds to the latter."""
    if isinstance(callbacks, (list, tuple)):
        return callbacks
    if is_of_keras(callbacks, "CallbackList"):
        return [c for c in callbacks.callbacks if not is_of_keras(c, "History", "ProgbarLogger")]
    return [callbacks] if callbacks else []


def callback_list(callbacks: Any, model: Any) -> Any:
    """Returns a `keras.callbacks.CallbackList` for an evaluation or predictions outside of a training.

    Raises UsageError for ctl callbacks.
    """
    from keras import callbacks as keras_callbacks

    ours, theirs = sorted_callbacks(callbacks, model)
    if ours:
        raise UsageError(
            f"callbacks has a {type(ours[0]).__name__}, which follows a training; expected Keras callbacks "
            "with on_test_begin, on_test_end, on_predict_begin or on_predict_end."
        )
    return keras_callbacks.CallbackList(theirs, model=model)


def is_of_batches(callback: Any) -> bool:
    """Returns True if a Keras callback must be called at each batch."""
    if getattr(callback, "save_freq", None) == "epoch" and is_of_keras(callback, "ModelCheckpoint"):
        return False
    return _overrides(callback, _OF_BATCHES)


def has_test_batches(callbacks: Sequence[Any]) -> bool:
    """Returns True if one of the Keras callbacks must be called at each batch of an evaluation."""
    return any(_overrides(callback, _OF_TEST_BATCHES) for callback in callbacks)


def has_predict_batches(callbacks: Sequence[Any]) -> bool:
    """Returns True if one of the Keras callbacks must be called at each batch of a prediction."""
    return any(_overrides(callback, _OF_PREDICT_BATCHES) for callback in callbacks)


def _check(callback: Any, model: Any) -> None:
    name = type(callback).__name__
    refused = {n: reason for n, reason in _REFUSED.items() if is_of_keras(callback, n)}
    if has_own(model, "train_step"):  # on one replica, ctl does not check its gradients
        refused.pop("TerminateOnNaN", None)
    if refused:
        raise UsageError(f"ctl.fit does not take {name}: {next(iter(refused.values()))}.")
    if type(callback).__module__.startswith("ctl.hvd"):
        raise UsageError(
            f"ctl.fit does not take {name}, which is for Model.fit on the ranks of Horovod; leave it out."
        )
    if is_of_keras(callback, "CallbackList"):
        raise UsageError("callbacks contains a CallbackList; expected the callbacks themselves.")
    if is_of_keras(callback, "TensorBoard"):
        _check_tensorboard(callback)


def _check_tensorboard(callback: Any) -> None:
    """Raises UsageError for logs of single batches, which are written around each batch of Keras's loop."""
    arguments = {
        "update_freq": (callback.update_freq, "epoch"),
        "profile_batch": (keras_models.profiled_batches(callback), (0, 0)),
        "write_steps_per_second": (callback.write_steps_per_second, False),
    }
    for name, (value, expected) in arguments.items():
        if value != expected:
            raise UsageError(
                f"TensorBoard has {name}={value!r}; expected {expected!r} in ctl.fit, which runs many "
                "batches in one graph call. With model_dir=... ctl writes its own logs for TensorBoard, "
                "with the speed; profile steps with ctl.KerasTrainer(..., profile=...)."
            )


def _overrides(callback: Any, methods: Sequence[str]) -> bool:
    """Returns True if a callback has one of the methods, except for methods of TensorBoard itself."""
    overridden = [m for m in methods if not keras_models.is_default(getattr(callback, m))]
    if is_of_keras(callback, "TensorBoard"):
        overridden = [m for m in overridden if not getattr(callback, m).__module__.startswith("keras.")]
    return bool(overridden)


def is_of_keras(callback: Any, *names: str) -> bool:
    """Returns True if the callback is an instance of a Keras 3 class with one of these names."""
    return any(c.__name__ in names and c.__module__.startswith("keras.") for c in type(callback).__mro__)


def is_metric_of_keras(name: str) -> bool:
    """Returns False for the metrics that ctl adds, such as "gradient_norm/critic_optimizer"."""
    return not name.startswith(_NOT_OF_KERAS)


def _of_keras(values: Mapping[str, float]) -> dict[str, float]:
    """Returns the values without the metrics that ctl adds."""
    return {name: value for name, value in values.items() if is_metric_of_keras(name)}
