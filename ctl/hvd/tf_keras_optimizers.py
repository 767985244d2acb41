"""Distributed optimizer of tf_keras (Keras 2), legacy or new, which exchanges its computed gradients."""

from typing import Any

import tensorflow as tf
from ctl.hvd.keras3_optimizers import Distributed


class TfKeras(Distributed):
    """Mixin for tf_keras optimizers. It precedes the optimizer's class in a common subclass.

    `minimize` and `model.fit` exchange the gradients when they compute them. `apply_gradients` exchanges
    gradients that this optimizer has not computed.
    """

    _HAS_AGGREGATE_GRAD = True
    iterations: Any

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> Any:
        """Returns pairs of exchanged gradients and variables. Collective."""
        return self._compute_gradients(loss, var_list, None, tape)

    @tf.autograph.experimental.do_not_convert
    def _compute_gradients(self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None) -> Any:
        base: Any = super()
        tape = tf.GradientTape() if tape is None else tape
        if hasattr(base, "_compute_gradients"):
            pairs = base._compute_gradients(loss, var_list, grad_loss, tape=tape)
        else:
            pairs = base.compute_gradients(loss, var_list, tape=tape)
        gradients, variables = zip(*pairs, strict=True)
        return list(zip(self._allreduce(gradients, variables), variables, strict=True))

    def get_gradients(self, loss: Any, params: Any) -> Any:
        """Returns exchanged gradients, for legacy optimizers. Collective."""
        base: Any = super()
        return self._allreduce(base.get_gradients(loss, params), params)

    def _allreduce(self, gradients: Any, variables: Any) -> Any:
        exchanged = self._hvd(gradients, variables)
        self.__dict__["_hvd_exchanged"] = True  # after the exchange: a failed one does not count
        return exchanged

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Applies gradients, and exchanges them first if this optimizer has not computed them."""
        pairs = list(grads_and_vars)
        if not self.__dict__.pop("_hvd_exchanged", False):
            gradients, variables = zip(*pairs, strict=True)
            pairs = list(zip(self._hvd(gradients, variables), variables, strict=True))
        base: Any = super()
        apply = base.apply_gradients
        aggregator = self._hvd.aggregator
        if aggregator is None:
            return apply(pairs, *args, **kwargs)

        def update() -> None:
            apply(pairs, *args, **kwargs)

        def count() -> None:
            self.iterations.assign_add(1)

        _ = self.iterations  # creates the variable, which is not possible in a branch
        return tf.cond(aggregator.is_due(), update, count)
