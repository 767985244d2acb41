"""Checks before a run resumes from a checkpoint or rolls back to one."""

import logging
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from ctl.checkpoints.protocol import CheckpointManager, Manifest
from ctl.config import Config
from ctl.data.batches import Batches
from ctl.distribute.host_allreduce import HostAllReduce
from ctl.distribute.topology import Topology
from ctl.distribute.world import World
from ctl.errors import UsageError
from ctl.io import paths
from ctl.supervision import lease
from ctl.training.task import Task

_COUNTED_BATCHES = re.compile(r"([\d,]+) batches of (\d+)")
_MAY_DIFFER = (  # the numbers stay equal
    *("workers", "replicas", "strategy", "tensorflow", "ctl"),
    *("steps_per_loop", "log_every", "evaluate_every", "save_every"),
)
_RATE_NAMES = ("learning_rate", "lr")
_ORDER_SEED, _POSITION = "seed of from_arrays or from_source", "position in train_data"
_DEFAULTS = {"precision": "float32"}  # of settings that older checkpoints do not have
_log = logging.getLogger("ctl")


def check_no_other_job(model_dir: str | None, topology: Topology) -> None:
    """Raises UsageError while another job trains in `model_dir`."""
    if topology.is_chief:
        lease.check_model_dir_is_free(model_dir)


def check_configuration(
    config: Config,
    topology: Topology,
    resumed: Manifest | None,
    batches: Batches,
    configuration: Mapping[str, Any],
) -> None:
    """Compares the configuration with that of the resumed checkpoint, and logs the differences.

    The number of workers may differ, unless each worker reads its own part of the data.

    Args:
      config: Settings of the trainer.
      topology: Processes of the job.
      resumed: Manifest of the checkpoint, or None.
      batches: Training data.
      configuration: Settings and versions of this run, as in manifests.

    Raises:
      UsageError: If the order of the data differs, unless `config.allow_config_change`.
    """
    if resumed is None:
        return
    before = {
        "seed": resumed.data.get("seed"),
        "global_batch_size": resumed.world.get("global_batch_size"),
        "train_data": _source_before(resumed, batches) if batches.has_exact_counts else None,
        "overfit_batches": resumed.config.get("overfit_batches", 0) if resumed.config else None,
    }
    current = {
        "seed": config.seed,
        "global_batch_size": config.global_batch_size,
        "train_data": batches.description,
        "overfit_batches": config.overfit_batches,
    }
    seeds = resumed.data.get("order_seed"), batches.order_seed
    if None not in seeds and seeds != (before["seed"], current["seed"]):  # else named once
        before[_ORDER_SEED], current[_ORDER_SEED] = seeds
    if resumed.data.get("iterator") and batches.has_exact_counts and not batches.saves_own_position:
        before[_POSITION], current[_POSITION] = "a state of Grain's iterator", batches.mode
    if batches.is_per_worker:
        before["workers"] = resumed.world.get("workers")
        current["workers"] = topology.num_workers
    order = [k for k in before if before[k] is not None and before[k] != current[k]]
    lines = [f"  {k}: {before[k]} before, {current[k]} now" for k in order]
    if lines and not config.allow_config_change:
        raise UsageError(
            f"The checkpoint of step {resumed.step} was saved with other settings; with these, the order "
            "of examples would differ from that of an uninterrupted run.\n"
            + "\n".join(lines)
            + "\nGive the earlier settings, another --model_dir, or --allow_config_change."
        )
    old = resumed.config
    changed_settings = [
        k
        for k in configuration
        if old and k not in (*before, *_MAY_DIFFER) and old.get(k, _DEFAULTS.get(k)) != configuration[k]
    ]
    lines += [f"  {k}: {old.get(k, 'nothing')} before, {configuration[k]} now" for k in changed_settings]
    if lines and topology.is_chief:
        _log.warning("Settings have changed since step %d:\n%s", resumed.step, "\n".join(lines))


def warn_of_restored_rate(
    resumed: Manifest | None, configuration: Mapping[str, Any], rate: float | None
) -> None:
    """Logs a warning if a setting for the learning rate differs from `rate`, that of the optimizer."""
    if resumed is None or not resumed.config or rate is None:
        return
    for name in _RATE_NAMES:
        value = configuration.get(name)
        if not isinstance(value, float) or resumed.config.get(name, value) == value:
            continue
        if not math.isclose(value, rate, rel_tol=1e-6):
            _log.warning(
                "%s is %s now, but the optimizer continues with the learning rate of the checkpoint, %.6g. "
                "Set self.optimizer.learning_rate in before_training to change it.",
                name,
                value,
                rate,
            )


def _source_before(resumed: Manifest, batches: Batches) -> str | None:
    """Returns the description of the data at a checkpoint, in the form of `batches.description`.

    Manifests without the key `one_pass` count the batches of all epochs of that run.
    """
    before, current = resumed.data.get("source"), batches.description
    counts = [_COUNTED_BATCHES.fullmatch(text or "") for text in (before, current)]
    if resumed.data.get("one_pass") or None in counts:
        return before
    (all_epochs, size), (one_epoch, size_now) = (match.groups() for match in counts if match)
    is_multiple = int(all_epochs.replace(",", "")) % max(1, int(one_epoch.replace(",", ""))) == 0
    return current if size == size_now and is_multiple else before


def check_not_deleted(model_dir: str, topology: Topology, manager: CheckpointManager) -> None:
    """Raises UsageError, on the chief, if the lease records a saved step and there is no checkpoint."""
    if manager.is_temporary or not (model_dir and topology.is_chief):
        return
    directory = paths.path(model_dir)
    if manager.directory != directory / "checkpoints":
        return
    lock = directory / lease.LOCK_NAME
    holder = lease.Lease(lock).read()
    if holder is not None and holder.step > 0:
        raise UsageError(
            f"{lock} records that a training saved step {holder.step} here, and there is no checkpoint in "
            f"{manager.directory}. Was it deleted, or is a disk not mounted? Restore it, or give another "
            f"--model_dir; to start at step 0 here, delete {lock}."
        )


def check_equal_steps(all_reduce: HostAllReduce, topology: Topology, step: int) -> None:
    """Raises UsageError if managers that choose on each worker have chosen different steps."""
    values = np.zeros(all_reduce.num_workers + 1)
    values[topology.worker_index] = step
    values[-1] = step if topology.is_chief else 0
    *steps, chief_step = map(int, all_reduce.sum(values))
    differing = [f"worker {i} at step {s}" for i, s in enumerate(steps) if s != chief_step]
    if all_reduce.num_workers > 1 and differing:
        raise UsageError(
            f"The chief found the newest checkpoint at step {chief_step}, {', '.join(differing)}; expected "
            "the same step on all workers. Put model_dir on shared storage that all workers can read."
        )


def rolls_back_on_nonfinite(task: Task) -> bool:
    """Returns True if a loss or gradient that is NaN or infinite causes a rollback."""
    rolls_back: bool = task.gradients.on_nonfinite == "rollback"
    return rolls_back


def check_can_roll_back(world: World, task: Task) -> None:
    """Raises UsageError if a rollback is not possible."""
    if world.is_asynchronous:
        raise UsageError(
            "rollback needs synchronous workers, and those of parameter servers are asynchronous. Write "
            "on_nonfinite='skip' or 'stop' (--on_nonfinite)."
        )
    if "train_data_fn" in task.methods:
        raise UsageError(
            "rollback skips the data of the steps that it undoes, which train_data_fn cannot. Write "
            "train_data, with global batches, or on_nonfinite='skip'."
        )
