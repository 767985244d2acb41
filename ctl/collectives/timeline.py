"""Chrome trace of the collectives (chrome://tracing, Perfetto), with one row per tensor.

A write error ends the trace with a message on stderr. It does not end the job.
"""

import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


class Timeline:
    """Writer of the trace. A no-op without a file. Thread-safe."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None
        self._lock = threading.Lock()
        self._rows: dict[str, int] = {}
        self._open_negotiations: set[str] = set()
        self._mark_cycles = False
        self._started = 0.0

    @property
    def is_active(self) -> bool:
        """True while a trace is written."""
        return self._file is not None

    def start(self, path: str, *, mark_cycles: bool = False) -> None:
        """Starts a new trace file. Raises OSError if it cannot be created."""
        self.stop()
        with self._lock:
            self._file = Path(path).open("w")  # noqa: SIM115  until stop()
            self._file.write("[\n")
            self._rows, self._open_negotiations = {}, set()
            self._mark_cycles = mark_cycles
            self._started = time.monotonic()

    def stop(self) -> None:
        """Completes the file as valid JSON and closes it."""
        with self._lock:
            if self._file is not None:
                with self._close_on_error():
                    self._file.write("{}]\n")
                    self._file.close()
                self._file = None

    def record_request(self, name: str, collective_kind: str, rank: int) -> None:
        """Records the request of a rank."""
        with self._lock:
            if self._file is None:
                return
            with self._close_on_error():
                if name not in self._open_negotiations:
                    self._open_negotiations.add(name)
                    self._write("B", name, f"NEGOTIATE_{collective_kind.upper()}")
                self._write("X", name, str(rank), dur=0)

    def record_agreement(self, name: str) -> None:
        """Records that all ranks have requested the collective."""
        with self._lock:
            if self._file is not None and name in self._open_negotiations:
                self._open_negotiations.discard(name)
                with self._close_on_error():
                    self._write("E", name, "")

    def record_execution(self, name: str, collective_kind: str, start: float) -> None:
        """Records a collective that started at `start` (`time.monotonic()`) and ends now."""
        with self._lock:
            if self._file is not None and start >= self._started:
                ended = time.monotonic()
                with self._close_on_error():
                    self._write(
                        "X", name, collective_kind.upper(), at=start, dur=int(1e6 * (ended - start))
                    )

    def record_cycle(self) -> None:
        """Records a cycle of the coordinator."""
        with self._lock:
            if self._file is not None and self._mark_cycles:
                with self._close_on_error():
                    self._write("i", "", "CYCLE_START", s="g")

    @contextlib.contextmanager
    def _close_on_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            with contextlib.suppress(OSError):
                assert self._file is not None
                self._file.close()
            print(f"hvd: cannot write the timeline: {e.strerror or e}", file=sys.stderr, flush=True)
            self._file = None

    def _write(self, phase: str, row: str, event_name: str, at: float | None = None, **fields: Any) -> None:
        assert self._file is not None
        if row not in self._rows:
            number = self._rows[row] = len(self._rows)
            metadata = {"name": "process_name", "ph": "M", "pid": number, "args": {"name": row}}
            self._file.write(json.dumps(metadata) + ",\n")
        micros = int(1e6 * ((time.monotonic() if at is None else at) - self._started))
        event = {"name": event_name, "ph": phase, "pid": self._rows[row], "tid": 0, "ts": micros, **fields}
        self._file.write(json.dumps(event) + ",\n")
        self._file.flush()
