"""Order, failures and waits of the calls to an experiment tracker."""

import threading
import time

import pytest
from conftest import TIMEOUT_SECS
from ctl.metrics.protocol import Ended, Exported, ImageLogged, Joined, RunEnd, RunInfo, Started, TextLogged
from ctl.trackers import background_writer
from ctl.trackers.background_writer import TrackerWriter

INFO = RunInfo("Small", "default", 1, 1, 8, "96 examples", "float32", 0, None, run_id="a1", name="seed=0")


class ListTracker(TrackerWriter):
    """A tracker that stores its calls, and raises the given errors first."""

    def __init__(self, errors=(), **options):
        super().__init__("Tracker", **{"close_secs": 0.3, "upload_secs": 30.0, **options})
        self.calls, self.errors, self.gate = [], list(errors), threading.Event()
        self.gate.set()

    def _add(self, *call):
        self.gate.wait(TIMEOUT_SECS)
        if self.errors and (error := self.errors.pop(0)) is not None:
            raise error
        self.calls.append(call)

    def start_run(self, event):
        self._add("start", event.info.run_id)

    def join_run(self, event):
        self._add("join", event.run_id)

    def log_metrics(self, step, values, unix_secs):
        self._add("metrics", step, dict(values))

    def log_exports(self, step, paths):
        self._add("exports", step, tuple(paths))

    def end_run(self, event):
        self._add("end", event.status, event.error)


@pytest.fixture
def retries(monkeypatch):
    monkeypatch.setattr("ctl.trackers.background_writer._RETRY_SECS", (0.001,))


def run(writer, steps=(1, 2), end=RunEnd.DONE, opening=None):
    writer.note(opening or Started(0, 2, INFO))
    for step in steps:
        writer.write(step, {"loss": 1.0 / step})
    writer.note(Ended(max(steps), end))
    return writer.calls


def test_calls_are_complete_and_in_order_when_the_run_has_ended():
    writer = ListTracker()
    writer.note(Started(0, 2, INFO))
    writer.write(1, {"loss": 2.0})
    writer.note(TextLogged(1, "note", "text"))
    writer.note(ImageLogged(1, "digits", b"", 1, 1))
    writer.write(2, {"clean/loss": 1.0}, "eval")
    writer.note(Exported(2, ("export/model.keras",)))
    writer.note(Ended(2, RunEnd.FAILED, error="ValueError: bad batch"))
    assert writer.calls == [
        ("start", "a1"),
        ("metrics", 1, {"train/loss": 2.0}),
        ("metrics", 2, {"eval/clean/loss": 1.0}),
        ("exports", 2, ("export/model.keras",)),
        ("end", "failed", "ValueError: bad batch"),
    ]


def test_a_lost_connection_loses_no_call_and_is_one_warning(retries, caplog):
    writer = ListTracker([None, ConnectionError("away"), ConnectionError("away"), None, TimeoutError()])
    names = [call[0] for call in run(writer)]
    assert names == ["start", "metrics", "metrics", "end"]
    assert caplog.text.count("Tracker failed (ConnectionError: away)") == len(caplog.records) == 1


def test_a_refused_call_is_discarded_and_the_next_calls_are_executed(caplog):
    names = [call[0] for call in run(ListTracker([None, ValueError("no name")]))]
    assert names == ["start", "metrics", "end"] and len(caplog.records) == 1


def test_a_run_that_cannot_be_opened_is_one_warning_and_the_next_run_is_tracked(caplog):
    writer = ListTracker([PermissionError("denied")])
    writer.is_transient = lambda error: False
    assert run(writer) == [] and len(caplog.records) == 1
    assert [call[0] for call in run(writer)] == ["start", "metrics", "metrics", "end"]


def test_a_tracker_without_answer_delays_neither_steps_nor_the_end(caplog):
    writer = ListTracker(close_secs=0.05)
    writer.gate.clear()
    assert run(writer, steps=range(1, 200)) == []
    assert [record.getMessage()[:27] for record in caplog.records] == ["Tracker failed (no answer);"]
    writer.gate.set()


def test_the_end_waits_for_a_tracker_that_answers():
    writer = ListTracker(close_secs=0.0)
    is_sent = threading.Event()
    send = writer.log_metrics

    def slow(*arguments):
        is_sent.wait(0.3)  # longer than close_secs
        send(*arguments)

    writer.log_metrics = slow
    writer.note(Started(0, 1, INFO))
    while not writer.calls:
        is_sent.wait(0.001)
    writer.write(1, {"loss": 1.0})
    writer.note(Ended(1, RunEnd.DONE))
    assert [call[0] for call in writer.calls] == ["start", "metrics", "end"]


@pytest.mark.parametrize("answers_first", [True, False])
def test_the_wait_after_a_signal_is_at_most_close_secs(answers_first, caplog, monkeypatch):
    monkeypatch.setattr(background_writer, "_OPEN_FACTOR", 1e9)
    writer = ListTracker(upload_secs=TIMEOUT_SECS)
    has_answered, is_released = threading.Event(), threading.Event()
    if not answers_first:
        writer.gate.clear()
    writer.log_metrics = lambda *arguments: (has_answered.set(), is_released.wait(TIMEOUT_SECS))
    writer.note(Started(0, 2, INFO))
    thread = writer._thread
    writer.write(1, {"loss": 1.0})
    assert not answers_first or has_answered.wait(TIMEOUT_SECS)
    start_secs = time.monotonic()
    writer.note(Ended(1, RunEnd.SIGNAL))
    assert time.monotonic() - start_secs < TIMEOUT_SECS / 2 and "no answer" in caplog.text
    writer.gate.set(), is_released.set()
    thread.join(TIMEOUT_SECS)


def test_a_roll_back_continues_the_run():
    writer = ListTracker()
    writer.gate.clear()
    writer.note(Started(0, 4, INFO))
    writer.note(Started(2, None, INFO))
    assert [thread.name for thread in threading.enumerate()].count("ctl-tracker") == 1
    writer.gate.set()
    assert run(writer)[:2] == [("start", "a1"), ("start", "a1")]
    assert [call[0] for call in writer.calls].count("end") == 1


def test_a_process_that_joins_does_not_start_a_run():
    calls = run(ListTracker(), opening=Joined("a1", "Small", "runs/a"), end=RunEnd.TRAINING_ENDED)
    assert calls[0] == ("join", "a1") and calls[-1] == ("end", "done", "")


def test_an_abandoned_run_gets_no_further_calls():
    writer = ListTracker()
    writer.gate.clear()
    writer.note(Started(0, 2, INFO))
    writer.write(1, {"loss": 1.0})
    assert writer.abandon()
    writer.gate.set()
    writer.note(Ended(1, RunEnd.FAILED))
    assert [call[0] for call in writer.calls if call[0] != "start"] == []


def test_metrics_without_a_run_are_ignored():
    writer = ListTracker()
    writer.write(1, {"loss": 1.0})
    writer.note(Ended(1, RunEnd.DONE))
    assert writer.calls == []


@pytest.mark.parametrize("end", list(RunEnd))
def test_every_end_has_one_of_three_states(end):
    stopped = {RunEnd.STOPPED, RunEnd.SIGNAL, RunEnd.TIME_LIMIT}
    expected = "failed" if end is RunEnd.FAILED else "stopped" if end in stopped else "done"
    assert Ended(1, end).status == expected
