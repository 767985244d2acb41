"""Choice of the checkpoint to resume from: the newest undamaged one on the chief, for all workers.

Damage is a missing file, a wrong size or a wrong checksum. A read error is not damage: reading is retried
for some seconds, then the job ends with a code that permits a restart. On network file systems the other
workers wait until the chosen checkpoint is visible.
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

VISIBLE_SECS = 60.0  # timeout of a worker for the checkpoint that the chief has chosen
_POLL_SECS = 0.5
T = TypeVar("T")
_log = logging.getLogger("ctl")


class Choice(NamedTuple):
    """A checkpoint to restore, and the damaged ones that were passed over, with the reason."""

    path: AnyPath
    manifest: Manifest
    damaged: Mapping[AnyPath, str]


def newest_checkpoint(directory: AnyPath) -> Choice | None:
    """The newest undamaged checkpoint, None if there is none at all.

    A warning names each damaged one, its file and the cause. Raises CheckpointError if all are damaged:
    never a silent start at step 0. Raises ReadError where a newer one cannot be read.
    """
    found, faults = _survey(directory)
    damaged = {p: str(e).rstrip(".") for p, e in faults.items() if not isinstance(e, ReadError)}
    unread = {commit.step_of(p): e for p, e in faults.items() if isinstance(e, ReadError)}
    for path, fault in damaged.items():
        _log.warning("Passing over the damaged checkpoint %s: %s.", path, fault)
    for path, manifest in reversed(found):
        _check_read(unread, manifest.step)
        wrong = paths.persistently(functools.partial(commit.verify, path, manifest))
        if wrong is None:
            return Choice(path, manifest, damaged)
        damaged[path] = wrong
        _log.warning("Passing over the damaged checkpoint %s: %s.", path, wrong)
    _check_read(unread, -1)
    if damaged:
        listed = "; ".join(f"{p.name}: {fault}" for p, fault in damaged.items())
        raise CheckpointError(
            f"Every checkpoint in {directory} is damaged ({listed}). Restore one from a backup, or "
            "start again with another --model_dir."
        )
    return None


def _survey(directory: AnyPath) -> tuple[list, dict]:
    try:
        return paths.persistently(lambda: commit.survey(directory, paths.persistently))
    except OSError as e:
        failed = ReadError(f"{directory} cannot be read: {e.strerror or e}.")
        failed.errno = e.errno
        raise failed from e


def _check_read(unread: Mapping[int, CheckpointError], step: int) -> None:
    """Raises ReadError for the newest one that cannot be read and is newer than `step`."""
    if unread and max(unread) > step:
        raise unread[max(unread)]


def of_step(directory: AnyPath, step: int) -> tuple[AnyPath, Manifest]:
    """The good checkpoint of `step`; raises CheckpointError if there is none, or it is damaged."""
    found, faults = _survey(directory)
    for path, manifest in found:
        if manifest.step == step:
            fault = paths.persistently(functools.partial(commit.verify, path, manifest))
            if fault is None:
                return path, manifest
            raise CheckpointError(f"The checkpoint {path} is damaged: {fault}.")
    for path, error in faults.items():
        if commit.step_of(path) == step:
            raise error
    raise CheckpointError(
        f"There is no good checkpoint of step {step} in {directory}; there are "
        f"{[m.step for _, m in found] or 'none'}."
    )


def awaited(
    directory: AnyPath,
    step: int,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[AnyPath, Manifest]:
    """The checkpoint of `step`, which the chief sees undamaged; waits until this worker sees it, too.

    Raises ReadError if it does not within `VISIBLE_SECS`.
    """
    until, told = clock() + VISIBLE_SECS, False
    while True:
        try:
            return of_step(directory, step)
        except CheckpointError as e:
            if clock() >= until:
                raise ReadError(
                    f"The chief restores the checkpoint of step {step}, and this worker has not seen it "
                    f"within {VISIBLE_SECS:g} s: {str(e).rstrip('.')}. All workers must see the same "
                    "model_dir: put it on shared storage."
                ) from e
            if not told:
                _log.warning("Waiting for the checkpoint that the chief restores: %s", e)
                told = True
            sleep(_POLL_SECS)


def newest_of_workers(agreement: HostAllReduce, topology: Topology, directory: AnyPath) -> list[int]:
    """Returns the step of the newest checkpoint that each worker sees, -1 for none. All workers call it."""
    steps = np.zeros(agreement.num_workers)
    steps[topology.worker_index] = _newest_step(directory) + 1
    return [int(step) - 1 for step in agreement.sum(steps)]


def check_sees_newest(
    directory: AnyPath,
    steps: Sequence[int],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Raises UsageError, on the chief, if another worker sees a newer checkpoint for `VISIBLE_SECS`.

    A network file system may show it some time later. A directory that is not shared never does; without
    this check, a chief on another host than before would begin at step 0.

    Args:
      steps: The result of `newest_of_workers`.
    """
    until, newest = clock() + VISIBLE_SECS, max(steps)
    while (visible := _newest_step(directory)) < newest:
        if clock() >= until:
            workers = ", ".join(f"worker {i} at step {s}" for i, s in enumerate(steps) if s > visible)
            newest_here = f"its newest checkpoint at step {visible}" if visible >= 0 else "no checkpoint"
            raise UsageError(
                f"The chief finds {newest_here} in {directory}, {workers}. All workers must see the same "
                "model_dir: put it on shared storage. To begin without these checkpoints, give another "
                "--model_dir."
            )
        sleep(_POLL_SECS)


def _newest_step(directory: AnyPath) -> int:
    try:
        checkpoints, _ = commit.survey(directory)
    except OSError:  # as before the first save
        return -1
    return max((manifest.step for _, manifest in checkpoints), default=-1)


def checksum_of(manifest: Manifest) -> int:
    """Returns a checksum of the files of a checkpoint."""
    return zlib.crc32(json.dumps(dict(manifest.files), sort_keys=True).encode())


def chosen_by_chief(
    agreement: HostAllReduce,
    place: Topology,
    choose: Callable[[], int | None],
    take: Callable[[int], T],
    checksum: Callable[[Any], int],
) -> T | None:
    """Returns the result of `take` for the number >= 0 that the chief chooses, on every worker.

    All workers must call it. Where `choose` or `take` raises a CtlError on one of them, every one raises
    one, with the same exit code.

    Args:
      agreement: sums over the workers.
      place: of this worker.
      choose: called on the chief. Returns None if there is no checkpoint; then the result is None.
      take: called on every worker with the chosen number.
      checksum: of a result. Workers with another one than the chief raise UsageError, as all do then.
    """
    choice, failure, taken = 0, None, None
    try:
        chosen = choose() if place.is_chief else None
        choice = 0 if chosen is None else chosen + 1
    except CtlError as e:
        failure = e
    choice, own_checksum = int(agreement.sum([float(choice)])[0]), 0
    try:
        taken = take(choice - 1) if choice and failure is None else None
        own_checksum = 0 if taken is None else checksum(taken)
    except CtlError as e:
        failure = e
    endings = np.zeros([2, agreement.num_workers])
    endings[0, place.worker_index] = 0 if failure is None else failure.exit_code
    endings[1, place.worker_index] = own_checksum
    codes, checksums = np.rint(agreement.sum(endings.ravel())).reshape(endings.shape)
    if failure is not None:
        raise failure
    if codes.any():
        first = int(np.flatnonzero(codes)[0])
        other = CheckpointError(f"Worker {first} could not restore a checkpoint; its log tells why.")
        other.exit_code = int(codes[first])
        raise other
    different = [f"worker {i}" for i in np.flatnonzero(checksums != checksums[0])]
    if different:
        raise UsageError(
            f"The chief and {', '.join(different)} read different checkpoints. All workers must read the "
            "same files: put the directory on shared storage, or name a checkpoint such as .../ckpt-500."
        )
    return taken
