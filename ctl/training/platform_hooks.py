"""Integration with platforms: directories of logs and models, and a metric for hyperparameter tuning.

On platforms that end all processes with the chief, the chief waits for the evaluator.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from ctl.checkpoints import export
from ctl.checkpoints.protocol import CheckpointManager
from ctl.config import Config
from ctl.distribute.topology import Topology
from ctl.errors import CtlError, StorageError, UsageError
from ctl.evaluator import checkpoint_follower, process
from ctl.io import disk_errors, paths
from ctl.io.directories import Directories
from ctl.metrics.hypertune import HypertuneWriter
from ctl.metrics.protocol import MetricWriter
from ctl.training import validation
from ctl.training.following import watched_checkpoints
from ctl.training.task import Task


def check_platform(
    task: Task, config: Config, model_dir: str, directories: Directories, *, is_chief: bool
) -> None:
    """Checks, before `build`, that the platform gets the metric and the model that it expects.

    Args:
      task: Methods of the user.
      config: Settings of the program.
      model_dir: Directory of the run, or an empty string.
      directories: Directories of the platform.
      is_chief: True in the process that writes shared files.

    Raises:
      UsageError: If the metric is not evaluated, or the model cannot be copied to its directory.
      StorageError: If the directory of the model cannot be written at present.
    """
    if directories.model and config.mode in ("train", "train_and_eval"):
        _check_model_directory(model_dir, directories.model, is_chief=is_chief)
    if not config.report_hypertune:
        return
    validation.check_methods(task, "evaluate")
    if config.mode == "train":
        raise UsageError(
            f"--report_hypertune={config.report_hypertune} requires evaluations, but got "
            "--mode=train. Leave --mode out."
        )


def writers_for_platform(config: Config, topology: Topology) -> list[MetricWriter]:
    """Returns the metric writers that the platform needs in addition to those of the trainer."""
    is_reported = config.report_hypertune and not topology.evaluates  # the chief evaluates, too
    return [HypertuneWriter(config.report_hypertune)] if is_reported else []


def _check_model_directory(model_dir: str, model: str, *, is_chief: bool) -> None:
    """Raises an error before training if the model cannot be copied after it."""
    if not model_dir:
        raise UsageError(
            f"AIP_MODEL_DIR is {model}, but there is no model_dir from which the model could be copied. "
            "Give --model_dir, or set AIP_CHECKPOINT_DIR."
        )
    if paths.is_url(model) or not is_chief:
        return
    try:
        Path(model).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=model):
            pass
    except OSError as e:
        error_class = StorageError if disk_errors.is_transient(e) else UsageError
        raise error_class(
            f"AIP_MODEL_DIR is {model}, where the model cannot be written ({e.strerror}). Set it to "
            "another directory, or unset it."
        ) from None


def hand_over(model_dir: str, directories: Directories, formats: Sequence[str], *, is_chief: bool) -> None:
    """Copies the exported SavedModel to the directory from which the platform serves it.

    A model in the directory is replaced: `saved_model.pb` is deleted first and written last.

    Raises:
      CtlError: If the copy fails.
    """
    if not directories.model or "saved_model" not in formats or not is_chief:
        return
    source = paths.path(model_dir) / "export" / "saved_model"
    try:
        paths.copy_tree(source, paths.path(directories.model), last=export.SAVED_MODEL_MARK)
    except OSError as e:
        raise CtlError(
            f"The model is in {source}, but could not be copied to AIP_MODEL_DIR={directories.model}: "
            f"{e}. Copy it yourself, or set AIP_MODEL_DIR to another directory."
        ) from e


def let_evaluator_finish(
    task: Task, model_dir: str, manager: CheckpointManager | None, topology: Topology
) -> None:
    """Waits for the evaluator after a training, on the chief of a platform that ends all processes with it.

    Args:
      task: Methods of the user.
      model_dir: Directory of the run, or an empty string.
      manager: Checkpoint manager of the trainer.
      topology: Topology as the platform describes it.
    """
    ends_evaluator = topology.is_chief and topology.has_evaluator and topology.ends_with_chief
    if model_dir and ends_evaluator:
        watched = watched_checkpoints(task, model_dir, manager)
        checkpoint_follower.wait_for_evaluator(watched, f"{model_dir}/{process.EVALUATED}")
