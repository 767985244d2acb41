"""Choice of the checkpoint to resume from: the newest undamaged one on the chief, for all workers.

Damage is a missing file, a wrong size or a wrong checksum. A read error is not damage: reading is retried
for some seconds, then the job ends with an exit code that permits a restart. On network file systems the
other workers wait until the chosen checkpoint is visible.
"""

import functools
import json
import logging
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from ctl.checkpoints import commit
from ctl.checkpoints.protocol import Manifest
from ctl.distribute.host_allreduce import HostAllReduce
from ctl.distribute.topology import Topology
from ctl.errors import CheckpointError, CtlError, ReadError, UsageError
from ctl.io import paths
from ctl.io.paths import AnyPath

VISIBILITY_TIMEOUT_SECS = 60.0  # of a worker for a checkpoint that is visible to another worker
_POLL_SECS = 0.5
T = TypeVar("T")
_log = logging.getLogger("ctl")


class Choice(NamedTuple):
    """A checkpoint to restore.

    Attributes:
      path: Directory of the checkpoint.
      manifest: Its manifest.
      damaged: Path -> fault of the newer checkpoints that are damaged.
    """

    path: AnyPath
    manifest: Manifest
    damaged: Mapping[AnyPath, str]


def newest_checkpoint(directory: AnyPath) -> Choice | None:
    """Returns the newest undamaged checkpoint, or None if there is no checkpoint.

    Logs a warning with the file and the cause for each damaged one.

    Raises:
      CheckpointError: If all checkpoints are damaged, so that a run does not silently start at step 0.
      ReadError: If a newer checkpoint cannot be read at present.
    """
    checkpoints, error_by_path = _survey(directory)
    damaged = {p: str(e).rstrip(".") for p, e in error_by_path.items() if not isinstance(e, ReadError)}
    unread = {commit.step_of(p): e for p, e in error_by_path.items() if isinstance(e, ReadError)}
    for path, fault in damaged.items():
        _log.warning("Skipping the damaged checkpoint %s: %s.", path, fault)
    for path, manifest in reversed(checkpoints):
        _check_newer_are_readable(unread, manifest.step)
        damage = _find_damage(path, manifest)
        if damage is None:
            return Choice(path, manifest, damaged)
        damaged[path] = damage
        _log.warning("Skipping the damaged checkpoint %s: %s.", path, damage)
    _check_newer_are_readable(unread, -1)
    if damaged:
        details = "; ".join(f"{p.name}: {fault}" for p, fault in damaged.items())
        raise CheckpointError(
            f"Every checkpoint in {directory} is damaged ({details}). Restore one from a backup, or "
            "start again with another --model_dir."
        )
    return None


def _survey(directory: AnyPath) -> tuple[list, dict]:
    try:
        return paths.call_with_retries(
            lambda: commit.survey_checkpoints(directory, paths.call_with_retries)
        )
    except OSError as e:
        raise commit.read_error(directory, e) from e


def _find_damage(path: AnyPath, manifest: Manifest) -> str | None:
    return paths.call_with_retries(functools.partial(commit.find_damage, path, manifest))


def _check_newer_are_readable(unread: Mapping[int, CheckpointError], step: int) -> None:
    """Raises the error of the newest unreadable checkpoint if it is newer than `step`."""
    if unread and max(unread) > step:
        raise unread[max(unread)]


def find_checkpoint(directory: AnyPath, step: int) -> tuple[AnyPath, Manifest]:
    """Returns the checkpoint of `step`. Raises CheckpointError if it does not exist or is damaged."""
    checkpoints, error_by_path = _survey(directory)
    for path, manifest in checkpoints:
        if manifest.step == step:
            damage = _find_damage(path, manifest)
            if damage is None:
                return path, manifest
            raise CheckpointError(f"The checkpoint {path} is damaged: {damage}.")
    for path, error in error_by_path.items():
        if commit.step_of(path) == step:
            raise error
    raise CheckpointError(
        f"There is no checkpoint of step {step} in {directory}; available steps: "
        f"{[m.step for _, m in checkpoints] or 'none'}."
    )


def wait_for_checkpoint(
    directory: AnyPath,
    step: int,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[AnyPath, Manifest]:
    """Waits until a checkpoint that the chief has verified is visible to this worker, and returns it.

    Raises:
      ReadError: After `VISIBILITY_TIMEOUT_SECS`.
    """
    deadline, has_warned = clock() + VISIBILITY_TIMEOUT_SECS, False
    while True:
        try:
            return find_checkpoint(directory, step)
        except CheckpointError as e:
            if clock() >= deadline:
                raise ReadError(
                    f"The chief restores the checkpoint of step {step}, which this worker could not read "
                    f"within {VISIBILITY_TIMEOUT_SECS:g} s: {str(e).rstrip('.')}. All workers must see the "
                    "same model_dir: put it on shared storage."
                ) from e
            if not has_warned:
                _log.warning("Waiting for the checkpoint that the chief restores: %s", e)
                has_warned = True
            sleep(_POLL_SECS)


def newest_step_by_worker(agreement: HostAllReduce, topology: Topology, directory: AnyPath) -> list[int]:
    """Returns the newest step that is visible to each worker, -1 for none. All workers call it."""
    steps = np.zeros(agreement.num_workers)
    steps[topology.worker_index] = _newest_step(directory) + 1
    return [int(step) - 1 for step in agreement.sum(steps)]


def check_newest_is_visible(
    directory: AnyPath,
    steps: Sequence[int],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Waits on the chief until the newest checkpoint of any worker is visible.

    A network file system may show it with a delay. A directory that is not shared never does; without this
    check, a chief that has moved to another host would start at step 0.

    Args:
      directory: Directory of the checkpoints.
      steps: The result of `newest_step_by_worker`.
      clock: Returns the time (seconds).
      sleep: Waits for a number of seconds.

    Raises:
      UsageError: After `VISIBILITY_TIMEOUT_SECS`.
    """
    deadline, newest = clock() + VISIBILITY_TIMEOUT_SECS, max(steps)
    while (visible := _newest_step(directory)) < newest:
        if clock() >= deadline:
            workers = ", ".join(f"worker {i} at step {s}" for i, s in enumerate(steps) if s > visible)
            subject = f"its newest checkpoint at step {visible}" if visible >= 0 else "no checkpoint"
            raise UsageError(
                f"The chief finds {subject} in {directory}; other workers find newer ones: {workers}. All "
                "workers must see the same model_dir: put it on shared storage. To start without these "
                "checkpoints, give another --model_dir."
            )
        sleep(_POLL_SECS)


def _newest_step(directory: AnyPath) -> int:
    try:
        checkpoints, _ = commit.survey_checkpoints(directory)
    except OSError:  # as before the first save
        return -1
    return max((manifest.step for _, manifest in checkpoints), default=-1)


def manifest_checksum(manifest: Manifest) -> int:
    """Returns a checksum of the list of files of a checkpoint."""
    return zlib.crc32(json.dumps(dict(manifest.files), sort_keys=True).encode())


def load_choice_of_chief(
    agreement: HostAllReduce,
    topology: Topology,
    choose: Callable[[], int | None],
    load: Callable[[int], T],
    checksum: Callable[[Any], int],
) -> T | None:
    """Returns the result of `load` for the number >= 0 that the chief chooses, on every worker.

    All workers must call it. If `choose` or `load` raises a CtlError on one worker, every worker raises a
    CtlError with the same exit code.

    Args:
      agreement: Sums over the workers.
      topology: Topology of the job.
      choose: Called on the chief. If it returns None, `load` is not called and the result is None.
      load: Called on every worker with the chosen number.
      checksum: Returns the checksum of a result.

    Raises:
      UsageError: On every worker, if the checksums differ.
    """
    choice, failure, result = 0, None, None
    try:
        chosen = choose() if topology.is_chief else None
        choice = 0 if chosen is None else chosen + 1
    except CtlError as e:
        failure = e
    choice, result_checksum = int(agreement.sum([float(choice)])[0]), 0
    try:
        result = load(choice - 1) if choice and failure is None else None
        result_checksum = 0 if result is None else checksum(result)
    except CtlError as e:
        failure = e
    outcomes = np.zeros([2, agreement.num_workers])
    outcomes[0, topology.worker_index] = 0 if failure is None else failure.exit_code
    outcomes[1, topology.worker_index] = result_checksum
    exit_codes, checksums = np.rint(agreement.sum(outcomes.ravel())).reshape(outcomes.shape)
    if failure is not None:
        raise failure
    if exit_codes.any():
        worker = int(np.flatnonzero(exit_codes)[0])
        error = CheckpointError(f"Worker {worker} could not restore a checkpoint; its log has the reason.")
        error.exit_code = int(exit_codes[worker])
        raise error
    different = [f"worker {i}" for i in np.flatnonzero(checksums != checksums[0])]
    if different:
        raise UsageError(
            f"The chief and {', '.join(different)} read different checkpoints. All workers must read the "
            "same files: put the directory on shared storage, or name a checkpoint such as .../ckpt-500."
        )
    return result
