"""Heartbeat file, and exit of a process when its steps hang."""

import json
import threading
import time

import ctl
import pytest
from conftest import TIMEOUT_SECS, some_of
from ctl.supervision import heartbeat
from ctl.supervision.beat_file import PollClock
from ctl.supervision.heartbeat import Heartbeat
from polling import wait_until
from small_models import Small, every_step


def content(path):
    return json.loads(path.read_text())


def test_the_file_contains_step_phase_and_beat(tmp_path):
    path = tmp_path / "job_0.json"
    monitor = Heartbeat(path, beat_secs=0.01)
    monitor.start()
    assert content(path)["phase"] == "starting"
    with monitor.supervise_training(0.0):
        monitor.record_step(7)
        wait_until(lambda: (content(path)["step"], content(path)["phase"]) == (7, "training"))
        with monitor.enter_phase(heartbeat.SAVING):
            wait_until(lambda: content(path)["phase"] == "saving")
        first = content(path)
        wait_until(lambda: content(path)["beat"] > first["beat"])
        assert content(path)["progressed"] >= first["progressed"]
    assert content(path)["phase"] == "ended" and content(path)["step"] == 7


def test_without_a_request_there_is_no_thread(monkeypatch):
    monkeypatch.delenv(heartbeat.HEARTBEAT_VARIABLE, raising=False)
    monitor = Heartbeat()
    with monitor.supervise_training(0.0):
        monitor.record_step(1)
    assert monitor._beats is None


def test_an_unwritable_path_does_not_stop_training(tmp_path):
    monitor = Heartbeat(tmp_path / "no" / "such" / "place", beat_secs=0.01)
    with monitor.supervise_training(0.0):
        monitor.record_step(1)


def test_a_hang_prints_the_stacks_of_all_threads_and_ends_with_134(capfd):
    ended = threading.Event()
    codes = []

    def end(code):
        codes.append(code)
        ended.set()
        threading.Event().wait()  # like a process that has ended

    monitor = Heartbeat(beat_secs=0.01, end=end)

    def a_hook_that_hangs():
        assert ended.wait(TIMEOUT_SECS)

    with monitor.supervise_training(1.0):
        monitor.record_step(12)
        a_hook_that_hangs()
    printed = capfd.readouterr().err
    assert codes == [134]
    assert "no progress for 1 s" in printed and "after step 12 while training" in printed
    assert "a_hook_that_hangs" in printed and printed.lower().count("thread 0x") >= 2


def test_steps_within_a_long_graph_call_are_progress():
    ended = []
    steps = iter(range(13, 10**9))
    monitor = Heartbeat(beat_secs=0.01, end=ended.append)
    read_steps = []

    def read_step():
        read_steps.append(next(steps))
        return read_steps[-1]

    with monitor.supervise_training(0.02, read_step):
        monitor.record_step(12)
        wait_until(lambda: len(read_steps) >= 3)
    assert not ended


@pytest.mark.parametrize("shift_secs", [3600.0, -3600.0])
def test_a_change_of_the_system_clock_is_no_hang(tmp_path, monkeypatch, shift_secs):
    real, ended = time.time, []
    monitor = Heartbeat(tmp_path / "job_0.json", beat_secs=0.01, end=ended.append)
    with monitor.supervise_training(60.0):
        monitor.record_step(12)
        monkeypatch.setattr(time, "time", lambda: real() + shift_secs)
        first = content(tmp_path / "job_0.json")["beat"]
        wait_until(lambda: content(tmp_path / "job_0.json")["beat"] > first + 0.05)
    assert not ended


def test_the_time_of_a_stopped_process_does_not_count(monkeypatch):
    """After Ctrl-Z and fg an hour may have passed."""
    time_secs, ended, beats = [0.0], [], []
    monkeypatch.setattr(
        heartbeat, "PollClock", lambda max_poll_secs: PollClock(max_poll_secs, clock=lambda: time_secs[0])
    )
    monitor = Heartbeat(beat_secs=0.01, end=ended.append)
    monkeypatch.setattr(monitor, "_write", lambda: beats.append(1))
    with monitor.supervise_training(60.0):
        time_secs[0] += 3600.0
        last = len(beats)
        wait_until(lambda: len(beats) > last + 3)
        assert not ended
        wait_until(lambda: time_secs.append(time_secs.pop() + 0.04) or ended, pause_secs=0.005)
    assert ended[0] == 134


def test_steps_in_a_long_graph_call_reach_the_file_without_a_limit(tmp_path, monkeypatch):
    """The launcher's own limit, --hang_timeout_secs, needs them."""
    monkeypatch.setattr(heartbeat, "_READ_STEP_SECS", 0.05)
    path, steps = tmp_path / "job_0.json", iter(range(13, 10**9))
    monitor = Heartbeat(path, beat_secs=0.01)
    with monitor.supervise_training(0.0, lambda: next(steps)):
        first = content(path)["progressed"]
        wait_until(lambda: content(path)["progressed"] > first)
        second = content(path)["progressed"]
        wait_until(lambda: content(path)["progressed"] > second)


@pytest.mark.parametrize("phase", ["evaluating", "saving", "compiling", "starting"])
def test_the_limit_of_steps_is_not_that_of_other_phases(tmp_path, monkeypatch, capfd, phase):
    path, ended = tmp_path / "job_0.json", []
    monitor = Heartbeat(path, beat_secs=0.01, end=ended.append)

    def is_older_than_a_step():
        state = content(path)
        return state["phase"] == phase and state["beat"] > state["progressed"] + 0.1

    with monitor.limit_phase(0.05, phase):
        wait_until(is_older_than_a_step)
        last = content(path)["beat"]
        wait_until(lambda: content(path)["beat"] > last)  # it has polled in between
        assert not ended
        monkeypatch.setitem(heartbeat._MIN_LIMIT_SECS, phase, 0.2)
        wait_until(lambda: ended)
    assert ended[0] == 134 and "no progress for 0.2 s" in capfd.readouterr().err


def test_a_trainer_records_its_steps_and_its_end(tmp_path, monkeypatch):
    path = tmp_path / "job_0.json"
    monitor = Heartbeat(path, beat_secs=0.01)
    monkeypatch.setattr(heartbeat, "current", monitor)
    phases = set()

    class Slow(Small):
        def after_loop(self, step, means):
            wait_until(lambda: content(path)["step"] == step)
            phases.add(content(path)["phase"])

    Slow(strategy="default", intervals=every_step(), writers=[]).train(3)
    assert phases == {"training"}
    assert content(path)["phase"] == "ended" and content(path)["step"] == 3


def test_a_trainer_records_phases_without_steps(tmp_path, monkeypatch):
    phases = []

    class RecordingHeartbeat(Heartbeat):
        def enter_phase(self, phase):
            phases.append(phase)
            return super().enter_phase(phase)

    monkeypatch.setattr(heartbeat, "current", RecordingHeartbeat())
    intervals = every_step(steps_per_loop=1, evaluate=ctl.Every(steps=2), save=ctl.Every(steps=2))
    Small(strategy="default", model_dir=str(tmp_path), intervals=intervals, writers=[]).train(2)
    save_phases = ["saving"]  # by the checkpoint manager at the start and at the end
    loop_phases = ["compiling", "training", "saving", "evaluating"]
    start_phases = ["starting", "starting", "compiling"]  # build and restore, open the data, trace
    assert phases == [*start_phases, "training", *save_phases, *loop_phases, *save_phases]


@pytest.mark.parametrize(
    "method", some_of(["build", "train_data", "train_step", "eval_step"], "build", "eval_step")
)
def test_a_hang_before_the_first_step_is_detected_too(monkeypatch, method):
    ended = []
    monkeypatch.setattr(heartbeat, "current", Heartbeat(beat_secs=0.01, end=ended.append))
    for phase in ("starting", "compiling"):
        monkeypatch.setitem(heartbeat._MIN_LIMIT_SECS, phase, 0.2)

    class HangingTrainer(Small):
        pass

    def wait_for_end(self, *args):
        wait_until(lambda: ended)  # a real process would end here
        return getattr(Small, method)(self, *args)

    setattr(HangingTrainer, method, wait_for_end)
    trainer = HangingTrainer(
        strategy="default", writers=[], intervals=every_step(evaluate=ctl.Every(steps=2))
    )
    trainer.callbacks = [ctl.EarlyStopping("loss", patience=5)]  # so that eval_step is traced first
    trainer.step_timeout_secs = 0.05
    trainer.train(2)
    assert ended[0] == 134


@pytest.mark.parametrize("step_timeout_secs", some_of([0.0, 30.0], 30.0))
def test_a_run_with_progress_continues(step_timeout_secs):
    class Timed(Small):
        pass

    Timed.step_timeout_secs = step_timeout_secs
    assert Timed(strategy="default", intervals=every_step(), writers=[]).train(2)["loss"] > 0
    assert ctl.Config().step_timeout_secs == 0.0
