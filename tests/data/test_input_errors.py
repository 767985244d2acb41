"""Errors of unreadable data: one sentence with the method and the file, and exit code 2."""

import ctl
import numpy as np
import pytest
import tensorflow as tf
from conftest import some_of
from ctl.io import error_report
from small_models import BATCH, Small

CASES = {
    "missing": r"cannot be read: .*nope\.tfrecord; No such file",
    "directory": "cannot be read: .*Is a directory",
    "pattern": r"\(\) found no file: no name matches the pattern '.*none\*'",
    "first": "damaged file: corrupted record at byte 12 of a TFRecord",
    "late": r"damaged file: corrupted record at byte \d{4,}",
    "numpy": r"\(\) cannot read its data: .*No such file or directory: '.*nope\.npy'",
    "image": r"(a function of its pipeline \(map\) failed|cannot be read): .*nope\.png; No such file",
}


def records(path):
    with tf.io.TFRecordWriter(str(path)) as writer:
        for i in range(300):
            writer.write(tf.io.serialize_tensor(tf.fill([8], float(i % 3))).numpy())
    return path.read_bytes()


def faulty_dataset(case, directory):
    content = bytearray(records(directory / "a.tfrecord"))
    names = {"missing": "nope.tfrecord", "directory": ""}
    path = directory / names.get(case, "a.tfrecord")
    if case == "pattern":
        return tf.data.Dataset.list_files(f"{directory}/none*")
    if case == "numpy":
        np.load(directory / "nope.npy")
    if case in ("first", "late"):
        content[20 if case == "first" else len(content) // 2] ^= 0xFF
        path.write_bytes(content)
    data = tf.data.TFRecordDataset(str(path))
    if case == "image":
        return data.map(lambda _: tf.strings.length(tf.io.read_file(f"{directory}/nope.png")))
    return data.map(lambda row: tf.ensure_shape(tf.io.parse_tensor(row, tf.float32), [8]))


def batches(data, batch_size):
    return data.repeat().map(lambda x: (tf.zeros([8]) + tf.cast(x, tf.float32), 0)).batch(batch_size)


@pytest.mark.parametrize("method", ["train_data", "eval_data"])
@pytest.mark.parametrize("case", some_of(CASES, *CASES.keys() - {"directory", "late"}))
def test_unreadable_data_is_one_sentence(case, method, tmp_path):
    class Reading(Small):
        def train_data(self, batch_size):
            if method != "train_data":
                return super().train_data(batch_size)
            return batches(faulty_dataset(case, tmp_path), batch_size)

        def eval_data(self, batch_size):
            return batches(faulty_dataset(case, tmp_path), batch_size).take(300 // BATCH)

    trainer = Reading("module", strategy="default", writers=[])
    with pytest.raises(ctl.UsageError, match=f"{method}.*{CASES[case]}") as raised:
        trainer.train(300 // BATCH) if method == "train_data" else trainer.evaluate()
    assert "\n" not in str(raised.value) and raised.value.exit_code == 2


class Files:
    """A source whose example 40 is in a missing file."""

    def __len__(self):
        return 300

    def __getitem__(self, index):
        if index == 40:
            np.load("/nowhere/x.npy")
        return np.zeros(8, np.float32), np.int64(0)


def generated_from_files(batch_size):
    for index in (0, 40):
        yield np.zeros((batch_size, 8), np.float32), np.zeros(batch_size, np.int64)
        Files()[index]


@pytest.mark.parametrize("kind", ["source", "transform", "generator"])
@pytest.mark.parametrize("method", ["train_data", "eval_data"])
def test_a_missing_file_in_python_data_is_one_sentence_with_the_path_and_the_line(kind, method):
    class Reading(Small):
        def train_data(self, batch_size):
            if kind == "generator":
                return generated_from_files(batch_size)
            if kind == "source":
                return ctl.from_source(Files(), batch_size)
            return ctl.from_source(range(300), batch_size, transform=Files().__getitem__)

        eval_data = train_data

    trainer = Reading("module", strategy="default", writers=[])
    example = {"source": "example 40 of a Files: ", "transform": "example 40 of a range: "}.get(kind, "")
    line = rf"cannot be read: {example}FileNotFoundError: .*'/nowhere/x.npy' \(File .*, in __getitem__\)"
    with pytest.raises(ctl.UsageError, match=f"{method} {line}") as raised:
        trainer.train(20) if method == "train_data" else trainer.evaluate()
    assert "\n" not in str(raised.value) and raised.value.exit_code == 2


@pytest.mark.parametrize("error", some_of([OSError, ValueError, KeyError, StopIteration], OSError))
def test_an_error_of_a_source_names_the_example_and_shows_the_line_of_the_user(error):
    class Broken(Files):
        def __getitem__(self, index):
            if index == 40:
                raise error("torn")
            return super().__getitem__(index)

    class Reading(Small):
        def train_data(self, batch_size):
            return ctl.from_source(Broken(), batch_size)

    with pytest.raises(tf.errors.OpError) as raised:
        Reading("module", strategy="default", writers=[]).train(20)
    report = error_report.short_report(raised.value)
    assert f"example 40 of a Broken: {error.__name__}: " in report.splitlines()[-1]
    assert "in __getitem__" in report and 'raise error("torn")' in report


def test_an_assertion_of_the_user_in_a_step_is_raised_unchanged():
    class Asserting(Small):
        def eval_step(self, batch):
            tf.debugging.assert_less(batch[0], -1e9)
            return super().eval_step(batch)

    with pytest.raises(tf.errors.InvalidArgumentError):
        Asserting("module", strategy="default", writers=[]).evaluate()


def test_errors_of_the_user_are_raised_unchanged():
    class Failing(Small):
        def train_data(self, batch_size):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        Failing(strategy="default", writers=[]).train(1)


def test_a_temporary_error_is_not_explained():
    from ctl.data import input_errors

    message = "x; Input/output error [[{{node IteratorGetNext}}]]"
    explain = input_errors.explain_input_error
    assert explain(tf.errors.UnknownError(None, None, message), "train_data") is None
    assert explain(tf.errors.NotFoundError(None, None, "in a step"), "train_data") is None
