"""Callbacks for `model.fit` on several ranks, for Keras 3 and tf_keras.

    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.001 * hvd.size()),
    ]

The callbacks are collective or equal on all ranks. Pass them to `fit` on every rank.
"""

import numbers
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.errors import UsageError
from ctl.hvd import objects
from ctl.hvd.keras.rates import LearningRateScheduleCallback, LearningRateWarmupCallback, TwoKerasCallback
from ctl.hvd.reducing import variable_key
from ctl.hvd.variables import broadcast_variables

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(TwoKerasCallback):
    """A callback that broadcasts the weights and the optimizer's state of one rank after the first batch.

    Before the first batch, the optimizer does not have all of its variables. Metrics and the seeds of
    dropout layers are not broadcast.

    Args:
      root_rank: Rank with the variables to broadcast.
      device: Device of the operation.
      local_variables: A variable or a list of variables that are not broadcast.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None):
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        self._local: set[Any] = set()
        for variable in _to_list(local_variables):
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Excludes `var` from the broadcast."""
        if not hasattr(var, "assign"):
            raise UsageError(f"local_variables contains {var!r}; expected variables.")
        self._local.add(variable_key(var))

    def on_batch_end(self, batch: int, logs: Mapping | None = None) -> None:
        """Broadcasts the variables after the first batch. Collective."""
        if self.broadcast_done:
            return
        state = getattr(self.model.optimizer, "variables", [])
        all_variables = [*self.model.weights, *(state() if callable(state) else state)]
        with tf.device(self.device):
            broadcast_variables(
                [v for v in all_variables if variable_key(v) not in self._local], self.root_rank
            )
        self.broadcast_done = True


def _to_list(variables: Any) -> Iterable[Any]:
    if variables is None:
        return []
    return variables if isinstance(variables, (list, tuple, set)) else [variables]


class MetricAverageCallback(TwoKerasCallback):
    """A callback that averages an epoch's metrics over ranks, in place. Later callbacks get the averages.

    Pass it before ReduceLROnPlateau, EarlyStopping, TensorBoard and similar callbacks, so that their
    decisions are equal on all ranks. All ranks have equal weight, regardless of their number of examples.

    Args:
      device: Ignored.
    """

    def __init__(self, device: str = ""):
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: MutableMapping | None = None) -> None:
        """Averages the metrics. Collective. Raises UsageError on all ranks if their metrics differ."""
        logs = {} if logs is None else logs
        own_metrics = {k: float(v) for k, v in sorted(logs.items()) if _is_number(v)}
        metrics_by_rank = objects.allgather_object(own_metrics, name="MetricAverageCallback")
        names = {name for metrics in metrics_by_rank for name in metrics}
        for rank, metrics in enumerate(metrics_by_rank):
            if names != set(metrics):
                raise UsageError(
                    f"rank {rank} has no metric {sorted(names - set(metrics))[0]!r}, but other ranks have "
                    "it; expected the same metrics on all ranks. Pass validation data on all ranks or none."
                )
        for name in sorted(names):
            logs[name] = float(np.mean([metrics[name] for metrics in metrics_by_rank]))


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Number) or (hasattr(value, "shape") and np.size(value) == 1)


class BestModelCheckpoint(tf.keras.callbacks.ModelCheckpoint):
    """Keras's ModelCheckpoint with `save_best_only`. Pass it to `fit` on rank 0.

    Args:
      monitor, verbose, save_weights_only, mode, save_freq: See Keras.
      filepath: Path of the file. Alternatively set the attribute of this name before `fit`.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
        filepath: Any = None,
    ):
        ending = ".weights.h5" if save_weights_only else ".keras"
        super().__init__(
            filepath or f"not_set{ending}",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        if filepath is None:
            self.filepath = None

    def on_train_begin(self, logs: Mapping | None = None) -> None:
        """Raises UsageError if `filepath` is not set."""
        if not self.filepath:
            raise UsageError(
                "BestModelCheckpoint has no filepath; expected "
                'BestModelCheckpoint(filepath="best.keras"), or callback.filepath set before fit.'
            )
        super().on_train_begin(logs)
