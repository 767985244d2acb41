"""A Keras 3 optimizer that exchanges its gradients before it applies them.

The optimizer's class is replaced with a subclass of the same name, so a saved model can be loaded with and
without `ctl.hvd`. The new optimizer has the variables of the old one, so training continues.
"""

from typing import Any

import tensorflow as tf
from ctl.hvd import process
from ctl.hvd.aggregation import Aggregator
from ctl.hvd.errors import RefusedError
from ctl.hvd.reducing import Exchange, Reduction
from ctl.tensorflow_patches import keras_compilation, optimizer_attributes

_INSIDE_OUT = (
    "A LossScaleOptimizer was put around a DistributedOptimizer; a rank that overflows would skip the "
    "exchange that the others wait in. Expected the other order: "
    "hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer)). For model.compile "
    'under the policy "mixed_float16", set the policy before hvd.DistributedOptimizer is called.'
)


class CallableList(list):
    """A list that may also be called, for `optimizer.variables` and `optimizer.variables()`."""

    def __call__(self) -> "CallableList":
        return self


class Distributed:
    """Common base of the optimizers of Keras 3 and of tf_keras, with one exchange per optimizer."""

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
        """State of the optimizer, as a list that may also be called."""
        found = super().variables  # type: ignore[misc]
        return CallableList(found() if callable(found) and not isinstance(found, list) else found)

    def __reduce__(self) -> Any:
        """Makes copies and pickles distributed, too. Keras alone would restore the base optimizer."""
        before, base = type(self).__bases__
        plain: Any = object.__new__(base)
        kept = {k: v for k, v in self.__dict__.items() if not k.startswith("_hvd_")}
        plain.__dict__.update(kept)
        return distributed, (plain, before, self._hvd_options)

    def register_local_var(self, var: Any) -> None:
        """Keeps the gradient of `var` on this rank, for a layer that other ranks do not have."""
        self._hvd.keep_local(var)


class Keras3(Distributed):
    """A mixin that precedes the class of a Keras 3 optimizer in a common subclass."""

    built: bool
    build: Any
    _trainable_variables: Any

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Exchanges and applies the gradients. Collective. With several passes, in the last one only."""
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
        tf.cond(exchange.aggregator.is_due(), lambda: apply(reduced, variables), self._count)

    def _count(self) -> None:
        inner: Any = getattr(self, "inner_optimizer", self)
        optimizer_attributes.count_step(inner)

    def __setattr__(self, name: Any, value: Any) -> None:
        """Raises RefusedError if a LossScaleOptimizer wraps this one, which sets this attribute to None."""
        if name == "loss_scale_factor" and value is None and name in self.__dict__:
            raise RefusedError(_INSIDE_OUT)
        super().__setattr__(name, value)


def with_loss_scale(optimizer: Any) -> Any:
    """Returns the optimizer in a LossScaleOptimizer if the policy requires it, as `model.compile` would."""
    import keras

    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if scales or keras.config.dtype_policy().name != "mixed_float16":
        return optimizer
    return keras.optimizers.LossScaleOptimizer(optimizer)


def distributed(optimizer: Any, before: type, options: tuple[Reduction, int, bool]) -> Any:
    """Returns an optimizer with the same variables, of a new subclass of `before` and its class."""
    keras_compilation.install_compilation_check(process.has_peers)
    base = type(optimizer)
    members = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_hvd_options": options,
    }
    made: Any = object.__new__(type(base.__name__, (before, base), members))
    made.__dict__.update(optimizer.__dict__)
    return made
