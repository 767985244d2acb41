"""Matrices, sounds and precision-recall curves as values to log.

trainer.log("confusion", ctl.Matrix(counts, rows=names, columns=names))
trainer.log("speech", ctl.Audio(samples, sample_rate=16_000))
trainer.log("spam", ctl.PrCurve(labels, scores))
"""

import io
import wave
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ctl.errors import UsageError
from ctl.metrics.protocol import AudioLogged, CurveLogged, Event, ImageLogged, TextLogged
from ctl.setting_values import check_integer

_NUM_THRESHOLDS = 201  # the default of TensorBoard's plugin
_MAX_LABELLED = 20  # rows or columns; a larger picture has no numbers and names
_CELL, _LETTER, _LINE = 88, 13, 28  # pixels
_LOW, _HIGH = np.array([247, 251, 255]), np.array([8, 48, 107])  # light blue to dark blue


@dataclass(frozen=True)
class Matrix:
    """A matrix to log as a picture with a number in each cell, such as a confusion matrix.

    Attributes:
      values: Numbers `[m, n]`.
      rows: Names of the rows from the top. None: 0, 1, ...
      columns: Names of the columns from the left. None: 0, 1, ...
    """

    values: Any
    rows: Sequence[str] | None = None
    columns: Sequence[str] | None = None

    def event(self, step: int, name: str, run: str) -> Event:
        """Returns the picture. Raises UsageError for a wrong shape, or a wrong number of names."""
        values = _numbers(name, self.values)
        if values.ndim != 2 or not values.size:
            raise UsageError(f"Matrix for {name!r} has shape {values.shape}; expected [m, n].")
        names = []
        for axis, labels in enumerate((self.rows, self.columns)):
            texts = [str(t) for t in (range(values.shape[axis]) if labels is None else labels)]
            if len(texts) != values.shape[axis]:
                raise UsageError(
                    f"Matrix for {name!r} has {len(texts)} names for {values.shape[axis]} "
                    f"{('rows', 'columns')[axis]}; expected one for each."
                )
            names.append(texts)
        picture = _draw_matrix(values, *names)
        file = io.BytesIO()
        picture.save(file, "PNG")
        width, height = picture.size
        return ImageLogged(step, name, file.getvalue(), width, height, run)


@dataclass(frozen=True)
class Audio:
    """A sound to log.

    Attributes:
      samples: Numbers from -1 to 1, `[n]` or `[n, channels]`.
      sample_rate: Samples per second.
    """

    samples: Any
    sample_rate: int

    def event(self, step: int, name: str, run: str) -> Event:
        """Returns a WAV file with 16 bits per sample. Raises UsageError for other shapes."""
        samples = _numbers(name, self.samples)
        if samples.ndim not in (1, 2) or not samples.size or samples.shape[1:] > (8,):
            raise UsageError(
                f"Audio for {name!r} has shape {samples.shape}; expected [n] or [n, channels]."
            )
        rate = check_integer(f"sample_rate of Audio for {name!r}", self.sample_rate, 1)
        file = io.BytesIO()
        with wave.open(file, "wb") as out:
            out.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
            out.setsampwidth(2)
            out.setframerate(rate)
            scaled = np.clip(np.nan_to_num(samples), -1, 1) * 32767
            out.writeframes(np.round(scaled).astype("<i2").tobytes())
        return AudioLogged(step, name, file.getvalue(), run=run)


@dataclass(frozen=True)
class PrCurve:
    """A precision-recall curve to log.

    Attributes:
      labels: True or False, `[n]`.
      scores: Probabilities of True, `[n]`.
    """

    labels: Any
    scores: Any

    def event(self, step: int, name: str, run: str) -> Event:
        """Returns the counts for 201 thresholds. Raises UsageError for unequal shapes and other scores."""
        labels, scores = _numbers(name, self.labels).ravel() > 0.5, _numbers(name, self.scores).ravel()
        if labels.shape != scores.shape or not labels.size:
            raise UsageError(
                f"PrCurve for {name!r} has {labels.size} labels and {scores.size} scores; expected one "
                "score for each label."
            )
        if not (np.min(scores) >= 0 and np.max(scores) <= 1):
            raise UsageError(f"PrCurve for {name!r} has scores outside 0..1; expected probabilities.")
        thresholds = np.linspace(0, 1, _NUM_THRESHOLDS)
        true = _count_at_least(scores[labels], thresholds)
        false = _count_at_least(scores[~labels], thresholds)
        positives, negatives = int(labels.sum()), int((~labels).sum())
        precision = true / np.maximum(true + false, 1)
        recall = true / max(positives, 1)
        table = np.stack([true, false, negatives - false, positives - true, precision, recall])
        return CurveLogged(step, name, table.astype(np.float32), run=run)


def array_event(step: int, name: str, values: np.ndarray, run: str) -> Event:
    """Returns the event of a metric of rank >= 1: a table of a vector, else a picture of a matrix.

    All axes but the last one become rows of the matrix.
    """
    if values.ndim == 1:
        rows = "\n".join(f"| {i} | {value:.6g} |" for i, value in enumerate(values.tolist()))
        return TextLogged(step, name, f"| | {name} |\n| --- | --- |\n{rows}", run=run)
    return Matrix(values.reshape(-1, values.shape[-1])).event(step, name, run)


def _numbers(name: str, values: Any) -> np.ndarray:
    array = np.asarray(values.numpy() if hasattr(values, "numpy") else values)
    if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
        raise UsageError(f"log({name!r}) got values of {array.dtype}; expected numbers.")
    return array.astype(np.float64)


def _count_at_least(scores: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Returns, for each threshold, the number of scores that are at least as large."""
    return scores.size - np.searchsorted(np.sort(scores), thresholds, side="left")


def _draw_matrix(values: np.ndarray, rows: Sequence[str], columns: Sequence[str]) -> Any:
    """Returns a picture of cells from light to dark. A small matrix has names, and numbers in its cells."""
    from PIL import Image, ImageDraw, ImageFont

    m, n = values.shape
    is_labelled = max(m, n) <= _MAX_LABELLED
    texts = [[f"{v:.4g}" for v in row] for row in values.tolist()] if is_labelled else []
    max_letters = max((len(t) for row in [*texts, columns if is_labelled else []] for t in row), default=0)
    width = max(_CELL, max_letters * _LETTER + 12) if is_labelled else max(2, 600 // max(m, n))
    height = _CELL if is_labelled else width
    margin = (max(map(len, rows)) * _LETTER + 16) if is_labelled else 0
    header = _LINE + 12 if is_labelled else 0
    picture = Image.new("RGB", (margin + n * width, header + m * height), "white")
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(_LETTER * 1.8)
    finite = values[np.isfinite(values)]
    low, size = (finite.min(), np.ptp(finite) or 1.0) if finite.size else (0.0, 1.0)
    for i in range(m):
        for j in range(n):
            share = (values[i, j] - low) / size if np.isfinite(values[i, j]) else 0.0
            colour = tuple(int(c) for c in np.round(_LOW + share * (_HIGH - _LOW)))
            x, y = margin + j * width, header + i * height
            draw.rectangle((x, y, x + width - 1, y + height - 1), fill=colour)
            if is_labelled:
                ink = "white" if share > 0.5 else "black"
                draw.text((x + width / 2, y + height / 2), texts[i][j], fill=ink, font=font, anchor="mm")
    if is_labelled:
        for i, text in enumerate(rows):
            draw.text(
                (margin - 10, header + (i + 0.5) * height), text, fill="black", font=font, anchor="rm"
            )
        for j, text in enumerate(columns):
            draw.text((margin + (j + 0.5) * width, header / 2), text, fill="black", font=font, anchor="mm")
    return picture
