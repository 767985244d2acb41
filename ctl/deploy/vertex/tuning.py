"""Parameters and metric of a tuning job, from strings such as `learning_rate:1e-4..1e-1:log`."""

import re
from argparse import ArgumentTypeError, Namespace
from typing import Any

from ctl.io.console import quoted

_SCALES = {"": "UNIT_LINEAR_SCALE", "linear": "UNIT_LINEAR_SCALE", "log": "UNIT_LOG_SCALE"}
FORMS = "name:1e-4..1e-1:log, name:32..512 or name:adam|sgd"
_NUMBER = r"-?(?:[0-9]{1,15}\.?[0-9]{0,15}|\.[0-9]{1,15})(?:e-?[0-9]{1,2})?"
_RANGE = re.compile(rf"(?P<least>{_NUMBER})\.\.(?P<most>{_NUMBER})(?::(?P<scale>.*))?")


def parameter(word: str) -> dict[str, Any]:
    """Returns the ParameterSpec of a `--tune` value. Two integer bounds create an integer parameter."""
    name, _, rest = word.partition(":")
    values = rest.split("|")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or not rest:
        raise ArgumentTypeError(f"{quoted(word)} cannot be read; expected {FORMS}")
    if ".." in rest:
        return {"parameterId": name, **_interval(word, name, rest)}
    if len(values) < 2 or not all(values) or len(set(values)) < len(values):
        raise ArgumentTypeError(f"{quoted(word)} has no two different values; expected {FORMS}")
    return {"parameterId": name, "categoricalValueSpec": {"values": values}}


def _interval(word: str, name: str, rest: str) -> dict[str, Any]:
    found = _RANGE.fullmatch(rest)
    if not found:
        raise ArgumentTypeError(f"{quoted(word)} has no two numbers; expected {FORMS}")
    ends, scale = found.group("least", "most"), found["scale"] or ""
    least, most = map(float, ends)
    if scale not in _SCALES:
        raise ArgumentTypeError(f"{quoted(word)} has the scale {quoted(scale)}; expected :linear or :log")
    if least >= most:
        expected = f"two different numbers, the smaller one first: {name}:{ends[1]}..{ends[0]}"
        raise ArgumentTypeError(f"{quoted(word)} goes from {ends[0]} to {ends[1]}; expected {expected}")
    if scale == "log" and least <= 0:
        came = f"{quoted(word)} has a log scale from {ends[0]}"
        raise ArgumentTypeError(f"{came}; expected numbers above 0, or :linear")
    is_whole = all(re.fullmatch("-?[0-9]+", end) for end in ends)
    kind, number = ("integerValueSpec", int) if is_whole else ("doubleValueSpec", float)
    return {kind: {"minValue": number(ends[0]), "maxValue": number(ends[1])}, "scaleType": _SCALES[scale]}


def metric(word: str) -> dict[str, str]:
    """Returns name and goal of `--metric`. A name that resembles a loss requires an explicit goal."""
    name, _, goal = word.partition(":")
    expected = f"expected {name}:minimize or {name}:maximize"
    if not re.fullmatch(r"[A-Za-z0-9_./-]{1,64}", name):
        raise ArgumentTypeError(f"{quoted(word)} is no metric; expected a name such as accuracy")
    if goal not in ("", "maximize", "minimize"):
        raise ArgumentTypeError(f"{quoted(word)} has the goal {quoted(goal)}; {expected}")
    if not goal and re.search("loss|error|perplexity", name):
        raise ArgumentTypeError(f"{name} does not say whether less is better; {expected}")
    return {"metric": name, "goal": (goal or "maximize").upper()}


def trials(options: Namespace) -> tuple[int, int]:
    """Returns the total number of trials and the number of parallel trials."""
    return options.trials or 10, options.parallel_trials or 2
