"""A checkpoint directory is complete or it is not there.

    ckpt-400/
      state.index, state.data-00000-of-00001    tf.train.Checkpoint(...).read(".../ckpt-400/state")
      manifest.json                             written last; without it this is no checkpoint

Where directories can be renamed, everything is written under a temporary name, synced, and renamed.
In object stores it is written in place, and the manifest marks it as complete. Their listings may be
old, so files are looked for by name, and checkpoints.json beside them names the committed ones.
"""

import contextlib
import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ctl.checkpoints import checksums
from ctl.checkpoints.protocol import Manifest
from ctl.errors import CheckpointError, ReadError
from ctl.io import paths
from ctl.io.paths import AnyPath

STATE = "state"
MANIFEST = "manifest.json"
DAMAGED = "damaged"
NOTE = "checkpoints.json"
_NAME = re.compile(r"(replaced-)?ckpt-(0|[1-9]\d*)", re.ASCII)
_TENSORS = (f"{STATE}.data-00000-of-00001", f"{STATE}.index")
_TEMPORARY = ".tempstate"  # in the names of files that TensorFlow renames when they are complete
_LEFT_OVER = re.compile(r"((tmp|deleted|replaced)-ckpt-\d+(-[0-9a-f]+)?|workertemp_\d+)(_temp)?", re.ASCII)


def write_checkpoint(
    directory: AnyPath,
    manifest: Manifest,
    write_state: Callable[[str], object],
    *,
    owner: str = "",
    fence: Callable[[], None] = lambda: None,
) -> AnyPath:
    """Commits `directory/ckpt-<step>`; on any error nothing of it is left.

    One that is there already stays, or what replaces it is there, at every moment.

    Args:
      write_state: writes the tensors to files that start with the prefix it is given.
      owner: hexadecimal, in the name of what is not complete: another job has names of its own.
      fence: raises where another job has taken the directory over; called just before the commit.
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
    discard(temporary)
    try:
        temporary.mkdir(parents=True)
        fill(temporary, manifest, write_state)
        fence()
        if final.exists():
            discard(replaced)
            Path(final).rename(replaced)  # still listed, until the next line is done
        temporary.rename(final)
        paths.sync(directory)
    except BaseException:
        discard(temporary)
        raise
    discard(replaced)


def _write_in_place(directory: AnyPath, final: AnyPath, manifest: Manifest, write_state: Any) -> None:
    replaced = directory / f"replaced-{final.name}"
    again = is_committed(final)
    if again:  # a second copy is listed while the first is written anew
        discard(replaced)
        replaced.mkdir(parents=True, exist_ok=True)
        try:
            fill(replaced, manifest, write_state)
        except BaseException:
            discard(replaced)
            raise
    discard(final)
    try:
        final.mkdir(parents=True, exist_ok=True)
        fill(final, manifest, write_state)
    except BaseException:
        discard(final)
        raise
    if again:
        discard(replaced)
    _note(directory, final)


def fill(path: AnyPath, manifest: Manifest, write_state: Callable[[str], object]) -> None:
    """Writes the tensors, then the manifest, into an empty directory."""
    write_state(str(path / STATE))
    names = _files(path)
    listed = {
        n: {"size": (path / n).stat().st_size, "checksum": checksums.of_file(path / n)} for n in names
    }
    for name in names:
        paths.sync(path / name)
    mark(path, manifest.with_files(listed))


def mark(path: AnyPath, manifest: Manifest) -> None:
    """Writes the manifest, which makes a directory a checkpoint."""
    (path / MANIFEST).write_bytes(manifest.to_json().encode())
    paths.sync(path / MANIFEST)
    paths.sync(path)


def amend(path: AnyPath, metrics: Mapping[str, float], state: Mapping[str, Any]) -> None:
    """Gives a committed checkpoint new metrics and loop state; raises OSError, CheckpointError."""
    manifest = replace(read_manifest(path), metrics=metrics, state=state)
    paths.write_whole(path / MANIFEST, manifest.to_json(), durable=True)
    paths.sync(path)


def steps_listed(directory: AnyPath) -> list[int]:
    """Steps of what looks like a checkpoint by its name, complete or not; raises OSError."""
    return sorted(step_of(p) for p in _directories(directory) if not _is_replaced(p))


def scan(directory: AnyPath) -> list[tuple[AnyPath, Manifest]]:
    """Committed checkpoints, oldest first. Directories without a readable manifest are not listed.

    One that was being replaced when the process was killed is listed where its successor is not.
    """
    return survey(directory)[0]


def survey(
    directory: AnyPath, attempt: Callable = lambda act: act()
) -> tuple[list[tuple[AnyPath, Manifest]], dict[AnyPath, CheckpointError]]:
    """Committed checkpoints, oldest first; and directories named like such, with what is wrong there.

    In object stores one without a manifest was never complete, and is in neither.

    Args:
      attempt: calls what it is given, such as `paths.persistently`.
    """
    found: dict[int, tuple[AnyPath, Manifest]] = {}
    faults: dict[AnyPath, CheckpointError] = {}
    renamed = paths.has_rename(directory)
    for path in sorted(_directories(directory), key=lambda p: p.name, reverse=True):
        try:
            manifest = attempt(functools.partial(read_manifest, path))
            if manifest.step != step_of(path):
                raise CheckpointError(f"its {MANIFEST} is of step {manifest.step}")
            found[manifest.step] = (path, manifest)  # "ckpt-3" comes after "replaced-ckpt-3"
        except CheckpointError as e:
            missing = isinstance(e.__cause__, FileNotFoundError)
            if not _is_replaced(path) and (renamed or not missing):
                faults[path] = e
    return [found[step] for step in sorted(found)], dict(sorted(faults.items()))


def step_of(path: AnyPath) -> int:
    """The step in the name of a checkpoint directory, or -1."""
    match = _NAME.fullmatch(path.name)
    return int(match[2]) if match else -1


def is_left_over(path: AnyPath) -> bool:
    """True for the names that only interrupted saves and deletions leave."""
    return _LEFT_OVER.fullmatch(path.name) is not None


def is_committed(path: AnyPath) -> bool:
    """True if there is a good manifest; raises ReadError where nobody can tell."""
    try:
        return read_manifest(path).step == step_of(path)
    except ReadError:
        raise
    except CheckpointError:
        return False


def read_manifest(path: AnyPath) -> Manifest:
    """The manifest of a checkpoint directory.

    Raises CheckpointError if it is missing or damaged, ReadError where that cannot be told.
    """
    try:
        text = paths.read_file(path / MANIFEST).decode()
    except (FileNotFoundError, NotADirectoryError) as e:
        raise CheckpointError(f"{path / MANIFEST} is missing.") from e
    except (IsADirectoryError, paths.NotAFile, UnicodeDecodeError) as e:
        raise CheckpointError(f"{path / MANIFEST} is damaged: {e}.") from None
    except OSError as e:
        raise _unread(path / MANIFEST, e) from e
    return Manifest.from_json(text, str(path / MANIFEST))


def _unread(path: AnyPath, error: OSError) -> ReadError:
    failed = ReadError(f"{path} cannot be read: {error.strerror or error}.")
    failed.errno = error.errno
    return failed


def verify(path: AnyPath, manifest: Manifest) -> str | None:
    """What is wrong with the files of a checkpoint, or None; raises ReadError where nobody can tell."""
    faults = (_fault(path / n, expected) for n, expected in manifest.files.items())
    return next(filter(None, faults), None) if manifest.files else "the manifest lists no files"


def _fault(file: AnyPath, expected: Mapping) -> str | None:
    try:
        size = file.stat().st_size
        if size != expected["size"] and file.is_file():
            return f"{file.name} has {size} bytes, expected {expected['size']}"
        same = checksums.of_file(file, expected["checksum"]) == expected["checksum"]
        fault = "" if same else "has another checksum than when it was written"
    except (FileNotFoundError, NotADirectoryError):
        fault = "is missing"
    except (IsADirectoryError, paths.NotAFile):
        fault = "is not a file"
    except ValueError as e:
        fault = f"cannot be compared: {e}"
    except OSError as e:
        raise _unread(file, e) from e
    return f"{file.name} {fault}" if fault else None


def remove_checkpoint(path: AnyPath) -> None:
    """Deletes a checkpoint so that a half-deleted one is never listed."""
    if isinstance(path, Path) and paths.has_rename(path):
        going = path.with_name(f"deleted-{path.name.removeprefix('replaced-')}")
        if going.exists():
            paths.remove_tree(going)
        path.rename(going)
        path = going
    discard(path, quietly=False)


def discard(path: AnyPath, quietly: bool = True) -> None:
    """Deletes what is or may be a checkpoint directory, its manifest first."""
    with contextlib.suppress(OSError) if quietly else contextlib.nullcontext():
        names = [] if paths.has_rename(path) or not path.is_dir() else _files(path)
        (path / MANIFEST).unlink(missing_ok=True)
        for name in names:
            (path / name).unlink(missing_ok=True)
        if path.exists():
            paths.remove_tree(path)


def recover(directory: AnyPath) -> None:
    """Gives a checkpoint whose replacement was interrupted its name back."""
    for path in _directories(directory):
        final = path.parent / path.name.removeprefix("replaced-")
        if not _is_replaced(path) or not is_committed(path) or is_committed(final):
            continue
        if not paths.has_rename(path):
            discard(final)
            _copy(path, final)
        elif isinstance(path, Path) and not final.exists():
            path.rename(final)


def sweep(directory: AnyPath) -> list[str]:
    """Deletes what interrupted saves left in a checkpoint directory; returns the names."""
    recover(directory)
    listed = {path for path, _ in scan(directory)}
    left = [p for p in _entries(directory) if is_left_over(p) and p not in listed]
    if not paths.has_rename(directory):
        left += [p for p in _directories(directory) if p not in left and not _has_manifest(p)]
    for path in left:
        discard(path)
    return [p.name for p in left]


def set_aside(path: AnyPath) -> AnyPath:
    """Moves a damaged checkpoint to `damaged/ckpt-<step>`, or `-1`, `-2`, ... after it; raises OSError.

    In object stores, where a directory has no name to be changed, its files are copied.
    """
    folder = path.parent / DAMAGED
    name = path.name.removeprefix("replaced-")
    goal, number = folder / name, 0
    while goal.exists():
        number += 1
        goal = folder / f"{name}-{number}"
    folder.mkdir(exist_ok=True, parents=True)
    if isinstance(path, Path) and paths.has_rename(path):
        path.rename(goal)
        return goal
    _copy(path, goal)
    discard(path, quietly=False)
    return goal


def _copy(path: AnyPath, goal: AnyPath) -> None:
    """Copies the files of a checkpoint directory, the manifest last."""
    goal.mkdir(exist_ok=True, parents=True)
    there = [MANIFEST] if (path / MANIFEST).exists() else []
    for name in _files(path) + there:
        (goal / name).write_bytes(paths.read_file(path / name))


def _has_manifest(path: AnyPath) -> bool:
    """Whether there is a manifest, readable or not; raises OSError where nobody can tell."""
    if not isinstance(path, Path):
        return (path / MANIFEST).exists()
    try:
        (path / MANIFEST).stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _is_replaced(path: AnyPath) -> bool:
    return path.name.startswith("replaced-")


def _files(path: AnyPath) -> list[str]:
    """The files of a checkpoint directory without its manifest, those that are not listed yet as well."""
    known = {*_TENSORS, *(p.name for p in path.iterdir())}
    with contextlib.suppress(CheckpointError):
        known |= {n for n in read_manifest(path).files if "/" not in n}
    return sorted(n for n in known if n != MANIFEST and _TEMPORARY not in n and (path / n).is_file())


def _note(directory: AnyPath, newest: AnyPath) -> None:
    """Writes down, where listings may be old, which checkpoints there are."""
    if not isinstance(directory, Path):
        return
    names = {p.name for p in _directories(directory) if not _is_replaced(p) and is_committed(p)}
    paths.write_whole(directory / NOTE, json.dumps(sorted({*names, newest.name})) + "\n")


def _noted(directory: AnyPath) -> list[AnyPath]:
    if not isinstance(directory, Path) or paths.has_rename(directory):
        return []
    try:
        names = json.loads(paths.read_file(directory / NOTE))
        return [directory / n for n in names if _NAME.fullmatch(n)]
    except (OSError, ValueError, TypeError):
        return []


def _directories(directory: AnyPath) -> list[AnyPath]:
    """Those named like checkpoints."""
    found = {p.name: p for p in (*_entries(directory), *_noted(directory)) if _NAME.fullmatch(p.name)}
    return [p for p in found.values() if p.is_dir()]


def _entries(directory: AnyPath) -> list[AnyPath]:
    return list[AnyPath](directory.iterdir()) if directory.is_dir() else []
