"""Elastic training with `model.fit`: state of a Keras model, and callbacks that commit it.

state = hvd.elastic.KerasState(model, batch=0, epoch=0)

@hvd.elastic.run
def train(state):
    model.fit(data, epochs=10 - state.epoch, steps_per_epoch=100, callbacks=[
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=10),
    ])

The commit callback comes after the update callbacks. Otherwise it commits outdated values.
"""

from typing import Any

from ctl.errors import UsageError
from ctl.hvd.elastic import State, TensorFlowKerasState, run
from ctl.hvd.keras.rates import TwoKerasCallback

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class KerasState(TensorFlowKerasState):
    """A state of a Keras model, its optimizer, and objects by keyword such as `batch=0, epoch=0`."""

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any):
        super().__init__(model, optimizer, **kwargs)


class CommitStateCallback(TwoKerasCallback):
    """A callback that commits every `batches_per_commit` batches of one `fit`, and after each epoch."""

    def __init__(self, state: State, batches_per_commit: int = 1):
        super().__init__()
        if batches_per_commit < 1:
            raise UsageError(f"batches_per_commit is {batches_per_commit}; expected 1 or more.")
        self.state = state
        self.batches_per_commit = batches_per_commit
        self._left = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        self._left = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._left -= 1
        if self._left == 0:
            self._left = self.batches_per_commit
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.commit()


class UpdateBatchStateCallback(TwoKerasCallback):
    """A callback that stores the number of completed batches of the epoch in `state.batch`; 0 at its end.

    A resumed epoch begins at `state.batch`. Keras 3 does not let a callback shorten the epoch. For an epoch
    of equal length pass `fit` a dataset that begins there, or `steps_per_epoch` for the remaining batches.
    """

    def __init__(self, state: State):
        super().__init__()
        self.state: Any = state
        self._begin = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._begin = self.state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch = self._begin + batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = self._begin = 0


class UpdateEpochStateCallback(TwoKerasCallback):
    """A callback that stores the number of completed epochs in `state.epoch`, over all calls of `fit`."""

    def __init__(self, state: State):
        super().__init__()
        self.state: Any = state
        self._begin = state.epoch  # type: ignore[attr-defined]

    def on_train_begin(self, logs: Any = None) -> None:
        self._begin = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch = self._begin + epoch + 1
