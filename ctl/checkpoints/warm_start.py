"""Beginning with the variables of another run's model; its step and its optimizer are left there."""

import errno
import functools
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from ctl.checkpoints import commit, name_matching, restoring, tensor_files
from ctl.checkpoints.protocol import Manifest
from ctl.checkpoints.tracked_state import TrackedState
from ctl.distribute.host_allreduce import HostAllReduce
from ctl.errors import CheckpointError, ReadError, UsageError
from ctl.io import paths
from ctl.io.paths import AnyPath

_MOST_LINES = 20
_log = logging.getLogger("ctl")


class _Loaded(NamedTuple):
    """A checkpoint, and what in it belongs to variables of this model."""

    path: AnyPath
    manifest: Manifest
    pairs: dict[str, str]  # name here -> name there
    reasons: dict[str, str | None]  # name here -> why it is not loaded, or None
    values: dict[str, Any]


def load(
    where: str, state: TrackedState, models: Sequence[str], agreement: HostAllReduce | None = None
) -> list[str]:
    """Gives variables of `models` the values of those of equal path, shape and dtype; returns names.

    Args:
      where: `.../ckpt-10`, or a directory of such, or a model_dir: then the newest good one that the chief
        sees, on all workers.
      models: names of the trainer's attributes with the models to load.
      agreement: sums over the workers; None for a single process.

    All workers must call it. Raises UsageError if there is no checkpoint or workers read different ones,
    ReadError for a transient read error, CheckpointError if the checkpoint is damaged, or if no variable or
    several variables match. After an error all variables keep their values, on all workers.
    """
    if agreement is None or agreement.num_workers == 1:
        loaded = _loaded(*newest_good(where), state, models)
    else:
        loaded = _loaded_together(where, state, models, agreement)
    for name, value in loaded.values.items():
        state.variables[name].assign(value)
    if state.topology.is_chief:
        _say(loaded, models)
    return list(loaded.values)


def _loaded_together(
    where: str, state: TrackedState, models: Sequence[str], agreement: HostAllReduce
) -> _Loaded:
    """On every worker from the checkpoint that the chief chooses; where one fails, every one raises."""
    given = paths.path(where)
    directories = _directories(given)
    found: list[tuple[AnyPath, Manifest]] = []

    def choose() -> int:
        path, manifest = newest_good(where)
        found.append((path, manifest))
        places = [i for i, d in enumerate(directories) if path.parent == d and path != given]
        return manifest.step * 3 + (places[0] + 1 if places else 0)

    def take(choice: int) -> _Loaded:
        step, place = divmod(choice, 3)
        if not found and place:
            found.append(restoring.awaited(directories[place - 1], step))
        return _loaded(*(found[0] if found else newest_good(where)), state, models)

    loaded = restoring.chosen_by_chief(
        agreement, state.topology, choose, take, lambda result: restoring.checksum_of(result.manifest)
    )
    assert loaded is not None  # `choose` always chooses
    return loaded


def _loaded(path: AnyPath, manifest: Manifest, state: TrackedState, models: Sequence[str]) -> _Loaded:
    """Reads what matches; changes nothing."""
    wanted = {n: s for n, s in state.spec().items() if n.split("/")[0] in models}
    pairs = _pairs(path, state, manifest, wanted)
    reasons = {name: _reason(pairs.get(name, ""), spec, manifest) for name, spec in wanted.items()}
    matching = [name for name, reason in reasons.items() if reason is None]
    if not matching:
        raise CheckpointError(
            f"--init_from {path} has nothing for this model: no variable of {', '.join(models)} is "
            f"there with its name and shape.{_listed(reasons)}\nGive the checkpoint of a model whose "
            "variables have these names."
        )
    keys = {name: manifest.keys[pairs[name]] for name in matching}
    return _Loaded(path, manifest, pairs, reasons, paths.persistently(lambda: _read(path, keys)))


def _read(path: AnyPath, keys: dict[str, str]) -> dict[str, Any]:
    """Name -> value of its tensor, all or nothing."""
    try:
        with tensor_files.state_prefix(path) as prefix:
            reader = tf.train.load_checkpoint(prefix)
            return {name: reader.get_tensor(key) for name, key in keys.items()}
    except Exception as e:
        cause = tensor_files.file_error(e) if isinstance(e, tf.errors.OpError) else e
        if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
            failed = ReadError(f"--init_from {path} cannot be read: {cause.strerror or cause}")
            failed.errno = errno.EIO
            raise failed from e
        raise CheckpointError(f"--init_from {path} cannot be read: {e}") from e


def _pairs(path: AnyPath, state: TrackedState, manifest: Manifest, wanted: Iterable[str]) -> dict[str, str]:
    """Name here -> name in the checkpoint; raises CheckpointError where that is not clear."""
    here = {name: state.paths[name] for name in wanted}
    there = dict(manifest.paths)
    if not there:  # written before paths were: names without any number, counted with "#"
        there = {name: name.replace("#", "~") for name in manifest.variables}
        here = {name: name.replace("#", "~") for name in here}
        _refuse_numbered(path, state, here)
    try:
        return name_matching.matching_names(here, there)
    except name_matching.Ambiguous as e:
        raise CheckpointError(
            f"--init_from {path}: it is not clear which variable is which: {e}. Give the layers names of "
            "their own in both models, keras.layers.Dense(..., name='head')."
        ) from None


def _refuse_numbered(path: AnyPath, state: TrackedState, here: Iterable[str]) -> None:
    """An older checkpoint does not say which of the layers that a user numbered is which."""
    numbered = [state.paths[name] for name in here if re.search(r"_\d+(?=[/_]|$)", state.paths[name])]
    if numbered:
        raise CheckpointError(
            f"--init_from {path} was written by a version of ctl that left numbers out of names, and this "
            f"model has {numbered[0]}. Resume that run for a step with this version, and give the "
            "checkpoint that it saves."
        )


def newest_good(where: str) -> tuple[AnyPath, Manifest]:
    """The checkpoint `where`, or the newest undamaged one in it; see `load` for what is raised."""
    given = paths.path(where)
    try:
        found = paths.persistently(lambda: _newest_good(given))
    except OSError as e:
        if isinstance(e, ReadError):
            raise
        failed = ReadError(f"--init_from {where} cannot be read: {e.strerror or e}.")
        failed.errno = e.errno
        raise failed from e
    except CheckpointError as e:
        raise CheckpointError(f"--init_from {where} is damaged: {e}") from e
    if found is None:
        raise UsageError(
            f"--init_from is {where!r}, where no checkpoint is; expected a directory such as "
            "runs/a/checkpoints/ckpt-500, or the model_dir of a run."
        )
    return found


def _newest_good(given: AnyPath) -> tuple[AnyPath, Manifest] | None:
    if commit.step_of(given) >= 0 or (given / commit.MANIFEST).exists():
        if not given.is_dir():
            return None
        manifest = paths.persistently(functools.partial(commit.read_manifest, given))
        fault = paths.persistently(functools.partial(commit.verify, given, manifest))
        if fault is not None:
            raise CheckpointError(fault)
        return given, manifest
    for directory in _directories(given):
        choice = restoring.newest_checkpoint(directory)
        if choice is not None:
            return choice.path, choice.manifest
    return None


def _directories(given: AnyPath) -> tuple[AnyPath, AnyPath]:
    """Where checkpoints are, if `given` is a model_dir, or a directory of checkpoints."""
    return given / "checkpoints", given


def _reason(name: str, spec: dict, manifest: Manifest) -> str | None:
    """Why a variable is not loaded, or None."""
    there = manifest.variables.get(name)
    if there is None:
        return "not in the checkpoint"
    if dict(there) != spec:
        return f"{there['dtype']}{there['shape']} in the checkpoint, {spec['dtype']}{spec['shape']} here"
    return None if name in manifest.keys else "the checkpoint does not say where it is"


def _say(loaded: _Loaded, models: Sequence[str]) -> None:
    path, manifest, pairs, reasons, _ = loaded
    left = {n: r for n, r in reasons.items() if r is not None}
    used = set(pairs.values())
    unused = [n for n in manifest.variables if n.split("/")[0] in models and n not in used]
    left |= dict.fromkeys((manifest.paths.get(n, n) for n in unused), "only in the checkpoint")
    _log.info(
        "Beginning with %d of %d variables of %s (step %d), not its step nor its optimizer.%s",
        len(reasons) - sum(r is not None for r in reasons.values()),
        len(reasons),
        path,
        manifest.step,
        _listed(left),
    )


def _listed(reasons: Mapping[str, str | None]) -> str:
    lines = [f"\n  not loaded: {name}: {reason}" for name, reason in reasons.items()]
    more = [f"\n  ... and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
    return "".join(lines[:_MOST_LINES] + more)
