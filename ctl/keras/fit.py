"""Functions `ctl.fit`, `ctl.evaluate` and `ctl.predict`: methods of `keras.Model` under any strategy."""

import functools
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf
from ctl.callbacks.schedule import Every
from ctl.checkpoints.protocol import CheckpointManager
from ctl.errors import UsageError
from ctl.keras import limits
from ctl.keras.argument_checks import with_checked_arguments
from ctl.keras.backup import SaveOptions, replace_backup_callback
from ctl.keras.callbacks import (
    BatchCallbackTrainer,
    KerasCallbacks,
    callback_list,
    has_predict_batches,
    has_test_batches,
    is_of_batches,
    sorted_callbacks,
)
from ctl.keras.data import (
    EndOfEvaluatedEpochs,
    EpochIntervals,
    Epochs,
    batch_size_of_validation,
    check_shares,
    repeated,
    single_pass,
    training_source,
    validation_epochs,
    validation_source,
)
from ctl.keras.epoch_console import EpochConsole
from ctl.keras.evaluation_batches import EvaluationBatches
from ctl.keras.history import History
from ctl.keras.keras_words import in_keras_words
from ctl.keras.overrides import ValidationArguments, prepare_validation, through_override
from ctl.keras.predictor import KerasPredictor
from ctl.keras.trainer import KerasTrainer
from ctl.metrics.adapter import MetricWriterLike
from ctl.metrics.console_text import format_number
from ctl.step.randomness import GeneratorStates
from ctl.tensorflow_patches import eager_context, keras_models, strategy_attributes
from ctl.tensorflow_patches.eager_context import tensorflow_seed_kept
from ctl.tensorflow_patches.replaced_methods import replace_method, replaced
from ctl.training.default_writers import default_writers

_log = logging.getLogger("ctl")
_GENERATOR_RESUMES = (
    "x is a generator, which cannot be rewound: a run that resumes in model_dir skips as many batches as "
    "it was trained on, so it needs a new generator that yields the same ones. A keras.utils.PyDataset is "
    "read again by itself."
)


@in_keras_words()
@through_override
@with_checked_arguments
def fit(
    model: Any,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: Any = "auto",
    callbacks: Any = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: bool | str = True,
    class_weight: Mapping[int, float] | None = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: int | Collection[int] = 1,
    *,
    model_dir: str | os.PathLike[str] | None = None,
    checkpoints: CheckpointManager | None = None,
    writers: Sequence[MetricWriterLike | str] | None = None,
    extra_writers: Sequence[MetricWriterLike] = (),
    seed: int | None = None,
    save_every_steps: int | None = None,
    own_step: str | None = None,
    sync_batch_norm: bool = False,
) -> History:
    """Trains a compiled Keras 3 model, created in the scope of its strategy. All workers must call it.

    The arguments up to `validation_freq` are those of `Model.fit`. Raises UsageError before the training.

    Args:
      model: Compiled Keras 3 model.
      x: Inputs: arrays, or a dataset, a PyDataset or a generator of global batches, equal on all workers.
      y: Targets, for arrays.
      batch_size: Examples per global batch of arrays. None: 32, or n / steps_per_epoch if that is given.
      epochs: Index of the last epoch.
      verbose: "auto", 0 (no output), 1 (a progress bar) or 2 (lines).
      callbacks: ctl or Keras callbacks. All workers call them; the chief decides (stop, learning rate).
      validation_split: Fraction of the arrays for validation, from the end.
      validation_data: Data of the evaluations, like `x` or a tuple `(x, y)` or `(x, y, sample_weight)`.
      shuffle: If True, the examples of arrays are shuffled in each epoch; "batch": batches stay.
      class_weight: Label -> weight of its examples.
      sample_weight: Weights of the examples of arrays.
      initial_epoch: Index of the first epoch.
      steps_per_epoch: Number of batches per epoch. None: all.
      validation_steps: Number of batches of an evaluation. None: all.
      validation_batch_size: Examples per batch of an evaluation. None: `batch_size`.
      validation_freq: Epochs between evaluations, or the epochs with one.
      model_dir: Directory of checkpoints and logs; an existing run resumes. None: no files.
      checkpoints: Checkpoint manager. None: checkpoints in `model_dir`.
      writers: Metric writers, or names such as ["console", "mlflow"]. None: the console, and files in
        `model_dir`.
      extra_writers: Metric writers in addition to those, such as `[ctl.MlflowWriter()]`.
      seed: Seed of all random numbers. None: that of `keras.utils.set_random_seed`, else 0.
      save_every_steps: Steps between checkpoints. None: one checkpoint per epoch.
      own_step: "mean" runs a model's custom step on several replicas; see docs/keras.md.
      sync_batch_norm: If True, BatchNormalization layers compute statistics over all replicas.
    """
    directory = None if model_dir is None else os.fspath(model_dir)
    saves = SaveOptions(directory, checkpoints, save_every_steps)
    callbacks, saves = replace_backup_callback(callbacks, saves)
    epochs, steps = limits.limit_epochs(epochs), limits.limit_steps(steps_per_epoch)
    split = validation_split if validation_data is None else 0.0
    source = training_source((x, y, sample_weight), split, batch_size, steps)
    if steps_per_epoch is None and steps is not None:
        source = source.within_one_pass()
    data = source.validation if validation_data is None else validation_data
    validation = ValidationArguments(
        data,
        batch_size_of_validation(data, validation_batch_size, batch_size),
        limits.limit_steps(validation_steps),
    )
    validation = prepare_validation(model, validation)
    ours, theirs = sorted_callbacks(callbacks, model)
    check_shares(source, _replicas_of(model))
    seeds = _seeds(model, seed)
    evaluated = 0 if data is None else validation_epochs(validation_freq)
    plan = Epochs(source.steps, initial_epoch, max(initial_epoch, epochs), evaluated)
    per_batch = any(map(is_of_batches, theirs))
    trainer = (BatchCallbackTrainer if per_batch else KerasTrainer)(
        model, train=repeated(source, plan, shuffle, seeds["seed"]), **seeds,
        validation=validation_source(*validation),
        class_weight=class_weight, own_step=own_step, sync_batch_norm=sync_batch_norm, model_dir=directory,
        global_batch_size=source.batch_size, evaluate_ema=False,  # as in Model.fit, see _finished
        checkpoints=saves.checkpoints, intervals=_intervals(model, plan, saves.save_every_steps, per_batch),
        writers=_writers(writers, verbose, directory, plan), callbacks=ours, extra_writers=extra_writers,
    )  # fmt: skip
    if source.is_generator and (directory or saves.checkpoints):
        _log.warning(_GENERATOR_RESUMES)
    return _trained(trainer, model, plan, theirs, {"verbose": verbose, "epochs": epochs})


def _trained(
    trainer: KerasTrainer, model: Any, plan: Epochs, callbacks: Sequence[Any], params: Mapping[str, Any]
) -> History:
    """Runs the training with the Keras `callbacks` and returns its history."""
    if trainer.topology.num_workers > 1:
        _refuse_evaluation_of_keras(model)
    params = {**params, "steps": plan.steps}
    history = History(model, params)
    history.starts(plan)
    model.history = history
    trainer.extra_writers = [history, *trainer.extra_writers]
    caller = KerasCallbacks(callbacks, model, plan, params, is_chief=trainer.topology.is_chief)
    trainer.callbacks.append(caller)
    if caller.evaluation_batches is not None:
        trainer.observe_evaluations(caller.evaluation_batches)
    if isinstance(trainer, BatchCallbackTrainer):
        trainer.keras_callbacks = caller
        if trainer.topology.is_chief:
            names = ", ".join(type(c).__name__ for c in callbacks if is_of_batches(c))
            _log.warning(
                "%s has methods for batches: each step is a separate graph call, which is slower.", names
            )
    if plan.end == plan.first:
        caller.end(0, {}, {}, stopped=False)
        return history
    several = [model] if trainer.topology.num_local_replicas > 1 else []
    cut = functools.partial(_cut_predictions, trainer.topology.num_local_replicas)
    with tensorflow_seed_kept(), replaced(several, "predict_on_batch", cut):
        values = trainer.train(plan.steps * (plan.end - plan.first))
    _finished(trainer)
    history.set_model(trainer.model)
    assert trainer._prepared_trainer is not None
    stopped = trainer._prepared_trainer.callbacks.stopped
    if not stopped:
        _warn_of_missing_batches(trainer, plan)
    evaluated = {n.removeprefix("eval_"): v for n, v in values.items() if n.startswith("eval_")}
    means = {n: v for n, v in values.items() if not n.startswith("eval_")}
    caller.end(trainer.step, means, evaluated, stopped=stopped)
    history.take(caller.epochs, caller.logs)
    model.history = history  # in place of the callbacks' own
    return history


def _warn_of_missing_batches(trainer: KerasTrainer, plan: Epochs) -> None:
    """Logs a warning on the chief if the data ended before the last step."""
    epochs = plan.end - plan.first
    if trainer.step < plan.steps * epochs and trainer.topology.is_chief:
        _log.warning(
            "x ended after %d batches; expected %d, steps_per_epoch=%d times %d epochs. The training ends "
            "in epoch %d. Give a generator of more batches, or reduce steps_per_epoch or epochs.",
            trainer.step,
            plan.steps * epochs,
            plan.steps,
            epochs,
            plan.first + trainer.step // plan.steps + 1,
        )


def _refuse_evaluation_of_keras(model: Any) -> None:
    """Replaces `model.evaluate` by a method that raises, as Keras cannot sum its results over workers."""

    def evaluate(*_: Any, **__: Any) -> None:
        raise UsageError(
            "model.evaluate returns one value per replica on several workers. Call ctl.evaluate(model, x, "
            "y) with the same arguments, on every worker."
        )

    replace_method(model, "evaluate", evaluate)


def _cut_predictions(replicas: int, _: Any, predict_on_batch: Callable) -> Callable:
    """Returns a `predict_on_batch` with the outputs of one replica, as all replicas get the same batch."""

    @functools.wraps(predict_on_batch)
    def predict_once(x: Any) -> Any:
        outputs = predict_on_batch(x)
        return tf.nest.map_structure(lambda output: output[: len(output) // replicas], outputs)

    return predict_once


def _intervals(model: Any, plan: Epochs, save_every_steps: int | None, per_batch: bool) -> EpochIntervals:
    """Returns intervals of one epoch for logs and checkpoints, and the planned evaluations."""
    steps = plan.steps
    return EpochIntervals(
        plan=plan,
        steps_per_loop=_steps_per_loop(model, per_batch),
        log=Every(steps=steps),
        save=Every(steps=steps if save_every_steps is None else save_every_steps),
        evaluate=EndOfEvaluatedEpochs(plan=plan) if plan.validation_freq else Every(),
    )


def _finished(trainer: KerasTrainer) -> None:
    """Replaces the weights by their moving averages, as `Model.fit` does, unless the best were restored."""
    model = trainer.model
    assert trainer._prepared_trainer is not None
    if trainer._prepared_trainer.callbacks.has_best_weights or model.optimizer is None:
        return
    with trainer.strategy.scope():
        model.optimizer.finalize_variable_values(model.trainable_variables)


@in_keras_words()
@through_override
@with_checked_arguments
def evaluate(
    model: Any,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    verbose: Any = "auto",
    sample_weight: Any = None,
    steps: int | None = None,
    callbacks: Any = None,
    return_dict: bool = True,
    *,
    own_step: str | None = None,
) -> Any:
    """Returns the loss and metrics of a compiled Keras 3 model. All workers must call it.

    The arguments are those of `Model.evaluate`, except that `return_dict` is True by default. Every example
    counts once.

    Args:
      model: Compiled Keras 3 model.
      x: Inputs: arrays, or a dataset, a PyDataset or a generator of global batches.
      y: Targets, for arrays.
      batch_size: Examples per global batch of arrays. None: 32, or n / steps_per_epoch if that is given.
      sample_weight: Weights of the examples of arrays.
      steps: Number of batches. None: all.
      verbose: 0 for no output. Otherwise the chief prints one line.
      callbacks: Keras callbacks. With methods for test batches, each batch is a separate graph call.
      return_dict: If False, returns a list in the order of `Model.evaluate`, or only the loss.
      own_step: "mean" runs a model's custom `test_step` or `compute_loss` on several replicas.

    Raises UsageError before the evaluation starts.
    """
    source = single_pass(x, y, sample_weight, batch_size, limits.limit_steps(steps))
    caller = callback_list(callbacks, model)
    size = _divisible(source.batch_size, model)
    trainer = KerasTrainer(
        model, train=None, validation=source.data, global_batch_size=size, own_step=own_step, writers=[],
        **_seeds(model),
    )  # fmt: skip
    if has_test_batches(caller.callbacks):
        trainer.observe_evaluations(EvaluationBatches(model, lambda: caller))
    caller.on_test_begin()
    with tensorflow_seed_kept():
        values = dict(trainer.evaluate())
    caller.on_test_end(values)
    if verbose and trainer.topology.is_chief:
        print("evaluation: " + ", ".join(f"{n} {format_number(v)}" for n, v in values.items()), flush=True)
    if return_dict:
        return values
    return next(iter(values.values())) if len(values) == 1 else keras_models.results_in_order(model, values)


@in_keras_words()
@through_override
@with_checked_arguments
def predict(
    model: Any,
    x: Any,
    batch_size: int | None = None,
    verbose: Any = "auto",
    steps: int | None = None,
    callbacks: Any = None,
) -> Any:
    """Returns the outputs of a Keras 3 model for all of x, as arrays `[n, ...]` in the model's structure.

    Each process predicts all of x on its own replicas, so a single worker may call it.

    Args:
      model: Keras 3 model.
      x: Inputs: arrays, or a dataset, a PyDataset or a generator of batches.
      batch_size: Examples per batch of arrays. None: 32, or n / steps if that is given.
      verbose: No effect.
      steps: Number of batches. None: all.
      callbacks: Keras callbacks. With methods for prediction batches, each batch is a separate graph call.

    Raises:
      UsageError: If an argument is invalid, before the prediction starts.
    """
    source = single_pass(x, None, None, batch_size, limits.limit_steps(steps))
    caller = callback_list(callbacks, model)
    trainer = KerasPredictor(
        model, global_batch_size=_divisible(source.batch_size, model), writers=[], **_seeds(model)
    )
    caller.on_predict_begin()
    with tensorflow_seed_kept():
        if has_predict_batches(caller.callbacks):
            outputs = trainer.predict_batches(source.data, caller)
        else:
            outputs = trainer.predict(source.data)
    caller.on_predict_end()
    return outputs


def _divisible(batch_size: int, model: Any) -> int:
    """Returns the batch size, rounded up to a multiple of the replicas. The results do not depend on it."""
    replicas = _replicas_of(model)
    return -(-batch_size // replicas) * replicas


def _seeds(model: Any, seed: int | None = None) -> dict[str, Any]:
    """Returns the arguments of a trainer about random numbers.

    Without `seed`, a single worker uses the seed of the program and keeps the states of the generators of
    Python and NumPy. Several workers use seed 0.
    """
    strategy = getattr(model, "distribute_strategy", None)
    if seed is not None or (strategy is not None and strategy_attributes.has_several_workers(strategy)):
        return {"seed": seed or 0}
    return {"seed": int(eager_context.global_seed() or 0), "generator_states": GeneratorStates.current()}


def _replicas_of(model: Any) -> int:
    strategy = getattr(model, "distribute_strategy", None)
    return 1 if strategy is None else strategy.num_replicas_in_sync


def _steps_per_loop(model: Any, per_batch: bool) -> int | str:
    """Returns the compiled `steps_per_execution` if above 1, 1 for callbacks at each batch, else "auto"."""
    steps_per_execution = getattr(model, "steps_per_execution", 1) or 1
    return int(steps_per_execution) if steps_per_execution > 1 or per_batch else "auto"


def _writers(
    writers: Sequence[MetricWriterLike | str] | None, verbose: Any, model_dir: str | None, plan: Epochs
) -> Sequence[MetricWriterLike | str]:
    """Returns the given writers, or the default writers for a value of `verbose` as in Keras."""
    if writers is not None:
        return writers
    console = [EpochConsole(plan, live=False if verbose == 2 else None)] if verbose else []
    return [*console, *default_writers(model_dir, f"{model_dir}/logs", console=False)]
