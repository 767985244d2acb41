"""Where checkpoints go: a manager with two methods, called by every worker at the same step.

    class CheckpointManager(Protocol):
        def save(self, state, manifest): ...       # -> where it is, or None
        def restore(self, state, step=None): ...   # -> its Manifest, or None if there is none

*When* to save is an `Every`, *what to keep* is a `Keep`, *how to write* is a manager.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Protocol, runtime_checkable

from ctl.errors import CheckpointError

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What is known about a checkpoint besides its tensors; `manifest.json` is this as JSON.

    Attributes:
      step: completed steps.
      created: Unix time, seconds.
      variables: name -> {"shape": [...], "dtype": "float32"}.
      files: file name -> {"size": bytes, "checksum": "sha256:..."}.
      world: {"workers": n, "replicas": n, "strategy": word, "global_batch_size": examples}.
      data: {"mode": "indexed", "skip" or "iterator", "examples": consumed since the start, "seed": n,
        "source": words}.
      metrics: the newest evaluation at this step, name -> mean; empty if there was none.
      state: JSON-able state of the loop's parts, by part.
      config: settings of the run, name -> value; what may differ is checked when a run goes on.
      versions: {"ctl": ..., "tensorflow": ...}.
      format: of this file; a newer one is refused.
    """

    step: int
    created: float
    variables: Mapping[str, Mapping] = field(default_factory=dict)
    files: Mapping[str, Mapping] = field(default_factory=dict)
    world: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    format: int = FORMAT

    def with_files(self, files: Mapping[str, Mapping]) -> "Manifest":
        """The same with the list of files that were written."""
        return replace(self, files=files)

    def to_json(self) -> str:
        """Text for `manifest.json`; numbers keep every digit."""
        content = asdict(self)
        return json.dumps({**content, "checksum": _checksum(content)}, indent=1, sort_keys=True)

    @staticmethod
    def from_json(text: str, where: str) -> "Manifest":
        """Reads `manifest.json`; raises CheckpointError naming `where` if it cannot be used."""
        try:
            content = json.loads(text)
            written = content.pop("checksum")
            version = content["format"]
            if written != _checksum(content):
                raise ValueError("its checksum is another than when it was written")
            known = {f.name for f in fields(Manifest)}
            manifest = Manifest(**{k: v for k, v in content.items() if k in known})
            if not isinstance(manifest.step, int) or manifest.step < 0:
                raise ValueError(f"step {manifest.step!r}")
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise CheckpointError(f"{where} is damaged: {e!r}.") from None
        if version > FORMAT:
            raise CheckpointError(
                f"{where} has format {version}; this version of ctl reads up to {FORMAT}. "
                "Use the version that wrote it, or a newer one."
            )
        return manifest


def _checksum(content: dict) -> str:
    text = json.dumps(content, sort_keys=True)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


@runtime_checkable
class CheckpointManager(Protocol):
    """Keeps states of a run and brings them back."""

    def save(self, state: Any, manifest: Manifest) -> str | None:
        """Keeps `state` (a `ctl.state.State`); returns where, on the process that wrote it.

        Every worker calls this at the same step: some variables are summed over workers to be read.
        """
        ...

    def restore(self, state: Any, step: int | None = None) -> Manifest | None:
        """Brings back the newest state (or that of `step`), all of it or nothing.

        Returns None, and changes nothing, if there is none. Raises CheckpointError if what is there
        cannot be read or is of another model.
        """
        ...


class NullCheckpoints:
    """Keeps nothing."""

    def save(self, state: Any, manifest: Manifest) -> str | None:
        return None

    def restore(self, state: Any, step: int | None = None) -> Manifest | None:
        if step is not None:
            raise CheckpointError(f"There is no checkpoint of step {step}: nothing is kept here.")
        return None
