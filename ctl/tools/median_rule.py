"""Median rule of `ctl sweep --early_stop`: ends runs that are worse than the median of completed runs.

Golovin et al., "Google Vizier: A Service for Black-Box Optimization", 2017, section 3.2.
"""

import contextlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Curve = Sequence[tuple[int, float]]  # (step, value), ascending


def read_rows(directory: Path) -> list[dict[str, Any]]:
    """Returns the rows of metrics.jsonl in a directory. Incomplete lines are ignored."""
    rows = []
    with contextlib.suppress(OSError):
        for line in (directory / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                row = json.loads(line)
                if isinstance(row, dict):
                    rows.append(row)
    return rows


def newest_metrics(directory: Path) -> dict[str, Any]:
    """Returns the metrics of the newest evaluation in metrics.jsonl, else of training, else {}."""
    row_by_run = {row.pop("run", "train"): row for row in read_rows(directory)}
    chosen = row_by_run.get("eval") or row_by_run.get("train") or {}
    return {name: value for name, value in chosen.items() if name not in ("time", "epoch")}


def curves(directory: Path, metric: str) -> dict[str, list[tuple[int, float]]]:
    """Returns "eval" and "train" -> the values of a metric by step. NaN is infinitely bad."""
    result: dict[str, list[tuple[int, float]]] = {"eval": [], "train": []}
    for row in read_rows(directory):
        step, run = row.get("step"), row.get("run", "train")
        if metric in row and isinstance(step, int) and run in result:
            with contextlib.suppress(TypeError, ValueError):  # NaN is a string in metrics.jsonl
                result[run].append((step, float(row[metric])))
    return result


def last_step(curves_of_runs: Sequence[Mapping[str, Curve]]) -> int | None:
    """Returns the largest step of the curves of some runs, or None if there are no values."""
    steps = [
        step for curves_of_run in curves_of_runs for curve in curves_of_run.values() for step, _ in curve
    ]
    return max(steps, default=None)


def is_worse_than_median(
    running: Mapping[str, Curve], completed: Sequence[Mapping[str, Curve]], *, maximizes: bool
) -> bool:
    """Returns True if the best value of a run is worse than the median of completed runs at the same step.

    Compares evaluations if a completed run has some, else values of the training.

    Args:
      running: "eval" and "train" -> curve of the run.
      completed: The same of each completed run.
      maximizes: True if larger values are better.
    """
    run = "eval" if any(curves_of_run["eval"] for curves_of_run in completed) else "train"
    if not running[run]:
        return False
    step = max(step for step, _ in running[run])
    bests = [_best(curves_of_run[run], step, maximizes) for curves_of_run in completed]
    values = [best for best in bests if best is not None]
    best = _best(running[run], step, maximizes)
    if not values or best is None:
        return False
    return best < statistics.median(values) if maximizes else best > statistics.median(values)


def _best(curve: Curve, last_step: int, maximizes: bool) -> float | None:
    """Returns the best value up to a step, or None if the curve begins later."""
    worst = -math.inf if maximizes else math.inf
    values = [worst if math.isnan(value) else value for step, value in curve if step <= last_step]
    if not values:
        return None
    return max(values) if maximizes else min(values)
