"""What is checked when a run goes on: the same checkpoint on every worker, the same order of data."""

import logging
from typing import Any

from ctl.agreement import Agreement
from ctl.checkpoints.protocol import Manifest
from ctl.errors import UsageError

_log = logging.getLogger("ctl")


def warn_of_another_order(trainer: Any, resumed: Manifest) -> None:
    """Says that the data will come in another order than in the part of the run that was restored."""
    before = resumed.data.get("seed"), resumed.world.get("global_batch_size")
    now = trainer.seed, trainer.global_batch_size
    if trainer.placement.is_chief and None not in before and before != now:
        _log.warning(
            "The checkpoint was made with seed %s and global_batch_size %s, this run has %s and %s: "
            "examples come in another order than in an unbroken run.", *before, *now,
        )  # fmt: skip


def same_everywhere(agreement: Agreement, place, step: int) -> None:
    total = agreement.sum([float(step), float(step) if place.is_chief else 0.0])
    if total[0] != total[1] * agreement.num_workers:
        raise UsageError(
            f"Worker {place.worker_index} found the newest checkpoint at step {step}, the chief at "
            f"step {int(total[1])}. All workers must see the same model_dir: put it on shared storage."
        )
