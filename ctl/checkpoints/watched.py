"""Read-only access to the checkpoints of another process, for evaluators.

The training process may write to the directory at any time, so files are never changed or deleted here.
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

_DELETED = "it has been deleted"
_log = logging.getLogger("ctl")


class UnusableCheckpoint(CheckpointError):
    """An error for a checkpoint that is deleted or damaged. The next one may be usable."""


class WatchedCheckpoints(CheckpointManager):
    """The committed checkpoints in a directory, which another process saves and deletes.

    Args:
      directory: A local path or a URL.

    Attributes:
      directory: Directory of the checkpoints.
      unread: Error of a checkpoint that the newest call of `committed` left out because it cannot be read
        at present, or None.
    """

    directory: AnyPath

    def __init__(self, directory: str | os.PathLike[str]):
        self.directory = paths.path(directory)
        self._cached_manifests: dict[str, tuple[int, Manifest]] = {}  # with modification times in ns
        self._names_with_warning: set[str] = set()
        self.unread: ReadError | None = None

    def committed(self) -> list[Manifest]:
        """Returns the manifests of the committed checkpoints, ascending by step.

        Reads a manifest only if its modification time has changed.

        Raises:
          ReadError: If the directory cannot be listed at present.
        """
        manifests = {}
        self.unread = None
        for name in self._list_names():
            path = self.directory / name
            try:
                modified = (path / commit.MANIFEST).stat().st_mtime_ns
                cached = self._cached_manifests.get(name)
                manifest = cached[1] if cached and cached[0] == modified else commit.read_manifest(path)
            except OSError as e:
                if not paths.is_permanent_error(e):  # with a permanent error, it is being deleted
                    self.unread = _as_read_error(path, e)
                continue
            except CheckpointError as e:
                self._warn_once(path, e)
                continue
            if name == f"ckpt-{manifest.step}":
                manifests[name] = (modified, manifest)
        self._cached_manifests = manifests
        return sorted((m for _, m in manifests.values()), key=lambda m: m.step)

    def save(self, state: Any, manifest: Manifest) -> str | None:
        """Returns None. Evaluators do not save."""

    def restore(self, state: Any, step: int | None = None) -> Manifest | None:
        """Restores the checkpoint of `step`. Without a step it restores no checkpoint and returns None.

        Raises:
          UnusableCheckpoint: If the checkpoint is deleted or damaged.
          ReadError: If it cannot be read at present.
          CheckpointError: If it belongs to another model.
        """
        if step is None:
            return None
        path = self.directory / f"ckpt-{step}"
        try:
            manifest = paths.call_with_retries(functools.partial(commit.read_manifest, path))
            fault = paths.call_with_retries(functools.partial(commit.find_damage, path, manifest))
        except ReadError:
            if path.exists():
                raise
            manifest, fault = None, _DELETED
        except (OSError, CheckpointError) as e:
            manifest, fault = None, str(e)
        if manifest is None or fault is not None:
            raise UnusableCheckpoint(fault if path.exists() else _DELETED)
        state.check_matches(manifest.variables, str(path))
        try:
            restore_state(state, path, manifest.variables)
        except ReadError as e:
            if path.exists():
                raise
            raise UnusableCheckpoint(_DELETED) from e
        except CheckpointError as e:
            raise UnusableCheckpoint(str(e) if path.exists() else _DELETED) from e
        return manifest

    def _warn_once(self, path: AnyPath, error: CheckpointError) -> None:
        """Logs the first error of a damaged manifest, unless it is being deleted."""
        if path.name not in self._names_with_warning and (path / commit.MANIFEST).exists():
            self._names_with_warning.add(path.name)
            _log.warning("Skipping the damaged checkpoint %s: %s", path, error)

    def _list_names(self) -> list[str]:
        try:
            steps = paths.call_with_retries(lambda: commit.list_steps(self.directory))
        except OSError as e:
            raise _as_read_error(self.directory, e) from e
        return [f"ckpt-{step}" for step in steps]


def _as_read_error(path: AnyPath, error: OSError) -> ReadError:
    return error if isinstance(error, ReadError) else commit.read_error(path, error)
