"""Validation of a trainer before training starts."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from ctl.callbacks.best_value import BestValue
from ctl.callbacks.protocol import Callback
from ctl.callbacks.reduce_on_plateau import ReduceOnPlateau
from ctl.callbacks.save_best import SaveBest
from ctl.callbacks.schedule import AT_THE_END
from ctl.checkpoints import tracked_state
from ctl.checkpoints.protocol import CheckpointManager
from ctl.config import Config
from ctl.distribute.keras_objects import attribute, is_keras3, layers_of, synchronized_layer, unwrap
from ctl.distribute.strategy_kind import StrategyKind
from ctl.distribute.world import World
from ctl.errors import UsageError
from ctl.metrics.adapter import as_writers, is_writer
from ctl.setting_values import are_names
from ctl.step import optimizers as optimizers_lib
from ctl.step.context import StepContext
from ctl.tensorflow_patches import optimizer_attributes
from ctl.trackers.registry import check_writer_names
from ctl.training.run_options import RunOptions
from ctl.training.task import Task

_REQUIRED = {
    "train": ("build", "train_data", "train_step"),
    "evaluate": ("build", "eval_data", "eval_step"),
}


def check_methods(task: Task, purpose: str) -> None:
    """Raises UsageError for undefined methods that `purpose` ("train", "evaluate") needs."""
    missing = [m for m in _REQUIRED[purpose] if m not in task.methods]
    if "train_data" in missing and "train_data_fn" in task.methods:
        missing.remove("train_data")
    if missing:
        arguments = {"build": "self"}.get(missing[0], "self, batch" + "_size" * missing[0].endswith("data"))
        fix = f"Write `def {missing[0]}({arguments}): ...` in the class."
        fix = "Pass validation=(x, y) to KerasTrainer." if missing[0] in task.attributes else fix
        raise UsageError(
            f"{task.class_name} has no {', '.join(missing)}; to {purpose} it needs "
            f"{', '.join(_REQUIRED[purpose])}. {fix}"
        )


def check_train_data(task: Task) -> None:
    """Raises UsageError for two sources of training data."""
    if {"train_data", "train_data_fn"} <= task.methods.keys():
        raise UsageError(f"{task.class_name} has train_data and train_data_fn; expected one of them.")


def check_evaluation_methods(
    task: Task, options: RunOptions, manager: CheckpointManager, *, is_chief: bool
) -> None:
    """Checks that the methods of an evaluation exist if they are needed. Warns if only one exists.

    Raises:
      UsageError: If evaluations, or a best checkpoint, are requested without eval_data and eval_step.
    """
    missing = [m for m in ("eval_data", "eval_step") if m not in task.methods]
    every = options.intervals.evaluate
    if options.evaluates and missing and every != AT_THE_END:
        raise UsageError(
            f"Intervals(evaluate={every}), or eval_every_steps, needs eval_data and eval_step, and "
            f"{task.class_name} has no {' and '.join(missing)}. Write both methods (KerasTrainer: pass "
            "validation=...), or leave the setting out."
        )
    if len(missing) == 1 and options.evaluates and is_chief:
        written = "eval_data" if missing == ["eval_step"] else "eval_step"
        message = "%s has %s but no %s, which evaluation requires as well."
        logging.getLogger("ctl").warning(message, task.class_name, written, missing[0])
    best = manager.best_metric
    if best is not None and (missing or not options.evaluates):
        raise UsageError(
            f"the best checkpoint by {best!r} is to be kept, but there are no evaluations. Write eval_data "
            "and eval_step, and Intervals(evaluate=...) (--mode=train_and_eval); or leave best out."
        )


def check_best_metric(manager: CheckpointManager, means: Mapping[str, float]) -> None:
    """Raises UsageError if the metric of the best checkpoint is not among the evaluated metrics."""
    best = manager.best_metric
    if best is not None and best not in means:
        raise UsageError(
            f"the best checkpoint by {best!r} is to be kept, but eval_step returns "
            f"{', '.join(sorted(means))}. Write one of these."
        )


def check_limits(config: Config, *, can_save: bool) -> None:
    """Raises UsageError for a setting of `ctl.run` alone, and warns of a time limit without checkpoints."""
    if config.fast_dev_run:
        raise UsageError(
            "fast_dev_run is a flag of programs that call ctl.run; trainer.train(n) would run all n steps. "
            "Write trainer.train(2)."
        )
    if config.max_secs and not can_save:
        message = "max_secs is %g, without a model_dir: the weights of a run that reaches it are lost."
        logging.getLogger("ctl").warning(message, config.max_secs)


def check_metric_names(
    names: Sequence[str], options: RunOptions, manager: CheckpointManager, monitored: Sequence[BestValue]
) -> None:
    """Raises UsageError, before training, for requested metrics that eval_step does not return."""
    means = dict.fromkeys(names, 0.0)
    check_best_metric(manager, means)
    check_reported_metric(options.extra_writers, means)
    for best_value in monitored:
        best_value.of(means, "eval")


def names_matter(options: RunOptions, manager: CheckpointManager, monitored: Sequence[BestValue]) -> bool:
    """Returns True if a checkpoint manager, writer or callback requests a metric by its name."""
    is_reported = any(writer.metric is not None for writer in as_writers(options.extra_writers))
    return manager.best_metric is not None or is_reported or bool(monitored)


def check_reported_metric(writers: Sequence[Any], means: Mapping[str, float]) -> None:
    """Raises UsageError if a writer reports a metric that the evaluation does not return."""
    for writer in as_writers(writers):
        if writer.metric is not None and writer.metric not in means:
            raise UsageError(
                f"--report_hypertune={writer.metric}, but eval_step returns {', '.join(sorted(means))}. "
                "Write one of these: the tuning job receives no other metric."
            )


def check_mask(context: StepContext, num_replicas: int) -> None:
    """Raises UsageError where the entries of a mask cannot be counted over the whole global batch."""
    if context.is_compiled and num_replicas > 1:
        raise UsageError(
            "average(mask=...) adds up a count over replicas, which XLA cannot do inside a compiled "
            "step. Leave jit_compile out, or average per example without a mask."
        )


def check_gather(context: StepContext, num_replicas: int) -> None:
    """Raises UsageError where the rows of all replicas are not available at the same time."""
    if context.num_local_workers and num_replicas > 1:
        raise UsageError(
            "gather() with sync_every: workers train independently, so a step has no rows of the other "
            "workers. Leave sync_every out."
        )
    if context.num_parts > 1:
        raise UsageError(
            f"gather() with accumulate_steps={context.num_parts}: the parts of a batch run one after the "
            "other, so a step has no rows of the other parts. Leave accumulate_steps out."
        )
    if context.is_compiled and num_replicas > 1:
        raise UsageError(
            "gather() exchanges rows between replicas, which XLA cannot do inside a compiled step. Leave "
            "jit_compile out."
        )


def check_callbacks(task: Task, config: Config, callbacks: Sequence[Callback], *, evaluates: bool) -> None:
    """Raises UsageError for callbacks that would never be called, or could not act.

    Args:
      task: Methods and objects of the user.
      config: Settings of the trainer.
      callbacks: Callbacks to check.
      evaluates: True if evaluations are requested.
    """
    has_hook = "after_evaluation" in task.methods
    if not task.can_evaluate and (has_hook or any("after_evaluation" in c.handlers() for c in callbacks)):
        raise UsageError(
            "after_evaluation would never be called, without evaluations. Write eval_data and eval_step."
        )
    for callback in callbacks:
        name, monitored = callback.class_name, callback.monitored
        of_evaluation = monitored is not None and monitored.run == "eval"
        if of_evaluation and not (task.can_evaluate and evaluates):
            fix = "Write eval_data and eval_step, and Intervals(evaluate=...)."
            if config.mode == "train" and not evaluates:
                fix = "--mode=train does not evaluate: leave --mode out."
            raise UsageError(
                f"{name} requires evaluations, but there are none. {fix} For "
                "metrics of the training write run='train'."
            )
        if isinstance(callback, ReduceOnPlateau) and not has_variable_learning_rate(task.optimizer):
            raise UsageError(
                f"{name} lowers the learning rate, but self.optimizer has a schedule, or no learning rate. "
                "Give the optimizer a number."
            )
        if isinstance(callback, SaveBest):
            if callback.directory is None and not config.model_dir:
                raise UsageError(f"{name} needs a directory: SaveBest(directory=...), or a model_dir.")
            task.export_targets(callback.formats)


def has_variable_learning_rate(optimizer: Any) -> bool:
    """Returns True if the learning rate is a number that can be changed, and not a schedule."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    rate = optimizer_attributes.learning_rate_variable(inner, getattr(inner, "learning_rate", None))
    is_schedule = any("Schedule" in c.__name__ for c in type(rate).__mro__)
    return rate is not None and not is_schedule and hasattr(unwrap(rate), "numpy")


def check_arguments(
    checkpoints: Any, writers: Any, extra_writers: Any, callbacks: Any, model_dir: str | None
) -> None:
    """Raises UsageError for objects that are no checkpoint manager or no lists of writers or callbacks."""
    if isinstance(callbacks, str | Mapping) or not isinstance(callbacks, Iterable):
        raise UsageError(
            f"callbacks is {callbacks!r:.80}; expected a list, e.g. [ctl.EarlyStopping('loss')]."
        )
    if checkpoints is not None and not isinstance(checkpoints, CheckpointManager):
        raise UsageError(
            f"checkpoints is {checkpoints!r}; expected a ctl.CheckpointManager, e.g. "
            "ctl.ChiefOnlyCheckpoints(directory), or a subclass of yours."
        )
    for name, value in {"writers": writers, "extra_writers": extra_writers}.items():
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        if name == "writers" and are_names(value):
            continue  # which the settings have checked
        names = [w for w in value if isinstance(w, str)] if is_list and name == "writers" else []
        check_writer_names(Config(writers=names).writers, model_dir)
        if value is not None and not (is_list and all(w in names or is_writer(w) for w in value)):
            hint = ', or names, e.g. ["console"]' if name == "writers" else ""
            raise UsageError(
                f"{name} is {value!r}; expected a list of writers with write and note, e.g. "
                f"[ctl.ConsoleWriter()]{hint}."
            )


def check_trainable(task: Task, world: World, jit_compile: str) -> None:
    """Raises UsageError for a model or optimizer that cannot be trained under the strategy."""
    owned = task.owners
    is_empty = task.model is not None and not list(tracked_state.variables_of(task.model))
    if is_empty and not (is_keras3(task.model) and task.model.built):
        raise UsageError(
            f"self.model, a {type(task.model).__name__}, has no variables yet. Give it its input "
            "shape in build(): begin with keras.Input(shape), or call self.model.build(...)."
        )
    if not owned and not is_empty:
        raise UsageError(
            f"{task.class_name}.build() created no variables; expected it to set self.model, and "
            "self.optimizer unless the step assigns the weights itself."
        )
    for name, owner in owned.items():
        _check_scope(world, name, owner)
        _check_not_sharded(name, owner)
    _check_batch_normalization(world, owned)
    _check_central_storage(world, owned)
    check_compilation(jit_compile, world, owned)


def check_optimizers(task: Task, world: World) -> None:
    """Builds the slots of `self.optimizer`. Raises UsageError for other optimizers without slots."""
    for name, value in task.attributes.items():
        is_like_keras = attribute(value, "apply_gradients") and attribute(value, "build")
        is_first = name == "optimizer" and value is not None
        if is_first or is_like_keras:
            optimizers_lib.check_optimizer(value, name, world.topology.num_replicas)
            _check_optimizer_strategy(world, name, value)
        if is_first and (model := task.model) is not None:
            if not hasattr(model, "trainable_variables"):
                class_name = type(model).__name__
                raise UsageError(f"self.model is a {class_name}; expected a Keras model or tf.Module.")
            optimizers_lib.build_slots(value, model.trainable_variables)
        elif is_like_keras and not is_first and not getattr(value, "built", True):
            fix = f"Call self.{name}.build(variables) in build(), with the variables it will update."
            raise UsageError(f"self.{name} has no slots yet. {fix}")


def check_compilation(jit_compile: str, world: World, owned: Mapping[str, Any]) -> None:
    """Raises UsageError if XLA cannot compile forward and backward of a replica."""
    if jit_compile == "off":
        return
    strategy_kind, num_replicas = world.kind, world.topology.num_replicas
    is_local = strategy_kind in (StrategyKind.DEFAULT, StrategyKind.ONE_DEVICE, StrategyKind.MIRRORED)
    if jit_compile == "loop" and not (is_local and num_replicas == 1):
        raise UsageError(
            f"jit_compile='loop' with strategy {world.strategy_name!r} and {num_replicas} replicas: "
            "the program of a loop cannot contain TensorFlow's collectives. Train on one replica, such as "
            "--strategy=one_device, or write --jit_compile=step."
        )
    if strategy_kind in (StrategyKind.PARAMETER_SERVER, StrategyKind.CENTRAL_STORAGE):
        raise UsageError(
            f"jit_compile with strategy {world.strategy_name!r}: XLA cannot reach variables on another "
            "device. Leave jit_compile out, or use default, mirrored or multi_worker."
        )
    layer = synchronized_layer(layer for owner in owned.values() for layer in layers_of(owner))
    if num_replicas > 1 and layer is not None:
        raise UsageError(
            f"jit_compile with the layer {layer.name!r}: it sums over replicas within the step, which XLA "
            "cannot do. Leave jit_compile out, or use another normalization, such as "
            "keras.layers.LayerNormalization."
        )


def _check_central_storage(world: World, owned: Mapping[str, Any]) -> None:
    """Raises UsageError for objects that central storage cannot update."""
    if world.kind is not StrategyKind.CENTRAL_STORAGE or world.topology.num_replicas == 1:
        return
    for name, owner in owned.items():
        if optimizers_lib.skips_what_is_not_finite(owner):
            raise UsageError(
                f"self.{name} scales the loss, which needs conditional updates; strategy "
                "'central_storage' has none. Train with the policy 'mixed_bfloat16', or 'mirrored'."
            )
        for variable in tracked_state.variables_of(owner):
            has_none = getattr(unwrap(variable), "aggregation", None) == tf.VariableAggregation.NONE
            if has_none and not getattr(variable, "trainable", True):
                raise UsageError(
                    f"self.{name} has the variable {variable.name!r} that replicas update, and "
                    "'central_storage' cannot combine their values. Make the model in build(), or "
                    "give ctl.KerasTrainer a function that makes it; or use strategy 'mirrored'."
                )


def _check_optimizer_strategy(world: World, name: str, optimizer: Any) -> None:
    created_under = optimizer_attributes.strategy_of_optimizer(optimizer)
    if is_keras3(optimizer) and created_under is not None and created_under is not world.strategy:
        raise UsageError(_outside(f"self.{name}"))


def _check_scope(world: World, name: str, owner: Any) -> None:
    if world.strategy.num_replicas_in_sync == 1:
        return
    for variable in tracked_state.variables_of(owner):
        if not world.strategy.extended.variable_created_in_scope(unwrap(variable)):
            raise UsageError(_outside(f"self.{name}"))


def _check_not_sharded(name: str, owner: Any) -> None:
    """Raises UsageError for Keras 3 variables that a variable_partitioner has split."""
    for variable in tracked_state.variables_of(owner):
        if is_keras3(variable) and hasattr(variable.value, "variables"):
            raise UsageError(
                f"self.{name} has the Keras 3 variable {variable.path!r} in "
                f"{len(variable.value.variables)} shards, which Keras 3 cannot train. Leave "
                "variable_partitioner out, or write the model with tf_keras or as a tf.Module."
            )


def _outside(name: str) -> str:
    return (
        f"{name} was made outside the strategy's scope. Make models and optimizers in build(), which "
        "is called inside it, not in __init__ or at import."
    )


def _check_batch_normalization(world: World, owned: Mapping[str, Any]) -> None:
    """Raises UsageError for layers that normalize the examples of each replica separately.

    Strategies `mirrored` and `multi_worker` detect them in the trace; see `replica_assignments`.
    """
    num_replicas = world.strategy.num_replicas_in_sync
    if num_replicas == 1 or world.kind in (StrategyKind.MIRRORED, StrategyKind.MULTI_WORKER):
        return
    for owner in owned.values():
        for layer in layers_of(owner):
            is_local = is_keras3(layer) and not getattr(layer, "synchronized", True)
            if type(layer).__name__ == "BatchNormalization" and is_local and layer.trainable:
                raise UsageError(
                    f"the layer {layer.name!r} would normalize the examples of each of "
                    f"{num_replicas} replicas by themselves. Write "
                    "BatchNormalization(synchronized=True), or call ctl.synchronize_batch_norm(model) in "
                    "build(): the layer is the same on one device."
                )


def check_export(task: Task, model_dir: str, formats: Sequence[str]) -> None:
    """Raises UsageError for formats that cannot be written into `model_dir`."""
    if formats and not model_dir:
        raise UsageError(
            "export needs a directory: give directory=..., or the trainer a model_dir (--model_dir)."
        )
    task.export_targets(formats)
    if "saved_model" in formats:
        task.signatures()
