"""The `ctl inspect MODEL_DIR` command: checkpoints of a run, their integrity, and the lock of the run.

The command is read-only. For local paths it does not import TensorFlow.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

from ctl.checkpoints import commit
from ctl.checkpoints.protocol import Manifest
from ctl.checkpoints.retention import Keep
from ctl.errors import EXIT_DONE, EXIT_FAILED, EXIT_USAGE, CheckpointError, ReadError
from ctl.io import paths
from ctl.io.paths import AnyPath
from ctl.supervision.lease import LOCK_NAME, Lease

_NOT_CHECKED = "not checked"


def main(argv: Sequence[str]) -> int:
    """Prints the inspection. Returns 0, 1 if `--verify` finds damage, 2 for a path without checkpoints."""
    options = _parser().parse_args(list(argv))
    try:
        directory = _directory(paths.path(options.model_dir))
        if directory is None:
            print(
                f"ctl inspect: {options.model_dir!r} is no model_dir; expected a directory with "
                "checkpoints/ in it, or one of ckpt-<step> directories.",
                file=sys.stderr,
            )
            return EXIT_USAGE
        seen = inspect_run(directory, verify=options.verify, best=options.best)
    except OSError as e:
        print(f"ctl inspect: {options.model_dir!r} cannot be read: {e}.", file=sys.stderr)
        return EXIT_USAGE
    if not options.variables:
        seen.pop("variables")
    print(json.dumps(seen, indent=1) if options.json else inspection_text(seen, time.time()))
    return EXIT_FAILED if options.verify and _is_damaged(seen) else EXIT_DONE


def inspect_run(directory: AnyPath, *, verify: bool = False, best: str | None = None) -> dict[str, Any]:
    """Returns the contents of a checkpoints directory as a JSON object. `verify` reads every file."""
    found, faults = commit.survey_checkpoints(directory)
    winner = Keep(best=best).best_of([m for _, m in found]) if best else None
    rows = [_row(path, m, verify, winner) for path, m in found]
    rows += [_unreadable(path, fault) for path, fault in faults.items()]
    rows.sort(key=lambda row: row["step"])
    listed = {row["path"] for row in rows}
    entries = list[AnyPath](directory.iterdir())
    aside = directory / commit.DAMAGED
    holder = Lease(directory.parent / LOCK_NAME) if not paths.is_url(str(directory)) else None
    who = holder.read() if holder else None
    return {
        "directory": str(directory),
        "checkpoints": rows,
        "left_overs": sorted(p.name for p in entries if commit.is_leftover(p) and str(p) not in listed),
        "damaged": sorted(p.name for p in aside.iterdir()) if aside.is_dir() else [],
        "lock": None
        if holder is None or who is None
        else {
            "host": who.host,
            "pid": who.pid,
            "started": who.started,
            "state": who.state,
            "reason": who.reason,
            "step": who.step,
            "beat": who.beat,
            "alive": holder.is_alive(who),
        },
        "variables": dict(found[-1][1].variables) if found else {},
    }


def inspection_text(seen: dict[str, Any], now: float) -> str:
    """Returns the inspection as text for a terminal. `now` is the Unix time (seconds)."""
    rows = seen["checkpoints"]
    head = ["step", "saved", "size", "files", "verified", "best", "metrics"]
    cells = [head] + [
        [
            str(row["step"]),
            _ago(row["created"], now),
            _size(row["bytes"]),
            str(len(row["files"])),
            row["verified"],
            "*" if row["best"] else "",
            " ".join(f"{k}={_short(v)}" for k, v in row["metrics"].items()),
        ]
        for row in rows
    ]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    right = (0, 2, 3)
    lines = [seen["directory"]]
    for line in cells if rows else []:
        padded = [
            c.rjust(w) if i in right else c.ljust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    if not rows:
        lines.append("no checkpoints")
    for label, names in (("left over", seen["left_overs"]), ("set aside", seen["damaged"])):
        lines += [f"{label}: {', '.join(names)}"] if names else []
    lock = seen["lock"]
    if lock is not None:
        beats = f"trains, last heartbeat {_ago(lock['beat'], now)}"
        state = beats if lock["alive"] else lock["reason"] or "died"
        lines.append(f"LOCK: {lock['host']}, process {lock['pid']}: {state}, step {lock['step']}")
    variables = seen.get("variables", {})
    wide = max(map(len, variables), default=0)
    for name, spec in variables.items():
        lines.append(f"  {name:<{wide}}  {spec['dtype']}{spec['shape']}")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ctl inspect", description="Shows the checkpoints of a run; changes nothing."
    )
    parser.add_argument("model_dir", help="of a run, or a directory of checkpoints")
    parser.add_argument("--verify", action="store_true", help="read all files, compare checksums")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--variables", action="store_true", help="those of the newest, with shapes")
    parser.add_argument("--best", metavar="METRIC", help="mark the best by a metric, as --keep does")
    return parser


def _directory(given: AnyPath) -> AnyPath | None:
    if (given / "checkpoints").is_dir():
        return given / "checkpoints"
    if given.is_dir() and any(commit.survey_checkpoints(given)):
        return given
    return None


def _row(path: AnyPath, manifest: Manifest, verify: bool, best: Manifest | None) -> dict[str, Any]:
    try:
        fault = commit.find_damage(path, manifest) if verify else None
    except ReadError as e:
        fault = str(e)
    return {
        "step": manifest.step,
        "path": str(path),
        "created": manifest.created,
        "bytes": sum(f["size"] for f in manifest.files.values()),
        "files": sorted(manifest.files),
        "verified": (fault or "ok") if verify else _NOT_CHECKED,
        "best": best is not None and best.step == manifest.step,
        "metrics": {k: _finite(v) for k, v in manifest.metrics.items()},
    }


def _unreadable(path: AnyPath, error: CheckpointError) -> dict[str, Any]:
    fault = str(error).removeprefix(f"{path / commit.MANIFEST} ")
    how = "unreadable" if isinstance(error, ReadError) else "damaged"
    return {
        "step": commit.step_of(path),
        "path": str(path),
        "created": None,
        "bytes": 0,
        "files": [],
        "verified": f"{how}: manifest {fault}",
        "best": False,
        "metrics": {},
    }


def _is_damaged(seen: dict[str, Any]) -> bool:
    return any(row["verified"] != "ok" for row in seen["checkpoints"])


def _finite(value: float) -> float | str:
    """Returns the value, or a string for NaN and infinity, which JSON does not have."""
    return value if math.isfinite(value) else str(value)


def _short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


def _ago(created: float | None, now: float) -> str:
    if created is None:
        return "?"
    secs = max(0.0, now - created)
    for least, size, unit in ((172800, 86400, "days"), (7200, 3600, "h"), (120, 60, "min")):
        if secs >= least:
            return f"{secs / size:.0f} {unit} ago"
    return f"{secs:.0f} s ago"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
