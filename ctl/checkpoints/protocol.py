"""Base class of checkpoint managers, and the manifest of a checkpoint.

`ctl.Every` defines when to save, `ctl.Keep` which checkpoints to keep. A manager writes and restores them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from ctl.callbacks.best_value import smaller_is_better
from ctl.checkpoints.checksums import CRC32C, compute_checksum
from ctl.errors import CheckpointError
from ctl.io.paths import AnyPath

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Description of a checkpoint, without its tensors. It is saved as `manifest.json`.

    Attributes:
      step: Number of completed steps.
      created: Unix time (seconds).
      variables: Name -> {"shape": [...], "dtype": "float32"}.
      keys: Name -> key of the tensor in the TensorFlow checkpoint. Variables without one key are absent.
      paths: Name -> full path, see `tracked_state.TrackedState`; empty in older checkpoints.
      files: File name -> {"size": bytes, "checksum": "crc32c:..."}.
      world: {"workers": n, "replicas": n, "strategy": name, "global_batch_size": examples,
        "network": fields of `collectives.transfer_costs.NetworkCosts`}.
      data: {"mode": "indexed", "skip" or "iterator", "examples": consumed since the start, "seed": n,
        "source": description}.
      metrics: Name -> mean of the newest evaluation at this step; empty without an evaluation.
      state: State of parts of the loop as JSON values, by part.
      config: Settings of the run, name -> value. `training/resume_checks.py` compares them at a resume.
      versions: {"ctl": ..., "tensorflow": ...}.
      format: Version of the file format. Newer versions than `FORMAT` are rejected.
    """

    step: int
    created: float
    variables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    paths: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    world: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    format: int = FORMAT

    def with_files(self, files: Mapping[str, Mapping[str, Any]]) -> "Manifest":
        """Returns a copy with another list of files."""
        return replace(self, files=files)

    def to_json(self) -> str:
        """Returns the text of `manifest.json`. Numbers keep all digits."""
        content = asdict(self)
        return json.dumps({**content, "checksum": _checksum(content)}, indent=1, sort_keys=True)

    @staticmethod
    def from_json(text: str, where: str) -> "Manifest":
        """Parses the text of `manifest.json`.

        Args:
          text: Content of the file.
          where: Path of the file, for messages.

        Raises:
          CheckpointError: If the manifest is damaged, or has a newer format.
        """
        try:
            content = json.loads(text)
            checksum, version = content.pop("checksum"), content["format"]
            if not isinstance(checksum, str) or checksum != _checksum(content, like=checksum):
                raise ValueError("wrong checksum")
            names = {f.name for f in fields(Manifest)}
            manifest = Manifest(**{k: v for k, v in content.items() if k in names})
            if not _is_whole_number(version):
                raise ValueError(f"format {version!r}")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise CheckpointError(f"{where} is damaged: {e!r:.300}.") from None
        if version > FORMAT:
            raise CheckpointError(
                f"{where} has format {version}; this version of ctl reads up to {FORMAT}. "
                "Use the version that wrote it, or a newer one."
            )
        if invalid := _invalid_fields(manifest):
            raise CheckpointError(f"{where} is damaged: invalid values of {', '.join(invalid)}.")
        return manifest


def _checksum(content: dict, like: str = CRC32C) -> str:
    return compute_checksum([json.dumps(content, sort_keys=True).encode()], like)


def _invalid_fields(manifest: Manifest) -> list[str]:
    """Returns the names of the attributes with a value of a wrong type or range."""

    def is_mapping_of(value: Any, is_valid: Callable[[Any], bool]) -> bool:
        return isinstance(value, Mapping) and all(is_valid(v) for v in value.values())

    is_valid_by_name = {
        "step": _is_whole_number(manifest.step),
        "created": _is_number(manifest.created),
        "variables": is_mapping_of(manifest.variables, _is_spec),
        "keys": is_mapping_of(manifest.keys, lambda v: isinstance(v, str)),
        "paths": is_mapping_of(manifest.paths, lambda v: isinstance(v, str)),
        "files": is_mapping_of(manifest.files, _is_file) and all(_is_file_name(n) for n in manifest.files),
        "metrics": is_mapping_of(manifest.metrics, _is_number),
    }
    for name in ("world", "data", "state", "versions"):
        is_valid_by_name[name] = isinstance(getattr(manifest, name), Mapping)
    return [name for name, is_valid in is_valid_by_name.items() if not is_valid]


def _is_whole_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, (int, float)) and float(value) is not None
    except OverflowError:
        return False


def _is_spec(value: Any) -> bool:
    has_shape = isinstance(value, Mapping) and isinstance(value.get("shape"), list)
    return (
        has_shape
        and all(d is None or _is_whole_number(d) for d in value["shape"])
        and isinstance(value.get("dtype"), str)
    )


def _is_file(value: Any) -> bool:
    checksum = value.get("checksum") if isinstance(value, Mapping) else None
    return isinstance(checksum, str) and checksum != "" and _is_whole_number(value.get("size"))


def _is_file_name(name: str) -> bool:
    """Returns True for a name without directories."""
    return name not in ("", ".", "..") and not set(name) & set("/\\\0")


class CheckpointManager:
    """Base class of checkpoint managers. Subclasses define `save` and `restore`.

    Every worker calls the methods at the same step; only the chief calls `choose` and `amend`. Methods
    other than `save` and `restore` are no-ops by default.

    Attributes:
      directory: Directory of the checkpoints, a local path or a URL. None for other kinds of storage.
      is_temporary: True if the checkpoints are deleted when the run has succeeded.
      is_shared: If True, all workers restore the step that `choose` returns on the chief. Otherwise each
        worker restores the newest state that it finds, and different steps end the run with an error.
    """

    directory: AnyPath | None = None
    is_temporary = False
    is_shared = False

    def save(self, state: Any, manifest: Manifest) -> str | None:
        """Saves a state.

        Args:
          state: A `ctl.checkpoints.tracked_state.TrackedState`. All workers must read its variables,
            because some are sums over workers.
          manifest: Description of the checkpoint.

        Returns:
          The path on the process that has written it, otherwise None.
        """
        raise NotImplementedError

    def restore(self, state: Any, step: int | None = None) -> Manifest | None:
        """Restores a state completely, or raises an error before any variable changes.

        Args:
          state: A `ctl.checkpoints.tracked_state.TrackedState`.
          step: Step to restore; None for the newest.

        Returns:
          The manifest, or None if `step` is None and there is no checkpoint.

        Raises:
          CheckpointError: If the checkpoint does not exist, cannot be read or belongs to another model.
        """
        raise NotImplementedError

    def choose(self) -> int | None:
        """Returns the step that all workers restore, or None if there is none."""
        return None

    def begin(self, state: Any, on_saved: Callable[[int, str], None]) -> None:
        """Prepares for the saves of a run, after all workers have restored.

        Args:
          state: A `ctl.checkpoints.tracked_state.TrackedState`.
          on_saved: Function to call with step and path when a background save is complete.
        """

    def finish(self) -> None:
        """Waits for background saves, after the last step or an error.

        Raises the error of the newest save.
        """

    def fence(self, check: Callable[[], None]) -> None:
        """Sets a function to call before each commit. It raises if another job has taken model_dir over."""

    def amend(self, step: int, metrics: Mapping[str, float], state: Mapping[str, Any]) -> bool:
        """Adds an evaluation to the manifest of a saved step. Returns False if this is not possible.

        Args:
          step: The saved step.
          metrics: Name -> mean.
          state: New value of `Manifest.state`.
        """
        return False

    def succeeded(self, state: Any) -> None:
        """Handles the end of a run that has reached its last step and saved it."""

    def steps(self) -> Sequence[int]:
        """Returns the steps of the saved states, ascending."""
        return ()

    @property
    def best_metric(self) -> str | None:
        """Name of the metric by which the best checkpoint is kept, or None."""
        return None

    def is_better(self, value: float, other: float) -> bool:
        """Returns True if a newer value of `best_metric` replaces another one."""
        return value <= other if smaller_is_better(self.best_metric or "") else value >= other


class NullCheckpoints(CheckpointManager):
    """A manager that does not save."""

    def save(self, state: Any, manifest: Manifest) -> str | None:
        """Returns None."""
        return None

    def restore(self, state: Any, step: int | None = None) -> Manifest | None:
        """Returns None, or raises CheckpointError for an explicit step."""
        if step is not None:
            raise CheckpointError(f"There is no checkpoint of step {step}: this run does not save any.")
        return None
