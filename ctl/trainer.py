"""The trainer: what you write, what you call, and in between what `ctl` does.

class Mnist(ctl.Trainer):
    def build(self): ...                    # self.model, self.optimizer
    def train_data(self, batch_size): ...   # global batches
    def train_step(self, batch): ...        # one replica's share of a batch

Mnist(model_dir="/tmp/mnist", strategy="mirrored").train(1000)
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from ctl.callbacks.protocol import Callback
from ctl.callbacks.schedule import Intervals
from ctl.checkpoints import export as export_lib
from ctl.checkpoints.protocol import CheckpointManager
from ctl.distribute import strategies
from ctl.distribute.host_allreduce import HostAllReduce
from ctl.errors import UsageError
from ctl.io import exit_hook
from ctl.metrics.events import number_or_event
from ctl.metrics.images import grid
from ctl.metrics.protocol import MetricWriter
from ctl.step import averaging, gradients
from ctl.step.replica_step import Recorder
from ctl.supervision import lease
from ctl.training import evaluation, evaluator, preparation, resume, run, validation
from ctl.training.session import Session


class Trainer:
    """Trains, evaluates and exports one model, the same way on every strategy.

    You write `build`, `train_data` and `train_step`; `eval_data`, `eval_step` and `after_loop` if
    you need them; `predict` (yields a dictionary per example, for --mode=predict) and `signatures`
    (name -> `tf.function` that an exported SavedModel serves) if you want them. Attributes that own
    variables (models, optimizers, metrics) and do not start with an underscore are saved in checkpoints.

    Attributes:
      model, optimizer: yours, set in `build`; what `minimize` uses by default.
      gradients: a `ctl.Gradients`; set it in `build` for clipping, accumulation, a wire dtype.
      hparams: what TensorBoard's HParams lists, name -> bool, number or string.
      strategy, topology: the `tf.distribute.Strategy`; which of its processes this is, and of how many.
      step_variable: completed steps as a `tf.Variable`, for use in a step's graph.
      check_collectives: workers compare what they are about to sum, to find a wrong order; slow.
      step_timeout_secs: without any progress for so long, all stacks are printed and the process ends
        with 134; 0 for no limit.
      data_position: how the place in train_data is found again: "auto", "indexed", "skip" or "iterator".
      allow_config_change: go on from a checkpoint although the order of the data is another one.
      callbacks: those of the constructor; `build` may add others.
      log_dir: where TensorBoard's files go; None: `model_dir/logs`.
      extra_writers: writers that are told beside those of the constructor, or the default ones.
      init_from: a checkpoint, or the model_dir of another run, whose model variables to begin with.
      jit_compile: compile forward and backward of `train_step` with XLA; the update comes after it.
    """

    model: Any = None
    optimizer: Any = None
    step_variable: Any = None
    log_dir: str | None = None
    extra_writers: Sequence[MetricWriter] = ()
    init_from: str | None = None
    jit_compile: bool = False
    check_collectives: bool = False
    step_timeout_secs: float = 0.0
    allow_config_change: bool = False
    data_position: str = "auto"

    def __init__(
        self,
        *,
        model_dir: str | None = None,
        strategy: str | tf.distribute.Strategy = "auto",
        global_batch_size: int = 64,
        seed: int = 0,
        intervals: Intervals | None = None,
        checkpoints: CheckpointManager | None = None,
        writers: Sequence[MetricWriter] | None = None,
        callbacks: Sequence[Callback] = (),
    ):
        """Keeps and checks; a word for the strategy makes it, which waits for other workers.

        Args:
          model_dir: where the run lives: checkpoints, logs, export. None keeps nothing on disk.
          strategy: a word of `ctl.distribute.strategies.WORDS`, or a strategy object.
          global_batch_size: examples in one step, over all replicas.
          seed: of everything random, the same on every worker.
          intervals: when to log, evaluate and save, and the length of loops.
          checkpoints: where states go; by default `model_dir/checkpoints`, the 5 newest.
          writers: who is told; by default the console, and TensorBoard and metrics.jsonl in model_dir.
          callbacks: what sees the numbers and decides, such as `ctl.EarlyStopping("loss")`.
        """
        exit_hook.install()
        validation.whole("global_batch_size", global_batch_size, 1)
        validation.whole("seed", seed, 0, 2**32 - 1)
        validation.parts(checkpoints, writers)
        self.strategy = strategies.make(strategy) if isinstance(strategy, str) else strategy
        self.topology = strategies.topology_of(self.strategy)
        self.global_batch_size = int(global_batch_size)
        self.seed = int(seed)
        self.model_dir = None if model_dir is None else str(model_dir)
        self.intervals = intervals or Intervals()
        self.callbacks = list(callbacks)
        self.gradients = gradients.Gradients()
        self.hparams: dict[str, Any] = {}
        self._checkpoints = checkpoints
        self._writers = writers
        self._session: Session | None = None
        self._recorder = Recorder()
        self._warned = False
        self._eval_is_known = False

    def build(self) -> None:
        """Yours: sets `self.model` and `self.optimizer`. Called once, inside `strategy.scope()`."""
        raise NotImplementedError

    def train_data(self, batch_size: int) -> Any:
        """Yours: a `tf.data.Dataset` of global batches, `ctl.from_arrays(...)`, or arrays.

        `ctl.example_numbers(batch_size)` is for a step that makes its own data. Instead of this
        method, `train_data_fn(self, input_context)` may give each worker's own part of the data, in
        batches of one replica.
        """
        raise NotImplementedError

    def eval_data(self, batch_size: int) -> Any:
        """Yours, optional: one pass over the examples to evaluate, in batches of any size."""
        raise NotImplementedError

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Yours, traced: updates the model on one replica's batch.

        Returns name -> `[b]`, one number per example; or `[]`; or a pair (parts of a sum, parts of its
        count), e.g. (token_loss * mask, mask); or a Keras metric that the step has updated.
        """
        raise NotImplementedError

    def eval_step(self, batch: Any) -> dict[str, Any]:
        """Yours, traced, optional: name -> `[b]`; each example counts once in the mean."""
        raise NotImplementedError

    def after_loop(self, step: int, means: dict[str, float]) -> Any:
        """Yours, optional, eager: called on every worker after each loop; return True to stop.

        `means` are those of the loop's steps over the global batches. Overriding this fetches them
        after each loop.
        """

    @property
    def step(self) -> int:
        """Completed steps, over all runs in `model_dir`."""
        return self._session.step if self._session else 0

    def prepare(self) -> None:
        """Builds the model and restores the newest checkpoint; `train` and `evaluate` do it first.

        Raises UsageError for what is missing or was made outside `build`, CheckpointError for a
        checkpoint of another model.
        """
        preparation.prepared(self)

    def train(
        self, steps: int | None = None, *, epochs: float | None = None, export: Sequence[str] = ()
    ) -> dict[str, float]:
        """Trains until `steps` steps (or `epochs`) are complete in all, resumed ones included.

        Args:
          steps: total number of steps; None: until the data ends.
          epochs: total number of passes over `train_data`, which must have a known length.
          export: formats to write at the end, see `export`.

        Returns the newest means: of training, and of the evaluation as "eval_<name>".
        Raises UsageError before any work, NonFiniteError if a gradient is NaN or infinite, Stopped
        after a signal and a checkpoint.

        In an evaluator task of TF_CONFIG this trains nothing: it evaluates the checkpoints of
        model_dir as they come, until training has ended; see docs/evaluator.md.
        """
        if self.topology.evaluates:
            return evaluator.follow(self, preparation.prepared(self))
        resume.claim(self)
        prepared = preparation.prepared(self)
        with lease.holding(
            self.model_dir if self.topology.is_chief else None, lambda: prepared.saved
        ) as prepared.lease:
            return run.train(self, prepared, steps=steps, epochs=epochs, formats=tuple(export))

    def evaluate(self) -> dict[str, float]:
        """Means of `eval_step` over all of `eval_data`, the same on every worker."""
        return evaluation.evaluate(self, preparation.prepared(self))

    def log(self, name: str, value: Any) -> None:
        """Hands the metric writers something of your own, at this step.

        For `after_loop`, or a callback that has the trainer; every worker may call it, the chief writes.

        Args:
          value: a number, which goes where the training's means go; a text, in Markdown; or an array of
            numbers, whose histogram TensorBoard shows. Raises UsageError for anything else.
        """
        if self._session is None or not self._session.running:
            return
        step = self._session.step
        found = number_or_event(step, name, value)
        if isinstance(found, float):
            self._session.running.write(step, {name: found}, "train")
        else:
            self._session.running.note(found)

    def show(self, name: str, images: Any) -> None:
        """Shows images `[n, h, w, c]` in TensorBoard, as one grid at this step.

        For `after_loop`; every worker may call it, the chief writes. `c` is 1, 3 or 4; numbers are
        0..255 if the dtype is uint8, else 0..1.
        """
        if self._session is not None and self._session.running:
            step = self._session.step
            self._session.running.note(grid(step, name, images))

    def export(self, *formats: str, directory: str | None = None) -> list[str]:
        """Writes the model as "keras", "saved_model", "weights"; returns the paths on the chief.

        All workers must call it. `directory` is `model_dir/export` unless given.
        """
        self.prepare()
        if self.topology.evaluates:
            return []  # the chief writes
        formats = formats or export_lib.possible(self.model)[:2]
        if directory is None:
            validation.export(self, formats)
        directory = directory or f"{self.model_dir}/export"
        served = export_lib.signatures_of(self)
        paths = export_lib.export(self.model, directory, formats, self.topology, served)
        HostAllReduce(self.strategy, self.topology).sum([0.0])  # nobody leaves before the chief has written
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
        self._recorder.averaged = True
        if mask is not None:
            validation.mask(self, self._recorder)
        loss = averaging.average(
            per_example,
            global_batch_size=self.global_batch_size,
            sample_weight=sample_weight,
            mask=mask,
            empty=self._recorder.empty,
        )
        if regularization is None:
            return loss
        terms = [tf.cast(tf.reduce_sum(t), loss.dtype) for t in tf.nest.flatten(regularization)]
        shares = self.topology.num_replicas * self._recorder.parts
        return loss + tf.add_n(terms) / shares if terms else loss

    @tf.autograph.experimental.do_not_convert
    def minimize(
        self,
        loss: Any,
        tape: tf.GradientTape,
        variables: Any = None,
        optimizer: Any = None,
        when: Any = None,
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

        May be called several times in a step. The norm is reported as "gradient_norm".
        """
        if optimizer is None and self.optimizer is None:
            raise UsageError("minimize() needs an optimizer; set self.optimizer in build().")
        optimizer = self.optimizer if optimizer is None else optimizer
        variables = self.model.trainable_variables if variables is None else variables
        if self.topology.num_replicas > 1 and not self._recorder.averaged and not self._warned:
            self._warned = True
            logging.getLogger("ctl").warning(
                "minimize() got a loss that average() did not make. Gradients are added up over %d "
                "replicas: unless the loss is this replica's share of the mean, they are too large.",
                self.topology.num_replicas,
            )
        update = gradients.compute(loss, tape, variables, optimizer, self._recorder.empty)
        update.when = None if when is None else tf.convert_to_tensor(when, tf.bool)
        self._recorder.minimize(update, self.gradients)
