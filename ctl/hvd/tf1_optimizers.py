"""An optimizer of tf.compat.v1.train, in a graph or eager, whose gradients are exchanged."""

from typing import Any

import tensorflow as tf
from ctl.errors import UsageError
from ctl.hvd.aggregation import Aggregator
from ctl.hvd.reducing import Exchange, Reduction


class Tf1Optimizer(tf.compat.v1.train.Optimizer):
    """Computes as `optimizer` does, exchanges, and applies by it.

    Args:
      optimizer: a tf.compat.v1.train.Optimizer.
      name: of this one.
      use_locking: as for any optimizer.
      options: the reduction, passes per step, and whether their sum becomes their mean.
    """

    def __init__(self, optimizer: Any, name: str, use_locking: bool, options: tuple[Reduction, int, bool]):
        super().__init__(name=name, use_locking=use_locking)
        self._optimizer = optimizer
        reduction, passes, averages = options
        if passes > 1 and tf.executing_eagerly():
            raise UsageError(
                "backward_passes_per_step > 1 is for graphs with optimizers of tf.compat.v1; "
                "expected a Keras optimizer when executing eagerly."
            )
        self._agg_helper = Aggregator(passes, averages) if passes > 1 else None
        self._exchange = Exchange(reduction, self._agg_helper)

    def register_local_var(self, var: Any) -> None:
        """Keeps the gradient of `var` on this rank."""
        self._exchange.keep_local(var)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Pairs of exchanged gradients and variables; collective when they are evaluated."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        gradients, variables = zip(*pairs, strict=True)
        if self._agg_helper is None:
            found = self._exchange(gradients, variables)
        else:
            found = self._in_order(gradients, variables)
        return list(zip(found, variables, strict=True))

    def _in_order(self, gradients: Any, variables: Any) -> Any:
        """The exchange as one function: only in there do the assignments keep their order."""
        if self._exchange.reduction.sparse_as_dense:
            gradients = [None if g is None else tf.convert_to_tensor(g) for g in gradients]
        present = [i for i, g in enumerate(gradients) if g is not None]

        @tf.function
        def exchanged(*given: Any) -> Any:
            every: list[Any] = [None] * len(gradients)
            for i, gradient in zip(present, given, strict=True):
                every[i] = gradient
            found = self._exchange(every, variables)
            return [found[i] for i in present]

        result: list[Any] = [None] * len(gradients)
        for i, value in zip(present, exchanged(*[gradients[i] for i in present]), strict=True):
            result[i] = value
        return result

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: Any = None) -> Any:
        """Applies by the wrapped optimizer; `global_step` counts every pass."""
        pairs = list(grads_and_vars)

        def update() -> Any:
            return self._optimizer.apply_gradients(pairs, global_step=global_step, name=name)

        if self._agg_helper is None:
            return update()

        def count() -> Any:
            return tf.no_op() if global_step is None else global_step.assign_add(1).op

        with tf.control_dependencies([g for g, _ in pairs if g is not None]):
            return tf.cond(self._agg_helper.is_due(), update, count)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped optimizer's."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped optimizer's."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped optimizer's."""
        return self._optimizer.variables(*args, **kwargs)
