"""Base class of trainers: methods to define in a subclass, and methods to call.

class Mnist(ctl.Trainer):
    def build(self): ...                    # self.model, self.optimizer
    def train_data(self, batch_size): ...   # global batches
    def train_step(self, batch): ...        # one replica's part of a batch

Mnist(model_dir="/tmp/mnist", strategy="mirrored").train(1000)
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from ctl.callbacks.protocol import Callback
from ctl.callbacks.schedule import Intervals
from ctl.checkpoints import export as export_lib
from ctl.checkpoints.protocol import CheckpointManager
from ctl.config import Config, create_signature, resolve_config
from ctl.distribute import strategies
from ctl.distribute.topology import Topology
from ctl.distribute.world import World
from ctl.elastic import recovery
from ctl.errors import UsageError
from ctl.io import exit_hook, log_filter, notebook
from ctl.metrics.adapter import MetricWriterLike
from ctl.metrics.events import number_or_event
from ctl.metrics.images import image_grid
from ctl.metrics.results import Results
from ctl.setting_values import names_in
from ctl.step import averaging, gather
from ctl.step.gradient_settings import Gradients
from ctl.step.traced_step import traced_step
from ctl.step.update_request import compute_update
from ctl.supervision import lease
from ctl.training import (
    construction,
    evaluation,
    following,
    manual_checkpoints,
    prediction,
    preparation,
    resume_checks,
    run_metadata,
    training_run,
    validation,
)
from ctl.training.prepared import PreparedTrainer
from ctl.training.run_options import RunOptions
from ctl.training.task import SETTINGS
from ctl.training.training_run import RunRequest
from ctl.training.user_methods import UserMethods, any_signature

if TYPE_CHECKING:
    from ctl.setting_types import TrainerSettings
    from typing_extensions import Unpack


class Trainer(UserMethods):
    """Training, evaluation and export of one model, with any strategy.

    A subclass defines `build`, `train_data` and `train_step`, and optionally other methods of `UserMethods`
    and `predict(self)`, which yields a dictionary per example for --mode=predict. Attributes that own
    variables (models, optimizers, metrics) and do not start with an underscore are saved in checkpoints.

    Attributes:
      model, optimizer: Set them in `build`. `minimize` updates this model with this optimizer by default.
      gradients: A `ctl.Gradients`. Set it in `build` for clipping, accumulation or a wire dtype.
      hparams: Hyperparameters for TensorBoard: name -> bool, number or string.
      config: The settings, a frozen `ctl.Config`. `build` may change several as attributes, such as seed.
      strategy: The `tf.distribute.Strategy`.
      topology: Rank of this process, numbers of processes and replicas.
      step_variable: Number of completed steps as a `tf.Variable`, for use in the graph of a step.
      callbacks: Callbacks of the constructor. `build` may add callbacks; see `ctl.Callback`.
      log_dir: Directory of the TensorBoard logs. None: `model_dir/logs`.
      extra_writers: Metric writers in addition to those of the constructor or the default writers.
    """

    model: Any = None
    optimizer: Any = None
    step_variable: Any = None
    log_dir: str | None = None
    extra_writers: Sequence[MetricWriterLike] = ()

    def __init__(
        self,
        config: Config | None = None,
        *,
        intervals: Intervals | None = None,
        checkpoints: CheckpointManager | None = None,
        writers: Sequence[MetricWriterLike | str] | None = None,
        extra_writers: Sequence[MetricWriterLike] | None = None,
        callbacks: Sequence[Callback | Any] = (),
        **settings: Unpack[TrainerSettings],
    ) -> None:
        """Validates and stores the settings. Creating a strategy by name blocks until all workers connect.

        Args:
          config: Settings. Defaults are those of the class, then those of `ctl.Config`.
          settings: Settings by name, such as `model_dir="/tmp/run"`. They override `config`.
          intervals: Intervals of logs, evaluations and saves, also in seconds or epochs.
          checkpoints: Checkpoint manager. Defaults to `model_dir/checkpoints` with the setting `keep`.
          writers: Metric writers, or their names. Defaults to the console, and files in `model_dir`.
          extra_writers: Metric writers in addition to those.
          callbacks: Callbacks, for example `ctl.EarlyStopping("loss")`.

        Raises UsageError for an unknown setting or an invalid value.
        """
        exit_hook.install_exit_hook()
        if notebook.shell() is not None:  # TensorFlow logs INFO messages in notebooks
            log_filter.quiet_logs()
        values = construction.with_writer_names(settings, writers)
        self.config: Config = (config := resolve_config(type(self), config, values))
        validation.check_arguments(checkpoints, writers, extra_writers, callbacks, config.model_dir)
        self.strategy: tf.distribute.Strategy = construction.strategy_of(config)
        self.topology: Topology = strategies.topology_of(self.strategy)
        self.global_batch_size: int = config.global_batch_size
        self.seed: int = config.seed
        self.model_dir: str | None = config.model_dir or None
        self.init_from: str | None = config.init_from or None
        self.jit_compile: str | bool = str(config.jit_compile)
        self.check_collectives: bool = config.check_collectives
        self.evaluate_ema: bool = config.evaluate_ema
        self.step_timeout_secs: float = config.step_timeout_secs
        self.allow_config_change: bool = config.allow_config_change
        self.data_position: str = config.data_position
        self.intervals: Intervals = construction.intervals_of(config, intervals)
        self.callbacks: list[Callback | Any] = list(callbacks)
        self.gradients: Gradients = Gradients(on_nonfinite=config.on_nonfinite)
        self.hparams: dict[str, Any] = {}
        self._checkpoints = construction.checkpoints_of(config) if checkpoints is None else checkpoints
        self._writers = construction.writers_of(config, writers)
        self.extra_writers = self.extra_writers if extra_writers is None else extra_writers
        self._prepared_trainer: PreparedTrainer | None = None
        self._rows_may_vary = False  # True if losses are divided by the rows of each batch

    __init__.__signature__ = create_signature(__init__)  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        with contextlib.suppress(Exception):  # an incomplete trainer
            name, world = type(self).__name__, World.of(self.strategy, self.topology)
            return run_metadata.describe_trainer(name, world, self.model_dir, self._prepared_trainer)
        return f"{type(self).__name__}()"

    def __setattr__(self, name: str, value: Any) -> None:
        if name in SETTINGS and vars(self).get("_prepared_trainer") is not None:
            raise UsageError(
                f"self.{name} was set to {value!r:.80} after the model was built, when it has no effect. "
                "Set it in build(), or give it to the constructor."
            )
        super().__setattr__(name, value)

    @property
    def step(self) -> int:
        """Number of completed steps, over all runs in `model_dir`."""
        return self._prepared_trainer.step if self._prepared_trainer else 0

    def prepare(self) -> None:
        """Builds the model and restores the newest checkpoint. `train` and `evaluate` call this method.

        Raises UsageError for an invalid trainer, CheckpointError for a checkpoint of another model.
        """
        self._prepare_trainer()

    def _prepare_trainer(self, checkpoints: CheckpointManager | None = None) -> PreparedTrainer:
        """Returns the prepared trainer. The first call creates it; `checkpoints` replaces the manager."""
        if self._prepared_trainer is None:
            manager = checkpoints or self._checkpoints
            prepared = preparation.prepare_trainer(self, self._run_options, manager)
            self.config, self.jit_compile = prepared.config, str(prepared.config.jit_compile)
            self._prepared_trainer = prepared
        return self._prepared_trainer

    @property
    def _run_options(self) -> RunOptions:
        log_dir = self.log_dir or (f"{self.model_dir}/logs" if self.model_dir else "")
        return RunOptions(self.intervals, self.hparams, log_dir, self._writers, self.extra_writers)

    def train(
        self, steps: int | None = None, *, epochs: float | None = None, export: str | Sequence[str] = ()
    ) -> Results:
        """Trains until `steps` steps (or `epochs`) are complete, including the steps of resumed runs.

        Args:
          steps: Total number of steps. None: until the data ends.
          epochs: Total number of passes over `train_data`. Must be whole if its length is unknown.
          export: One format or several to export at the end, see `export`.

        Returns the newest means of the training, and those of the evaluation as "eval_<name>".
        Raises UsageError before training starts, NonFiniteError if a gradient is NaN or infinite, and
        Stopped after a signal and a checkpoint.

        An evaluator task evaluates each checkpoint until the training has ended; see docs/evaluator.md.
        """
        if self.topology.evaluates:
            return Results(following.follow_training(self._prepare_trainer(), self._run_options))
        formats = names_in("export", export)
        resume_checks.check_no_other_job(self.model_dir, self.topology)
        prepared = self._prepare_trainer()
        attempts = recovery.attempts(prepared)  # one, unless workers join or leave
        while True:
            attempt = next(attempts)  # may change the topology
            model_dir = self.model_dir if self.topology.is_chief else None
            lock = lease.hold_lease(model_dir, lambda: prepared.checkpointing.saved_step)
            with attempt, prepared.peer_errors(), lock as held:
                request = RunRequest(steps, epochs, formats, lambda f: self.export(*f), held)
                return training_run.train(prepared, self._run_options, request)

    def evaluate(self) -> Results:
        """Returns the means of `eval_step` over `eval_data`, equal on all workers, and array metrics."""
        result = evaluation.evaluate_trainer(self._prepare_trainer(), self._run_options)
        return Results({**result.means, **result.arrays})

    @any_signature
    def predict(self, data: Any = None) -> Any:
        """Returns the outputs of `self.model` for all of `data`, as arrays `[n, ...]` in its structure.

        Each process predicts on its own replicas. For --mode=predict define a method without arguments that
        yields a dictionary per example.

        `data` are arrays, or a dataset of batches. Of tuples, only the first component is used.

        >>> probabilities = trainer.predict(images)
        """
        if data is None:
            raise UsageError(
                "predict() needs data: arrays, or a tf.data.Dataset of batches. For --mode=predict write "
                "predict(self), which yields a dictionary per example."
            )
        prepared = self._prepare_trainer()
        with prepared.task.moving_averages.in_place():
            return prediction.run_prediction(prepared, self.model, data)

    def save(self) -> str | None:
        """Saves a checkpoint of this step in `model_dir`. Returns its path on the chief, None elsewhere.

        All workers must call it. During a run (in `after_loop` or a callback) it returns None, and the
        checkpoint is saved at the end of the loop, after the other pending actions.
        """
        resume_checks.check_no_other_job(self.model_dir, self.topology)
        return manual_checkpoints.save_now(self._prepare_trainer(), self._run_options)

    def restore(self, path: str) -> int:
        """Restores weights, optimizers, step and data position of a checkpoint, and returns the step.

        All workers must call it, outside of a run. The next `train` resumes at this step.

        Args:
          path: `.../ckpt-500`; or a directory of checkpoints or a model_dir, for the newest valid one.

        Raises UsageError if there is no checkpoint, CheckpointError if it is damaged or of another model.
        """
        return manual_checkpoints.restore_from(self._prepare_trainer(), path)

    @tf.autograph.experimental.do_not_convert
    def log(self, name: str, value: Any, *, reduce: str = "mean") -> None:
        """Logs a custom value with the metric writers.

        In a step: a number, `[]` or `[b]`, which is reported like the values that the step returns. In a
        hook: a value at this step. Every worker may call it; the chief writes.

        Args:
          name: Name of the value.
          value: In a hook: a number, written with the means of the training; a string in Markdown; an
            array of numbers, shown as a histogram in TensorBoard; `ctl.Matrix`, `ctl.Audio` or
            `ctl.PrCurve`. Raises UsageError for other types.
          reduce: In a step: "mean" over examples or replicas; "sum" over replicas, then mean over steps.
        """
        if tf.inside_function():
            traced_step().log(name, value, reduce, self.topology.replica_count)
            return
        if self._prepared_trainer is None or (writers := self._prepared_trainer.activity.writers) is None:
            return
        # on all workers, as all of them participate in reading the variables of a metric
        content = number_or_event(self.step, name, value)
        if isinstance(content, float):
            writers.write(self.step, {name: content}, "train")
        else:
            writers.note(content)

    def show(self, name: str, images: Any) -> None:
        """Writes images `[n, h, w, c]` to TensorBoard, as one grid with this name at this step.

        For use in `after_loop`. Every worker may call it; the chief writes. `c` is 1, 3 or 4. Pixels are
        0..255 if the dtype is uint8, else 0..1.
        """
        if self._prepared_trainer and (writers := self._prepared_trainer.activity.writers) is not None:
            writers.note(image_grid(self.step, name, images))

    def export(self, *formats: str, directory: str | None = None) -> list[str]:
        """Exports models and returns the paths on the chief. All workers must call it.

        `formats` are "keras", "saved_model", "weights" for `self.model`, or "generator:keras" for
        `self.generator` in a separate folder. `directory` is `model_dir/export` by default.
        Raises UsageError for a model that is not set, or a format that the model does not support.
        """
        prepared = self._prepare_trainer()
        if self.topology.evaluates:
            return []  # the chief exports
        formats = names_in("export", formats) or export_lib.default_formats(self)
        if directory is None:
            validation.check_export(prepared.task, prepared.config.model_dir, formats)
        directory = directory or f"{self.model_dir}/export"
        with prepared.peer_errors():
            with prepared.task.moving_averages.in_place():
                targets, signatures = prepared.task.export_targets(formats), prepared.task.signatures()
                paths = export_lib.export(targets, directory, self.topology, signatures)
            prepared.world.wait_for_all_workers()  # until the chief has written
        return paths

    @tf.autograph.experimental.do_not_convert
    def average(
        self, per_example: Any, *, sample_weight: Any = None, mask: Any = None, regularization: Any = None
    ) -> Any:
        """Returns this replica's share of the mean of losses over the global batch, `[]`.

        Args:
          per_example: One loss per example of this replica's batch, `[b]`.
          sample_weight: Factors of the losses, `[b]`. The divisor stays the global batch size.
          mask: `[b, ...]`, the shape of `per_example` in this case. The mean is over the entries of the
            global batch where it is true, such as the tokens of sentences of unequal length.
          regularization: Losses that are added once per step, such as `self.model.losses`.

        >>> loss = self.average(per_example, regularization=self.model.losses)
        """
        (step := traced_step()).record.record_average()
        size, context = self.global_batch_size, step.context
        if mask is not None:
            validation.check_mask(context, self.topology.num_replicas)
        loss = averaging.average(
            per_example, global_batch_size=size, sample_weight=sample_weight, mask=mask, context=context
        )
        num_shares = self.topology.replica_count * context.num_parts
        return averaging.add_regularization(loss, regularization, num_shares)

    @tf.autograph.experimental.do_not_convert
    def gather(self, rows: Any) -> tuple[Any, Any]:
        """Returns the rows of all replicas, `[B, ...]`, and the index of the first row of this replica.

        For a step with a loss between examples of the global batch, such as a contrastive loss. Gradients
        flow back to the replica of each row. On one replica, returns `rows`, `[b, ...]`, and 0.

        >>> all_rows, first = self.gather(embeddings)
        >>> labels = first + tf.range(tf.shape(embeddings)[0])  # row of each example in the global batch

        Raises UsageError in a compiled step, and with accumulate_steps, as its parts have no common batch.
        """
        validation.check_gather(context := traced_step().context, self.topology.num_replicas)
        largest = -(-self.global_batch_size // self.topology.min_replicas)
        return gather.gather(rows, largest, context.is_empty)

    @tf.autograph.experimental.do_not_convert
    def minimize(
        self,
        loss: Any,
        tape: tf.GradientTape,
        variables: Any = None,
        optimizer: Any = None,
        when: Any = None,
        *,
        scaled: bool = False,
    ) -> None:
        """Sums the gradient over replicas once, checks that it is finite, clips it and applies it once.

        Args:
          loss: Result of `average`, computed inside `tape`, `[]`.
          tape: Tape of the forward pass.
          variables: Variables to update. Defaults to `self.model.trainable_variables`.
          optimizer: Optimizer of Keras 3 or tf_keras, or an object with `apply(gradients, variables)` or
            `apply_gradients(pairs)`, which receives summed gradients. Defaults to `self.optimizer`.
          when: Condition `[]`, equal on all replicas, such as `self.step_variable % 2 == 0`. If false, the
            step does not change these variables and this optimizer. None: always update.
          scaled: True if the loss is this replica's share of the global loss, without `average`.

        May be called several times in a step. The norm is reported as "gradient_norm", or as
        "gradient_norm/<attribute>" for an optimizer in another attribute.
        """
        if optimizer is None and self.optimizer is None:
            raise UsageError("minimize() needs an optimizer; set self.optimizer in build().")
        optimizer = self.optimizer if optimizer is None else optimizer
        variables = self.model.trainable_variables if variables is None else variables
        step = traced_step(self.gradients)
        is_traced = step.graph is not None  # False in a custom loop of the user
        if is_traced and self.topology.max_replicas > 1 and not step.record.uses_average and not scaled:
            raise UsageError(
                "minimize() got a loss that average() has not computed. Gradients are summed over "
                f"{self.topology.num_replicas} replicas. Write loss = self.average(per_example); if the "
                "loss is this replica's share of the global mean, self.minimize(loss, tape, scaled=True)."
            )
        request = compute_update(loss, tape, variables, optimizer, step.context)
        condition = None if when is None else tf.convert_to_tensor(when, tf.bool)
        label = run_metadata.label_of(vars(self), self.optimizer, optimizer)
        step.update(dataclasses.replace(request, label=label, condition=condition))


construction.name_forgotten_init(Trainer)
