"""Metrics as JSON lines, also after a restart."""

import json
import math

import pytest
from ctl.metrics.jsonl import JsonlWriter
from ctl.metrics.protocol import Ended, RunEnd, RunInfo, Started

INFO = RunInfo("M", "one_device", 1, 1, 8, "", "float32", 0, None)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.jsonl"


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def strict_rows(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def attempt(path, start, steps, evals=()):
    writer = JsonlWriter(path)
    writer.note(Started(start, None, INFO))
    for step in steps:
        writer.write(step, {"loss": float(step)})
        if step in evals:
            writer.write(step, {"loss": step + 0.5}, run="eval")
    return writer


def test_a_row_contains_step_run_time_and_values(path):
    JsonlWriter(path, clock=lambda: 1234.5).write(200, {"loss": 0.25}, run="eval")
    assert rows(path) == [{"step": 200, "run": "eval", "time": 1234.5, "loss": 0.25}]


def test_a_row_can_be_read_before_the_run_ends(path):
    writer = JsonlWriter(path)
    writer.write(1, {"loss": 1.0})
    assert len(rows(path)) == 1
    writer.write(2, {"loss": 1.0})
    assert len(rows(path)) == 2


def test_floats_keep_every_digit(path):
    value = 0.1 + 0.2
    JsonlWriter(path).write(1, {"loss": value, "tiny": 5e-324, "third": 1 / 3})
    assert rows(path)[0]["loss"] == value
    assert rows(path)[0]["tiny"] == 5e-324
    assert rows(path)[0]["third"] == 1 / 3


def test_any_json_parser_reads_numbers_that_are_not_finite(path):
    JsonlWriter(path).write(1, {"a": math.nan, "b": math.inf, "c": -math.inf})
    row = strict_rows(path)[0]
    assert (row["a"], row["b"], row["c"]) == ("NaN", "Infinity", "-Infinity")
    assert math.isnan(float(row["a"])) and float(row["c"]) == -math.inf


def test_a_metric_called_step_does_not_hide_the_step(path):
    JsonlWriter(path).write(7, {"step": 0.5, "time": 0.25})
    row = rows(path)[0]
    assert (row["step"], row["metric.step"], row["metric.time"]) == (7, 0.5, 0.25)


def test_a_restart_drops_rows_after_the_checkpoint(path):
    attempt(path, 0, range(1, 8), evals=(4, 6))
    attempt(path, 4, range(5, 9)).note(Ended(8, RunEnd.DONE))
    train = [row["step"] for row in rows(path) if row["run"] == "train"]
    assert train == [1, 2, 3, 4, 5, 6, 7, 8]


def test_an_evaluation_at_the_restored_step_stays(path):
    attempt(path, 0, range(1, 8), evals=(4, 6))
    attempt(path, 4, ())
    assert [row["step"] for row in rows(path) if row["run"] == "eval"] == [4]


def test_a_line_cut_short_by_a_kill_is_dropped(path):
    attempt(path, 0, range(1, 4))
    path.write_bytes(path.read_bytes()[:-5])
    attempt(path, 3, [3])
    assert [row["step"] for row in rows(path)] == [1, 2, 3]


def test_a_line_that_lacks_only_its_newline_is_torn_too(path):
    attempt(path, 0, range(1, 4))
    path.write_bytes(path.read_bytes()[:-1])
    attempt(path, 3, [4])
    assert [row["step"] for row in rows(path)] == [1, 2, 4]


def test_a_line_written_before_the_start_is_not_appended_to_an_incomplete_line(path):
    attempt(path, 0, [1, 2])
    path.write_bytes(path.read_bytes()[:-5])
    writer = JsonlWriter(path)
    writer.write(2, {"loss": 0.5})
    assert json.loads(path.read_text().splitlines()[-1])["loss"] == 0.5
    writer.note(Started(2, None, INFO))
    assert [row["step"] for row in rows(path)] == [1, 2]


def test_a_start_without_a_checkpoint_begins_an_empty_file(path):
    attempt(path, 0, range(1, 4))
    attempt(path, 0, [1])
    assert [row["step"] for row in rows(path)] == [1]


def test_an_interrupted_rewrite_leaves_the_old_file_unchanged(path, monkeypatch):
    attempt(path, 0, range(1, 8)).note(Ended(7, RunEnd.DONE))
    before = path.read_bytes()

    def raise_interrupt(*paths):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", raise_interrupt)
    with pytest.raises(KeyboardInterrupt):
        attempt(path, 4, ())
    assert path.read_bytes() == before


def test_a_restart_leaves_no_other_files(path):
    attempt(path, 0, range(1, 8))
    attempt(path, 4, [5])
    attempt(path, 9, [10])
    assert [entry.name for entry in path.parent.iterdir()] == ["metrics.jsonl"]


def test_a_file_that_cannot_be_written_is_an_error_with_its_name(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        JsonlWriter(tmp_path / "file" / "metrics.jsonl").write(1, {"loss": 1.0})


def test_integers_and_truth_values_keep_their_types(tmp_path):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer.write(1, {"count": 2**60 + 1, "is_full": True, "loss": 1})
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (row["count"], row["is_full"], row["loss"]) == (2**60 + 1, True, 1) and row["is_full"] is True
