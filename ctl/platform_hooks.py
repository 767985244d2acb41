"""What a platform gets of a run: logs and the model where it looks for them, a number for its tuning.

Also what it takes: where all processes end with the chief, the evaluator has to finish first.
"""

from collections.abc import Sequence
from typing import Any

from ctl import checks, cluster, evaluator, files, following
from ctl.directories import Directories
from ctl.errors import UsageError
from ctl.export import publish
from ctl.reports.hypertune import HypertuneReport


def prepare(trainer: Any, places: Directories, hypertune: str, mode: str) -> None:
    """Before anything is built; `hypertune` is a metric of the evaluation, or empty.

    Raises UsageError where nothing is evaluated.
    """
    if places.logs and not files.is_url(places.logs):
        trainer.log_dir = places.logs
    if not hypertune:
        return
    checks.methods(trainer, "evaluate")
    if mode == "train":
        raise UsageError(
            f"--report_hypertune={hypertune} came with --mode=train, which evaluates nothing. Leave "
            "--mode out."
        )
    trainer.also_report = (*trainer.also_report, HypertuneReport(hypertune))


def hand_over(trainer: Any, places: Directories, formats: Sequence[str]) -> None:
    """After a training, or an export: copies the SavedModel, and waits for the evaluator."""
    if places.model and "saved_model" in formats and trainer.placement.is_chief:
        publish(f"{trainer.model_dir}/export/saved_model", places.model)
    me = cluster.read()
    if trainer.model_dir and me.is_chief and me.has_evaluator and me.ends_with_chief:
        following.wait_for_evaluator(
            following.checkpoints(trainer), f"{trainer.model_dir}/{evaluator.EVALUATED}"
        )
