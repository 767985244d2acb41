"""Base class of checkpoint managers, and the manifest of a checkpoint.

`ctl.Every` says when to save and `ctl.Keep` which checkpoints to keep; a manager writes and restores them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from ctl.checkpoints import checksums
from ctl.errors import CheckpointError
from ctl.io.paths import AnyPath

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Description of a checkpoint, without its tensors. It is saved as `manifest.json`.

    Attributes:
      step: completed steps.
      created: Unix time, seconds.
      variables: name -> {"shape": [...], "dtype": "float32"}.
      keys: name -> key of its tensor in the TensorFlow checkpoint, if it is known.
      paths: name -> full path, see `tracked_state.TrackedState`; empty in older checkpoints.
      files: file name -> {"size": bytes, "checksum": "crc32c:..."}.
      world: {"workers": n, "replicas": n, "strategy": word, "global_batch_size": examples}.
      data: {"mode": "indexed", "skip" or "iterator", "examples": consumed since the start, "seed": n,
        "source": description}.
      metrics: newest evaluation at this step, name -> mean; empty if there was none.
      state: state of parts of the loop as JSON values, by part.
      config: settings of the run, name -> value; `training/resume.py` compares them when a run resumes.
      versions: {"ctl": ..., "tensorflow": ...}.
      format: version of the file format; a newer one is refused.
    """

    step: int
    created: float
    variables: Mapping[str, Mapping] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    paths: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Mapping] = field(default_factory=dict)
    world: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    format: int = FORMAT

    def with_files(self, files: Mapping[str, Mapping]) -> "Manifest":
        """Returns a copy with another list of files."""
        return replace(self, files=files)

    def to_json(self) -> str:
        """Returns the text of `manifest.json`. Numbers keep all digits."""
        content = asdict(self)
        return json.dumps({**content, "checksum": _checksum(content)}, indent=1, sort_keys=True)

    @staticmethod
    def from_json(text: str, where: str) -> "Manifest":
        """Returns the manifest of a text; raises CheckpointError, with the path `where`, if it has none."""
        try:
            content = json.loads(text)
            written, version = content.pop("checksum"), content["format"]
            if not isinstance(written, str) or written != _checksum(content, like=written):
                raise ValueError("its checksum is another than when it was written")
            names = {f.name for f in fields(Manifest)}
            manifest = Manifest(**{k: v for k, v in content.items() if k in names})
            if not _is_whole(version):
                raise ValueError(f"format {version!r}")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise CheckpointError(f"{where} is damaged: {e!r:.300}.") from None
        if version > FORMAT:
            raise CheckpointError(
                f"{where} has format {version}; this version of ctl reads up to {FORMAT}. "
                "Use the version that wrote it, or a newer one."
            )
        if wrong := _wrong_parts(manifest):
            raise CheckpointError(f"{where} is damaged: its {', '.join(wrong)} cannot be used.")
        return manifest


def _checksum(content: dict, like: str = checksums.KIND) -> str:
    return checksums.of([json.dumps(content, sort_keys=True).encode()], like)


def _wrong_parts(manifest: Manifest) -> list[str]:
    """Returns the names of the attributes with a wrong type."""

    def table(value: Any, good: Any) -> bool:
        return isinstance(value, Mapping) and all(good(v) for v in value.values())

    checks = {
        "step": _is_whole(manifest.step),
        "created": _is_number(manifest.created),
        "variables": table(manifest.variables, _is_spec),
        "keys": table(manifest.keys, lambda v: isinstance(v, str)),
        "paths": table(manifest.paths, lambda v: isinstance(v, str)),
        "files": table(manifest.files, _is_file) and all(_is_name(n) for n in manifest.files),
        "metrics": table(manifest.metrics, _is_number),
    }
    parts = ("world", "data", "state", "versions")
    checks |= {n: isinstance(getattr(manifest, n), Mapping) for n in parts}
    return [name for name, good in checks.items() if not good]


def _is_whole(value: Any) -> bool:
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
        and all(d is None or _is_whole(d) for d in value["shape"])
        and isinstance(value.get("dtype"), str)
    )


def _is_file(value: Any) -> bool:
    has_checksum = isinstance(value, Mapping) and isinstance(value.get("checksum"), str)
    return has_checksum and _is_whole(value.get("size"))


def _is_name(name: str) -> bool:
    """Returns True for the name of a file within the directory."""
    return name not in ("", ".", "..") and not set(name) & set("/\\\0")


class CheckpointManager:
    """Saves states of a run and restores them. Subclasses define `save` and `restore`.

    Every worker calls the methods at the same step; only the chief calls `choose` and `amend`. The methods
    other than `save` and `restore` do nothing by default.

    Attributes:
      directory: of the checkpoints, a local path or a URL; None where they are not in a directory.
      is_temporary: the checkpoints are deleted when the run has succeeded.
      is_shared: all workers restore the step that `choose` returns on the chief. Otherwise each worker
        restores the newest state that it finds, and the run ends with an error if their steps differ.
    """

    directory: AnyPath | None = None
    is_temporary = False
    is_shared = False

    def save(self, state: Any, manifest: Manifest) -> str | None:
        """Saves `state`; returns its path on the process that wrote it.

        Args:
          state: a `ctl.checkpoints.tracked_state.TrackedState`. Some of its variables are sums over
            workers, so that all workers have to read them.
        """
        raise NotImplementedError

    def restore(self, state: Any, step: int | None = None) -> Manifest | None:
        """Restores the newest state, or that of `step`, completely or not at all.

        Returns None, and changes nothing, if there is none. Raises CheckpointError if the checkpoint cannot
        be read or belongs to another model.
        """
        raise NotImplementedError

    def choose(self) -> int | None:
        """Returns the step that all workers restore, or None if there is none."""
        return None

    def begin(self, state: Any, on_saved: Callable[[int, str], None]) -> None:
        """Prepares for the saves of a run, after all workers have restored.

        Args:
          on_saved: to be called with step and path when a save in the background is complete.
        """

    def finish(self) -> None:
        """Waits for saves in the background, after the last step or an error.

        Raises the error of the newest save.
        """

    def fence(self, check: Callable[[], None]) -> None:
        """Accepts a function to call before each commit.

        It raises if another job has taken model_dir over.
        """

    def amend(self, step: int, metrics: Mapping[str, float], state: Mapping[str, Any]) -> bool:
        """Adds an evaluation to the manifest of a step that was saved; returns whether it did so."""
        return False

    def succeeded(self, state: Any) -> None:
        """Called when a run has reached its last step and everything is saved."""

    def steps(self) -> Sequence[int]:
        """Returns the steps of the saved states, ascending."""
        return ()

    @property
    def best_metric(self) -> str | None:
        """Name of the metric by which the best checkpoint is kept, or None."""
        return None


class NullCheckpoints(CheckpointManager):
    """Does not save."""

    def save(self, state: Any, manifest: Manifest) -> str | None:
        return None

    def restore(self, state: Any, step: int | None = None) -> Manifest | None:
        if step is not None:
            raise CheckpointError(f"There is no checkpoint of step {step}: nothing is kept here.")
        return None
