"""Beginning with the variables of another run's model; its step and its optimizer are left there."""

import logging
from collections.abc import Sequence

import tensorflow as tf
from ctl import files
from ctl.checkpoints import commit
from ctl.checkpoints.protocol import Manifest
from ctl.errors import CheckpointError, UsageError
from ctl.files import AnyPath
from ctl.state import State

_MOST_LINES = 20
_log = logging.getLogger("ctl")


def load(where: str, state: State, models: Sequence[str]) -> list[str]:
    """Gives variables of `models` the values of those of equal name, shape and dtype; returns names.

    Args:
      where: `.../ckpt-10`, or a directory of such, or a model_dir: then its newest good one.
      models: names of the trainer's attributes whose variables may be given.

    All workers must call it. Raises UsageError if there is no checkpoint, CheckpointError if it cannot
    be read or nothing in it matches; then nothing is changed.
    """
    path, manifest = newest_good(where)
    wanted = {n: s for n, s in state.spec().items() if n.split("/")[0] in models}
    reasons = {name: _reason(name, spec, manifest) for name, spec in wanted.items()}
    matching = [name for name, reason in reasons.items() if reason is None]
    if not matching:
        raise CheckpointError(
            f"--init_from {path} has nothing for this model: no variable of {', '.join(models)} is "
            f"there with its name and shape.{_listed(reasons)}\nGive the checkpoint of a model whose "
            "variables have these names."
        )
    try:
        reader = tf.train.load_checkpoint(str(path / commit.STATE))
        values = {name: reader.get_tensor(manifest.keys[name]) for name in matching}
    except Exception as e:
        raise CheckpointError(f"--init_from {path} cannot be read: {e}") from e
    for name, value in values.items():
        state.variables[name].assign(value)
    if state.placement.is_chief:
        _say(path, manifest, models, matching, reasons)
    return matching


def newest_good(where: str) -> tuple[AnyPath, Manifest]:
    """The checkpoint `where`, or the newest undamaged one in it; see `load` for what is raised."""
    given = files.path(where)
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
            manifest = commit.read_manifest(path)
            fault = commit.verify(path, manifest)
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
        paths = [p for p, _ in commit.scan(directory)] or commit.uncommitted(directory)
        if paths:
            return paths
    return []


def _reason(name: str, spec: dict, manifest: Manifest) -> str | None:
    """Why a variable is not loaded, or None."""
    there = manifest.variables.get(name)
    if there is None:
        return "not in the checkpoint"
    if dict(there) != spec:
        return (
            f"{there['dtype']}{there['shape']} in the checkpoint, {spec['dtype']}{spec['shape']} here"
        )
    return None if name in manifest.keys else "the checkpoint does not say where it is"


def _say(path: AnyPath, manifest: Manifest, models: Sequence[str], matching, reasons) -> None:
    left = {n: r for n, r in reasons.items() if r is not None}
    unused = [n for n in manifest.variables if n.split("/")[0] in models and n not in reasons]
    left |= dict.fromkeys(unused, "only in the checkpoint")
    _log.info(
        "Beginning with %d of %d variables of %s (step %d), not its step nor its optimizer.%s",
        len(matching), len(reasons), path, manifest.step, _listed(left),
    )  # fmt: skip


def _listed(reasons: dict[str, str | None]) -> str:
    lines = [f"\n  not loaded: {name}: {reason}" for name, reason in reasons.items()]
    more = [f"\n  ... and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
    return "".join(lines[:_MOST_LINES] + more)
