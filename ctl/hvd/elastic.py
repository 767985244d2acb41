"""Elastic training, in which ranks are added and removed: commit, restore and synchronization of state.

    state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0)

    @hvd.elastic.run
    def train(state):
        while state.batch < 1000:
            train_step(...)
            state.batch += 1
            state.commit()

    train(state)

If a rank is lost, the remaining ranks restore their last commit and resume without it. If ranks are added
or removed without an error, all ranks continue from their current state at the next commit. Start the
script with `ctlrun --min-np 1 ...`.
"""

import functools
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from ctl.collectives import graph_errors
from ctl.collectives.errors import HorovodInternalError
from ctl.errors import UsageError
from ctl.hvd import aggregation, elastic_line, objects, process, variables
from ctl.hvd.errors import HostsUpdatedInterrupt
from ctl.tensorflow_patches import optimizer_attributes

__all__ = ["ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]


def run(func: Callable) -> Callable:
    """Decorates the training function. Its first argument is a `State`.

    The wrapper synchronizes the state with rank 0 and calls the function. After each change of the ranks it
    does so again, until the function returns. Call collectives only in the function, because a new rank has
    not executed earlier ones. In a job that is not elastic, the state is synchronized once, and exceptions
    are propagated.
    """

    @functools.wraps(func)
    def wrapper(state: "State", *args: Any, **kwargs: Any) -> Any:
        elastic_line.add_listener(state)
        must_sync = True
        try:
            while True:
                try:
                    if must_sync:
                        state.sync()
                    elastic_line.report_synced()
                    return func(state, *args, **kwargs)
                except Exception as e:
                    interrupt = _find_interrupt(e)
                    if interrupt is None or not elastic_line.is_elastic():
                        raise
                    if isinstance(interrupt, HorovodInternalError):
                        state.restore()
                must_sync = _join_next_group(getattr(interrupt, "skip_sync", False))
                state.on_reset()
        finally:
            elastic_line.remove_listener(state)

    return wrapper


class State:
    """State that all ranks share. Subclasses implement save, restore and synchronization.

    Args:
      bcast_object: Broadcasts an object of rank 0. Defaults to `hvd.broadcast_object`.
      get_rank: Ignored.

    Attributes:
      allow_pickle: If True, objects of unsupported types are pickled. Use it only if every rank is trusted.
    """

    allow_pickle = False

    def __init__(self, bcast_object: Callable | None = None, get_rank: Callable | None = None):
        self._bcast_object = bcast_object
        self._changes = 0
        self._host_messages: queue.Queue = queue.Queue()  # name in Horovod; scripts wait for a message
        self._lock = threading.Lock()
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Registers functions to call after each change of the ranks, for example to scale the rate."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Calls `reset` and the callbacks after the ranks have changed."""
        with self._lock:
            self._changes = 0
            while not self._host_messages.empty():
                self._host_messages.get()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Records that hosts were removed (1), added (2), or both (3). Called in another thread."""
        with self._lock:
            self._changes |= update_res
        self._host_messages.put((timestamp, update_res))

    def on_hosts_noticed(self, timestamp: float, update_res: int) -> None:
        """Records hosts that are not ready yet, which `commit` ignores. Called in another thread."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Saves the state. Raises HostsUpdatedInterrupt if the ranks will change. Collective."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raises HostsUpdatedInterrupt if the ranks will change. A no-op if the job is not elastic.

        Collective: rank 0 broadcasts the changes.
        """
        if not elastic_line.is_elastic():
            return
        with self._lock:
            changes = self._changes
        changes = self._broadcast(changes, "elastic.changes")
        if changes:
            raise HostsUpdatedInterrupt(changes == elastic_line.REMOVED)

    def save(self) -> None:
        """Saves the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restores the state of the last `save`."""
        raise NotImplementedError

    def sync(self) -> None:
        """Replaces the state with that of rank 0. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Handles a change of the ranks before the state is synchronized. A no-op by default."""

    def _broadcast(self, obj: Any, name: str) -> Any:
        if self._bcast_object is not None:
            return self._bcast_object(obj)
        return objects.broadcast_object(obj, 0, name=name, allow_pickle=self.allow_pickle)


class ObjectState(State):
    """A state of Python objects. Each keyword becomes an attribute: `ObjectState(epoch=0, batch=0)`.

    Args:
      bcast_object: Broadcasts an object of rank 0. Defaults to `hvd.broadcast_object`.
      get_rank: Ignored.
      **kwargs: The attributes and their initial values.
    """

    def __init__(
        self, bcast_object: Callable | None = None, get_rank: Callable | None = None, **kwargs: Any
    ):
        super().__init__(bcast_object, get_rank)
        self._saved = kwargs
        self._set_attributes()

    def save(self) -> None:
        """Saves references to the attributes."""
        self._saved = {name: getattr(self, name) for name in self._saved}

    def restore(self) -> None:
        """Restores the attributes of the last `save`."""
        self._set_attributes()

    def sync(self) -> None:
        """Replaces and saves the attributes with those of rank 0. Collective."""
        if self._saved:
            current_values = {name: getattr(self, name) for name in self._saved}
            self._saved = self._broadcast(current_values, "elastic.objects")
            self._set_attributes()

    def _set_attributes(self) -> None:
        for name, value in self._saved.items():
            setattr(self, name, value)


class _VariableState(ObjectState):
    """A state of objects, and variables of TensorFlow or Keras that a subclass lists."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self._values: list[np.ndarray] = []
        self._save_variables()

    def save(self) -> None:
        self._save_variables()
        super().save()

    def restore(self) -> None:
        for variable, value in zip(self._list_variables(), self._values, strict=False):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        variables.broadcast_variables(self._list_variables(), root_rank=0)
        self._save_variables()
        super().sync()

    def _save_variables(self) -> None:
        self._values = [np.array(variable.numpy()) for variable in self._list_variables()]

    def _list_variables(self) -> list[Any]:
        raise NotImplementedError


class TensorFlowState(_VariableState):
    """A state of a list of variables, and objects by keyword. Eager mode only.

    Args:
      variables: `tf.Variable`s.
      session: Argument of TensorFlow 1 scripts, expected to be None.
    """

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any):
        import tensorflow as tf

        if session is not None:
            raise UsageError(
                f"TensorFlowState got session={session!r}; expected None, because ctl.hvd.elastic supports "
                "eager mode only."
            )
        self.variables = list(tf.compat.v1.global_variables() if variables is None else variables)
        if not self.variables:
            raise UsageError(
                "TensorFlowState got no variables; expected a list such as "
                "TensorFlowState(variables=[*model.variables, step], batch=0)."
            )
        super().__init__(**kwargs)

    def _list_variables(self) -> list[Any]:
        return self.variables


class TensorFlowKerasState(_VariableState):
    """A state of a Keras model, its optimizer, and objects by keyword. For Keras 3 and tf_keras.

    The state contains the weights of the model and all variables of the optimizer, which is built if
    necessary. It does not contain the seeds of layers such as dropout, which differ between ranks.

    Args:
      model: A built model.
      optimizer: Defaults to the optimizer that the model was compiled with, if any.
      backend: Ignored.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any):
        if not getattr(model, "built", True):
            raise UsageError("the model is not built; call model.build(input_shape) first.")
        self.model = model
        self.optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        super().__init__(**kwargs)

    def _list_variables(self) -> list[Any]:
        return [*self.model.weights, *_optimizer_variables(self.optimizer, self.model)]


def _optimizer_variables(optimizer: Any, model: Any) -> list[Any]:
    """Builds an optimizer of any Keras version if necessary, and returns its variables."""
    if optimizer is None:
        return []
    if optimizer_attributes.is_legacy(optimizer):
        optimizer_attributes.build_legacy(optimizer, model.trainable_variables)
    elif not optimizer_attributes.is_built(optimizer):
        optimizer.build(model.trainable_variables)
    optimizer_variables = optimizer.variables
    return list(optimizer_variables() if callable(optimizer_variables) else optimizer_variables)


def _join_next_group(skip_sync: bool) -> bool:
    """Leaves the group and joins the next one. Returns True if the state has to be synchronized."""
    process.shutdown()
    aggregation.reset_all()
    elastic_line.set_skip_sync(skip_sync)
    while True:
        try:
            process.init()
            return elastic_line.must_sync()
        except HorovodInternalError:  # a rank of the new group failed immediately
            process.shutdown()


def _find_interrupt(error: Exception) -> Exception | None:
    """Returns the interrupt that caused an error, including errors of a tf.function, or None."""
    original_error = graph_errors.restore_error_type(error)
    if isinstance(original_error, HorovodInternalError | HostsUpdatedInterrupt):
        return original_error
    import tensorflow as tf

    if isinstance(error, tf.errors.OpError) and HorovodInternalError.__name__ in str(error):
        return HorovodInternalError(str(error))  # raised in a py_function of the script
    return None
