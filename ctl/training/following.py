"""Evaluation of the checkpoints of another process, in an evaluator task of TF_CONFIG."""

from collections.abc import Mapping

from ctl.checkpoints.protocol import CheckpointManager, Manifest
from ctl.checkpoints.watched import WatchedCheckpoints
from ctl.errors import UsageError
from ctl.evaluator import process
from ctl.metrics.group import WriterGroup
from ctl.metrics.protocol import Joined
from ctl.supervision import signals
from ctl.training import evaluation, run_metadata, validation
from ctl.training.active_run import ActiveRun
from ctl.training.default_writers import created_writers
from ctl.training.loop import Interrupted
from ctl.training.prepared import PreparedTrainer
from ctl.training.run_options import RunOptions
from ctl.training.task import Task


def follow_training(prepared: PreparedTrainer, options: RunOptions) -> dict[str, float]:
    """Evaluates each checkpoint of a training until it has ended; see `process.follow`."""
    watched, interruption = prepared.checkpointing.manager, signals.Interruption()
    assert isinstance(watched, WatchedCheckpoints)
    writers = _writers(prepared.config.model_dir, options)
    joined = list[Joined]()

    def evaluate(manifest: Manifest) -> Mapping[str, float] | None:
        watched.restore(prepared.state, manifest.step)
        if not joined:  # not earlier, as the chief stores the identifier at its start
            joined.append(run_metadata.joined_run(prepared))
            writers.note(joined[0])
        try:
            means = evaluation.evaluate_trainer(prepared, options).means
            prepared.callbacks.raise_failure()
        except Interrupted:
            return None
        return means

    with prepared.activity.running(ActiveRun(writers, interruption)):
        return process.follow(prepared.config.model_dir, watched, evaluate, writers, interruption)


def watched_checkpoints(
    task: Task, model_dir: str | None, manager: CheckpointManager | None
) -> WatchedCheckpoints:
    """Returns the manager of an evaluator. Raises UsageError for a trainer that cannot evaluate.

    Args:
      task: Methods of the trainer.
      model_dir: Directory of the run.
      manager: Checkpoint manager of the trainer, which determines the directory of the checkpoints.
    """
    validation.check_methods(task, "evaluate")
    if not model_dir:
        raise UsageError(
            "an evaluator task of TF_CONFIG evaluates the checkpoints of a training, but has no "
            "model_dir. Give the trainer the model_dir of the workers (--model_dir)."
        )
    directory = None if manager is None else manager.directory
    return WatchedCheckpoints(directory or f"{model_dir}/checkpoints")


def _writers(model_dir: str, options: RunOptions) -> WriterGroup:
    """Returns the user's writers, or the default ones with the evaluator's own metrics file."""
    writers = created_writers(model_dir, options, metrics_file=process.NUMBERS)
    return WriterGroup([*writers, *options.extra_writers])
