"""Matrices, sounds and curves, read with TensorBoard's reader."""

import io
import wave

import ctl
import numpy as np
import pytest
import tensorflow as tf
from ctl.metrics.events import number_or_event
from PIL import Image
from small_models import Small, every_step
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.pr_curve import summary as curve_summary

SOUND = np.sin(np.linspace(0, 50, 800))
LABELS, SCORES = np.array([0, 1, 1, 0, 1]), np.array([0.1, 0.4, 0.9, 0.5, 1.0])


class LoggingFigures(Small):
    def after_loop(self, step, means):
        self.log("confusion", ctl.Matrix([[5, 1], [0, 7]], rows=["cat", "dog"], columns=["cat", "dog"]))
        self.log("tone", ctl.Audio(SOUND, sample_rate=8000))
        self.log("spam", ctl.PrCurve(LABELS, tf.constant(SCORES)))


@pytest.fixture(scope="module")
def events(tmp_path_factory):
    directory = tmp_path_factory.mktemp("figures")
    writers = [ctl.TensorBoardWriter(directory)]
    LoggingFigures(strategy="default", writers=writers, intervals=every_step()).train(1)
    return EventAccumulator(str(directory / "train"), size_guidance={"tensors": 0}).Reload()


def tensor(events, tag):
    (event,) = events.Tensors(tag)
    assert event.step == 1
    return tf.make_ndarray(event.tensor_proto), events.SummaryMetadata(tag).plugin_data.plugin_name


def test_a_matrix_is_a_picture_with_darker_cells_for_larger_numbers(events):
    (width, height, png), plugin = tensor(events, "confusion")
    picture = Image.open(io.BytesIO(png)).convert("L")
    assert plugin == "images" and picture.size == (int(width), int(height))
    corners = ((170, 80), (80, 170), (80, 80))  # left of and above the numbers in the cells of 0, 1 and 7
    shades = [picture.getpixel((picture.width - x, picture.height - y)) for x, y in corners]
    assert shades[0] > shades[1] > shades[2]


def test_a_sound_is_a_wav_file(events):
    content, plugin = tensor(events, "tone")
    assert plugin == "audio" and content.shape == (1, 2)
    with wave.open(io.BytesIO(content[0, 0])) as file:
        assert (file.getframerate(), file.getnchannels(), file.getnframes()) == (8000, 1, 800)
        samples = np.frombuffer(file.readframes(800), "<i2")
    np.testing.assert_allclose(samples / 32767, SOUND, atol=1e-4)


def test_a_curve_is_that_of_tensorboard(events):
    table, plugin = tensor(events, "spam/pr_curves")
    tensorboard_summary = curve_summary.pb("spam", LABELS.astype(bool), SCORES, num_thresholds=201)
    expected = tf.make_ndarray(tensorboard_summary.value[0].tensor)
    assert plugin == "pr_curves"
    np.testing.assert_allclose(table, expected, atol=1e-6)


def test_a_large_matrix_is_drawn_without_numbers():
    event = ctl.Matrix(np.eye(300)).event(1, "large", "train")
    assert 300 <= event.width <= 1000 and event.width == event.height


@pytest.mark.parametrize("value, error_pattern", [
    (ctl.Matrix([1, 2]), r"shape \(2,\); expected \[m, n\]"),
    (ctl.Matrix([[1, 2]], columns=["a"]), "1 names for 2 columns"),
    (ctl.Matrix([["a"]]), "expected numbers"),
    (ctl.Audio(np.zeros([2, 3, 4]), 8000), r"expected \[n\] or \[n, channels\]"),
    (ctl.Audio(np.zeros(5), 0), "sample_rate of Audio for .* is 0"),
    (ctl.PrCurve([1, 0], [0.5]), "2 labels and 1 scores"),
    (ctl.PrCurve([1, 0], [0.5, 1.5]), "outside 0..1"),
    (ctl.PrCurve([1, 0], [0.5, float("nan")]), "outside 0..1"),
])  # fmt: skip
def test_a_value_that_cannot_be_shown_is_refused(value, error_pattern):
    with pytest.raises(ctl.UsageError, match=error_pattern):
        number_or_event(1, "x", value)
