"""Values logged by name: numbers go to all writers, texts and histograms to writers that support them."""

import json

import ctl
import numpy as np
import pytest
import tensorflow as tf
from ctl.metrics.events import number_or_event
from ctl.metrics.images import image_grid
from ctl.metrics.protocol import HistogramLogged, TextLogged
from ctl.metrics.summaries import histogram_summary
from small_models import Small, every_step
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


class Logging(Small):
    def after_loop(self, step, means):
        self.log("temperature", tf.constant(step * 0.5))
        self.log("note", f"**step** {step}")
        self.log("weights", self.model.trainable_variables[0])


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    directory, memory = tmp_path_factory.mktemp("logged"), ctl.MemoryWriter()
    tensorboard = ctl.TensorBoardWriter(directory / "logs")
    lines = ctl.JsonlWriter(directory / "metrics.jsonl")
    writers = [memory, tensorboard, lines]
    Logging(strategy="default", writers=writers, intervals=every_step(steps_per_loop=1)).train(3)
    return directory, memory


def test_a_number_is_written_by_the_writers_of_means(logged):
    directory, memory = logged
    rows = [(step, values["temperature"]) for _, step, values in memory.rows if "temperature" in values]
    assert rows == [(1, 0.5), (2, 1.0), (3, 1.5)]
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    assert [line["temperature"] for line in lines if "temperature" in line] == [0.5, 1.0, 1.5]
    events = EventAccumulator(str(directory / "logs" / "train")).Reload()
    assert [e.step for e in events.Tensors("temperature")] == [1, 2, 3]


def test_texts_and_histograms_have_the_format_of_tensorflow_s_summaries(logged):
    events = EventAccumulator(str(logged[0] / "logs" / "train"), size_guidance={"tensors": 0}).Reload()
    plugins = {tag: events.SummaryMetadata(tag).plugin_data.plugin_name for tag in ("note", "weights")}
    assert plugins == {"note": "text", "weights": "histograms"}
    assert [tf.make_ndarray(e.tensor_proto).item() for e in events.Tensors("note")][2] == b"**step** 3"
    rows = tf.make_ndarray(events.Tensors("weights")[2].tensor_proto)
    assert rows.shape == (30, 3) and rows[:, 2].sum() == 8 * 16
    np.testing.assert_array_equal(rows[1:, 0], rows[:-1, 1])


def test_a_histogram_is_that_of_tf_summary(tmp_path):
    values = np.random.default_rng(0).normal(size=500)
    with tf.summary.create_file_writer(str(tmp_path)).as_default():
        tf.summary.histogram("x", values, step=1)
    events = EventAccumulator(str(tmp_path), size_guidance={"tensors": 0}).Reload()
    expected = tf.make_ndarray(events.Tensors("x")[0].tensor_proto)
    event = number_or_event(1, "x", values)
    histogram = histogram_summary("x", event.edges, event.counts).value[0].tensor.double_val
    np.testing.assert_allclose(np.reshape(histogram, [-1, 3]), expected, rtol=1e-6)


@pytest.mark.parametrize("value", [[1.0, float("nan"), float("inf")], [], [2.0, 2.0], [True, False]])
def test_any_array_of_numbers_has_a_histogram(value):
    event = number_or_event(1, "x", np.asarray(value))
    assert isinstance(event, HistogramLogged) and len(event.edges) == len(event.counts) + 1
    assert sum(event.counts) == np.isfinite(np.asarray(value, np.float64)).sum()


def test_a_value_that_cannot_be_logged_is_refused_and_log_outside_a_run_has_no_effect():
    assert number_or_event(1, "x", "text") == TextLogged(1, "x", "text")
    for name, value in (("x", object()), ("x", {"a": 1}), ("", 1.0), (3, 1.0), ("x", np.array(["a"]))):
        with pytest.raises(ctl.UsageError, match=r"log\("):
            number_or_event(1, name, value)
    Small(strategy="default", writers=[]).log("x", 1.0)


def test_float_images_are_rounded_and_values_outside_0_to_1_are_clipped():
    values = [[0.0, 0.25, 0.5], [1.0, 2.0, -1.0], [np.nan, 0.001, 0.002]]
    logged = image_grid(1, "images", np.reshape(values, [1, 3, 3, 1]))
    decoded = tf.io.decode_png(logged.png)
    assert decoded[..., 0].numpy().tolist() == [[0, 64, 128], [255, 255, 0], [0, 0, 1]]
