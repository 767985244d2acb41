"""A line of JSON per set of numbers: `{"step": 200, "run": "eval", "time": 1.7e9, "loss": 0.2}`."""

import collections
import errno
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from ctl.io import paths
from ctl.metrics.protocol import Ended, Event, MetricWriter, Started
from ctl.metrics.publishing import Publishing

MOST_WAITING = 10_000  # lines
_OWN_KEYS = ("step", "run", "time")
_log = logging.getLogger("ctl")


class JsonlWriter(MetricWriter):
    """Appends to the file at `path` and flushes every line; `time` is in Unix seconds.

    JSON has no NaN and no infinity, so these are the strings "NaN", "Infinity" and "-Infinity",
    which `float()` takes back. All other floats keep every digit. A metric that is itself called
    step, run or time becomes `metric.step`, `metric.run`, `metric.time`.

    `Started(step=k)` drops lines of an earlier attempt beyond step k, and lines cut short by a
    kill; lines at step k stay. While a disk refuses for a time, up to `MOST_WAITING` lines wait and
    are tried again with the next one; warnings say when it begins and ends. Raises OSError if the
    file can never be written there.
    """

    def __init__(self, path: str | os.PathLike[str], *, clock: Callable[[], float] = time.time) -> None:
        self._path = Path(path)
        self._clock = clock
        self._file: IO[bytes] | None = None
        self._publishing = Publishing()
        self._waiting: collections.deque[bytes] = collections.deque()
        self._drop_beyond: int | None = None  # of `Started`, to be done before the next line
        self._in_trouble = False  # the disk refuses, for now
        self._lost = 0  # lines since then

    def write(self, step: int, values: Mapping[str, float], run: str = "train") -> None:
        row: dict[str, Any] = {"step": int(step), "run": run, "time": self._clock()}
        for name, value in values.items():
            row[f"metric.{name}" if name in _OWN_KEYS else name] = _json_number(value)
        line = json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
        self._waiting.append(line.encode())
        if len(self._waiting) > MOST_WAITING:
            self._waiting.popleft()
            self._lost += 1
        self._write_waiting()

    def note(self, event: Event) -> None:
        if isinstance(event, Started):
            self._close()
            self._drop_beyond = event.step
            kept = (line for line in self._waiting if json.loads(line)["step"] <= event.step)
            self._waiting = collections.deque(kept)
            self._write_waiting()
        elif isinstance(event, Ended):
            self._write_waiting(last=True)
            self._close()

    def abandon(self) -> bool:
        """Discards the pending lines, as the file now belongs to another job."""
        self._waiting.clear()
        self._drop_beyond = None
        self._close()
        return True

    def _write_waiting(self, last: bool = False) -> None:
        """Writes what waits, and says when the disk begins to refuse, and when it no longer does."""
        try:
            if last:
                paths.call_with_retries(self._write_all, where=self._path)
            else:
                self._write_all()
        except OSError as e:
            if paths.is_permanent_error(e):
                raise
            self._close()
            if last:
                _log.warning(
                    "%s: %d lines are lost; the disk still refuses.",
                    self._path,
                    self._lost + len(self._waiting),
                )
                self._waiting.clear()
            elif not self._in_trouble:
                self._in_trouble = True
                _log.warning(
                    "%s cannot be written for now (%s); up to %d lines wait, and are tried again.",
                    self._path,
                    e.strerror or e,
                    MOST_WAITING,
                )
            return
        if self._in_trouble:
            self._in_trouble = False
            _log.warning("%s is written again; %d lines were dropped.", self._path, self._lost)
            self._lost = 0

    def _write_all(self) -> None:
        if self._file is None and self._path.exists() and not self._path.is_file():
            raise paths.NotAFile(errno.EINVAL, "is not a regular file; remove it", str(self._path))
        if self._drop_beyond is not None:
            self._drop_lines_beyond(self._drop_beyond)
            self._drop_beyond = None
        if self._file is not None and self._waiting and not self._is_there(self._file):
            self._close()
            _log.warning("%s is gone, with what it held; it is begun anew.", self._path)
        while self._waiting:
            file = self._file or self._open()
            _append(file, self._waiting[0])
            self._waiting.popleft()
            self._publishing.flushed(file, self._path)

    def _is_there(self, file: IO[bytes]) -> bool:
        """Whether the file still has its name; in an object store nobody can tell."""
        try:
            return os.stat(self._path).st_ino == os.fstat(file.fileno()).st_ino
        except FileNotFoundError:
            return not paths.has_rename(self._path)

    def _open(self) -> IO[bytes]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        torn = _ends_without_newline(self._path)
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115
        if torn:
            self._file.write(b"\n")  # so that the next line is not glued to half a line
        return self._file

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _drop_lines_beyond(self, step: int) -> None:
        if not self._path.exists():
            return
        if not paths.has_rename(self._path):
            self._drop_in_place(step)
            return
        rest = self._path.with_name(self._path.name + ".tmp")
        dropped = False
        with open(rest, "wb") as file:
            for line, keep in _judge(self._path, step):
                dropped = dropped or not keep
                if keep:
                    file.write(line)
            file.flush()
            os.fsync(file.fileno())
        if dropped:
            os.replace(rest, self._path)
        else:
            rest.unlink()

    def _drop_in_place(self, step: int) -> None:
        """Writes from the first line that goes on; mostly there is nothing to be kept after it."""
        lines = list(_judge(self._path, step))
        first = next((i for i, (_, keep) in enumerate(lines) if not keep), len(lines))
        if first == len(lines):
            return
        with open(self._path, "r+b") as file:
            file.seek(sum(len(line) for line, _ in lines[:first]))
            file.write(b"".join(line for line, keep in lines[first:] if keep))
            file.truncate()
            os.fsync(file.fileno())


def _append(file: IO[bytes], line: bytes) -> None:
    """Writes a line, all of it or nothing; raises OSError."""
    before = os.fstat(file.fileno()).st_size
    done = 0
    try:
        while done < len(line):
            done += file.write(line[done:]) or 0
    except OSError:
        if done and os.fstat(file.fileno()).st_size == before + done:  # nobody else has added a line
            os.ftruncate(file.fileno(), before)
        raise


def _judge(path: Path, last_step: int) -> Iterator[tuple[bytes, bool]]:
    """Every line of the file and whether it is whole and not beyond `last_step`."""
    with open(path, "rb") as file:
        for line in file:
            try:
                row = json.loads(line)
                keep = line.endswith(b"\n") and int(row.get("step", 0)) <= last_step
            except (ValueError, TypeError, AttributeError, RecursionError):
                keep = False
            yield line, keep


def _ends_without_newline(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _json_number(value: float) -> float | int | str:
    if isinstance(value, int):  # bool too: true and false are JSON
        return value
    number = float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
