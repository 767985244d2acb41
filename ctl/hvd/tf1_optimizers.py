"""Distributed optimizers of tf.compat.v1.train, for graphs and eager mode."""

from typing import Any

import tensorflow as tf
from ctl.errors import UsageError
from ctl.hvd.aggregation import Aggregator
from ctl.hvd.reducing import Exchange, Reduction


class Tf1Optimizer(tf.compat.v1.train.Optimizer):
    """Wrapper of an optimizer that exchanges the computed gradients before it applies them.

    Args:
      optimizer: A tf.compat.v1.train.Optimizer.
      name: Name of the wrapper.
      use_locking: See `tf.compat.v1.train.Optimizer`.
      options: The reduction, the passes per step, and True to average over the passes.
    """

    def __init__(self, optimizer: Any, name: str, use_locking: bool, options: tuple[Reduction, int, bool]):
        super().__init__(name=name, use_locking=use_locking)
        self._optimizer = optimizer
        reduction, passes, averages = options
        if passes > 1 and tf.executing_eagerly():
            raise UsageError(
                f"backward_passes_per_step is {passes} in eager mode, which optimizers of tf.compat.v1 do "
                "not support; expected a Keras optimizer, or backward_passes_per_step=1."
            )
        self._agg_helper = Aggregator(passes, averages) if passes > 1 else None
        self._exchange = Exchange(reduction, self._agg_helper)

    def register_local_var(self, var: Any) -> None:
        """Keeps the gradient of `var` on this rank."""
        self._exchange.keep_local(var)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Returns pairs of exchanged gradients and variables. Collective when they are evaluated."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        gradients, variables = zip(*pairs, strict=True)
        if self._agg_helper is None:
            exchanged = self._exchange(gradients, variables)
        else:
            exchanged = self._exchange_in_order(gradients, variables)
        return list(zip(exchanged, variables, strict=True))

    def _exchange_in_order(self, gradients: Any, variables: Any) -> Any:
        """Runs the exchange in a tf.function, which preserves the order of assignments."""
        if self._exchange.reduction.sparse_as_dense:
            gradients = [None if g is None else tf.convert_to_tensor(g) for g in gradients]
        present = [i for i, g in enumerate(gradients) if g is not None]

        @tf.function
        def exchange_present(*present_gradients: Any) -> Any:
            all_gradients: list[Any] = [None] * len(gradients)
            for i, gradient in zip(present, present_gradients, strict=True):
                all_gradients[i] = gradient
            reduced = self._exchange(all_gradients, variables)
            return [reduced[i] for i in present]

        result: list[Any] = [None] * len(gradients)
        for i, value in zip(present, exchange_present(*[gradients[i] for i in present]), strict=True):
            result[i] = value
        return result

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: Any = None) -> Any:
        """Applies the gradients with the wrapped optimizer. `global_step` counts every pass."""
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
        """Returns a slot of the wrapped optimizer."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the slot names of the wrapped optimizer."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the variables of the wrapped optimizer."""
        return self._optimizer.variables(*args, **kwargs)
