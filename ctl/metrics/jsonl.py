"""Metrics as lines of JSON: `{"step": 200, "run": "eval", "time": 1.7e9, "epoch": 2, "loss": 0.2}`."""

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

from ctl.callbacks.schedule import EpochLength
from ctl.io import paths
from ctl.metrics.protocol import Ended, Event, MetricWriter, Started
from ctl.metrics.publishing import Publishing
from ctl.setting_values import check_type

MAX_PENDING = 10_000  # lines
_RESERVED_KEYS = ("step", "run", "time")
_log = logging.getLogger("ctl")


class JsonlWriter(MetricWriter):
    """Metric writer that appends lines of JSON to a file and flushes every line.

    JSON has no NaN and no infinity, so their values are the strings "NaN", "Infinity" and "-Infinity",
    which `float()` accepts. All other floats keep every digit. Metrics with the names step, run and time
    have the keys `metric.step`, `metric.run` and `metric.time`. The key `epoch` is the number of the epoch,
    counted from 1. It is absent for data without a length, and replaced by a metric of this name.

    `Started(step=k)` removes the lines of an earlier attempt after step k, and incomplete lines of a killed
    process. While the disk fails, up to `MAX_PENDING` lines are pending, and each new line retries the
    write. Warnings are logged at the first failure and at the next success. A permanent error raises
    OSError.

    Args:
      path: Path of the file. Its directory is created if necessary.
      clock: Function that returns the Unix time (seconds).
    """

    def __init__(self, path: str | os.PathLike[str], *, clock: Callable[[], float] = time.time) -> None:
        check_type("path", path, str | os.PathLike[str])
        self._path = Path(path)
        self._clock = clock
        self._file: IO[bytes] | None = None
        self._publishing = Publishing()
        self._pending: collections.deque[bytes] = collections.deque()
        self._epoch_length: EpochLength | None = None
        self._last_valid_step: int | None = None  # later lines are removed before the next write
        self._is_failing = False  # True after a failed write
        self._num_dropped = 0  # lines since the first failure

    def write(self, step: int, values: Mapping[str, float], run: str = "train") -> None:
        """Writes one line with step, run, time and metrics."""
        row: dict[str, Any] = {"step": int(step), "run": run, "time": self._clock()}
        if self._epoch_length is not None and step > 0:
            row["epoch"] = self._epoch_length.epoch_of(step)
        for name, value in values.items():
            row[f"metric.{name}" if name in _RESERVED_KEYS else name] = _json_number(value)
        line = json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
        self._pending.append(line.encode())
        if len(self._pending) > MAX_PENDING:
            self._pending.popleft()
            self._num_dropped += 1
        self._write_pending()

    def note(self, event: Event) -> None:
        """Opens the file at the start of a run and closes it at the end."""
        if isinstance(event, Started):
            self._close()
            self._last_valid_step, self._epoch_length = event.step, None
            valid_lines = (line for line in self._pending if json.loads(line)["step"] <= event.step)
            self._pending = collections.deque(valid_lines)
            self._write_pending()
        elif isinstance(event, EpochLength):
            self._epoch_length = event
        elif isinstance(event, Ended):
            self._write_pending(is_last=True)
            self._close()

    def abandon(self) -> bool:
        """Discards the pending lines, because the file belongs to another job."""
        self._pending.clear()
        self._last_valid_step = None
        self._close()
        return True

    def _write_pending(self, is_last: bool = False) -> None:
        """Writes the pending lines, and logs the first failure and the next success.

        Args:
          is_last: True to retry for some seconds, and to discard the lines if that fails.
        """
        try:
            if is_last:
                paths.call_with_retries(self._write_all, where=self._path)
            else:
                self._write_all()
        except OSError as e:
            if paths.is_permanent_error(e):
                raise
            self._close()
            if is_last:
                _log.warning(
                    "%s: %d lines are lost, because the disk still fails.",
                    self._path,
                    self._num_dropped + len(self._pending),
                )
                self._pending.clear()
            elif not self._is_failing:
                self._is_failing = True
                _log.warning(
                    "%s cannot be written for now (%s); up to %d lines are kept and written later.",
                    self._path,
                    e.strerror or e,
                    MAX_PENDING,
                )
            return
        if self._is_failing:
            self._is_failing = False
            _log.warning("%s is written again; %d lines were dropped.", self._path, self._num_dropped)
            self._num_dropped = 0

    def _write_all(self) -> None:
        if self._file is None and self._path.exists() and not self._path.is_file():
            raise paths.NotAFile(errno.EINVAL, "is not a regular file; remove it", str(self._path))
        if self._last_valid_step is not None:
            self._remove_lines_after(self._last_valid_step)
            self._last_valid_step = None
        if self._file is not None and self._pending and not self._is_in_place(self._file):
            self._close()
            _log.warning("%s was deleted: its lines are lost. A new file is started.", self._path)
        while self._pending:
            file = self._file or self._open()
            _append(file, self._pending[0])
            self._pending.popleft()
            self._publishing.after_flush(self._path)

    def _is_in_place(self, file: IO[bytes]) -> bool:
        """Returns False if another process has removed or replaced the file. In object stores: True."""
        try:
            return os.stat(self._path).st_ino == os.fstat(file.fileno()).st_ino
        except FileNotFoundError:
            return not paths.has_rename(self._path)

    def _open(self) -> IO[bytes]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        is_torn = _ends_without_newline(self._path)
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115
        if is_torn:
            self._file.write(b"\n")  # ends an incomplete line
        return self._file

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _remove_lines_after(self, step: int) -> None:
        if not self._path.exists():
            return
        if not paths.has_rename(self._path):
            self._remove_in_place(step)
            return
        temporary = self._path.with_name(self._path.name + ".tmp")
        has_invalid_lines = False
        with open(temporary, "wb") as file:
            for line, is_valid in _read_lines(self._path, step):
                has_invalid_lines = has_invalid_lines or not is_valid
                if is_valid:
                    file.write(line)
            file.flush()
            os.fsync(file.fileno())
        if has_invalid_lines:
            os.replace(temporary, self._path)
        else:
            temporary.unlink()

    def _remove_in_place(self, step: int) -> None:
        """Rewrites the file from its first invalid line. Usually no valid line follows that line."""
        lines = list(_read_lines(self._path, step))
        first = next((i for i, (_, is_valid) in enumerate(lines) if not is_valid), len(lines))
        if first == len(lines):
            return
        with open(self._path, "r+b") as file:
            file.seek(sum(len(line) for line, _ in lines[:first]))
            file.write(b"".join(line for line, is_valid in lines[first:] if is_valid))
            file.truncate()
            os.fsync(file.fileno())


def _append(file: IO[bytes], line: bytes) -> None:
    """Writes a complete line. Raises OSError, and then removes an incomplete line."""
    size = os.fstat(file.fileno()).st_size
    num_written = 0
    try:
        while num_written < len(line):
            num_written += file.write(line[num_written:]) or 0
    except OSError:
        # the size differs if another process has added a line
        if num_written and os.fstat(file.fileno()).st_size == size + num_written:
            os.ftruncate(file.fileno(), size)
        raise


def _read_lines(path: Path, last_step: int) -> Iterator[tuple[bytes, bool]]:
    """Yields each line of the file, and True if it is complete and has a step up to `last_step`."""
    with open(path, "rb") as file:
        for line in file:
            try:
                row = json.loads(line)
                is_valid = line.endswith(b"\n") and int(row.get("step", 0)) <= last_step
            except (ValueError, TypeError, AttributeError, RecursionError):
                is_valid = False
            yield line, is_valid


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
