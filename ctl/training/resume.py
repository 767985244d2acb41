"""Saving, restoring and rolling back, with checks of the configuration at a resume."""

import contextlib
import logging
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from ctl.checkpoints import commit, restoring, saving
from ctl.checkpoints.chief_only import ChiefOnlyCheckpoints
from ctl.checkpoints.protocol import CheckpointManager, Manifest, NullCheckpoints
from ctl.data.batches import Batches
from ctl.distribute import engine_all_reduce, parameter_servers, strategies
from ctl.distribute.host_allreduce import HostAllReduce
from ctl.distribute.topology import Topology
from ctl.errors import NonFiniteError, UsageError
from ctl.io import paths
from ctl.metrics.group import WriterGroup
from ctl.metrics.protocol import Saved, Started
from ctl.supervision import lease
from ctl.training import error_translation, run_metadata
from ctl.training.optional_methods import is_defined_by_user
from ctl.training.session import Session
from ctl.training.trainer_protocol import TrainerProtocol

_log = logging.getLogger("ctl")


def claim(trainer: TrainerProtocol) -> None:
    """Raises UsageError while another job trains in the trainer's model_dir."""
    if trainer.topology.is_chief:
        lease.check_model_dir_is_free(trainer.model_dir)


_COUNTED_BATCHES = re.compile(r"([\d,]+) batches of (\d+)")
_MAY_DIFFER = (  # the numbers stay equal
    *("workers", "replicas", "strategy", "tensorflow", "ctl"),
    *("steps_per_loop", "log_every", "evaluate_every", "save_every"),
)


def check_configuration(
    trainer: TrainerProtocol, resumed: Manifest | None, batches: Batches, config: Mapping[str, Any]
) -> None:
    """Compares the configuration with that of the resumed checkpoint, and logs the differences.

    The number of workers may differ, unless each worker reads its own part of the data.

    Raises:
      UsageError: If the order of the data differs, unless `trainer.allow_config_change`.
    """
    if resumed is None:
        return
    before = {
        "seed": resumed.data.get("seed"),
        "global_batch_size": resumed.world.get("global_batch_size"),
        "train_data": _source_before(resumed, batches) if batches.has_exact_counts else None,
    }
    now = {
        "seed": trainer.seed,
        "global_batch_size": trainer.global_batch_size,
        "train_data": batches.description,
    }
    if batches.is_per_worker:
        before["workers"] = resumed.world.get("workers")
        now["workers"] = trainer.topology.num_workers
    order = [k for k in before if before[k] is not None and before[k] != now[k]]
    lines = [f"  {k}: {before[k]} before, {now[k]} now" for k in order]
    if lines and not trainer.allow_config_change:
        raise UsageError(
            f"The checkpoint of step {resumed.step} was made with other settings: from here on, examples "
            "would come in another order than in an unbroken run.\n"
            + "\n".join(lines)
            + "\nGive the settings of before, another --model_dir, or --allow_config_change."
        )
    old = resumed.config
    others = [k for k in config if old and k not in (*before, *_MAY_DIFFER) and old.get(k) != config[k]]
    lines += [f"  {k}: {old.get(k, 'nothing')} before, {config[k]} now" for k in others]
    if lines and trainer.topology.is_chief:
        _log.warning("Other settings than at step %d:\n%s", resumed.step, "\n".join(lines))


def _source_before(resumed: Manifest, batches: Batches) -> str | None:
    """Returns the description of the data at a checkpoint, in the form of `batches.description`.

    Manifests without the key `one_pass` count the batches of all epochs of that run.
    """
    before, now = resumed.data.get("source"), batches.description
    counts = [_COUNTED_BATCHES.fullmatch(text or "") for text in (before, now)]
    if resumed.data.get("one_pass") or None in counts:
        return before
    (all_epochs, size), (one_epoch, size_now) = (match.groups() for match in counts if match)
    is_multiple = int(all_epochs.replace(",", "")) % max(1, int(one_epoch.replace(",", ""))) == 0
    return now if size == size_now and is_multiple else before


def restore(
    trainer: TrainerProtocol, manager: CheckpointManager, state: Any, agreement: HostAllReduce
) -> Manifest | None:
    """Restores the same checkpoint on all workers. All workers call it.

    Returns:
      The manifest, or None if there is no checkpoint.

    Raises:
      CtlError: On all workers, if one of them fails.
    """
    if agreement.num_workers == 1 or not manager.is_shared:
        resumed = manager.restore(state)
        if resumed is None:
            _check_not_deleted(trainer, manager)
        _check_equal_steps(agreement, state.topology, 0 if resumed is None else resumed.step)
        return resumed

    directory, steps = manager.directory, []
    if directory is not None:
        steps = restoring.newest_step_by_worker(agreement, state.topology, directory)

    def chosen() -> int | None:
        if directory is not None and steps:
            restoring.check_newest_is_visible(directory, steps)
        step = manager.choose()
        if step is None:
            _check_not_deleted(trainer, manager)
        return step

    return restoring.load_choice_of_chief(
        agreement,
        state.topology,
        chosen,
        lambda step: manager.restore(state, step),
        restoring.manifest_checksum,
    )


def _check_not_deleted(trainer: TrainerProtocol, manager: CheckpointManager) -> None:
    """Raises UsageError, on the chief, if the lease records a saved step and there is no checkpoint."""
    if manager.is_temporary or not (trainer.model_dir and trainer.topology.is_chief):
        return
    where = paths.path(trainer.model_dir)
    if manager.directory != where / "checkpoints":
        return
    holder = lease.Lease(where / lease.LOCK_NAME).read()
    if holder is not None and holder.step > 0:
        raise UsageError(
            f"{where / lease.LOCK_NAME} says that a training saved step {holder.step} here, and there is "
            f"no checkpoint in {manager.directory}. Was it deleted, or is a disk not mounted? Bring it "
            f"back, or give another --model_dir; to begin at step 0 here, delete {where / lease.LOCK_NAME}."
        )


def _check_equal_steps(agreement: HostAllReduce, topology: Topology, step: int) -> None:
    """Raises UsageError if managers that choose on each worker have chosen different steps."""
    values = np.zeros(agreement.num_workers + 1)
    values[topology.worker_index] = step
    values[-1] = step if topology.is_chief else 0
    *steps, chief_step = map(int, agreement.sum(values))
    differing = [f"worker {i} at step {s}" for i, s in enumerate(steps) if s != chief_step]
    if agreement.num_workers > 1 and differing:
        raise UsageError(
            f"The chief found the newest checkpoint at step {chief_step}, {', '.join(differing)}; expected "
            "the same step on all workers. Put model_dir on shared storage that all workers can read."
        )


_ROLLBACKS = 3  # to one checkpoint


def rolls_back_on_nonfinite(trainer: TrainerProtocol) -> bool:
    """Returns True if a loss or gradient that is NaN or infinite causes a rollback."""
    rolls_back: bool = trainer.gradients.on_nonfinite == "rollback"
    return rolls_back


def check_rollback(trainer: TrainerProtocol, *, by_callback: bool) -> None:
    """Raises UsageError if the settings or a callback request a rollback that is not possible."""
    if rolls_back_on_nonfinite(trainer) or by_callback:
        _check_can_roll_back(trainer)


def _check_can_roll_back(trainer: TrainerProtocol) -> None:
    if parameter_servers.is_used(trainer.strategy):
        raise UsageError(
            "rollback needs workers in step, and those of parameter servers go at their own speed. Write "
            "on_nonfinite='skip' or 'stop' (--on_nonfinite)."
        )
    if is_defined_by_user(trainer, "train_data_fn"):
        raise UsageError(
            "rollback skips the data of the steps that it takes back, which train_data_fn cannot. Write "
            "train_data, with global batches, or on_nonfinite='skip'."
        )


def roll_back(trainer: TrainerProtocol, session: Session, batches: Batches, step: int) -> Manifest:
    """Restores the newest checkpoint and continues with later data. Raises NonFiniteError if it cannot."""
    _check_can_roll_back(trainer)
    session.advance(step, trainer.global_batch_size, batches)
    session.manager.finish()  # a save in the background
    session.agreement.sum([0.0])  # afterwards all workers find the same checkpoints
    manifest = restore(trainer, session.manager, session.state, session.agreement)
    if manifest is None:
        raise NonFiniteError(
            f"Step {step}: there is no checkpoint to go back to. Save more often (--save_every_steps), or "
            "write --on_nonfinite=skip."
        )
    back = manifest.step
    count = session.count_rollback(back)
    if count > _ROLLBACKS:
        raise NonFiniteError(
            f"Step {step}: went back {_ROLLBACKS} times to the checkpoint of step {back}, each time with "
            f"other data, and it was of no use; {error_translation.newest_step_phrase(session.manager)}. "
            "Lower the learning rate."
        )
    session.roll_back(manifest)
    if trainer.topology.is_chief:
        _log.warning(
            "Step %d: going back to the checkpoint of step %d, and on with the next data: the %d "
            "examples since then are skipped (%d of %d times).",
            step,
            back,
            (step - back) * trainer.global_batch_size,
            count,
            _ROLLBACKS,
        )
    active = session.active
    if active is not None and active.info is not None:
        active.writers.note(Started(back, None, active.info, f"going back from step {step}"))
    return manifest


def save(trainer: TrainerProtocol, session: Session, batches: Batches, step: int) -> str | None:
    """Saves a checkpoint of `step`. All workers call it at the same step."""
    session.advance(step, trainer.global_batch_size, batches)
    session.record_data(batches)
    return _save(trainer, session, step)


def saving_checkpoints(session: Session, writers: WriterGroup) -> contextlib.AbstractContextManager[None]:
    """Prepares the checkpoint manager for a block of steps, and completes its saves at the end."""
    if session.lease is not None:
        session.manager.fence(session.lease.check_now)

    def notify_saved(step: int, path: str) -> None:
        session.record_checkpoint(step)
        writers.note(Saved(step, path))

    return saving.opened_manager(session.manager, session.state, notify_saved)


@error_translation.translates_peer_errors
def save_now(trainer: TrainerProtocol, session: Session) -> str | None:
    """Implementation of `Trainer.save`: saves now, or within a run at the end of the loop."""
    if isinstance(session.manager, NullCheckpoints):
        raise UsageError(
            "save() has no place for checkpoints. Give the trainer a model_dir, or checkpoints=..."
        )
    if trainer.topology.evaluates:
        raise UsageError("save() came in an evaluator task, which only reads checkpoints.")
    if session.active is not None:
        session.save_request.submit()
        return None
    saved: list[str] = []
    with saving.opened_manager(session.manager, session.state, lambda step, path: saved.append(path)):
        path = _save(trainer, session, session.step)
    session.agreement.sum([0.0])  # the chief has written
    return path or next(iter(saved), None)


def _save(trainer: TrainerProtocol, session: Session, step: int) -> str | None:
    keeps = not isinstance(session.manager, NullCheckpoints)
    state = session.reducer.worker_state if keeps else None
    if state is not None:
        state.gather()
    path = session.manager.save(session.state, manifest_of(trainer, session, step))
    if state is not None:
        state.release()
    if path is not None:
        session.record_checkpoint(step)
        if session.writers is not None:
            session.writers.note(Saved(step, path))
    return path


@error_translation.translates_peer_errors
def restore_from(trainer: TrainerProtocol, session: Session, where: str) -> int:
    """Implementation of `Trainer.restore`. Returns the step of the checkpoint, equal on all workers."""
    if session.active is not None:
        raise UsageError("restore() came within a run; call it before train().")
    given = paths.path(where)
    step = commit.step_of(given)
    if step >= 0:
        directory = given.parent
    else:
        inside = given / "checkpoints"
        directory = inside if paths.call_with_retries(inside.is_dir) else given
    manager = ChiefOnlyCheckpoints(str(directory))

    def choose() -> int:
        found = step if step >= 0 and given.is_dir() else manager.choose() if step < 0 else None
        if found is None:
            raise UsageError(
                f"restore({str(where)!r}): no checkpoint is there; expected a directory such as "
                "runs/a/checkpoints/ckpt-500, or the model_dir of a run."
            )
        return found

    topology, state = session.state.topology, session.state
    manifest = restoring.load_choice_of_chief(
        session.agreement,
        topology,
        choose,
        lambda chosen: manager.restore(state, chosen),
        restoring.manifest_checksum,
    )
    assert manifest is not None  # `choose` always chooses
    session.resume(manifest, trainer.global_batch_size)
    return manifest.step


def manifest_of(trainer: TrainerProtocol, session: Session, step: int) -> Manifest:
    """Returns the manifest of a checkpoint of `step`."""
    topology = trainer.topology
    return session.progress.to_manifest(
        step,
        variables=session.state.spec(),
        world={
            "workers": topology.num_workers,
            "replicas": topology.num_replicas,
            "strategy": strategies.word_of(trainer.strategy),
            "communication": engine_all_reduce.path_of(trainer.strategy),
            "global_batch_size": trainer.global_batch_size,
        },
        seed=trainer.seed,
        config=run_metadata.plain_configuration(trainer),
    )
