"""Beginning with the variables of another run's model; its step and its optimizer are left there."""

import errno
import functools
import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf
from ctl.checkpoints import commit, name_matching
from ctl.checkpoints.protocol import Manifest
from ctl.checkpoints.tracked_state import State
from ctl.errors import CheckpointError, ReadError, UsageError
from ctl.io import paths
from ctl.io.paths import AnyPath

_MOST_LINES = 20
_log = logging.getLogger("ctl")


def load(where: str, state: State, models: Sequence[str]) -> list[str]:
    """Gives variables of `models` the values of those of equal path, shape and dtype; returns names.

    Args:
      where: `.../ckpt-10`, or a directory of such, or a model_dir: then its newest good one.
      models: names of the trainer's attributes whose variables may be given.

    All workers must call it. Raises UsageError if there is no checkpoint, CheckpointError if it cannot
    be read, nothing in it matches, or it is not clear what does; then nothing is changed.
    """
    path, manifest = newest_good(where)
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
    values = paths.persistently(lambda: _read(path, keys))
    for name, value in values.items():
        state.variables[name].assign(value)
    if state.placement.is_chief:
        _say(path, manifest, models, pairs, reasons)
    return matching


def _read(path: AnyPath, keys: dict[str, str]) -> dict[str, Any]:
    """Name -> value of its tensor, all or nothing."""
    try:
        reader = tf.train.load_checkpoint(str(path / commit.STATE))
        return {name: reader.get_tensor(key) for name, key in keys.items()}
    except (tf.errors.UnknownError, tf.errors.PermissionDeniedError) as e:
        failed = ReadError(f"--init_from {path} cannot be read: {e.message}")
        failed.errno = errno.EIO
        raise failed from e
    except Exception as e:
        raise CheckpointError(f"--init_from {path} cannot be read: {e}") from e


def _pairs(path: AnyPath, state: State, manifest: Manifest, wanted: Iterable[str]) -> dict[str, str]:
    """Name here -> name in the checkpoint; raises CheckpointError where that is not clear."""
    here = {name: state.paths[name] for name in wanted}
    there = dict(manifest.paths)
    if not there:  # written before paths were: names without any number, counted with "#"
        there = {name: name.replace("#", "~") for name in manifest.variables}
        here = {name: name.replace("#", "~") for name in here}
        _refuse_numbered(path, state, here)
    try:
        return name_matching.pairs(here, there)
    except name_matching.Ambiguous as e:
        raise CheckpointError(
            f"--init_from {path}: it is not clear which variable is which: {e}. Give the layers names of "
            "their own in both models, keras.layers.Dense(..., name='head')."
        ) from None


def _refuse_numbered(path: AnyPath, state: State, here: Iterable[str]) -> None:
    """An older checkpoint does not say which of the layers that a person numbered is which."""
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
        found = _candidates(given)
    except OSError as e:
        raise UsageError(f"--init_from is {where!r}, which cannot be read: {e}.") from None
    if not found:
        raise UsageError(
            f"--init_from is {where!r}, where no checkpoint is; expected a directory such as "
            "runs/a/checkpoints/ckpt-500, or the model_dir of a run."
        )
    damaged = []
    for path in reversed(found):
        try:
            manifest = paths.persistently(functools.partial(commit.read_manifest, path))
            fault = paths.persistently(functools.partial(commit.verify, path, manifest))
        except ReadError:
            raise
        except CheckpointError as e:
            fault = str(e)
        if fault is None:
            return path, manifest
        damaged.append(f"{path.name}: {fault}")
        _log.warning("Passing over the damaged checkpoint %s: %s.", path, fault.rstrip("."))
    raise CheckpointError(f"--init_from {where} is damaged ({'; '.join(damaged)}).")


def _candidates(given: AnyPath) -> list[AnyPath]:
    """Checkpoint directories, oldest first."""
    if commit.step_of(given) >= 0 or (given / commit.MANIFEST).exists():
        return [given] if given.is_dir() else []
    for directory in (given / "checkpoints", given):
        found, faults = commit.survey(directory, paths.persistently)
        if found or faults:
            return [p for p, _ in found] or list(faults)
    return []


def _reason(name: str, spec: dict, manifest: Manifest) -> str | None:
    """Why a variable is not loaded, or None."""
    there = manifest.variables.get(name)
    if there is None:
        return "not in the checkpoint"
    if dict(there) != spec:
        return f"{there['dtype']}{there['shape']} in the checkpoint, {spec['dtype']}{spec['shape']} here"
    return None if name in manifest.keys else "the checkpoint does not say where it is"


def _say(path: AnyPath, manifest: Manifest, models: Sequence[str], pairs: dict, reasons: dict) -> None:
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


def _listed(reasons: dict[str, str | None]) -> str:
    lines = [f"\n  not loaded: {name}: {reason}" for name, reason in reasons.items()]
    more = [f"\n  ... and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
    return "".join(lines[:_MOST_LINES] + more)
