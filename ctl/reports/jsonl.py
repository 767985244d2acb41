"""A line of JSON per set of numbers: `{"step": 200, "run": "eval", "time": 1.7e9, "loss": 0.2}`."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from ctl import files
from ctl.reports.protocol import Ended, Event, Started
from ctl.reports.publishing import Publishing

_OWN_KEYS = ("step", "run", "time")


class JsonlReport:
    """Appends to the file at `path` and flushes every line; `time` is in Unix seconds.

    JSON has no NaN and no infinity, so these are the strings "NaN", "Infinity" and "-Infinity",
    which `float()` takes back. All other floats keep every digit. A metric that is itself called
    step, run or time becomes `metric.step`, `metric.run`, `metric.time`.

    `Started(step=k)` drops lines of an earlier attempt beyond step k, and lines cut short by a
    kill; lines at step k stay. Raises OSError if the file cannot be written.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, clock: Callable[[], float] = time.time
    ) -> None:
        self._path = Path(path)
        self._clock = clock
        self._file: IO[str] | None = None
        self._publishing = Publishing()

    def write(self, step: int, values: Mapping[str, float], run: str = "train") -> None:
        row: dict[str, Any] = {"step": int(step), "run": run, "time": self._clock()}
        for name, value in values.items():
            row[f"metric.{name}" if name in _OWN_KEYS else name] = _json_number(value)
        file = self._file or self._open()
        file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        file.flush()
        self._publishing.flushed(file, self._path)

    def note(self, event: Event) -> None:
        if isinstance(event, Started):
            self._close()
            self._drop_lines_beyond(event.step)
        elif isinstance(event, Ended):
            self._close()

    def _open(self) -> IO[str]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        torn = _ends_without_newline(self._path)
        self._file = open(self._path, "a", encoding="utf-8", newline="\n")  # noqa: SIM115
        if torn:
            self._file.write("\n")  # so that the next line is not glued to half a line
        return self._file

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _drop_lines_beyond(self, step: int) -> None:
        if not self._path.exists():
            return
        if not files.has_rename(self._path):
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


def _judge(path: Path, last_step: int) -> Iterator[tuple[bytes, bool]]:
    """Every line of the file and whether it is whole and not beyond `last_step`."""
    with open(path, "rb") as file:
        for line in file:
            try:
                row = json.loads(line)
                keep = line.endswith(b"\n") and int(row.get("step", 0)) <= last_step
            except (ValueError, TypeError, AttributeError):
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
