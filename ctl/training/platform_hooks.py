"""What a platform gets of a run: logs and the model where it looks for them, a number for its tuning.

Also what it takes: where all processes end with the chief, the evaluator has to finish first.
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


def prepare_platform(trainer: TrainerProtocol, places: Directories, hypertune: str, mode: str) -> None:
    """Before anything is built; `hypertune` is a metric of the evaluation, or empty.

    Raises UsageError where nothing is evaluated, or no model can be copied to the platform's place.
    """
    if places.model and mode in ("train", "train_and_eval"):
        _check_model_directory(trainer, places.model)
    if places.logs and not paths.is_url(places.logs):
        trainer.log_dir = places.logs
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
    """A model that cannot be served is found now, not after hours."""
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
        kind = StorageError if disk_errors.is_transient(e) else UsageError
        raise kind(
            f"AIP_MODEL_DIR names {model} for the model, and nothing can be written there ({e.strerror}). "
            "Name another directory, or unset it."
        ) from None


def hand_over(trainer: TrainerProtocol, places: Directories, formats: Sequence[str]) -> None:
    """After an export: a copy of the SavedModel goes where the platform serves it from.

    What is there is replaced; `saved_model.pb` is deleted first and written last. Raises CtlError.
    """
    if not places.model or "saved_model" not in formats or not trainer.topology.is_chief:
        return
    assert trainer.model_dir is not None  # `_check_model_directory` has seen to it
    source = paths.path(trainer.model_dir) / "export" / "saved_model"
    try:
        paths.copy_tree(source, paths.path(places.model), last=export.SAVED_MODEL_MARK)
    except OSError as e:
        raise CtlError(
            f"The model is in {source}, and could not be copied to {places.model}, which AIP_MODEL_DIR "
            f"names: {e}. Copy it there yourself, or write another place into AIP_MODEL_DIR."
        ) from e


def let_evaluator_finish(trainer: TrainerProtocol, me: Topology) -> None:
    """After a training, on the chief, where its end is everybody's.

    `me` is the cluster as the platform told it, before TF_CONFIG was written anew for TensorFlow.
    """
    if trainer.model_dir and me.is_chief and me.has_evaluator and me.ends_with_chief:
        checkpoint_follower.wait_for_evaluator(
            checkpoint_follower.checkpoints(trainer), f"{trainer.model_dir}/{evaluator.EVALUATED}"
        )
