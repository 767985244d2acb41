"""Elastic training with `model.fit`: state of a Keras model, and callbacks that commit it.

state = hvd.elastic.KerasState(model, batch=0, epoch=0)

@hvd.elastic.run
def train(state):
    model.fit(data, epochs=10 - state.epoch, steps_per_epoch=100, callbacks=[
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=10),
    ])

Pass the commit callback after the update callbacks. Otherwise it commits outdated values.
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
    """A callback that commits the state every `batches_per_commit` batches, and after each epoch."""

    def __init__(self, state: State, batches_per_commit: int = 1):
        super().__init__()
        if batches_per_commit < 1:
            raise UsageError(f"batches_per_commit is {batches_per_commit}; expected 1 or more.")
        self.state = state
        self.batches_per_commit = batches_per_commit
        self._num_batches_left = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        """Resets the number of batches until the next commit."""
        self._num_batches_left = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commits the state after `batches_per_commit` batches. Collective."""
        self._num_batches_left -= 1
        if self._num_batches_left == 0:
            self._num_batches_left = self.batches_per_commit
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commits the state. Collective."""
        self.state.commit()


class UpdateBatchStateCallback(TwoKerasCallback):
    """A callback that stores the number of completed batches of the epoch in `state.batch`.

    A resumed epoch starts at `state.batch`. A callback cannot shorten an epoch in Keras 3. For an epoch of
    equal length pass `fit` a dataset that starts at this batch, or `steps_per_epoch` for the remaining
    batches.
    """

    def __init__(self, state: State):
        super().__init__()
        self.state: Any = state
        self._first = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Stores the first batch of the epoch."""
        self._first = self.state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Updates `state.batch`."""
        self.state.batch = self._first + batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Sets `state.batch` to 0."""
        self.state.batch = self._first = 0


class UpdateEpochStateCallback(TwoKerasCallback):
    """A callback that stores the number of completed epochs in `state.epoch`, over all calls of `fit`."""

    def __init__(self, state: State):
        super().__init__()
        self.state: Any = state
        self._first = state.epoch  # type: ignore[attr-defined]

    def on_train_begin(self, logs: Any = None) -> None:
        """Stores the first epoch of this call of `fit`."""
        self._first = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Updates `state.epoch`."""
        self.state.epoch = self._first + epoch + 1
