"""The file LOCK: who trains in a directory, whether it still does, and why it no longer does."""

import json
import os
import subprocess
import sys
import threading
import time

import ctl
import pytest
from conftest import environment
from ctl.supervision import lease as lease_module
from ctl.supervision.lease import Lease, hold_lease
from ctl.supervision.process_identity import process_mark, process_start_time
from launching import wait_for
from small_models import Small, every_step

TIMEOUT_SECS = 60

HOLDS = """
import sys, time
from ctl.supervision.lease import Lease
with Lease(sys.argv[1], beat_secs=float(sys.argv[2])).held(step=lambda: 7):
    print("held", flush=True)
    sys.stdin.read()
"""


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def path(tmp_path):
    return tmp_path / "LOCK"


@pytest.fixture
def holder(path):
    """Starts a process that holds the lease until its stdin is closed; killed at the end."""
    started = []

    def start(beat_secs=0.05):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDS, str(path), str(beat_secs)], env=environment(),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        started.append(process)
        assert process.stdout.readline() == b"held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=TIMEOUT_SECS)


def elsewhere(path, **changes):
    """Writes the lease of a process on another machine."""
    content = {
        "host": "elsewhere", "pid": 1, "process": "", "started": 900.0, "beat": 1000.0,
        "state": "training", **changes,
    }  # fmt: skip
    path.write_text(json.dumps(content))


def test_a_lease_says_who_holds_it_and_then_that_it_ended(path):
    before = time.time()
    lease = Lease(path)
    with lease.held(step=lambda: 3):
        mine = lease.read()
        assert lease.is_alive(mine)
        assert (mine.pid, mine.state, mine.reason, mine.step) == (os.getpid(), "training", "", 3)
        assert before <= mine.started <= mine.beat <= time.time()
        assert set(json.loads(path.read_text())) >= {
            "host", "pid", "started", "beat", "state", "reason", "step",
        }  # fmt: skip
    ended = lease.read()
    assert (ended.state, ended.reason, ended.exit_code) == ("ended", "done", 0)
    assert not lease.is_alive(ended) and ended.identity == mine.identity
    assert [p.name for p in path.parent.iterdir()] == ["LOCK"]


@pytest.mark.parametrize(
    ("error", "reason", "code"),
    [
        (ValueError("x"), "failed: ValueError", 1),
        (ctl.NonFiniteError("x"), "failed: NonFiniteError", 1),
        (ctl.PeerLostError("x"), "failed: PeerLostError", 134),
        (ctl.Stopped("x", 143), "stopped by a signal", 143),
        (KeyboardInterrupt(), "stopped by Ctrl-C", 130),
    ],
)
def test_the_end_says_why(path, error, reason, code):
    with pytest.raises(type(error)), Lease(path).held(step=lambda: 0):
        raise error
    ended = Lease(path).read()
    assert (ended.state, ended.reason, ended.exit_code) == ("ended", reason, code)


def test_a_beat_is_rewritten_and_carries_the_newest_step(path):
    steps = [1]
    with Lease(path, beat_secs=0.01).held(step=lambda: steps[0]):
        first = Lease(path).read()
        steps[0] = 5
        wait_for(lambda: Lease(path).read().step == 5)
        assert Lease(path).read().beat > first.beat
        assert Lease(path).read().started == first.started


def test_no_beat_comes_after_the_end(path):
    lease = Lease(path, beat_secs=0.001)
    for _ in range(50):
        with lease.held(step=lambda: 0):
            pass
        mine = lease.read()
        lease._write(mine, step=0)  # a beat that was under way when training ended
        assert lease.read() == mine and mine.state == "ended"
    wait_for(lambda: "ctl-lease" not in [t.name for t in threading.enumerate()])


def test_a_killed_holder_is_dead_at_once(path, holder):
    process = holder(beat_secs=1000)
    lease = Lease(path)
    mine = lease.read()
    assert mine.pid == process.pid and mine.step == 7 and lease.is_alive(mine)
    process.kill()
    wait_for(lambda: not lease.is_alive(mine))  # also while nobody has asked for its exit code
    assert process.returncode is None and lease.read().state == "training"


def test_another_process_with_its_number_is_not_the_holder(path, holder):
    holder(beat_secs=1000)
    content = json.loads(path.read_text())
    namespace, ticks = content["process"].split("/")
    path.write_text(json.dumps({**content, "process": f"{namespace}/{int(ticks) - 1}"}))
    lease = Lease(path)
    assert not lease.is_alive(lease.read())


def test_a_number_of_another_container_tells_nothing(path, holder):
    process = holder(beat_secs=1000)
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "process": "pid:[1]/5"}))
    lease = Lease(path)
    mine = lease.read()
    process.kill()
    process.wait(TIMEOUT_SECS)
    assert lease.is_alive(mine)  # its beat is fresh, and that is all there is to go by


def test_elsewhere_a_minute_without_a_beat_is_death(path):
    clock = Clock()
    elsewhere(path)
    lease = Lease(path, clock=clock)
    assert lease.is_alive(lease.read())
    clock.now = 1059.0
    assert lease.is_alive(lease.read())
    clock.now = 1061.0
    assert not lease.is_alive(lease.read())


@pytest.mark.parametrize("beat", [100.0, 1000.0, 9000.0])
def test_the_age_of_a_beat_by_the_clock_of_another_machine_does_not_matter(path, beat):
    clock = Clock()
    elsewhere(path, beat=beat)
    lease = Lease(path, clock=clock)
    assert lease.is_alive(lease.read())
    clock.now = 1059.0
    assert lease.is_alive(lease.read())
    clock.now = 1061.0
    assert not lease.is_alive(lease.read())


@pytest.mark.parametrize("shift_secs", [7200.0, -7200.0])
def test_a_clock_that_is_set_makes_no_living_process_dead(path, monkeypatch, shift_secs):
    """The clock of the reader, or of the holder, jumps between two beats."""
    real = time.time
    elsewhere(path, beat=real())
    lease = Lease(path)
    assert lease.is_alive(lease.read())
    monkeypatch.setattr(time, "time", lambda: real() + shift_secs)
    assert lease.is_alive(lease.read())
    elsewhere(path, beat=real() + shift_secs)
    assert lease.is_alive(lease.read())


@pytest.mark.parametrize("skew", [-3600.0, 3600.0])
def test_clocks_that_differ_neither_kill_nor_keep_alive(path, skew):
    clock = Clock()
    lease = Lease(path, clock=clock)
    for _ in range(100):
        elsewhere(path, beat=clock.now + skew)
        assert lease.is_alive(lease.read())
        clock.now += 5.0
    clock.now += 50.0
    assert lease.is_alive(lease.read())
    clock.now += 11.0
    assert not lease.is_alive(lease.read())


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"host": "a"}', '{"host": 1, "pid": "x", "started": null}']
)
def test_what_cannot_be_read_is_nobody(path, text):
    path.write_text(text)
    assert Lease(path).read() is None
    path.unlink()
    assert Lease(path).read() is None


def test_a_key_of_a_later_version_is_left_out(path):
    elsewhere(path, colour="green")
    assert Lease(path).read().host == "elsewhere"


def test_a_full_disk_warns_once_and_training_goes_on(path, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(lease_module.os, "replace", full)
    with Lease(path, beat_secs=0.001).held(step=lambda: 0):
        wait_for(lambda: caplog.records)
        done = threading.Event()
        done.wait(0.05)
    [said] = [r.getMessage() for r in caplog.records]
    assert "No space left on device" in said and list(path.parent.iterdir()) == []


def test_without_a_directory_nothing_is_held():
    with hold_lease(None, lambda: 0):
        pass


def test_a_process_knows_when_it_began(tmp_path):
    before = time.time()
    where = "ctl.supervision.process_identity"
    code = (
        f"import time; print(time.time()); time.sleep(1); from {where} import process_start_time as p; "
        "print(p())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, check=True,
        timeout=TIMEOUT_SECS,
    )  # fmt: skip
    first_line, started = map(float, done.stdout.split())
    assert before - 0.1 <= started <= first_line + 0.1
    assert process_start_time() == pytest.approx(process_start_time(), abs=0.5)
    assert process_mark(os.getpid()) and process_mark(2**22 + 1) == ""


def test_a_trainer_holds_the_lease_while_it_trains_and_says_how_it_ended(tmp_path):
    seen = []

    class Watched(Small):
        def after_loop(self, step, means):
            seen.append(Lease(tmp_path / "LOCK").read())
            if step == 4:
                raise ValueError("enough")

    trainer = Watched(
        model_dir=str(tmp_path), strategy="default", intervals=every_step(steps_per_loop=1), writers=[]
    )
    trainer.train(2)
    assert {h.state for h in seen} == {"training"} and Lease(tmp_path / "LOCK").read().step == 2
    assert Lease(tmp_path / "LOCK").read().reason == "done"
    with pytest.raises(ValueError, match="enough"):
        trainer.train(10)
    ended = Lease(tmp_path / "LOCK").read()
    assert (ended.state, ended.reason, ended.step) == ("ended", "failed: ValueError", 4)


def test_a_living_holder_is_named_and_keeps_the_lease(path, holder):
    process = holder()
    for refused in (lambda: Lease(path).check_is_free(), lambda: Lease(path).held(step=int).__enter__()):
        with pytest.raises(ctl.UsageError, match=f"is in use: process {process.pid} on "):
            refused()
    assert Lease(path).read().pid == process.pid


def test_the_lease_of_a_dead_holder_is_free_at_once(path, holder):
    process = holder()
    process.kill()
    process.wait(TIMEOUT_SECS)
    with Lease(path).held(step=lambda: 9):
        assert Lease(path).read().pid == os.getpid()


def far(path, **changes):
    """LOCK as a process of another machine would have written it: whole at every moment."""
    content = {"host": "far", "pid": 7, "process": "x/1", "started": time.time(), "beat": time.time(),
               "state": "training", **changes}  # fmt: skip
    path.with_name("LOCK.new").write_text(json.dumps(content))
    path.with_name("LOCK.new").rename(path)


def test_a_holder_on_another_machine_that_still_beats_keeps_the_lease(path):
    far(path)
    beats = threading.Timer(0.1, lambda: far(path, started=1.0, beat=time.time() + 1))
    beats.start()
    with pytest.raises(ctl.UsageError, match="process 7 on far"):
        Lease(path, beat_secs=0.02, stale_secs=TIMEOUT_SECS).check_is_free()


def test_a_holder_on_another_machine_that_beats_no_more_is_taken_for_dead(path, caplog):
    far(path)
    with Lease(path, beat_secs=0.02, stale_secs=0.2).held(step=lambda: 0):
        assert Lease(path).read().host != "far"
    assert any("waiting up to" in m for m in caplog.messages)
