"""Checkpoints that another process saves and deletes: read here, never touched.

The manager of an evaluator. Its caller decides which step to restore; nothing is swept, deleted or
written, because the directory belongs to a training that is busy in it.
"""

import functools
import logging
import os
from typing import Any

from ctl.checkpoints import commit
from ctl.checkpoints.protocol import CheckpointManager, Manifest
from ctl.checkpoints.snapshot import restore_state
from ctl.errors import CheckpointError, ReadError
from ctl.io import paths
from ctl.io.paths import AnyPath

_log = logging.getLogger("ctl")


class UnusableCheckpoint(CheckpointError):
    """This one is deleted or damaged; the next may be good."""


class WatchedCheckpoints(CheckpointManager):
    """The committed checkpoints in `directory`, as they come and go.

    Attributes:
      unread: why one of them was left out of the newest `committed()`: it cannot be read for now; or None.
    """

    directory: AnyPath

    def __init__(self, directory: str | os.PathLike[str]):
        self.directory = paths.path(directory)
        self._known: dict[str, tuple[int, Manifest]] = {}
        self._told: set[str] = set()
        self.unread: ReadError | None = None

    def committed(self) -> list[Manifest]:
        """Those that are there now, ascending by step; a manifest is read once for each save.

        Raises ReadError where the directory cannot be listed for now.
        """
        found = {}
        self.unread = None
        for name in self._names():
            path = self.directory / name
            try:
                written = (path / commit.MANIFEST).stat().st_mtime_ns
                known = self._known.get(name)
                manifest = known[1] if known and known[0] == written else commit.read_manifest(path)
            except OSError as e:
                if not paths.is_lasting(e):  # else it is being deleted
                    self.unread = _read_error(path, e)
                continue
            except CheckpointError as e:
                self._tell(path, e)
                continue
            if name == f"ckpt-{manifest.step}":
                found[name] = (written, manifest)
        self._known = found
        return sorted((m for _, m in found.values()), key=lambda m: m.step)

    def save(self, state: Any, manifest: Manifest) -> str | None:
        """Saves nothing."""

    def restore(self, state: Any, step: int | None = None) -> Manifest | None:
        """Restores that of `step` and no other; None, and nothing is restored, without a step.

        Raises UnusableCheckpoint if it is gone or damaged, ReadError if it cannot be read for now,
        CheckpointError if it is of another model.
        """
        if step is None:
            return None
        path = self.directory / f"ckpt-{step}"
        try:
            manifest = paths.persistently(functools.partial(commit.read_manifest, path))
            fault = paths.persistently(functools.partial(commit.verify, path, manifest))
        except ReadError:
            if path.exists():
                raise
            manifest, fault = None, "it was deleted meanwhile"
        except (OSError, CheckpointError) as e:
            manifest, fault = None, str(e)
        if manifest is None or fault is not None:
            raise UnusableCheckpoint(fault if path.exists() else "it was deleted meanwhile")
        state.check_matches(manifest.variables, str(path))
        try:
            restore_state(state, path, manifest.variables)
        except ReadError as e:
            if path.exists():
                raise
            raise UnusableCheckpoint("it was deleted meanwhile") from e
        except CheckpointError as e:
            raise UnusableCheckpoint(str(e) if path.exists() else "it was deleted meanwhile") from e
        return manifest

    def _tell(self, path: AnyPath, error: CheckpointError) -> None:
        """Says once that a manifest is damaged, unless it is being deleted."""
        if path.name not in self._told and (path / commit.MANIFEST).exists():
            self._told.add(path.name)
            _log.warning("Passing over the damaged checkpoint %s: %s", path, error)

    def _names(self) -> list[str]:
        try:
            steps = paths.persistently(lambda: commit.steps_listed(self.directory))
        except FileNotFoundError:
            return []
        except OSError as e:
            raise _read_error(self.directory, e) from e
        return [f"ckpt-{step}" for step in steps]


def _read_error(path: AnyPath, error: OSError) -> ReadError:
    if isinstance(error, ReadError):
        return error
    failed = ReadError(f"{path} cannot be read: {error.strerror or error}.")
    failed.errno = error.errno
    return failed
