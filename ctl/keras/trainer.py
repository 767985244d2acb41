"""Trainer of compiled Keras 3 models under any strategy: `ctl.fit(model, ...)` for `model.fit(...)`.

    with strategy.scope():
        model = build_and_compile_model()
    history = ctl.fit(model, dataset, epochs=3, steps_per_epoch=70)

The loss, its weights, the metrics and the optimizer are those of `compile`. ctl provides the loop, the
data, the checkpoints and the metric writers.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from ctl.data import sources
from ctl.data.indexed import IndexedData
from ctl.data.python_batches import example_batch
from ctl.distribute.keras_objects import layers_of
from ctl.distribute.row_partition import num_rows
from ctl.errors import UsageError
from ctl.keras import own_steps, several_replicas
from ctl.keras.argument_checks import check_model
from ctl.keras.batch_norm import synchronize_batch_norm
from ctl.keras.class_weights import class_weights
from ctl.keras.own_steps import ReplicaMeans, has_own
from ctl.keras.part_values import undivided_call
from ctl.keras.step_logs import StepLogs
from ctl.step.gradient_settings import Gradients
from ctl.step.keras_losses import GlobalMeans, undivided_means
from ctl.step.randomness import GeneratorStates
from ctl.step.traced_step import traced_step
from ctl.tensorflow_patches import keras_models
from ctl.tensorflow_patches.replaced_methods import replaced
from ctl.tensorflow_patches.weighted_means import weighted_means
from ctl.trainer import Trainer
from ctl.training.evaluation_observer import EvaluationObserver
from ctl.training.run_options import RunOptions

if TYPE_CHECKING:
    from ctl.trainer_options import ConfiguredTrainerOptions
    from typing_extensions import Unpack

_log = logging.getLogger("ctl")


class KerasTrainer(Trainer):
    """A trainer of a compiled Keras 3 model. `ctl.fit` creates one; `ctl.run` calls a function that does.

    Calls a custom `train_step` or `test_step` of the model; several replicas require `own_step="mean"`. On
    one replica the gradients of such a step do not pass through `minimize`, so they are not checked. The
    returned values are reported as in Keras: results of metrics, or the newest values of other numbers.

    >>> ctl.KerasTrainer(build_and_compile_model, train=(x, y), strategy="auto").train(1000)

    Attributes:
      optimizers: Optimizers of a model with a custom `train_step`, by name, except `model.optimizer`.
    """

    def __init__(
        self,
        model: Any,
        *,
        train: Any,
        validation: Any = None,
        class_weight: Mapping[int, float] | None = None,
        own_step: str | None = None,
        sync_batch_norm: bool = False,
        generator_states: GeneratorStates | None = None,
        **options: "Unpack[ConfiguredTrainerOptions]",
    ) -> None:
        """Validates and stores the arguments.

        Args:
          model: Compiled model, created inside the strategy's scope; or a function that returns one and
            is called in that scope.
          train: Dataset of global batches `(x, y)` or `(x, y, sample_weight)`; arrays in such a tuple; or
            a function of the global batch size that returns these. None for a trainer that only evaluates
            or predicts.
          validation: Data of the evaluations, like `train`.
          class_weight: Label -> weight of its examples in the loss and the weighted metrics.
          own_step: "mean" runs a model's custom `train_step`, `test_step` or `compute_loss` on several
            replicas, with losses that are means over the batch.
          sync_batch_norm: If True, BatchNormalization layers compute statistics over all replicas.
          generator_states: States of Python's and NumPy's generators in the training. None: both are
            seeded with `seed`.
          options: Options of `ctl.Trainer`. The default strategy is that of the model.
        """
        if not _is_model(model) and not callable(model):
            raise UsageError(f"model is {model!r}; expected a compiled Keras model, or a function.")
        own_steps.check_own_step(own_step)
        if _is_model(model):
            check_model(model, trains=train is not None)
            options.setdefault("strategy", model.distribute_strategy)
        super().__init__(**options)
        self._make_model = (lambda: model) if _is_model(model) else model
        self._data = {"train": train, "validation": validation}
        if validation is None and type(self).eval_data is KerasTrainer.eval_data:
            vars(self).update(eval_data=None, eval_step=None)  # as if not defined
        self._rows_may_vary = True  # Keras divides by the rows of each batch
        self._class_weight = None if class_weight is None else class_weights(class_weight)
        self._own_step, self._sync_batch_norm = own_step, sync_batch_norm
        self._generator_states = generator_states
        self._step_logs: dict[str, StepLogs] = {}
        self._names_of_mean_losses: frozenset[str] | None = None  # of layers; None after the warning
        self._losses_of_user: list[Any] = []
        self.metrics: list[Any] = []
        self.optimizers: dict[str, Any] = {}
        self._evaluation_observer: EvaluationObserver | None = None

    def observe_evaluations(self, observer: EvaluationObserver) -> None:
        """Calls an observer around the graph calls of each evaluation."""
        self._evaluation_observer = observer

    @property
    def _run_options(self) -> RunOptions:
        return dataclasses.replace(super()._run_options, evaluation_observer=self._evaluation_observer)

    def build(self) -> None:
        """Creates the model, its optimizers and its metrics with all variables, and checks them."""
        if self._generator_states is not None:
            self._generator_states.restore()
        self.model, trains = self._make_model(), self._data["train"] is not None
        check_model(self.model, trains=trains)
        if self.jit_compile == "off" and keras_models.compile_argument(self.model, "jit_compile") is True:
            self.jit_compile = "step"
        if self.model.run_eagerly and self.topology.is_chief:
            _log.warning(
                "run_eagerly=True has no effect: ctl runs steps as TensorFlow graphs, so Python code in a "
                "step runs once. Print values with tf.print."
            )
        replicas = self.topology.num_replicas
        if replicas > 1:
            evaluates = self._data["validation"] is not None
            own_steps.check_several_replicas(
                self.model, replicas, self._own_step, trains=trains, evaluates=evaluates
            )
            several_replicas.check_for_strategy(self.model, self.strategy, self.jit_compile != "off")
        if tf.distribute.has_strategy():
            several_replicas.check_scope_of_compile(self.model, self.strategy)
        if self._sync_batch_norm:
            synchronize_batch_norm(self.model)
        batch = self._example_batch()
        own_steps.check_targets(self.model, batch, trains=trains)
        own_steps.check_targets(self.model, _structure_of(self._data["validation"]), trains=False)
        if has_own(self.model, "compute_loss") or self._calls("train_step"):
            if trains:
                data = self._for_own_step(batch, self._class_weight)
                metrics = several_replicas.metrics_of_user(self.model) if replicas > 1 else []
                calls = own_steps.build_by_tracing(self.model, data, self.strategy, metrics)
                several_replicas.check_recorded_metrics(calls, num_rows(data), replicas)
                self.model.built = True  # at least the variables that the step uses
            self.optimizers = own_steps.own_optimizers(self.model)
            self._check_own_evaluation()
        elif batch is not None:
            if replicas == 1 and _has_traced_metrics(self.model):
                own_steps.build_by_tracing(self.model, self._for_own_step(batch), self.strategy)
            _build_for(self.model, batch)
            if replicas > 1:
                x, y, _ = _unpacked(batch, None)
                several_replicas.check_losses_and_metrics(self.model, x, y, replicas)
                self._losses_of_user = several_replicas.losses_of_user(self.model)
                self._names_of_mean_losses = several_replicas.check_added_losses(self.model, x, replicas)
        optimizer = self.model.optimizer
        is_unused = trains and optimizer is not None and not optimizer.built  # as in a GAN
        is_unused |= not self.model.trainable_variables
        if trains and not self.model.trainable_variables and self.topology.is_chief:
            _log.warning("The model has no trainable variables: a step only updates its metrics.")
        self.optimizer = None if is_unused else optimizer
        self.gradients = Gradients(merge_rows=False)  # as Model.fit passes them to the optimizer
        self.metrics = list(self.model.metrics)

    def train_data(self, batch_size: int) -> Any:
        """Returns the training data of the constructor."""
        return _of(self._data["train"], batch_size)

    def eval_data(self, batch_size: int) -> Any:
        """Returns the validation data of the constructor."""
        return _of(self._data["validation"], batch_size)

    def _check_own_evaluation(self) -> None:
        """Raises UsageError if a model with a custom train_step has no loss to evaluate."""
        model = self.model
        has_loss = keras_models.compiled_loss(model) is not None or model.losses
        if has_loss or has_own(model, "compute_loss") or has_own(model, "test_step"):
            return
        if self._data["validation"] is not None:
            raise UsageError(
                f"{type(model).__name__} has its own train_step and was compiled without a loss, so it "
                "cannot be evaluated. Write a test_step too, or leave the validation data out."
            )

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Computes the compiled loss and applies the optimizer, or calls a custom `train_step`."""
        if self._calls("train_step"):
            return self._call_own("train_step", batch, self._class_weight)
        x, y, weight = _unpacked(batch, self._class_weight)
        with tf.GradientTape() as tape, self._global_means(batch) as means:
            predicted = _call(self.model, x, training=True)
            loss = self._total_loss(means, x, y, predicted, weight, training=True)
            total = tf.reduce_sum(loss)  # a loss with reduction=None is not a scalar
        if self.model.trainable_variables:
            self.minimize(total, tape)
        return self._counted(batch, means, x, y, predicted, weight, loss)

    def eval_step(self, batch: Any) -> dict[str, Any]:
        """Computes the compiled loss and metrics, or calls a custom `test_step`."""
        if self._calls("test_step"):
            return self._call_own("test_step", batch, None)
        x, y, weight = _unpacked(batch, None)
        with self._global_means(batch) as means:
            predicted = _call(self.model, x, training=False)
            loss = self._total_loss(means, x, y, predicted, weight, training=False)
        return self._counted(batch, means, x, y, predicted, weight, loss)

    def _calls(self, method: str) -> bool:
        """Returns True if the method of the model is called instead of the steps of this class."""
        return own_steps.calls_model(self.model, method, self.topology.num_replicas)

    @tf.autograph.experimental.do_not_convert
    def _call_own(self, method: str, batch: Any, weight_of: Callable | None) -> dict[str, Any]:
        data, step, means = self._for_own_step(batch, weight_of), traced_step(self.gradients), None
        logs = self._step_logs.setdefault(method, StepLogs(lambda: self.model.metrics, self.strategy))
        if self.topology.num_replicas > 1:
            step.record.record_average()
            with self._global_means(batch) as counts:
                means = ReplicaMeans(counts, step, {"": self.model.optimizer, **self.optimizers})
        return own_steps.call_own_step(getattr(self.model, method), data, logs, means)

    @tf.autograph.experimental.do_not_convert
    def _for_own_step(self, batch: Any, weight_of: Callable | None = None) -> Any:
        """Returns the batch as Keras passes it to `train_step`: single inputs are not in a tuple."""
        if isinstance(batch, tuple) and len(batch) == 1:
            batch = batch[0]
        return batch if weight_of is None else _unpacked(batch, weight_of)

    def _global_means(self, batch: Any) -> GlobalMeans:
        context = traced_step().context
        is_local = context.num_local_workers > 0
        return GlobalMeans(num_rows(batch), self.topology.num_replicas, context.is_empty, is_local)

    @tf.autograph.experimental.do_not_convert
    def _total_loss(
        self, means: GlobalMeans, x: Any, y: Any, predicted: Any, weight: Any, training: bool
    ) -> Any:
        """Returns this replica's share of the loss. Added losses are weighted by the replica's rows."""
        traced_step().record.record_average()
        model = self.model
        compiled_loss = keras_models.compiled_loss(model)
        if compiled_loss is None and not model.losses and not has_own(model, "compute_loss"):
            raise UsageError(
                f"{type(model).__name__} was compiled without a loss, and no layer calls add_loss. Write "
                "compile(loss=...), or a compute_loss in the class of the model."
            )
        own_steps.check_targets(model, (x, y), trains=training)
        if self.topology.num_replicas == 1:
            return keras_models.compute_loss(model, x, y, predicted, weight, training=training)
        if training:
            self._warn_of_added_losses()
        # read before any sum over replicas, during which another replica replaces `model.losses`
        added = [tf.reduce_sum(tf.cast(t, tf.float32)) for t in model.losses]
        loss = None
        if compiled_loss:
            share = means.share_of_rows(tf.constant(1.0))
            with weighted_means(share), replaced(self._losses_of_user, "call", undivided_call):
                loss = compiled_loss(y, predicted, weight)
            if loss.shape.rank:
                raise UsageError(
                    'the compiled loss has reduction=None. On several replicas write reduction="sum", or '
                    '"sum_over_batch_size" for a mean over the global batch.'
                )
        added = [means.share_of_rows(t) for t in added]
        return tf.add_n([*([] if loss is None else [loss]), *added])

    @tf.autograph.experimental.do_not_convert
    def _counted(
        self, batch: Any, means: Any, x: Any, y: Any, predicted: Any, weight: Any, loss: Any
    ) -> dict[str, Any]:
        """Updates the metrics of the model and returns them by name."""
        tracker = keras_models.loss_tracker(self.model)
        exclusive_updates = traced_step().context.exclusive_updates  # Keras reads, then assigns
        with tf.control_dependencies([loss]), exclusive_updates():
            tracker.update_state(means.mean_of_share(loss), sample_weight=num_rows(batch))
            share = means.share_of_rows(tf.constant(1.0)) if self.topology.num_replicas > 1 else None
            with weighted_means(share), undivided_means():
                self.model.compute_metrics(x, y, predicted, sample_weight=weight)
        return {m.name: m for m in self.metrics}

    def _warn_of_added_losses(self) -> None:
        """Logs one warning on the chief about layers that add losses not verified to be means."""
        if self._names_of_mean_losses is None:
            return
        layers = [layer for layer in layers_of(self.model) if keras_models.has_added_losses(layer)]
        names = [layer.name for layer in layers if layer.name not in self._names_of_mean_losses]
        if names and self.topology.is_chief:
            self._names_of_mean_losses = None
            _log.warning(
                "Losses that the layers %s add are taken as means over the examples of a replica. On %d "
                "replicas a loss that is a sum over examples would be too small: divide it by the number "
                "of examples, or train on one device.",
                ", ".join(map(repr, names)),
                self.topology.num_replicas,
            )

    def _example_batch(self) -> Any:
        """Returns a batch with the shapes of one replica's batch, or None without data."""
        rows = -(-self.global_batch_size // self.topology.num_replicas)
        source = self.train_data(self.global_batch_size)
        if source is None and self.eval_data is not None:
            source = self.eval_data(self.global_batch_size)
        if source is None:
            return None
        source = sources.as_dataset(source, "train", rows, shuffle=False)
        if isinstance(source, tf.data.Dataset):
            specs = tf.nest.flatten(source.element_spec)
            if all(isinstance(s, tf.TensorSpec) and _is_known(s.shape[1:]) for s in specs):

                def zeros(spec: tf.TensorSpec) -> tf.Tensor:
                    has_rows = self.topology.num_replicas == 1 and spec.shape[0]
                    return tf.zeros([spec.shape[0] if has_rows else rows, *spec.shape[1:]], spec.dtype)

                return tf.nest.map_structure(zeros, source.element_spec)
            batch = example_batch(source)
            if batch is None:
                raise UsageError("the training data is empty; expected at least one batch.")
            return batch
        return source.read_first(rows)


def _is_known(shape: Any) -> bool:
    return shape.rank is not None and shape.is_fully_defined()


def _is_model(value: Any) -> bool:
    return hasattr(value, "compile") and hasattr(value, "predict_on_batch")


def _of(source: Any, batch_size: int) -> Any:
    is_function = callable(source) and not isinstance(source, tf.data.Dataset)
    return source(batch_size) if is_function else source


def _structure_of(source: Any) -> Any:
    """Returns the structure of a batch. None: another type of source, and the checks follow later."""
    if isinstance(source, tf.data.Dataset):
        return source.element_spec
    return source.read_first(1) if isinstance(source, IndexedData) else None


def _has_traced_metrics(model: Any) -> bool:
    """Returns True if the `update_state` of a metric is a `tf.function`, which Keras builds by a trace."""
    metrics = tf.nest.flatten(keras_models.compiled_metrics_of_user(model))
    return any(hasattr(getattr(m, "update_state", None), "get_concrete_function") for m in metrics)


def _build_for(model: Any, batch: Any) -> None:
    """Creates every variable of the model, its metrics and its optimizer, before a step is traced."""
    x, y, weight = _unpacked(batch, None)
    keras_models.build_symbolically(model, (x, y) if weight is None else (x, y, weight))
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


@tf.autograph.experimental.do_not_convert
def _call(model: Any, x: Any, training: bool) -> Any:
    """Calls the model. Loss objects inside the model return means over this replica's examples."""
    with undivided_means():
        return model(x, training=training) if keras_models.has_training_argument(model) else model(x)


@tf.autograph.experimental.do_not_convert
def _unpacked(batch: Any, weight_of: Callable | None) -> tuple:
    """Returns a batch as (x, y, weight), with class weights. Missing parts are None."""
    parts = batch if isinstance(batch, (tuple, list)) else (batch,)
    if not 1 <= len(parts) <= 3:
        raise UsageError(f"a batch has {len(parts)} parts; expected (x, y) or (x, y, sample_weight).")
    x, y, weight = (*parts, None, None)[:3]
    if weight_of is not None and y is not None:
        if weight is not None:
            raise UsageError("got class_weight and sample weights; expected one of them.")
        weight = weight_of(y)
    return x, y, weight
