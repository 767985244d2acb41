"""What a user logs that is no plain number: matrices, sounds, precision-recall curves.

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

_NUM_THRESHOLDS = 201  # as tf.summary's plugin has by default
_MOST_WRITTEN = 20  # rows or columns whose cells show their numbers
_CELL, _LETTER, _LINE = 88, 13, 28  # pixels
_LOW, _HIGH = np.array([247, 251, 255]), np.array([8, 48, 107])  # light blue to dark blue


@dataclass(frozen=True)
class Matrix:
    """Numbers `[m, n]` as a picture with a number in each cell, such as a confusion matrix.

    Attributes:
      rows, columns: their names, from top and from left; by default 0, 1, ...
    """

    values: Any
    rows: Sequence[str] | None = None
    columns: Sequence[str] | None = None

    def event(self, step: int, name: str, run: str) -> Event:
        """The picture. Raises UsageError for what is no matrix, and for other numbers of names."""
        values = _numbers(name, self.values)
        if values.ndim != 2 or not values.size:
            raise UsageError(f"Matrix for {name!r} has shape {values.shape}; expected [m, n].")
        names = []
        for axis, given in enumerate((self.rows, self.columns)):
            texts = [str(t) for t in (range(values.shape[axis]) if given is None else given)]
            if len(texts) != values.shape[axis]:
                raise UsageError(
                    f"Matrix for {name!r} has {len(texts)} names for {values.shape[axis]} "
                    f"{('rows', 'columns')[axis]}; expected one for each."
                )
            names.append(texts)
        picture = _drawn(values, *names)
        file = io.BytesIO()
        picture.save(file, "PNG")
        width, height = picture.size
        return ImageLogged(step, name, file.getvalue(), width, height, run)


@dataclass(frozen=True)
class Audio:
    """Sound `[n]`, or `[n, channels]`, of -1..1; `sample_rate` in samples per second."""

    samples: Any
    sample_rate: int

    def event(self, step: int, name: str, run: str) -> Event:
        """A WAV file of 16 bits. Raises UsageError for other shapes."""
        samples = _numbers(name, self.samples)
        if samples.ndim not in (1, 2) or not samples.size or samples.shape[1:] > (8,):
            raise UsageError(
                f"Audio for {name!r} has shape {samples.shape}; expected [n] or [n, channels]."
            )
        if not int(self.sample_rate) > 0:
            raise UsageError(f"Audio for {name!r}: sample_rate={self.sample_rate!r}; expected e.g. 16000.")
        file = io.BytesIO()
        with wave.open(file, "wb") as out:
            out.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
            out.setsampwidth(2)
            out.setframerate(int(self.sample_rate))
            whole = np.clip(np.nan_to_num(samples), -1, 1) * 32767
            out.writeframes(np.round(whole).astype("<i2").tobytes())
        return AudioLogged(step, name, file.getvalue(), run=run)


@dataclass(frozen=True)
class PrCurve:
    """Precision against recall of scores 0..1 for labels that are true or false, both `[n]`."""

    labels: Any
    scores: Any

    def event(self, step: int, name: str, run: str) -> Event:
        """Counts for 201 thresholds. Raises UsageError for shapes or scores that cannot be."""
        labels, scores = _numbers(name, self.labels).ravel() > 0.5, _numbers(name, self.scores).ravel()
        if labels.shape != scores.shape or not labels.size:
            raise UsageError(
                f"PrCurve for {name!r} has {labels.size} labels and {scores.size} scores; expected one "
                "score for each label."
            )
        if not (np.min(scores) >= 0 and np.max(scores) <= 1):
            raise UsageError(f"PrCurve for {name!r} has scores outside 0..1; expected probabilities.")
        thresholds = np.linspace(0, 1, _NUM_THRESHOLDS)
        true = _at_least(scores[labels], thresholds)
        false = _at_least(scores[~labels], thresholds)
        positives, negatives = int(labels.sum()), int((~labels).sum())
        precision = true / np.maximum(true + false, 1)
        recall = true / max(positives, 1)
        table = np.stack([true, false, negatives - false, positives - true, precision, recall])
        return CurveLogged(step, name, table.astype(np.float32), run=run)


def array_event(step: int, name: str, values: np.ndarray, run: str) -> Event:
    """A metric of rank >= 1: a table of a vector, a picture of a matrix; more axes become rows."""
    if values.ndim == 1:
        rows = "\n".join(f"| {i} | {value:.6g} |" for i, value in enumerate(values.tolist()))
        return TextLogged(step, name, f"| | {name} |\n| --- | --- |\n{rows}", run=run)
    return Matrix(values.reshape(-1, values.shape[-1])).event(step, name, run)


def _numbers(name: str, values: Any) -> np.ndarray:
    array = np.asarray(values.numpy() if hasattr(values, "numpy") else values)
    if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
        raise UsageError(f"log({name!r}) got values of {array.dtype}; expected numbers.")
    return array.astype(np.float64)


def _at_least(scores: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """How many scores are as large as each threshold."""
    return scores.size - np.searchsorted(np.sort(scores), thresholds, side="left")


def _drawn(values: np.ndarray, rows: Sequence[str], columns: Sequence[str]) -> Any:
    """Cells from light to dark, with names, and with numbers where there are few."""
    from PIL import Image, ImageDraw, ImageFont

    m, n = values.shape
    written = max(m, n) <= _MOST_WRITTEN
    texts = [[f"{v:.4g}" for v in row] for row in values.tolist()] if written else []
    widest = max((len(t) for row in [*texts, columns if written else []] for t in row), default=0)
    cell = max(_CELL, widest * _LETTER + 12) if written else max(2, 600 // max(m, n))
    high = _CELL if written else cell
    left = (max(map(len, rows)) * _LETTER + 16) if written else 0
    top = _LINE + 12 if written else 0
    picture = Image.new("RGB", (left + n * cell, top + m * high), "white")
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(_LETTER * 1.8)
    finite = values[np.isfinite(values)]
    low, size = (finite.min(), np.ptp(finite) or 1.0) if finite.size else (0.0, 1.0)
    for i in range(m):
        for j in range(n):
            share = (values[i, j] - low) / size if np.isfinite(values[i, j]) else 0.0
            colour = tuple(int(c) for c in np.round(_LOW + share * (_HIGH - _LOW)))
            x, y = left + j * cell, top + i * high
            draw.rectangle((x, y, x + cell - 1, y + high - 1), fill=colour)
            if written:
                ink = "white" if share > 0.5 else "black"
                draw.text((x + cell / 2, y + high / 2), texts[i][j], fill=ink, font=font, anchor="mm")
    if written:
        for i, text in enumerate(rows):
            draw.text((left - 10, top + (i + 0.5) * high), text, fill="black", font=font, anchor="rm")
        for j, text in enumerate(columns):
            draw.text((left + (j + 0.5) * cell, top / 2), text, fill="black", font=font, anchor="mm")
    return picture
