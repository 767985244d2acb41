"""Distributed Keras 3 optimizer, which exchanges its gradients before it applies them.

The class of the optimizer is replaced with a subclass of the same name. A saved model can therefore be
loaded with and without `ctl.hvd`. Training continues, because the new optimizer has the same variables.
"""

from typing import Any

import tensorflow as tf
from ctl.hvd import process
from ctl.hvd.aggregation import Aggregator
from ctl.hvd.errors import RefusedError
from ctl.hvd.reducing import Exchange, Reduction
from ctl.tensorflow_patches import keras_compilation, optimizer_attributes

_WRONG_NESTING = (
    "A LossScaleOptimizer wraps a DistributedOptimizer; a rank with an overflow would skip the exchange "
    "and block the other ranks. Expected the opposite order: "
    "hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer)). For model.compile "
    'under the policy "mixed_float16", set the policy before you call hvd.DistributedOptimizer.'
)


class CallableList(list):
    """A callable list, for `optimizer.variables` and `optimizer.variables()`."""

    def __call__(self) -> "CallableList":
        """Returns the list itself."""
        return self


class Distributed:
    """Base class of distributed optimizers of Keras 3 and of tf_keras, with one exchange per optimizer."""

    _hvd_options: tuple[Reduction, int, bool]

    @property
    def _hvd(self) -> Exchange:
        if "_hvd_exchange" not in self.__dict__:
            reduction, passes, averages = self._hvd_options
            aggregator = Aggregator(passes, averages) if passes > 1 else None
            self.__dict__["_hvd_exchange"] = Exchange(reduction, aggregator)
        return self.__dict__["_hvd_exchange"]

    @property
    def _agg_helper(self) -> Aggregator | None:
        return self._hvd.aggregator

    @property
    def variables(self) -> CallableList:
        """Variables of the optimizer, as a callable list."""
        variables = super().variables  # type: ignore[misc]
        return CallableList(
            variables() if callable(variables) and not isinstance(variables, list) else variables
        )

    def __reduce__(self) -> Any:
        """Preserves the distributed class in copies and pickles. Keras would restore the base optimizer."""
        mixin, base = type(self).__bases__
        base_optimizer: Any = object.__new__(base)
        base_state = {k: v for k, v in self.__dict__.items() if not k.startswith("_hvd_")}
        base_optimizer.__dict__.update(base_state)
        return distributed, (base_optimizer, mixin, self._hvd_options)

    def register_local_var(self, var: Any) -> None:
        """Keeps the gradient of `var` on this rank, for a layer that other ranks do not have."""
        self._hvd.keep_local(var)


class Keras3(Distributed):
    """Mixin for Keras 3 optimizers. It precedes the optimizer's class in a common subclass."""

    built: bool
    build: Any
    _trainable_variables: Any

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Exchanges and applies the gradients. Collective. With several passes, only in the last one."""
        if len(grads) == 0:
            return
        variables = self._trainable_variables if trainable_variables is None else trainable_variables
        variables = list(variables)
        base: Any = super()
        apply = base.apply
        exchange = self._hvd
        if exchange.aggregator is None:
            apply(exchange(grads, variables), variables)
            return
        if not self.built:
            self.build(variables)  # a variable cannot be created in one branch
        reduced = exchange(grads, variables)
        tf.cond(exchange.aggregator.is_due(), lambda: apply(reduced, variables), self._count_step)

    def _count_step(self) -> None:
        inner: Any = getattr(self, "inner_optimizer", self)
        optimizer_attributes.count_step(inner)

    def __setattr__(self, name: Any, value: Any) -> None:
        """Raises RefusedError if a LossScaleOptimizer wraps this one, which sets this attribute to None."""
        if name == "loss_scale_factor" and value is None and name in self.__dict__:
            raise RefusedError(_WRONG_NESTING)
        super().__setattr__(name, value)


def add_loss_scale(optimizer: Any) -> Any:
    """Wraps the optimizer in a LossScaleOptimizer if the dtype policy requires it, like `model.compile`."""
    import keras

    has_loss_scale = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if has_loss_scale or keras.config.dtype_policy().name != "mixed_float16":
        return optimizer
    return keras.optimizers.LossScaleOptimizer(optimizer)


def distributed(optimizer: Any, mixin: type, options: tuple[Reduction, int, bool]) -> Any:
    """Returns an optimizer with the same variables, of a new subclass of `mixin` and its class.

    Args:
      optimizer: Optimizer of Keras 3 or tf_keras.
      mixin: `Keras3` or `TfKeras`.
      options: The reduction, the passes per exchange, and True to average over the passes.
    """
    keras_compilation.install_compilation_check(process.has_peers)
    base = type(optimizer)
    members = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_hvd_options": options,
    }
    distributed_optimizer: Any = object.__new__(type(base.__name__, (mixin, base), members))
    distributed_optimizer.__dict__.update(optimizer.__dict__)
    return distributed_optimizer
