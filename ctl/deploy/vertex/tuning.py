"""Parameters and metric of a tuning job, from strings such as `learning_rate:1e-4..1e-1:log`."""

import re
from argparse import ArgumentTypeError, Namespace
from typing import Any

from ctl.io.console import quoted

_SCALES = {"": "UNIT_LINEAR_SCALE", "linear": "UNIT_LINEAR_SCALE", "log": "UNIT_LOG_SCALE"}
FORMS = "name:1e-4..1e-1:log, name:32..512 or name:adam|sgd"
_NUMBER = r"-?(?:[0-9]{1,15}\.?[0-9]{0,15}|\.[0-9]{1,15})(?:e-?[0-9]{1,2})?"
_RANGE = re.compile(rf"(?P<least>{_NUMBER})\.\.(?P<most>{_NUMBER})(?::(?P<scale>.*))?")


def parse_parameter(text: str) -> dict[str, Any]:
    """Returns the ParameterSpec of a `--tune` value. Two integer bounds create an integer parameter."""
    name, _, domain = text.partition(":")
    values = domain.split("|")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or not domain:
        raise ArgumentTypeError(f"{quoted(text)} is not a range; expected {FORMS}")
    if ".." in domain:
        return {"parameterId": name, **_interval(text, name, domain)}
    if len(values) < 2 or not all(values) or len(set(values)) < len(values):
        raise ArgumentTypeError(f"{quoted(text)} does not have two different values; expected {FORMS}")
    return {"parameterId": name, "categoricalValueSpec": {"values": values}}


def _interval(text: str, name: str, domain: str) -> dict[str, Any]:
    match = _RANGE.fullmatch(domain)
    if not match:
        raise ArgumentTypeError(f"{quoted(text)} does not have two numbers; expected {FORMS}")
    bounds, scale = match.group("least", "most"), match["scale"] or ""
    minimum, maximum = map(float, bounds)
    if scale not in _SCALES:
        raise ArgumentTypeError(f"{quoted(text)} has the scale {quoted(scale)}; expected :linear or :log")
    if minimum >= maximum:
        expected = f"two different numbers, the smaller one first: {name}:{bounds[1]}..{bounds[0]}"
        raise ArgumentTypeError(
            f"{quoted(text)} has the range {bounds[0]} to {bounds[1]}; expected {expected}"
        )
    if scale == "log" and minimum <= 0:
        problem = f"{quoted(text)} has a log scale from {bounds[0]}"
        raise ArgumentTypeError(f"{problem}; expected numbers above 0, or :linear")
    is_integer = all(re.fullmatch("-?[0-9]+", end) for end in bounds)
    value_spec, number = ("integerValueSpec", int) if is_integer else ("doubleValueSpec", float)
    return {
        value_spec: {"minValue": number(bounds[0]), "maxValue": number(bounds[1])},
        "scaleType": _SCALES[scale],
    }


def parse_metric(text: str) -> dict[str, str]:
    """Returns name and goal of `--metric`. A name that resembles a loss requires an explicit goal."""
    name, _, goal = text.partition(":")
    expected = f"expected {name}:minimize or {name}:maximize"
    if not re.fullmatch(r"[A-Za-z0-9_./-]{1,64}", name):
        raise ArgumentTypeError(f"{quoted(text)} is not a metric; expected a name such as accuracy")
    if goal not in ("", "maximize", "minimize"):
        raise ArgumentTypeError(f"{quoted(text)} has the goal {quoted(goal)}; {expected}")
    if not goal and re.search("loss|error|perplexity", name):
        raise ArgumentTypeError(f"the goal of {name} is ambiguous; {expected}")
    return {"metric": name, "goal": (goal or "maximize").upper()}


def trial_counts(options: Namespace) -> tuple[int, int]:
    """Returns the total number of trials and the number of parallel trials."""
    return options.trials or 10, options.parallel_trials or 2
