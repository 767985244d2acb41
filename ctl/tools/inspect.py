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
        directory = _find_checkpoints_dir(paths.path(options.model_dir))
        if directory is None:
            print(
                f"ctl inspect: {options.model_dir!r} is not a model_dir; expected a directory that "
                "contains checkpoints/ or ckpt-<step> directories.",
                file=sys.stderr,
            )
            return EXIT_USAGE
        inspection = inspect_run(directory, verify=options.verify, best=options.best)
    except OSError as e:
        print(f"ctl inspect: {options.model_dir!r} cannot be read: {e}.", file=sys.stderr)
        return EXIT_USAGE
    if not options.variables:
        inspection.pop("variables")
    print(json.dumps(inspection, indent=1) if options.json else inspection_text(inspection, time.time()))
    return EXIT_FAILED if options.verify and _has_damage(inspection) else EXIT_DONE


def inspect_run(directory: AnyPath, *, verify: bool = False, best: str | None = None) -> dict[str, Any]:
    """Returns the contents of a checkpoints directory as a JSON object. `verify` reads every file."""
    manifests, faults = commit.survey_checkpoints(directory)
    best_manifest = Keep(best=best).best_of([m for _, m in manifests]) if best else None
    rows = [_checkpoint_row(path, m, verify, best_manifest) for path, m in manifests]
    rows += [_unreadable_row(path, fault) for path, fault in faults.items()]
    rows.sort(key=lambda row: row["step"])
    listed_paths = {row["path"] for row in rows}
    entries = list[AnyPath](directory.iterdir())
    damaged_dir = directory / commit.DAMAGED
    lease = Lease(directory.parent / LOCK_NAME) if not paths.is_url(str(directory)) else None
    holder = lease.read() if lease else None
    return {
        "directory": str(directory),
        "checkpoints": rows,
        "left_overs": sorted(
            p.name for p in entries if commit.is_leftover(p) and str(p) not in listed_paths
        ),
        "damaged": sorted(p.name for p in damaged_dir.iterdir()) if damaged_dir.is_dir() else [],
        "lock": None
        if lease is None or holder is None
        else {
            "host": holder.host,
            "pid": holder.pid,
            "started": holder.started,
            "state": holder.state,
            "reason": holder.reason,
            "step": holder.step,
            "beat": holder.beat,
            "alive": lease.is_alive(holder),
        },
        "variables": dict(manifests[-1][1].variables) if manifests else {},
    }


def inspection_text(inspection: dict[str, Any], now_secs: float) -> str:
    """Returns the inspection as text for a terminal. `now_secs` is the Unix time (seconds)."""
    rows = inspection["checkpoints"]
    header = ["step", "saved", "size", "files", "verified", "best", "metrics"]
    cells = [header] + [
        [
            str(row["step"]),
            _format_age(row["created"], now_secs),
            _format_bytes(row["bytes"]),
            str(len(row["files"])),
            row["verified"],
            "*" if row["best"] else "",
            " ".join(f"{k}={_format_metric(v)}" for k, v in row["metrics"].items()),
        ]
        for row in rows
    ]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    right_aligned = (0, 2, 3)
    lines = [inspection["directory"]]
    for line in cells if rows else []:
        padded = [
            c.rjust(w) if i in right_aligned else c.ljust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    if not rows:
        lines.append("no checkpoints")
    for label, names in (("incomplete", inspection["left_overs"]), ("damaged", inspection["damaged"])):
        lines += [f"{label}: {', '.join(names)}"] if names else []
    lock = inspection["lock"]
    if lock is not None:
        running_state = f"training, last heartbeat {_format_age(lock['beat'], now_secs)}"
        state = running_state if lock["alive"] else lock["reason"] or "died"
        lines.append(f"LOCK: {lock['host']}, process {lock['pid']}: {state}, step {lock['step']}")
    variables = inspection.get("variables", {})
    name_width = max(map(len, variables), default=0)
    for name, spec in variables.items():
        lines.append(f"  {name:<{name_width}}  {spec['dtype']}{spec['shape']}")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ctl inspect", description="Lists the checkpoints of a run. Read-only."
    )
    parser.add_argument("model_dir", help="model_dir of a run, or a directory of checkpoints")
    parser.add_argument("--verify", action="store_true", help="read all files and compare their checksums")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--variables",
        action="store_true",
        help="list the variables of the newest checkpoint with their shapes",
    )
    parser.add_argument(
        "--best", metavar="METRIC", help="mark the best checkpoint by a metric, as --keep does"
    )
    return parser


def _find_checkpoints_dir(model_dir: AnyPath) -> AnyPath | None:
    if (model_dir / "checkpoints").is_dir():
        return model_dir / "checkpoints"
    if model_dir.is_dir() and any(commit.survey_checkpoints(model_dir)):
        return model_dir
    return None


def _checkpoint_row(
    path: AnyPath, manifest: Manifest, verify: bool, best: Manifest | None
) -> dict[str, Any]:
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
        "metrics": {k: _to_json_number(v) for k, v in manifest.metrics.items()},
    }


def _unreadable_row(path: AnyPath, error: CheckpointError) -> dict[str, Any]:
    fault = str(error).removeprefix(f"{path / commit.MANIFEST} ")
    condition = "unreadable" if isinstance(error, ReadError) else "damaged"
    return {
        "step": commit.step_of(path),
        "path": str(path),
        "created": None,
        "bytes": 0,
        "files": [],
        "verified": f"{condition}: manifest {fault}",
        "best": False,
        "metrics": {},
    }


def _has_damage(inspection: dict[str, Any]) -> bool:
    return any(row["verified"] != "ok" for row in inspection["checkpoints"])


def _to_json_number(value: float) -> float | str:
    """Returns the value, or a string for NaN and infinity, which JSON does not have."""
    return value if math.isfinite(value) else str(value)


def _format_metric(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


def _format_age(created: float | None, now_secs: float) -> str:
    if created is None:
        return "?"
    age_secs = max(0.0, now_secs - created)
    for min_secs, unit_secs, unit in ((172800, 86400, "days"), (7200, 3600, "h"), (120, 60, "min")):
        if age_secs >= min_secs:
            return f"{age_secs / unit_secs:.0f} {unit} ago"
    return f"{age_secs:.0f} s ago"


def _format_bytes(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"
