"""Integration with platforms: directories of logs and models, and a metric for hyperparameter tuning.

On platforms that end all processes with the chief, the chief waits for the evaluator.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from ctl.checkpoints import export
from ctl.distribute.topology import Topology
from ctl.errors import CtlError, StorageError, UsageError
from ctl.io import disk_errors, paths
from ctl.io.directories import Directories
from ctl.metrics.hypertune import HypertuneWriter
from ctl.training import checkpoint_follower, evaluator, validation
from ctl.training.trainer_protocol import TrainerProtocol


def prepare_platform(trainer: TrainerProtocol, directories: Directories, hypertune: str, mode: str) -> None:
    """Prepares a trainer for the platform, before `build`.

    Args:
      trainer: Trainer to prepare.
      directories: Directories of the platform.
      hypertune: Name of the metric to report to a tuning job, or an empty string.
      mode: Value of --mode.

    Raises:
      UsageError: If the metric is not evaluated, or the model cannot be copied to its directory.
    """
    if directories.model and mode in ("train", "train_and_eval"):
        _check_model_directory(trainer, directories.model)
    if directories.logs:
        trainer.log_dir = directories.logs
    if not hypertune:
        return
    validation.check_methods(trainer, "evaluate")
    if mode == "train":
        raise UsageError(
            f"--report_hypertune={hypertune} came with --mode=train, which evaluates nothing. Leave "
            "--mode out."
        )
    trainer.extra_writers = (*trainer.extra_writers, HypertuneWriter(hypertune))


def _check_model_directory(trainer: TrainerProtocol, model: str) -> None:
    """Raises an error before training if the model cannot be copied after it."""
    if trainer.model_dir is None:
        raise UsageError(
            f"AIP_MODEL_DIR names {model} for the model, and there is no model_dir to export it from. Give "
            "--model_dir, or set AIP_CHECKPOINT_DIR."
        )
    if paths.is_url(model) or not trainer.topology.is_chief:
        return
    try:
        Path(model).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=model):
            pass
    except OSError as e:
        error_class = StorageError if disk_errors.is_transient(e) else UsageError
        raise error_class(
            f"AIP_MODEL_DIR names {model} for the model, and nothing can be written there ({e.strerror}). "
            "Name another directory, or unset it."
        ) from None


def hand_over(trainer: TrainerProtocol, directories: Directories, formats: Sequence[str]) -> None:
    """Copies the exported SavedModel to the directory from which the platform serves it.

    A model in the directory is replaced: `saved_model.pb` is deleted first and written last.

    Raises:
      CtlError: If the copy fails.
    """
    if not directories.model or "saved_model" not in formats or not trainer.topology.is_chief:
        return
    assert trainer.model_dir is not None  # checked by `_check_model_directory`
    source = paths.path(trainer.model_dir) / "export" / "saved_model"
    try:
        paths.copy_tree(source, paths.path(directories.model), last=export.SAVED_MODEL_MARK)
    except OSError as e:
        raise CtlError(
            f"The model is in {source}, and could not be copied to {directories.model}, which "
            f"AIP_MODEL_DIR names: {e}. Copy it, or write another directory into AIP_MODEL_DIR."
        ) from e


def let_evaluator_finish(trainer: TrainerProtocol, topology: Topology) -> None:
    """Waits for the evaluator after a training, on the chief of a platform that ends all processes with it.

    Args:
      trainer: Trainer after its training.
      topology: Topology as the platform describes it.
    """
    ends_evaluator = topology.is_chief and topology.has_evaluator and topology.ends_with_chief
    if trainer.model_dir and ends_evaluator:
        checkpoint_follower.wait_for_evaluator(
            checkpoint_follower.checkpoints(trainer), f"{trainer.model_dir}/{evaluator.EVALUATED}"
        )
