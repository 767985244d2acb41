"""TensorBoard summaries of scalars, texts, figures and hyperparameters, without TensorFlow."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ctl.metrics.parameters import Parameter, parameter_rows, parameter_total
from tensorboard.compat.proto import summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
from tensorboard.plugins.audio import metadata as audio_metadata
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as layout_metadata
from tensorboard.plugins.histogram import metadata as histogram_metadata
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
from tensorboard.plugins.hparams import metadata as hparams_metadata
from tensorboard.plugins.image import metadata as image_metadata
from tensorboard.plugins.pr_curve import metadata as curve_metadata
from tensorboard.plugins.scalar import metadata as scalar_metadata
from tensorboard.plugins.text import metadata as text_metadata

CONFIGURATION_TAG = "configuration"
MODEL_TAG = "model"
_MAX_PARAMETER_ROWS = 200
_TIME_SHARES = "time shares"
_GROUP_BY_TAG = {
    "steps_per_sec": "speed", "examples_per_sec": "speed", "learning_rate": "optimizer",
    "gradient_norm": "optimizer", "loss_scale": "optimizer", _TIME_SHARES: _TIME_SHARES,
}  # fmt: skip
_RANK_0 = tensor_shape_pb2.TensorShapeProto()
_SCALAR = scalar_metadata.create_summary_metadata(display_name=None, description=None)
_HISTOGRAM = histogram_metadata.create_summary_metadata(display_name=None, description=None)
_IMAGE = image_metadata.create_summary_metadata(display_name=None, description=None)
_AUDIO = audio_metadata.create_summary_metadata(
    display_name=None, description=None, encoding=audio_metadata.Encoding.Value("WAV")
)
_TEXT = text_metadata.create_summary_metadata(display_name=None, description=None)


def scalars_summary(values: Mapping[str, float]) -> Any:
    """Returns the summary of `tf.summary.scalar` with a value for each tag. Values become float32."""
    summary = summary_pb2.Summary()
    for tag, value in values.items():
        tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_FLOAT, tensor_shape=_RANK_0, float_val=[value])
        summary.value.add(tag=tag, metadata=_SCALAR, tensor=tensor)
    return summary


def layout_summary(tags: Iterable[str]) -> Any:
    """Returns the layout of the tab CUSTOM SCALARS: one chart of all runs per tag, in groups."""
    layout = layout_pb2.Layout()
    groups: dict[str, list[str]] = {"metrics": [], "speed": [], "optimizer": [], _TIME_SHARES: []}
    for tag in sorted(tags):
        groups[_GROUP_BY_TAG.get(tag.partition("/")[0], "metrics")].append(tag)
    for title, members in groups.items():
        if members:
            category = layout.category.add(title=title)
            for tag in members:
                category.chart.add(
                    title=tag, multiline=layout_pb2.MultilineChartContent(tag=[f"^{re.escape(tag)}$"])
                )
    tensor = tensor_pb2.TensorProto(
        dtype=types_pb2.DT_STRING, tensor_shape=_RANK_0, string_val=[layout.SerializeToString()]
    )
    return _summary(layout_metadata.CONFIG_SUMMARY_TAG, layout_metadata.create_summary_metadata(), tensor)


def text_summary(tag: str, markdown: str) -> Any:
    """Returns the summary of `tf.summary.text`."""
    tensor = tensor_pb2.TensorProto(
        dtype=types_pb2.DT_STRING, tensor_shape=_RANK_0, string_val=[markdown.encode()]
    )
    return _summary(tag, _TEXT, tensor)


def image_summary(tag: str, png: bytes, width: int, height: int) -> Any:
    """Returns the summary of `tf.summary.image` for one picture. Width and height are in pixels."""
    values = [str(width).encode(), str(height).encode(), png]
    tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, tensor_shape=_shape(3), string_val=values)
    return _summary(tag, _IMAGE, tensor)


def audio_summary(tag: str, wav: bytes) -> Any:
    """Returns the summary of `tf.summary.audio` for one sound."""
    values = [wav, b""]
    tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, tensor_shape=_shape(1, 2), string_val=values)
    return _summary(tag, _AUDIO, tensor)


def curve_summary(tag: str, table: Any) -> Any:
    """Returns a curve for the tab PR CURVES. `table` is `[6, n]`, see `CurveLogged`."""
    content, shape = table.astype("<f4").tobytes(), _shape(*table.shape)
    tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_FLOAT, tensor_shape=shape, tensor_content=content)
    metadata = curve_metadata.create_summary_metadata(
        display_name=tag, description="", num_thresholds=table.shape[1]
    )
    return _summary(f"{tag}/pr_curves", metadata, tensor)


def histogram_summary(tag: str, edges: Sequence[float], counts: Sequence[float]) -> Any:
    """Returns the summary of `tf.summary.histogram`: rows of left edge, right edge and count."""
    rows = [x for row in zip(edges[:-1], edges[1:], counts, strict=True) for x in row]
    shape = _shape(len(counts), 3)
    tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_DOUBLE, tensor_shape=shape, double_val=rows)
    return _summary(tag, _HISTOGRAM, tensor)


def session_start_summary(hparams: Mapping[str, Any], start_secs: float, trial_name: str = "") -> Any:
    """Returns the start of a session in the tab HPARAMS.

    Args:
      hparams: Value by name. Other values than bool and finite numbers become strings.
      start_secs: Unix time (seconds).
      trial_name: Name of the trial. TensorBoard shows sessions with the same name as one trial. Empty: the
        path of the run.
    """
    info = plugin_data_pb2.SessionStartInfo(start_time_secs=start_secs, group_name=trial_name)
    for name, value in hparams.items():
        entry = info.hparams[name]
        if isinstance(value, bool):
            entry.bool_value = value
        elif isinstance(value, int | float) and math.isfinite(value):
            entry.number_value = value
        else:
            entry.string_value = str(value)
    return _hparams_summary(
        hparams_metadata.SESSION_START_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_start_info=info)
    )


def session_end_summary(succeeded: bool, end_secs: float) -> Any:
    """Returns the end of a session in the tab HPARAMS. `end_secs` is a Unix time (seconds)."""
    status = api_pb2.STATUS_SUCCESS if succeeded else api_pb2.STATUS_FAILURE
    info = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=end_secs)
    return _hparams_summary(
        hparams_metadata.SESSION_END_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_end_info=info)
    )


def configuration_card(config: Mapping[str, Any], resumed_from: str | None) -> str:
    """Returns a Markdown table with one row per setting."""
    rows = [(name, _value_text(value)) for name, value in config.items()]
    table = _markdown_table(("setting", "value"), rows)
    return f"{_literal(resumed_from)}\n\n{table}" if resumed_from else table


def model_card(model: str, parameters: Sequence[Parameter]) -> str:
    """Returns a Markdown table with one row per weight, and with the totals."""
    total = parameter_total(parameters)
    rows = parameter_rows(parameters, _MAX_PARAMETER_ROWS)
    rows.append(("total", "", f"{total.num_values:,}"))
    rows.append(("trainable", "", f"{total.num_trainable:,}"))
    megabytes = total.num_bytes / 1e6
    rows.append(("MB", "", f"{megabytes:,.2f}" if megabytes >= 1 else f"{megabytes:.3g}"))
    return f"{_literal(model)}\n\n{_markdown_table(('parameter', 'shape', 'count'), rows)}"


def _hparams_summary(tag: str, data: Any) -> Any:
    return _summary(tag, hparams_metadata.create_summary_metadata(data), hparams_metadata.NULL_TENSOR)


def _summary(tag: str, metadata: Any, tensor: Any) -> Any:
    summary = summary_pb2.Summary()
    summary.value.add(tag=tag, metadata=metadata, tensor=tensor)
    return summary


def _shape(*sizes: int) -> Any:
    dims = [tensor_shape_pb2.TensorShapeProto.Dim(size=size) for size in sizes]
    return tensor_shape_pb2.TensorShapeProto(dim=dims)


def _value_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    lines += ["| " + " | ".join(_literal(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _literal(text: str) -> str:
    """Returns the text with entities for all characters that Markdown or HTML could interpret."""
    line = " ".join(text.split())
    return "".join(c if c.isalnum() or c in " ,:/=%'\"" or ord(c) > 127 else f"&#{ord(c)};" for c in line)
