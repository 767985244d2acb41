"""The trainer: what you write, what you call, and in between what `ctl` does.

class Mnist(ctl.Trainer):
    def build(self): ...                    # self.model, self.optimizer
    def train_data(self, batch_size): ...   # global batches
    def train_step(self, batch): ...        # one replica's share of a batch

Mnist(model_dir="/tmp/mnist", strategy="mirrored").train(1000)
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from ctl import config as config_lib
from ctl.callbacks.protocol import Callback
from ctl.callbacks.schedule import Intervals
from ctl.checkpoints import export as export_lib
from ctl.checkpoints.protocol import CheckpointManager
from ctl.config import Config
from ctl.distribute import strategies
from ctl.distribute.world import World
from ctl.errors import UsageError
from ctl.io import exit_hook, log_filter, notebook
from ctl.metrics.adapter import MetricWriterLike
from ctl.metrics.events import number_or_event
from ctl.metrics.images import image_grid
from ctl.metrics.results import Results
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
from ctl.training.user_methods import UserMethods


class Trainer(UserMethods):
    """Trains, evaluates and exports one model, the same way on every strategy.

    A subclass defines `build`, `train_data` and `train_step`; if needed the other methods of `UserMethods`,
    and `predict(self)`, which yields a dictionary per example for --mode=predict. Attributes that own
    variables (models, optimizers, metrics) and do not start with an underscore are saved in checkpoints.

    Attributes:
      model, optimizer: yours, set in `build`; what `minimize` uses by default.
      gradients: a `ctl.Gradients`; set it in `build` for clipping, accumulation, a wire dtype.
      hparams: what TensorBoard's HParams lists, name -> bool, number or string.
      config: the settings, a frozen `ctl.Config`; model_dir, seed, jit_compile and others are also
        attributes, which `build` may change.
      strategy, topology: the `tf.distribute.Strategy`; which of its processes this is, and of how many.
      step_variable: completed steps as a `tf.Variable`, for use in a step's graph.
      callbacks: Callbacks of the constructor, to which `build` may add others; see `ctl.Callback`.
      log_dir: where TensorBoard's files go; None: `model_dir/logs`.
      extra_writers: Metric writers besides those of the constructor, or the default ones.
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
        writers: Sequence[MetricWriterLike] | None = None,
        callbacks: Sequence[Callback | Any] = (),
        **settings: Any,
    ):
        """Validates and stores the settings. Creating a strategy by name blocks until all workers connect.

        Args:
          config: Settings. Defaults are those of the class, then those of `ctl.Config`.
          settings: Settings by name, such as `model_dir="/tmp/run"`. They override `config`.
          intervals: Intervals of logs, evaluations and saves, also in seconds or epochs.
          checkpoints: Checkpoint manager. Defaults to `model_dir/checkpoints` with the setting `keep`.
          writers: Metric writers. Defaults to the console, TensorBoard and `metrics.jsonl` in `model_dir`.
          callbacks: Callbacks, for example `ctl.EarlyStopping("loss")`.

        Raises UsageError for an unknown setting or an invalid value.
        """
        exit_hook.install_exit_hook()
        if notebook.shell() is not None:  # there TensorFlow shows INFO
            log_filter.quiet_logs()
        self.config = config = config_lib.settled(type(self), config, settings)
        validation.check_checkpoints_and_writers(checkpoints, writers)
        self.strategy = construction.strategy_of(config)
        self.topology = strategies.topology_of(self.strategy)
        self.global_batch_size, self.seed = config.global_batch_size, config.seed
        self.model_dir = config.model_dir or None
        self.init_from = config.init_from or None
        self.jit_compile, self.check_collectives = str(config.jit_compile), config.check_collectives
        self.evaluate_ema = config.evaluate_ema
        self.step_timeout_secs = config.step_timeout_secs
        self.allow_config_change = config.allow_config_change
        self.data_position = config.data_position
        self.intervals = construction.intervals_of(config, intervals)
        self.callbacks = list(callbacks)
        self.gradients = Gradients(on_nonfinite=config.on_nonfinite)
        self.hparams: dict[str, Any] = {}
        self._checkpoints = construction.checkpoints_of(config) if checkpoints is None else checkpoints
        self._writers = writers
        self._prepared: PreparedTrainer | None = None
        self._rows_may_vary = False  # of batches on one replica: their number divides no loss

    __init__.__signature__ = config_lib.signature(__init__)  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        with contextlib.suppress(Exception):  # an incomplete trainer
            world = World.of(self.strategy, self.topology)
            name = type(self).__name__
            return run_metadata.describe_trainer(name, world, self.model_dir, self._prepared)
        return f"{type(self).__name__}()"

    def __setattr__(self, name: str, value: Any) -> None:
        if name in SETTINGS and vars(self).get("_prepared") is not None:
            raise UsageError(
                f"self.{name} was set to {value!r:.80} after the model was built, when it has no effect. "
                "Set it in build(), or give it to the constructor."
            )
        super().__setattr__(name, value)

    @property
    def step(self) -> int:
        """Number of completed steps, over all runs in `model_dir`."""
        return self._prepared.step if self._prepared else 0

    def prepare(self) -> None:
        """Builds the model and restores the newest checkpoint; `train` and `evaluate` call it.

        Raises UsageError for an invalid trainer, CheckpointError for a checkpoint of another model.
        """
        self._prepare()

    def _prepare(self, checkpoints: CheckpointManager | None = None) -> PreparedTrainer:
        """Returns the prepared trainer. The first call creates it; `checkpoints` replaces the manager."""
        if self._prepared is None:
            manager = checkpoints or self._checkpoints
            prepared = preparation.prepare_trainer(self, self._options, manager)
            self.config, self.jit_compile = prepared.config, str(prepared.config.jit_compile)
            self._prepared = prepared
        return self._prepared

    @property
    def _options(self) -> RunOptions:
        log_dir = self.log_dir or (f"{self.model_dir}/logs" if self.model_dir else "")
        return RunOptions(self.intervals, self.hparams, log_dir, self._writers, self.extra_writers)

    def train(
        self, steps: int | None = None, *, epochs: float | None = None, export: Sequence[str] = ()
    ) -> dict[str, float]:
        """Trains until `steps` steps (or `epochs`) are complete in all, resumed ones included.

        Args:
          steps: Total number of steps; None: until the data ends.
          epochs: Total number of passes over `train_data`; whole ones if its length is unknown.
          export: Formats to write at the end, see `export`.

        Returns the newest means: of training, and of the evaluation as "eval_<name>".
        Raises UsageError before any work, NonFiniteError if a gradient is NaN or infinite, Stopped
        after a signal and a checkpoint.

        In an evaluator task of TF_CONFIG this does not train: it evaluates each checkpoint in model_dir
        until the training has ended; see docs/evaluator.md.
        """
        if self.topology.evaluates:
            return Results(following.follow_training(self._prepare(), self._options))
        resume_checks.check_no_other_job(self.model_dir, self.topology)
        prepared = self._prepare()
        model_dir = self.model_dir if self.topology.is_chief else None
        with (
            prepared.peer_errors(),
            lease.hold_lease(model_dir, lambda: prepared.checkpointing.saved_step) as held,
        ):
            request = RunRequest(steps, epochs, tuple(export), lambda formats: self.export(*formats), held)
            return Results(training_run.train(prepared, self._options, request))

    def evaluate(self) -> dict[str, Any]:
        """Means of `eval_step` over all of `eval_data`, the same on every worker; and matrix metrics."""
        result = evaluation.evaluate_trainer(self._prepare(), self._options)
        return Results({**result.means, **result.arrays})

    def predict(self, data: Any = None) -> Any:
        """Outputs of `self.model` for all of `data`, as arrays `[n, ...]` in the model's structure.

        Each process predicts on its own replicas. For --mode=predict define a method without arguments that
        yields a dictionary per example.

        Args:
          data: Inputs as arrays, or a dataset of batches; of a tuple the first component.

        >>> probabilities = trainer.predict(images)
        """
        if data is None:
            raise UsageError(
                "predict() needs data: arrays, or a tf.data.Dataset of batches. For --mode=predict write "
                "predict(self), which yields a dictionary per example."
            )
        prepared = self._prepare()
        with prepared.task.moving_averages.in_place():
            return prediction.run_prediction(prepared, self.model, data)

    def save(self) -> str | None:
        """Saves a checkpoint of this step in `model_dir`; returns its path on the chief, None elsewhere.

        All workers must call it. Within a run (in `after_loop`, or a callback) the checkpoint is saved at
        the end of the loop, after the other pending actions, and None is returned.
        """
        resume_checks.check_no_other_job(self.model_dir, self.topology)
        return manual_checkpoints.save_now(self._prepare(), self._options)

    def restore(self, path: str) -> int:
        """Restores a checkpoint: weights, optimizers, the step, the position in the data; returns the step.

        All workers must call it, outside of a run. The next `train` continues from there.

        Args:
          path: `.../ckpt-500`, or a directory of checkpoints, or a model_dir: then the newest valid one.

        Raises UsageError if there is no checkpoint, CheckpointError if it is damaged or of another model.
        """
        return manual_checkpoints.restore_from(self._prepare(), path)

    @tf.autograph.experimental.do_not_convert
    def log(self, name: str, value: Any, *, reduce: str = "mean") -> None:
        """Hands the metric writers something of your own.

        In a step: a number, `[]` or `[b]`, that is reported like those which the step returns. In a hook:
        what holds at this step; every worker may call it, the chief writes.

        Args:
          value: in a hook: a number, which goes where the training's means go; a text, in Markdown; an
            array of numbers, whose histogram TensorBoard shows; `ctl.Matrix`, `ctl.Audio` or
            `ctl.PrCurve`. Raises UsageError for anything else.
          reduce: in a step: "mean" over examples, or replicas; "sum" over replicas, the mean over steps.
        """
        if tf.inside_function():
            traced_step().log(name, value, reduce, self.topology.num_replicas)
            return
        writers = None if self._prepared is None else self._prepared.activity.writers
        if writers is None:
            return
        # on all workers, which read the variables of a metric together
        content = number_or_event(self.step, name, value)
        if isinstance(content, float):
            writers.write(self.step, {name: content}, "train")
        else:
            writers.note(content)

    def show(self, name: str, images: Any) -> None:
        """Shows images `[n, h, w, c]` in TensorBoard, as one grid at this step.

        For `after_loop`; every worker may call it, the chief writes. `c` is 1, 3 or 4; numbers are
        0..255 if the dtype is uint8, else 0..1.
        """
        writers = None if self._prepared is None else self._prepared.activity.writers
        if writers is not None:
            writers.note(image_grid(self.step, name, images))

    def export(self, *formats: str, directory: str | None = None) -> list[str]:
        """Writes models to files and returns the paths on the chief; all workers must call it.

        `formats` are "keras", "saved_model", "weights" for `self.model`, or "generator:keras" for
        `self.generator`, which gets a folder of its own. `directory` is `model_dir/export` by default.
        Raises UsageError for a model that is not set, or a format that it cannot be written in.
        """
        prepared = self._prepare()
        if self.topology.evaluates:
            return []  # the chief writes
        formats = formats or export_lib.default_formats(self)
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
        """`[b]` -> `[]`: this replica's share of the mean over the global batch.

        Args:
          per_example: one loss per example of this replica's batch.
          sample_weight: `[b]`, multiplies the losses; the divisor stays the global batch size.
          mask: `[b, ...]` like `per_example` then; the mean is over the entries of the whole global
            batch where it is true, such as the tokens of sentences of unequal length.
          regularization: losses that hold once per step, such as `self.model.losses`.

        >>> loss = self.average(per_example, regularization=self.model.losses)
        """
        step = traced_step()
        step.record.record_average()
        if mask is not None:
            validation.check_mask(step.context, self.topology.num_replicas)
        loss = averaging.average(
            per_example,
            global_batch_size=self.global_batch_size,
            sample_weight=sample_weight,
            mask=mask,
            context=step.context,
        )
        if regularization is None:
            return loss
        terms = [tf.cast(tf.reduce_sum(t), loss.dtype) for t in tf.nest.flatten(regularization)]
        shares = self.topology.num_replicas * step.context.num_parts
        return loss + tf.add_n(terms) / shares if terms else loss

    @tf.autograph.experimental.do_not_convert
    def gather(self, rows: Any) -> tuple[Any, Any]:
        """`[b, ...]` -> `[B, ...]`: the rows of all replicas, in a step; and where this replica's begin.

        For losses between examples of the global batch, such as contrastive ones. Gradients flow back to
        the replica that each row comes from. Of one replica these are its own rows, from 0.

        >>> others, first = self.gather(embeddings)
        >>> labels = first + tf.range(tf.shape(embeddings)[0])  # its own row for each example

        Raises UsageError with accumulate_steps, whose parts have no common batch, and in a compiled step.
        """
        context = traced_step().context
        validation.check_gather(context, self.topology.num_replicas)
        largest = -(-self.global_batch_size // self.topology.num_replicas)
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
        """Sums the gradient over replicas once, checks that it is finite, clips, and applies it once.

        Args:
          loss: `[]`, from `average`; computed inside `tape`.
          variables: by default `self.model.trainable_variables`.
          optimizer: by default `self.optimizer`. Keras 3, tf_keras, or an object with
            `apply(gradients, variables)` or `apply_gradients(grads_and_vars)`, which is given the
            summed gradients.
          when: a truth value, equal on all replicas, such as `self.step_variable % 2 == 0`; where it is
            false, the step leaves these variables and this optimizer as they are. None: always.
          scaled: the loss is this replica's share of the global one although `average` was not called.

        May be called several times in a step. The norm is reported as "gradient_norm"; that of an
        optimizer in another attribute as "gradient_norm/its_name".
        """
        if optimizer is None and self.optimizer is None:
            raise UsageError("minimize() needs an optimizer; set self.optimizer in build().")
        optimizer = self.optimizer if optimizer is None else optimizer
        variables = self.model.trainable_variables if variables is None else variables
        step = traced_step(self.gradients)
        is_traced = step.graph is not None  # else the user's own loop calls the step
        if is_traced and self.topology.num_replicas > 1 and not step.record.uses_average and not scaled:
            raise UsageError(
                "minimize() got a loss that average() did not make. Gradients are summed over "
                f"{self.topology.num_replicas} replicas. Write loss = self.average(per_example); if the "
                "loss is this replica's share of the global mean, self.minimize(loss, tape, scaled=True)."
            )
        request = compute_update(loss, tape, variables, optimizer, step.context)
        condition = None if when is None else tf.convert_to_tensor(when, tf.bool)
        label = run_metadata.label_of(vars(self), self.optimizer, optimizer)
        step.update(dataclasses.replace(request, label=label, condition=condition))


construction.name_forgotten_init(Trainer)
