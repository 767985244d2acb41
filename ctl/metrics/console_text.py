"""Formats of numbers, run headers and run summaries for terminals and log files.

Names and values of the user are always `rich.text.Text`, never markup, because a metric may have the name
`loss [/epoch]`.
"""

import io
import math
import numbers
from collections.abc import Iterable, Mapping
from typing import IO, Any

from ctl.callbacks.schedule import EpochLength
from ctl.metrics.parameters import parameter_rows, parameter_total
from ctl.metrics.protocol import Ended, RunInfo, Started
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

_MAX_PARAMETER_ROWS = 8  # TensorBoard's model card has all
_TEXT_COLUMNS = 200
_RATES = {"steps_per_sec": "steps/s", "examples_per_sec": "examples/s"}
_SETTINGS = {"learning_rate": "lr", "gradient_norm": "grad"}


def format_number(value: Any) -> str:
    """Returns a number with four significant digits: 0.2301, 0.0001834, 1.2e-05, 12,346, nan."""
    if isinstance(value, numbers.Integral) or not isinstance(value, numbers.Real):
        return str(value)
    value = float(value)
    if 1e4 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def format_rate(value: float) -> str:
    """Returns a rate with three digits: 0.42, 412, 4120, 52.7k, 1.3M."""
    if not math.isfinite(value) or value < 999.5:
        return f"{value:.3g}"
    if value < 1e4:
        return f"{value:.0f}"
    return f"{value / 1e3:.3g}k" if value < 999_500 else f"{value / 1e6:.3g}M"


def format_duration(secs: float | None) -> str:
    """Returns a duration as 0:01, 12:34 or 1:02:03. None or infinity: -:--."""
    if secs is None or not math.isfinite(secs):
        return "-:--"
    minutes, seconds = divmod(round(secs), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def epoch_text(length: EpochLength | None, step: int, total_steps: int | None) -> list[str]:
    """Returns `epoch 2/5`, or `epoch 2` if the end is unknown, in a list. Empty for an unknown length."""
    if length is None:
        return []
    total = "" if total_steps is None else f"/{length.epoch_of(max(step, total_steps))}"
    return [f"epoch {length.epoch_of(step)}{total}"]


def metric_texts(values: Mapping[str, float]) -> list[str]:
    """Returns `name value` of each value that is neither a rate nor a setting."""
    return [
        f"{name} {format_number(value)}"
        for name, value in values.items()
        if name not in _RATES and name not in _SETTINGS
    ]


def rate_texts(values: Mapping[str, float]) -> list[str]:
    """Returns the rates in `values`: `412 steps/s`, `52.7k examples/s`."""
    return [f"{format_rate(values[key])} {unit}" for key, unit in _RATES.items() if key in values]


def setting_texts(values: Mapping[str, float]) -> list[str]:
    """Returns the settings in `values`: `lr 0.001`, `grad 1.32`."""
    return [f"{label} {format_number(values[key])}" for key, label in _SETTINGS.items() if key in values]


def run_header(started: Started) -> Group:
    """Returns model, settings and number of parameters of a run, and a table of a few weights."""
    parameters = started.info.parameters
    rows = parameter_rows(parameters, len(parameters)) if len(parameters) <= _MAX_PARAMETER_ROWS else []
    weights = Table.grid(padding=(0, 2, 0, 0))
    weights.add_column(overflow="fold")
    weights.add_column(overflow="fold")
    weights.add_column(justify="right")
    for row in rows:
        weights.add_row(*(Text(f"  {cell}" if not i else cell) for i, cell in enumerate(row)))
    return Group(Text(started.info.model, style="bold"), _aligned(_settings(started)), weights)


def run_footer(ended: Ended) -> Group:
    """Returns the cause of the end, further sentences, and the summary."""
    sentences = list(ended.sentences)
    if not sentences or not sentences[0].startswith("Stopped"):
        sentences.insert(0, f"{ended.reason} at step {ended.step}")
    return Group(
        Text(sentences[0], style="bold"),
        *(Text(f"  {sentence}") for sentence in sentences[1:]),
        _aligned(ended.summary.items()),
    )


def text_lines(block: RenderableType, width: int = _TEXT_COLUMNS) -> list[str]:
    """Returns a block as lines without colours and trailing spaces."""
    text = io.StringIO()
    console = Console(file=text, width=width, color_system=None, legacy_windows=False, force_jupyter=False)
    console.print(block, soft_wrap=isinstance(block, Text))
    return [line.rstrip() for line in text.getvalue().splitlines()]


def encodable(line: str, file: IO[str]) -> str:
    """Returns a line with escapes for characters that the file cannot encode."""
    encoding = getattr(file, "encoding", None) or "utf-8"
    return line.encode(encoding, "backslashreplace").decode(encoding)


def _settings(started: Started) -> list[tuple[str, str]]:
    info = started.info
    total = parameter_total(info.parameters)
    rows = [
        (
            "strategy",
            f"{info.strategy}, {_count(info.num_workers, 'worker')}, "
            f"{_count(info.num_replicas, 'replica')}",
        ),
        ("batch", f"{info.global_batch_size} examples, {_per_replica(info)} per replica"),
        ("steps", _steps(started.step, started.total_steps)),
        ("data", info.data),
        ("precision", info.precision),
        ("seed", f"{info.seed}{', random numbers differ by replica' if info.num_replicas > 1 else ''}"),
        ("model_dir", info.model_dir or "none, no checkpoints"),
        (
            "parameters",
            f"{total.num_values:,}, {total.num_trainable:,} trainable, {_size(total.num_bytes)}",
        ),
    ]
    if started.resumed_from:
        rows.insert(0, ("start", started.resumed_from))
    return rows


def _steps(first: int, last: int | None) -> str:
    if last is not None and last < first:
        return f"none: {first} are complete, {last} were requested"
    return f"{first} to {'the end of the data' if last is None else last}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _size(num_bytes: int) -> str:
    if num_bytes < 1e6:
        return f"{num_bytes} B" if num_bytes < 1e3 else f"{num_bytes / 1e3:.3g} kB"
    return f"{num_bytes / 1e6:,.2f} MB"


def _per_replica(info: RunInfo) -> str:
    return f"{info.global_batch_size / max(1, info.num_replicas):.4g}"


def _aligned(rows: Iterable[tuple[str, Any]]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(Text(f"  {label}", style="dim"), Text(format_number(value)))
    return table
