"""Signs of life in a file, and the end of a process whose steps hang."""

import json
import threading
import time

import ctl
import pytest
from conftest import TIMEOUT_SECS
from ctl.supervision import heartbeat
from ctl.supervision.beat_file import PollClock
from ctl.supervision.heartbeat import Heartbeat
from small_models import Small, every_step


def until(condition):
    deadline = time.monotonic() + TIMEOUT_SECS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def content(path):
    return json.loads(path.read_text())


def test_the_file_tells_step_phase_and_that_it_beats(tmp_path):
    path = tmp_path / "job_0.json"
    heart = Heartbeat(path, beat_secs=0.01)
    heart.start()
    assert content(path)["phase"] == "starting"
    with heart.supervise_training(0.0):
        heart.record_step(7)
        until(lambda: (content(path)["step"], content(path)["phase"]) == (7, "training"))
        with heart.enter_phase(heartbeat.SAVING):
            until(lambda: content(path)["phase"] == "saving")
        first = content(path)
        until(lambda: content(path)["beat"] > first["beat"])
        assert content(path)["progressed"] >= first["progressed"]
    assert content(path)["phase"] == "ended" and content(path)["step"] == 7


def test_nobody_who_asks_no_thread(monkeypatch):
    monkeypatch.delenv(heartbeat.HEARTBEAT_VARIABLE, raising=False)
    heart = Heartbeat()
    with heart.supervise_training(0.0):
        heart.record_step(1)
    assert heart._beats is None


def test_a_disk_that_refuses_is_no_reason_to_stop(tmp_path):
    heart = Heartbeat(tmp_path / "no" / "such" / "place", beat_secs=0.01)
    with heart.supervise_training(0.0):
        heart.record_step(1)


def test_a_hang_prints_the_stacks_of_all_threads_and_ends_with_134(capfd):
    ended = threading.Event()
    codes = []

    def end(code):
        codes.append(code)
        ended.set()
        threading.Event().wait()  # as a process that is gone

    heart = Heartbeat(beat_secs=0.01, end=end)

    def a_hook_that_hangs():
        assert ended.wait(TIMEOUT_SECS)

    with heart.supervise_training(1.0):
        heart.record_step(12)
        a_hook_that_hangs()
    printed = capfd.readouterr().err
    assert codes == [134]
    assert "no progress for 1 s" in printed and "after step 12 while training" in printed
    assert "a_hook_that_hangs" in printed and printed.lower().count("thread 0x") >= 2


def test_steps_within_a_long_graph_call_are_progress():
    ended = []
    steps = iter(range(13, 10**9))
    heart = Heartbeat(beat_secs=0.01, end=ended.append)
    looked = []

    def read_step():
        looked.append(next(steps))
        return looked[-1]

    with heart.supervise_training(0.02, read_step):
        heart.record_step(12)
        until(lambda: len(looked) >= 3)
    assert not ended


@pytest.mark.parametrize("shift_secs", [3600.0, -3600.0])
def test_a_clock_that_is_set_is_no_hang(tmp_path, monkeypatch, shift_secs):
    real, ended = time.time, []
    heart = Heartbeat(tmp_path / "job_0.json", beat_secs=0.01, end=ended.append)
    with heart.supervise_training(60.0):
        heart.record_step(12)
        monkeypatch.setattr(time, "time", lambda: real() + shift_secs)
        first = content(tmp_path / "job_0.json")["beat"]
        until(lambda: content(tmp_path / "job_0.json")["beat"] > first + 0.05)
    assert not ended


def test_a_process_that_was_stopped_has_not_used_up_its_limit(monkeypatch):
    """After Ctrl-Z and fg an hour may have passed."""
    now, ended, beats = [0.0], [], []
    monkeypatch.setattr(heartbeat, "PollClock", lambda most: PollClock(most, clock=lambda: now[0]))
    heart = Heartbeat(beat_secs=0.01, end=ended.append)
    monkeypatch.setattr(heart, "_write", lambda: beats.append(1))
    with heart.supervise_training(60.0):
        now[0] += 3600.0
        last = len(beats)
        until(lambda: len(beats) > last + 3)
        assert not ended
        until(lambda: now.append(now.pop() + 0.04) or ended)
    assert ended[0] == 134


def test_steps_in_a_long_graph_call_reach_the_file_without_a_limit(tmp_path, monkeypatch):
    """The launcher's own limit, --hang_timeout_secs, needs them."""
    monkeypatch.setattr(heartbeat, "_READ_STEP_SECS", 0.05)
    path, steps = tmp_path / "job_0.json", iter(range(13, 10**9))
    heart = Heartbeat(path, beat_secs=0.01)
    with heart.supervise_training(0.0, lambda: next(steps)):
        first = content(path)["progressed"]
        until(lambda: content(path)["progressed"] > first)
        second = content(path)["progressed"]
        until(lambda: content(path)["progressed"] > second)


@pytest.mark.parametrize("phase", ["evaluating", "saving", "compiling", "starting"])
def test_the_limit_of_steps_is_not_that_of_other_phases(tmp_path, monkeypatch, capfd, phase):
    path, ended = tmp_path / "job_0.json", []
    heart = Heartbeat(path, beat_secs=0.01, end=ended.append)

    def is_older_than_a_step():
        now = content(path)
        return now["phase"] == phase and now["beat"] > now["progressed"] + 0.1

    with heart.limit_phase(0.05, phase):
        until(is_older_than_a_step)
        last = content(path)["beat"]
        until(lambda: content(path)["beat"] > last)  # it has looked in between
        assert not ended
        monkeypatch.setitem(heartbeat._MIN_LIMIT_SECS, phase, 0.2)
        until(lambda: ended)
    assert ended[0] == 134 and "no progress for 0.2 s" in capfd.readouterr().err


def test_a_trainer_tells_its_steps_and_its_end(tmp_path, monkeypatch):
    path = tmp_path / "job_0.json"
    heart = Heartbeat(path, beat_secs=0.01)
    monkeypatch.setattr(heartbeat, "current", heart)
    phases = set()

    class Slow(Small):
        def after_loop(self, step, means):
            until(lambda: content(path)["step"] == step)
            phases.add(content(path)["phase"])

    Slow(strategy="default", intervals=every_step(), writers=[]).train(3)
    assert phases == {"training"}
    assert content(path)["phase"] == "ended" and content(path)["step"] == 3


def test_a_trainer_says_when_it_makes_no_steps(tmp_path, monkeypatch):
    phases = []

    class Noting(Heartbeat):
        def enter_phase(self, phase):
            phases.append(phase)
            return super().enter_phase(phase)

    monkeypatch.setattr(heartbeat, "current", Noting())
    intervals = every_step(steps_per_loop=1, evaluate=ctl.Every(steps=2), save=ctl.Every(steps=2))
    Small(strategy="default", model_dir=str(tmp_path), intervals=intervals, writers=[]).train(2)
    about = ["saving"]  # what the manager does at the start and at the end
    steps = ["compiling", "training", "saving", "evaluating"]
    before = ["starting", "starting", "compiling"]  # build and restore, open the data, trace
    assert phases == [*before, "training", *about, *steps, *about]


@pytest.mark.parametrize("where", ["build", "train_data", "train_step", "eval_step"])
def test_a_hang_before_the_first_step_is_found_too(monkeypatch, where):
    ended = []
    monkeypatch.setattr(heartbeat, "current", Heartbeat(beat_secs=0.01, end=ended.append))
    for phase in ("starting", "compiling"):
        monkeypatch.setitem(heartbeat._MIN_LIMIT_SECS, phase, 0.2)

    class Hanging(Small):
        pass

    def hangs(self, *args):
        until(lambda: ended)  # where it really ends
        return getattr(Small, where)(self, *args)

    setattr(Hanging, where, hangs)
    trainer = Hanging(strategy="default", writers=[], intervals=every_step(evaluate=ctl.Every(steps=2)))
    trainer.callbacks = [ctl.EarlyStopping("loss", patience=5)]  # so that eval_step is traced before
    trainer.step_timeout_secs = 0.05
    trainer.train(2)
    assert ended[0] == 134


@pytest.mark.parametrize("step_timeout_secs", [0.0, 30.0])
def test_a_run_that_moves_is_left_alone(step_timeout_secs):
    class Timed(Small):
        pass

    Timed.step_timeout_secs = step_timeout_secs
    assert Timed(strategy="default", intervals=every_step(), writers=[]).train(2)["loss"] > 0
    assert ctl.Config().step_timeout_secs == 0.0
