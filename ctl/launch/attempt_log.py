"""Log of the attempts of a job: one JSON line in `<log_dir>/attempts.jsonl` per completed attempt."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ctl.io.console import print_message

ATTEMPT_LOG = "attempts.jsonl"


@dataclass(kw_only=True)
class AttemptRecord:
    """Record of one attempt, which is one lifetime of the process group. The log line is its JSON.

    Attributes:
      attempt: 1, 2, ...
      started, ended: Unix time (seconds).
      workers: Number of workers, including the chief.
      hosts: Their hosts with -H or a discovery script, else None.
      step_before, step_after: Step of the newest checkpoint, None if unknown.
      failed: The first failed process: {"task", "job", "exit_code", "signal"}, or None.
      reason: Reason of the end.
      detected_secs: Duration of a hang when it was detected (seconds).
      next: "restart in 2 s", "done", "no restart: ...".
    """

    attempt: int
    started: float
    workers: int
    ended: float = 0.0
    hosts: Sequence[str] | None = None
    step_before: int | None = None
    step_after: int | None = None
    failed: dict[str, object] | None = None
    reason: str = "done"
    detected_secs: float | None = None
    next: str = "done"

    def append_to(self, log_dir: Path) -> None:
        """Appends the line. A write error is reported and ignored."""
        try:
            with open(log_dir / ATTEMPT_LOG, "a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(self)) + "\n")
        except OSError as e:
            print_message(f"{log_dir / ATTEMPT_LOG} cannot be written ({e.strerror}); the job continues")
