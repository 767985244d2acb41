"""Initialization of models with saved variables, without the step and the optimizer.

The source is a checkpoint of another run, or weights that another program has saved
(`external_weights.py`).
"""

import errno
import functools
import json
import logging
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from ctl.checkpoints import (
    commit,
    external_weights,
    name_matching,
    restoring,
    structure_matching,
    tensor_files,
)
from ctl.checkpoints.external_weights import ExternalWeights
from ctl.checkpoints.protocol import Manifest
from ctl.checkpoints.tracked_state import TrackedState
from ctl.distribute.host_allreduce import HostAllReduce
from ctl.errors import CheckpointError, ReadError, UsageError
from ctl.io import paths
from ctl.io.paths import AnyPath

_MAX_LINES = 20
_log = logging.getLogger("ctl")


class _Loaded(NamedTuple):
    """Values for variables of this model.

    Attributes:
      values: Name in this model -> value.
      checksum: Checksum of the source, equal on all workers that have read the same files.
      message: Lists of matched and unmatched variables for the log.
    """

    values: dict[str, Any]
    checksum: int
    message: str


def load_initial_values(
    source: str, state: TrackedState, models: Sequence[str], agreement: HostAllReduce | None = None
) -> list[str]:
    """Assigns saved values to the matching variables of the models.

    Variables of a checkpoint of ctl match by path, shape and dtype; those of other programs by structure or
    name, and by shape. All workers must call it. After an error all variables keep their values, on all
    workers.

    Args:
      source: `.../ckpt-10`, a directory of checkpoints, or a model_dir. From a directory, all workers load
        the newest undamaged checkpoint of the chief. Or saved weights of another program: the prefix of a
        `tf.train.Checkpoint`, its directory, or a weights file of Keras.
      state: The variables.
      models: Names of the trainer's attributes with the models to initialize.
      agreement: Sums over the workers; None for a single process.

    Returns:
      The names of the variables that were assigned.

    Raises:
      UsageError: If there is no checkpoint, workers read different ones, or no variable of another program
        matches.
      ReadError: If the checkpoint cannot be read at present.
      CheckpointError: If it is damaged, no variable matches, or a match is ambiguous.
    """
    if agreement is None or agreement.num_workers == 1:
        external = external_weights.open_external(source)
        loaded = (
            _load(*find_source(source), state, models)
            if external is None
            else _load_external(external, state, models)
        )
    else:
        loaded = _load_on_all_workers(source, state, models, agreement)
    for name, value in loaded.values.items():
        state.variables[name].assign(value)
    if state.topology.is_chief:
        _log.info("%s", loaded.message)
    return list(loaded.values)


def _load_on_all_workers(
    source: str, state: TrackedState, models: Sequence[str], agreement: HostAllReduce
) -> _Loaded:
    """Loads the checkpoint that the chief chooses. If one worker fails, every worker raises an error."""
    path = paths.path(source)
    directories = _directories(path)
    chosen: list[tuple[AnyPath, Manifest]] = []  # set on the chief, or by `load`

    def choose() -> int:
        """Returns 0 for weights of another program.

        Otherwise returns 1 + step * 3 + the position of the directory, counted from 1, or 0 for `source`
        itself.
        """
        if external_weights.open_external(source) is not None:
            return 0
        chosen.append(find_source(source))
        checkpoint_path, manifest = chosen[0]
        positions = [i for i, d in enumerate(directories) if checkpoint_path.parent == d]
        return 1 + manifest.step * 3 + (positions[0] + 1 if positions and checkpoint_path != path else 0)

    def load(choice: int) -> _Loaded:
        if choice == 0:
            external = external_weights.open_external(source)
            if external is None:
                raise UsageError(
                    f"--init_from is {source!r}, which exists on the chief but not on this worker; "
                    "expected the same files on all workers. Put them on shared storage."
                )
            return _load_external(external, state, models)
        step, position = divmod(choice - 1, 3)
        if not chosen and position:
            chosen.append(restoring.wait_for_checkpoint(directories[position - 1], step))
        return _load(*(chosen[0] if chosen else find_source(source)), state, models)

    loaded = restoring.load_choice_of_chief(
        agreement, state.topology, choose, load, lambda result: result.checksum
    )
    assert loaded is not None  # `choose` never returns None
    return loaded


def _load(path: AnyPath, manifest: Manifest, state: TrackedState, models: Sequence[str]) -> _Loaded:
    """Reads the values of the matching variables, without assigning them."""
    specs = {name: spec for name, spec in state.spec().items() if name.split("/")[0] in models}
    saved_names = _match_names(path, state, manifest, specs)
    reasons = {name: _mismatch(saved_names.get(name, ""), spec, manifest) for name, spec in specs.items()}
    matching = [name for name, reason in reasons.items() if reason is None]
    if not matching:
        raise CheckpointError(
            f"--init_from {path} does not fit this model: no variable of {', '.join(models)} has the same "
            f"name, shape and dtype there.{_listed(reasons)}\nGive the checkpoint of a model whose "
            "variables have these names."
        )
    keys = {name: manifest.keys[saved_names[name]] for name in matching}
    values = paths.call_with_retries(lambda: _read_tensors(path, keys))
    message = _message(path, manifest, saved_names, reasons, models)
    return _Loaded(values, restoring.manifest_checksum(manifest), message)


def _load_external(weights: ExternalWeights, state: TrackedState, models: Sequence[str]) -> _Loaded:
    """Reads the values of the matching variables of another program, without assigning them."""
    names = [n for names in structure_matching.weights_by_model(state, models).values() for n in names]
    try:
        keys = structure_matching.match_weights(weights, state, models)
    except name_matching.Ambiguous as e:
        raise CheckpointError(
            f"--init_from {weights.path}: the variables cannot be matched: {e}. Give the layers unique "
            "names in both models, keras.layers.Dense(..., name='head'), or save the model under the name "
            f"of the trainer's attribute, tf.train.Checkpoint({models[0] if models else 'model'}=...)."
        ) from None
    specs = {name: external_weights.Spec(tuple(v["shape"]), v["dtype"]) for name, v in state.spec().items()}
    unmatched = {name: "not in the checkpoint" for name in names if name not in keys}
    for name, key in list(keys.items()):
        if not specs[name].fits(weights.specs[key]):
            unmatched[name] = f"{weights.specs[key]} in the checkpoint, {specs[name]} in this model"
            del keys[name]
    used = {*keys.values()}
    saved_only = [label for key, label in weights.labels.items() if key not in used]
    if not keys:
        raise UsageError(
            f"--init_from {weights.path} ({weights.description}) does not fit this model: matched 0 of "
            f"{len(names)} variables; expected the same structure or the same names, and equal shapes.\n"
            f"In this model: {_shortened([f'{n} {specs[n]}' for n in names])}\nIn the checkpoint: "
            f"{_shortened([f'{label} {weights.specs[key]}' for key, label in weights.labels.items()])}\n"
            "Build the model that was saved, or give its layers the same names."
        )
    saved = paths.call_with_retries(lambda: weights.read(used))
    values = {name: specs[name].converted(saved[key]) for name, key in keys.items()}
    unmatched |= {label: "only in the checkpoint" for label in saved_only if label not in unmatched}
    not_matched = [f"{name} ({reason})" for name, reason in unmatched.items()]
    matched = [f"{name} from {weights.labels[key]}" for name, key in keys.items()]
    message = (
        f"--init_from {weights.path} ({weights.description}): matched {len(keys)} of {len(names)} "
        f"variables; not matched: {_shortened(not_matched)}\n"
        f"Matched: {_shortened(matched)}"
    )
    checksum = zlib.crc32(json.dumps(sorted(keys.items())).encode())
    for name in sorted(values):
        checksum = zlib.crc32(np.ascontiguousarray(values[name]).tobytes(), checksum)
    return _Loaded(values, checksum, message)


def _shortened(entries: Sequence[str]) -> str:
    suffix = [f"and {len(entries) - _MAX_LINES} more"] if len(entries) > _MAX_LINES else []
    return ", ".join([*entries[:_MAX_LINES], *suffix]) or "none"


def _read_tensors(path: AnyPath, keys: Mapping[str, str]) -> dict[str, Any]:
    """Returns name -> value for name -> key of a tensor."""
    try:
        with tensor_files.state_prefix(path) as prefix:
            reader = tf.train.load_checkpoint(prefix)
            return {name: reader.get_tensor(key) for name, key in keys.items()}
    except Exception as e:
        cause = tensor_files.file_error(e) if isinstance(e, tf.errors.OpError) else e
        if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
            cause = OSError(errno.EIO, cause.strerror or str(cause))  # is retried
            raise commit.read_error(f"--init_from {path}", cause) from e
        raise CheckpointError(f"--init_from {path} cannot be read: {e}") from e


def _match_names(
    path: AnyPath, state: TrackedState, manifest: Manifest, names: Iterable[str]
) -> dict[str, str]:
    """Returns name in this model -> name in the checkpoint. Raises CheckpointError for ambiguous names."""
    model_paths = {name: state.paths[name] for name in names}
    saved_paths = dict(manifest.paths)
    if not saved_paths:  # an older checkpoint: names have no numbers, "#" counts repeated ones
        saved_paths = {name: name.replace("#", "~") for name in manifest.variables}
        model_paths = {name: name.replace("#", "~") for name in model_paths}
        _check_has_no_numbers(path, state, model_paths)
    try:
        return name_matching.matching_names(model_paths, saved_paths)
    except name_matching.Ambiguous as e:
        raise CheckpointError(
            f"--init_from {path}: the variables cannot be matched: {e}. Give the layers unique names in "
            "both models, keras.layers.Dense(..., name='head')."
        ) from None


def _check_has_no_numbers(path: AnyPath, state: TrackedState, names: Iterable[str]) -> None:
    """Raises CheckpointError if the user numbered a layer, because older checkpoints omit the numbers."""
    numbered = [state.paths[name] for name in names if re.search(r"_\d+(?=[/_]|$)", state.paths[name])]
    if numbered:
        raise CheckpointError(
            f"--init_from {path} was written by a version of ctl that omits the numbers in names, and this "
            f"model has {numbered[0]}. Resume that run for one step with this version, and give the "
            "checkpoint that it saves."
        )


def find_source(source: str) -> tuple[AnyPath, Manifest]:
    """Returns the checkpoint `source`, or the newest undamaged one in it (`load_initial_values`)."""
    path = paths.path(source)
    try:
        checkpoint = paths.call_with_retries(lambda: _find_undamaged(path))
    except ReadError:
        raise
    except OSError as e:
        raise commit.read_error(f"--init_from {source}", e) from e
    except CheckpointError as e:
        raise CheckpointError(f"--init_from {source} is damaged: {e}") from e
    if checkpoint is None:
        raise UsageError(
            f"--init_from is {source!r}, which has no checkpoint; expected a directory such as "
            "runs/a/checkpoints/ckpt-500, the model_dir of a run, the prefix of a tf.train.Checkpoint such "
            "as runs/b/ckpt-100, or a weights file of Keras (.weights.h5 or .keras)."
        )
    return checkpoint


def _find_undamaged(path: AnyPath) -> tuple[AnyPath, Manifest] | None:
    if commit.step_of(path) >= 0 or (path / commit.MANIFEST).exists():
        if not path.is_dir():
            return None
        manifest = paths.call_with_retries(functools.partial(commit.read_manifest, path))
        damage = paths.call_with_retries(functools.partial(commit.find_damage, path, manifest))
        if damage is not None:
            raise CheckpointError(damage)
        return path, manifest
    for directory in _directories(path):
        choice = restoring.newest_checkpoint(directory)
        if choice is not None:
            return choice.path, choice.manifest
    return None


def _directories(path: AnyPath) -> tuple[AnyPath, AnyPath]:
    """Returns the directory of the checkpoints if `path` is a model_dir, and if it is that directory."""
    return path / "checkpoints", path


def _mismatch(saved_name: str, spec: dict, manifest: Manifest) -> str | None:
    """Returns the reason why a variable is not loaded, or None."""
    saved = manifest.variables.get(saved_name)
    if saved is None:
        return "not in the checkpoint"
    if dict(saved) != spec:
        saved_spec, model_spec = (f"{s['dtype']}{s['shape']}" for s in (saved, spec))
        return f"{saved_spec} in the checkpoint, {model_spec} in this model"
    return None if saved_name in manifest.keys else "the checkpoint has no key for its tensor"


def _message(
    path: AnyPath,
    manifest: Manifest,
    saved_names: Mapping[str, str],
    reasons: Mapping[str, str | None],
    models: Sequence[str],
) -> str:
    """Returns the message for the log.

    `saved_names` are those in the checkpoint, `reasons` those for which variables are not loaded, or None;
    both by the name in this model.
    """
    not_loaded = {n: r for n, r in reasons.items() if r is not None}
    num_loaded = len(reasons) - len(not_loaded)
    used = set(saved_names.values())
    unused = [n for n in manifest.variables if n.split("/")[0] in models and n not in used]
    not_loaded |= dict.fromkeys((manifest.paths.get(n, n) for n in unused), "only in the checkpoint")
    return (
        f"Loaded {num_loaded} of {len(reasons)} variables from {path} (step {manifest.step}), without its "
        f"step and optimizer.{_listed(not_loaded)}"
    )


def _listed(reasons: Mapping[str, str | None]) -> str:
    lines = [f"\n  not loaded: {name}: {reason}" for name, reason in reasons.items()]
    suffix = [f"\n  ... and {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else []
    return "".join(lines[:_MAX_LINES] + suffix)
