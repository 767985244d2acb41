"""Atomic commits of checkpoint directories.

    ckpt-400/
      state.index, state.data-00000-of-00001    tf.train.Checkpoint(...).read(".../ckpt-400/state")
      manifest.json                             written last; a directory without it is not a checkpoint

If directories can be renamed, files are written to a temporary directory, synced, and renamed. In object
stores they are written in place, and the manifest marks the checkpoint as complete. Listings of object
stores may be outdated. Therefore files are also opened by name, and checkpoints.json lists the committed
checkpoints.
"""

import contextlib
import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ctl.checkpoints.checksums import compute_file_checksum
from ctl.checkpoints.protocol import Manifest
from ctl.errors import CheckpointError, ReadError
from ctl.io import paths
from ctl.io.paths import AnyPath

STATE = "state"
MANIFEST = "manifest.json"
DAMAGED = "damaged"
LISTING = "checkpoints.json"
_NAME = re.compile(r"(replaced-)?ckpt-(0|[1-9]\d*)", re.ASCII)
_TENSOR_FILES = (f"{STATE}.data-00000-of-00001", f"{STATE}.index")
_TEMPORARY = ".tempstate"  # part of the names of files that TensorFlow has not completed
_LEFTOVER = re.compile(r"((tmp|deleted|replaced)-ckpt-\d+(-[0-9a-f]+)?|workertemp_\d+)(_temp)?", re.ASCII)


def write_checkpoint(
    directory: AnyPath,
    manifest: Manifest,
    write_state: Callable[[str], object],
    *,
    owner: str = "",
    fence: Callable[[], None] = lambda: None,
) -> AnyPath:
    """Writes and commits `directory/ckpt-<step>`. On an error no part of it remains.

    If there is a checkpoint of this step, either that one or its replacement is listed at any time.

    Args:
      directory: Directory of the checkpoints.
      manifest: Manifest without the list of files.
      write_state: Writes the tensors. Its argument is the prefix of the file names.
      owner: Hexadecimal text in the names of incomplete directories, which differs between jobs.
      fence: Called just before the commit. Raises an error if another job has taken the directory over.

    Returns:
      The path of the checkpoint.
    """
    final = directory / f"ckpt-{manifest.step}"
    if isinstance(directory, Path) and paths.has_rename(directory):
        _write_and_rename(directory, final, manifest, write_state, owner, fence)
    else:
        fence()
        _write_in_place(directory, final, manifest, write_state)
    return final


def _write_and_rename(
    directory: Path,
    final: AnyPath,
    manifest: Manifest,
    write_state: Callable[[str], object],
    owner: str,
    fence: Callable[[], None],
) -> None:
    temporary = directory / (f"tmp-{final.name}-{owner}" if owner else f"tmp-{final.name}")
    replaced = directory / f"replaced-{final.name}"
    discard_directory(temporary)
    try:
        temporary.mkdir(parents=True)
        write_checkpoint_files(temporary, manifest, write_state)
        fence()
        if final.exists():
            discard_directory(replaced)
            Path(final).rename(replaced)  # under this name it is listed until the next line has run
        temporary.rename(final)
        paths.sync(directory)
    except BaseException:
        discard_directory(temporary)
        raise
    discard_directory(replaced)


def _write_in_place(directory: AnyPath, final: AnyPath, manifest: Manifest, write_state: Any) -> None:
    replaced = directory / f"replaced-{final.name}"
    is_replacement = is_committed(final)
    if is_replacement:  # a second copy is listed while the first is overwritten
        _write_or_discard(replaced, manifest, write_state)
    _write_or_discard(final, manifest, write_state)
    if is_replacement:
        discard_directory(replaced)
    _write_listing(directory, final)


def _write_or_discard(path: AnyPath, manifest: Manifest, write_state: Any) -> None:
    discard_directory(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_checkpoint_files(path, manifest, write_state)
    except BaseException:
        discard_directory(path)
        raise


def write_checkpoint_files(path: AnyPath, manifest: Manifest, write_state: Callable[[str], object]) -> None:
    """Writes the tensors and then the manifest to an empty directory."""
    write_state(str(path / STATE))
    files = {
        name: {"size": (path / name).stat().st_size, "checksum": compute_file_checksum(path / name)}
        for name in _list_files(path)
    }
    for name in files:
        paths.sync(path / name)
    write_manifest(path, manifest.with_files(files))


def write_manifest(path: AnyPath, manifest: Manifest) -> None:
    """Writes the manifest, which makes a directory a checkpoint."""
    (path / MANIFEST).write_bytes(manifest.to_json().encode())
    paths.sync(path / MANIFEST)
    paths.sync(path)


def amend_manifest(path: AnyPath, metrics: Mapping[str, float], state: Mapping[str, Any]) -> None:
    """Replaces the metrics and the loop state of a checkpoint. Raises OSError or CheckpointError."""
    manifest = replace(read_manifest(path), metrics=metrics, state=state)
    paths.write_atomically(path / MANIFEST, manifest.to_json(), durable=True)
    paths.sync(path)


def list_steps(directory: AnyPath) -> list[int]:
    """Returns the steps in the names of checkpoints, complete or not, ascending. Raises OSError."""
    return sorted(step_of(p) for p in _checkpoint_directories(directory) if not _is_replaced(p))


def list_checkpoints(directory: AnyPath) -> list[tuple[AnyPath, Manifest]]:
    """Returns the committed checkpoints, oldest first. Directories without a valid manifest are left out.

    If the replacement of a checkpoint was interrupted, the replaced one is listed.
    """
    return survey_checkpoints(directory)[0]


def survey_checkpoints(
    directory: AnyPath, call: Callable = lambda function: function()
) -> tuple[list[tuple[AnyPath, Manifest]], dict[AnyPath, CheckpointError]]:
    """Lists the committed and the faulty checkpoints of a directory.

    Args:
      directory: Directory of the checkpoints.
      call: Calls its argument and returns the result, such as `paths.call_with_retries`.

    Returns:
      The committed checkpoints, oldest first, and path -> error for the other directories with the name of
      a checkpoint. In object stores a directory without a manifest was never complete and is left out.
    """
    checkpoint_by_step: dict[int, tuple[AnyPath, Manifest]] = {}
    faults: dict[AnyPath, CheckpointError] = {}
    can_rename = paths.has_rename(directory)
    # descending, so that "ckpt-3" overwrites "replaced-ckpt-3"
    for path in sorted(_checkpoint_directories(directory), key=lambda p: p.name, reverse=True):
        try:
            manifest = call(functools.partial(read_manifest, path))
            if manifest.step != step_of(path):
                raise CheckpointError(f"its {MANIFEST} is of step {manifest.step}")
            checkpoint_by_step[manifest.step] = (path, manifest)
        except CheckpointError as e:
            is_missing = isinstance(e.__cause__, FileNotFoundError)
            if not _is_replaced(path) and (can_rename or not is_missing):
                faults[path] = e
    return [checkpoint_by_step[step] for step in sorted(checkpoint_by_step)], dict(sorted(faults.items()))


def step_of(path: AnyPath) -> int:
    """Returns the step in the name of a checkpoint directory, or -1 for another name."""
    match = _NAME.fullmatch(path.name)
    return int(match[2]) if match else -1


def is_leftover(path: AnyPath) -> bool:
    """Returns True for a name that only interrupted saves and deletions leave."""
    return _LEFTOVER.fullmatch(path.name) is not None


def is_committed(path: AnyPath) -> bool:
    """Returns True for a directory with a valid manifest. Raises ReadError if it cannot be read."""
    try:
        return read_manifest(path).step == step_of(path)
    except ReadError:
        raise
    except CheckpointError:
        return False


def read_manifest(path: AnyPath) -> Manifest:
    """Returns the manifest of a checkpoint directory.

    Raises:
      CheckpointError: If it is missing or damaged.
      ReadError: If it cannot be read at present.
    """
    try:
        text = paths.read_file(path / MANIFEST).decode()
    except (FileNotFoundError, NotADirectoryError) as e:
        raise CheckpointError(f"{path / MANIFEST} is missing.") from e
    except (IsADirectoryError, paths.NotAFile, UnicodeDecodeError) as e:
        raise CheckpointError(f"{path / MANIFEST} is damaged: {e}.") from None
    except OSError as e:
        raise read_error(path / MANIFEST, e) from e
    return Manifest.from_json(text, str(path / MANIFEST))


def read_error(subject: object, error: OSError) -> ReadError:
    """Returns the error "<subject> cannot be read: ..." with the errno of `error`."""
    failure = ReadError(f"{subject} cannot be read: {error.strerror or error}.")
    failure.errno = error.errno
    return failure


def find_damage(path: AnyPath, manifest: Manifest) -> str | None:
    """Compares the files of a checkpoint with its manifest.

    Returns:
      A description of the first damaged file, or None if there is none.

    Raises:
      ReadError: If a file cannot be read at present.
    """
    if not manifest.files:
        return "the manifest lists no files"
    faults = (_find_file_damage(path / name, expected) for name, expected in manifest.files.items())
    return next(filter(None, faults), None)


def _find_file_damage(file: AnyPath, expected: Mapping) -> str | None:
    try:
        size = file.stat().st_size
        if size != expected["size"] and file.is_file():
            return f"{file.name} has {size} bytes, expected {expected['size']}"
        is_equal = compute_file_checksum(file, expected["checksum"]) == expected["checksum"]
        return None if is_equal else f"{file.name} does not have the checksum in the manifest"
    except (FileNotFoundError, NotADirectoryError):
        return f"{file.name} is missing"
    except (IsADirectoryError, paths.NotAFile):
        return f"{file.name} is not a file"
    except ValueError as e:
        return f"{file.name} cannot be compared: {e}"
    except OSError as e:
        raise read_error(file, e) from e


def remove_checkpoint(path: AnyPath) -> None:
    """Deletes a checkpoint. It is not listed any more when the first file is deleted. Raises OSError."""
    if isinstance(path, Path) and paths.has_rename(path):
        renamed = path.with_name(f"deleted-{path.name.removeprefix('replaced-')}")
        if renamed.exists():
            paths.remove_tree(renamed)
        path.rename(renamed)
        path = renamed
    discard_directory(path, ignore_errors=False)


def discard_directory(path: AnyPath, ignore_errors: bool = True) -> None:
    """Deletes a complete or incomplete checkpoint directory, its manifest first."""
    with contextlib.suppress(OSError) if ignore_errors else contextlib.nullcontext():
        names = [] if paths.has_rename(path) or not path.is_dir() else _list_files(path)
        for name in (MANIFEST, *names):
            (path / name).unlink(missing_ok=True)
        if path.exists():
            paths.remove_tree(path)


def recover_replaced(directory: AnyPath) -> None:
    """Restores the names of checkpoints whose replacement was interrupted."""
    for path in _checkpoint_directories(directory):
        final = path.parent / path.name.removeprefix("replaced-")
        if not _is_replaced(path) or not is_committed(path) or is_committed(final):
            continue
        if not paths.has_rename(path):
            discard_directory(final)
            _copy_files(path, final)
        elif isinstance(path, Path) and not final.exists():
            path.rename(final)


def delete_leftovers(directory: AnyPath) -> list[str]:
    """Deletes the files of interrupted saves. Returns the names of the deleted directories."""
    recover_replaced(directory)
    committed = {path for path, _ in list_checkpoints(directory)}
    leftovers = [p for p in _list_entries(directory) if is_leftover(p) and p not in committed]
    if not paths.has_rename(directory):
        candidates = [p for p in _checkpoint_directories(directory) if p not in leftovers]
        leftovers += [p for p in candidates if not _has_manifest(p)]
    for path in leftovers:
        discard_directory(path)
    return [p.name for p in leftovers]


def move_to_damaged(path: AnyPath) -> AnyPath:
    """Moves a checkpoint to `damaged/ckpt-<step>`, or `...-1`, `...-2` if that exists. Raises OSError.

    In object stores, which cannot rename a directory, the files are copied.

    Returns:
      The new path.
    """
    folder = path.parent / DAMAGED
    name = path.name.removeprefix("replaced-")
    destination, number = folder / name, 0
    while destination.exists():
        number += 1
        destination = folder / f"{name}-{number}"
    folder.mkdir(exist_ok=True, parents=True)
    if isinstance(path, Path) and paths.has_rename(path):
        path.rename(destination)
        return destination
    _copy_files(path, destination)
    discard_directory(path, ignore_errors=False)
    return destination


def _copy_files(path: AnyPath, destination: AnyPath) -> None:
    """Copies the files of a checkpoint directory, the manifest last."""
    destination.mkdir(exist_ok=True, parents=True)
    manifest = [MANIFEST] if (path / MANIFEST).exists() else []
    for name in _list_files(path) + manifest:
        (destination / name).write_bytes(paths.read_file(path / name))


def _has_manifest(path: AnyPath) -> bool:
    """Returns True if there is a manifest, valid or not. Raises OSError if this cannot be determined."""
    if not isinstance(path, Path):
        return (path / MANIFEST).exists()
    try:
        (path / MANIFEST).stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _is_replaced(path: AnyPath) -> bool:
    return path.name.startswith("replaced-")


def _list_files(path: AnyPath) -> list[str]:
    """Returns the names of the files except the manifest. They include files that are not yet listed."""
    names = {*_TENSOR_FILES, *(p.name for p in path.iterdir())}
    with contextlib.suppress(CheckpointError):
        names |= {n for n in read_manifest(path).files if "/" not in n}
    return sorted(n for n in names if n != MANIFEST and _TEMPORARY not in n and (path / n).is_file())


def _write_listing(directory: AnyPath, newest: AnyPath) -> None:
    """Writes the names of the committed checkpoints of a mounted object store to a file."""
    if not isinstance(directory, Path):
        return
    committed = [p for p in _checkpoint_directories(directory) if not _is_replaced(p) and is_committed(p)]
    names = {newest.name, *(p.name for p in committed)}
    paths.write_atomically(directory / LISTING, json.dumps(sorted(names)) + "\n")


def _read_listing(directory: AnyPath) -> list[AnyPath]:
    if not isinstance(directory, Path) or paths.has_rename(directory):
        return []
    try:
        names = json.loads(paths.read_file(directory / LISTING))
        return [directory / n for n in names if _NAME.fullmatch(n)]
    except (OSError, ValueError, TypeError):
        return []


def _checkpoint_directories(directory: AnyPath) -> list[AnyPath]:
    """Returns the directories with the name of a checkpoint."""
    entries = (*_list_entries(directory), *_read_listing(directory))
    path_by_name = {p.name: p for p in entries if _NAME.fullmatch(p.name)}
    return [p for p in path_by_name.values() if p.is_dir()]


def _list_entries(directory: AnyPath) -> list[AnyPath]:
    return list[AnyPath](directory.iterdir()) if directory.is_dir() else []
