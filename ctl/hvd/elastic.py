"""Training that goes on when ranks come and go: state that is committed, restored and shared.

    state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0)

    @hvd.elastic.run
    def train(state):
        while state.batch < 1000:
            train_step(...)
            state.batch += 1
            state.commit()

    train(state)

When a rank is lost, the others go back to their last commit and go on without it. When ranks are added or
leave in order, all go on from where they are, at the next commit. Start it with `ctlrun --min-np 1 ...`.
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
    """A decorator for the training function, whose first argument is a `State`.

    It shares the state of rank 0 with all, calls the function, and calls it again after each change of
    the ranks, until it returns. Collectives belong inside: a new rank would not know of those before.
    In a job that is not elastic the state is shared once, and what is raised is raised.
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
                    elastic_line.tell_synced()
                    return func(state, *args, **kwargs)
                except Exception as e:
                    interrupt = _interrupt(e)
                    if interrupt is None or not elastic_line.is_elastic():
                        raise
                    if isinstance(interrupt, HorovodInternalError):
                        state.restore()
                must_sync = _reset(getattr(interrupt, "skip_sync", False))
                state.on_reset()
        finally:
            elastic_line.remove_listener(state)

    return wrapper


class State:
    """What all ranks have in common; a subclass says how it is saved, restored and shared.

    Args:
      bcast_object: shares an object of rank 0, by default `hvd.broadcast_object`; get_rank: accepted.

    Attributes:
      allow_pickle: also share objects that are more than data; only among ranks that trust each other.
    """

    allow_pickle = False

    def __init__(self, bcast_object: Callable | None = None, get_rank: Callable | None = None):
        self._bcast_object = bcast_object
        self._changes = 0
        self._host_messages: queue.Queue = queue.Queue()  # Horovod's name; scripts wait for one
        self._lock = threading.Lock()
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """They are called after each change of the ranks, as to scale the learning rate anew."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The ranks have changed: `reset`, then the callbacks."""
        with self._lock:
            self._changes = 0
            while not self._host_messages.empty():
                self._host_messages.get()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Called in another thread when hosts come (2) or go (1), or both (3)."""
        with self._lock:
            self._changes |= update_res
        self._host_messages.put((timestamp, update_res))

    def on_hosts_noticed(self, timestamp: float, update_res: int) -> None:
        """Called in another thread when new hosts are known; `commit` goes on until they are ready."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Saves, and raises HostsUpdatedInterrupt when the ranks are to change; all ranks at once."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """The second half of `commit`: a small collective; rank 0 knows. Nothing if not elastic."""
        if not elastic_line.is_elastic():
            return
        with self._lock:
            changes = self._changes
        changes = self._broadcast(changes, "elastic.changes")
        if changes:
            raise HostsUpdatedInterrupt(changes == elastic_line.REMOVED)

    def save(self) -> None:
        """Keeps the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Goes back to the last `save`."""
        raise NotImplementedError

    def sync(self) -> None:
        """Takes the state of rank 0; all ranks at once."""
        raise NotImplementedError

    def reset(self) -> None:
        """The ranks have changed, and the state is not shared yet."""

    def _broadcast(self, obj: Any, name: str) -> Any:
        if self._bcast_object is not None:
            return self._bcast_object(obj)
        return objects.broadcast_object(obj, 0, name=name, allow_pickle=self.allow_pickle)


class ObjectState(State):
    """Plain objects, each an attribute by its keyword: `ObjectState(epoch=0, batch=0)`."""

    def __init__(
        self, bcast_object: Callable | None = None, get_rank: Callable | None = None, **kwargs: Any
    ):
        super().__init__(bcast_object, get_rank)
        self._saved = kwargs
        self._assign()

    def save(self) -> None:
        self._saved = {name: getattr(self, name) for name in self._saved}

    def restore(self) -> None:
        self._assign()

    def sync(self) -> None:
        if self._saved:
            mine = {name: getattr(self, name) for name in self._saved}
            self._saved = self._broadcast(mine, "elastic.objects")
            self._assign()

    def _assign(self) -> None:
        for name, value in self._saved.items():
            setattr(self, name, value)


class _VariableState(ObjectState):
    """Objects, and variables of TensorFlow or Keras; a subclass lists them."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self._values: list[np.ndarray] = []
        self._save_variables()

    def save(self) -> None:
        self._save_variables()
        super().save()

    def restore(self) -> None:
        for variable, value in zip(self._listed(), self._values, strict=False):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        variables.broadcast_variables(self._listed(), root_rank=0)
        self._save_variables()
        super().sync()

    def _save_variables(self) -> None:
        self._values = [np.array(variable.numpy()) for variable in self._listed()]

    def _listed(self) -> list[Any]:
        raise NotImplementedError


class TensorFlowState(_VariableState):
    """A list of variables, and objects by keyword; eager mode only.

    Args:
      variables: `tf.Variable`s; session: accepted for scripts of TensorFlow 1, expected to be None.
    """

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any):
        import tensorflow as tf

        if session is not None:
            raise UsageError("a session came; ctl.hvd.elastic works in eager mode, expected None.")
        self.variables = list(tf.compat.v1.global_variables() if variables is None else variables)
        if not self.variables:
            raise UsageError(
                "there are no variables to keep; in TensorFlow 2 name them, as in "
                "TensorFlowState(variables=[*model.variables, step], batch=0)."
            )
        super().__init__(**kwargs)

    def _listed(self) -> list[Any]:
        return self.variables


class TensorFlowKerasState(_VariableState):
    """A Keras model and its optimizer, and objects by keyword; for Keras 3 and tf_keras.

    Args:
      model: built; optimizer: by default the one that the model was compiled with, if it was.
      backend: accepted.

    Weights of the model and all variables of the optimizer are kept, which is built if it is not yet.
    Seeds of layers such as dropout are not: each rank has its own.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any):
        if not getattr(model, "built", True):
            raise UsageError("the model is not built yet; call model.build(input_shape) before.")
        self.model = model
        self.optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        super().__init__(**kwargs)

    def _listed(self) -> list[Any]:
        return [*self.model.weights, *_optimizer_variables(self.optimizer, self.model)]


def _optimizer_variables(optimizer: Any, model: Any) -> list[Any]:
    """Of an optimizer of any Keras; built first, so that all ranks have the same ones."""
    if optimizer is None:
        return []
    if optimizer_attributes.is_legacy(optimizer):
        optimizer_attributes.build_legacy(optimizer, model.trainable_variables)
    elif not optimizer_attributes.is_built(optimizer):
        optimizer.build(model.trainable_variables)
    found = optimizer.variables
    return list(found() if callable(found) else found)


def _reset(skip_sync: bool) -> bool:
    """Leaves the ranks and meets the new ones; returns whether they have to share their state."""
    process.shutdown()
    aggregation.forget_all()
    elastic_line.may_skip_sync(skip_sync)
    while True:
        try:
            process.init()
            return elastic_line.must_sync()
        except HorovodInternalError:  # one of the new ranks was lost at once
            process.shutdown()


def _interrupt(error: Exception) -> Exception | None:
    """What is meant by an error of a training function, also out of a tf.function; None for its own."""
    own = graph_errors.with_own_type(error)
    if isinstance(own, HorovodInternalError | HostsUpdatedInterrupt):
        return own
    import tensorflow as tf

    if isinstance(error, tf.errors.OpError) and HorovodInternalError.__name__ in str(error):
        return HorovodInternalError(str(error))  # of a py_function that the script itself wrote
    return None
