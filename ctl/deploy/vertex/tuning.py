"""What a tuning job varies and what it looks for, from words such as `learning_rate:1e-4..1e-1:log`."""

import argparse
import math
import re
from collections.abc import Sequence
from typing import Any

from ctl.errors import UsageError
from ctl.io.console import quoted

_SCALES = {"linear": "UNIT_LINEAR_SCALE", "log": "UNIT_LOG_SCALE"}
_FORMS = "name:1e-4..1e-1:log, name:32..512 or name:adam|sgd"
_GOALS = ("maximize", "minimize")


def parameters(given: Sequence[str]) -> list[dict[str, Any]]:
    """The ParameterSpecs of `--tune` words; whole numbers at both ends make whole numbers.

    Raises UsageError for a form that is none, bounds out of order, and a name that comes twice.
    """
    found: dict[str, dict[str, Any]] = {}
    for text in given:
        name, _, rest = text.partition(":")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or not rest:
            raise UsageError(f"--tune={quoted(text)} cannot be read; expected {_FORMS}")
        if name in found:
            raise UsageError(f"--tune={name} came twice; expected one range for each flag")
        found[name] = {"parameterId": name, **_range(text, name, rest)}
    return list(found.values())


def trials(options: argparse.Namespace) -> tuple[int, int]:
    """How many trials there are in all, and at a time."""
    return options.trials or 10, options.parallel_trials or 2


def metric(text: str) -> dict[str, str]:
    """Name and goal of `--metric`; what sounds like a loss needs its goal in words."""
    name, _, goal = text.partition(":")
    if not re.fullmatch(r"[A-Za-z0-9_./-]{1,64}", name):
        raise UsageError(f"--metric={quoted(text)} is no metric; expected a name such as accuracy")
    if goal and goal not in _GOALS:
        raise UsageError(
            f"--metric={quoted(text)} has the goal {quoted(goal)}; expected {name}:maximize "
            f"or {name}:minimize"
        )
    if not goal and re.search("loss|error|perplexity", name):
        raise UsageError(
            f"--metric={name} does not say whether less is better; expected {name}:minimize "
            f"or {name}:maximize"
        )
    return {"metric": name, "goal": (goal or "maximize").upper()}


def _range(text: str, name: str, rest: str) -> dict[str, Any]:
    if ".." not in rest:
        values = rest.split("|")
        if len(values) < 2 or not all(values) or len(set(values)) < len(values):
            raise UsageError(
                f"--tune={quoted(text)} has no range and no two different values; expected {_FORMS}"
            )
        return {"categoricalValueSpec": {"values": values}}
    bounds, _, scale = rest.partition(":")
    ends = bounds.split("..")
    numbers = [_number(end) for end in ends]
    if len(ends) != 2 or not all(map(math.isfinite, numbers)):
        raise UsageError(f"--tune={quoted(text)} has no two numbers; expected {_FORMS}")
    least, most = numbers
    if scale and scale not in _SCALES:
        raise UsageError(
            f"--tune={quoted(text)} has the scale {quoted(scale)}; expected "
            f"{name}:{bounds}:linear or {name}:{bounds}:log"
        )
    if least >= most:
        raise UsageError(
            f"--tune={quoted(text)} goes from {ends[0]} to {ends[1]}; expected two different numbers, "
            f"the smaller one first: {name}:{ends[1]}..{ends[0]}"
        )
    if scale == "log" and least <= 0:
        raise UsageError(
            f"--tune={quoted(text)} has a log scale from {ends[0]}; expected numbers above 0, or :linear"
        )
    is_whole = all(re.fullmatch("-?[0-9]+", end) for end in ends)
    kind, of = ("integerValueSpec", int) if is_whole else ("doubleValueSpec", float)
    bounds_of = {"minValue": of(ends[0]), "maxValue": of(ends[1])}
    return {kind: bounds_of, "scaleType": _SCALES[scale or "linear"]}


def _number(text: str) -> float:
    if not re.fullmatch(r"-?[0-9.]{1,20}(e-?[0-9]{1,3})?", text):
        return math.nan
    try:
        return float(text)
    except ValueError:
        return math.nan
