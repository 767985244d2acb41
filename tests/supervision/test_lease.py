"""Lock file of a model directory: owner, liveness and reason of the end."""

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
from polling import wait_until
from small_models import Small, every_step

TIMEOUT_SECS = 600

HOLDER_PROGRAM = """
import sys, time
from ctl.supervision.lease import Lease
with Lease(sys.argv[1], beat_secs=float(sys.argv[2])).held(step=lambda: 7):
    print("held", flush=True)
    sys.stdin.read()
"""


class Clock:
    time_secs = 1000.0

    def __call__(self):
        return self.time_secs


@pytest.fixture
def path(tmp_path):
    return tmp_path / "LOCK"


@pytest.fixture
def holder(path):
    """Starts a process that holds the lease until its stdin is closed; killed at the end."""
    started = []

    def start(beat_secs=0.05):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER_PROGRAM, str(path), str(beat_secs)], env=environment(),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        started.append(process)
        assert process.stdout.readline() == b"held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=TIMEOUT_SECS)


def write_remote_lease(path, **changes):
    """Writes the lease of a process on another machine."""
    content = {
        "host": "elsewhere", "pid": 1, "process": "", "started": 900.0, "beat": 1000.0,
        "state": "training", **changes,
    }  # fmt: skip
    path.write_text(json.dumps(content))


def test_a_lease_contains_its_holder_and_then_its_end(path):
    before = time.time()
    lease = Lease(path)
    with lease.held(step=lambda: 3):
        own_lease = lease.read()
        assert lease.is_alive(own_lease)
        assert (own_lease.pid, own_lease.step) == (os.getpid(), 3)
        assert (own_lease.state, own_lease.reason) == ("training", "")
        assert before <= own_lease.started <= own_lease.beat <= time.time()
        assert set(json.loads(path.read_text())) >= {
            "host", "pid", "started", "beat", "state", "reason", "step",
        }  # fmt: skip
    ended = lease.read()
    assert (ended.state, ended.reason, ended.exit_code) == ("ended", "done", 0)
    assert not lease.is_alive(ended) and ended.identity == own_lease.identity
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
def test_the_end_contains_the_reason(path, error, reason, code):
    with pytest.raises(type(error)), Lease(path).held(step=lambda: 0):
        raise error
    ended = Lease(path).read()
    assert (ended.state, ended.reason, ended.exit_code) == ("ended", reason, code)


def test_a_beat_is_rewritten_with_the_newest_step(path):
    steps = [1]
    with Lease(path, beat_secs=0.01).held(step=lambda: steps[0]):
        first = Lease(path).read()
        steps[0] = 5
        wait_until(lambda: Lease(path).read().step == 5)
        assert Lease(path).read().beat > first.beat
        assert Lease(path).read().started == first.started


def test_no_beat_comes_after_the_end(path):
    lease = Lease(path, beat_secs=0.001)
    for _ in range(50):
        with lease.held(step=lambda: 0):
            pass
        own_lease = lease.read()
        lease._write(own_lease, step=0)  # a beat that was in flight when training ended
        assert lease.read() == own_lease and own_lease.state == "ended"
    wait_until(lambda: "ctl-lease" not in [t.name for t in threading.enumerate()])


def test_a_killed_holder_is_dead_at_once(path, holder):
    process = holder(beat_secs=1000)
    lease = Lease(path)
    own_lease = lease.read()
    assert own_lease.pid == process.pid and own_lease.step == 7 and lease.is_alive(own_lease)
    process.kill()
    wait_until(lambda: not lease.is_alive(own_lease))  # also before its exit code is collected
    assert process.returncode is None and lease.read().state == "training"


def test_another_process_with_the_same_pid_is_not_the_holder(path, holder):
    holder(beat_secs=1000)
    content = json.loads(path.read_text())
    namespace, ticks = content["process"].split("/")
    path.write_text(json.dumps({**content, "process": f"{namespace}/{int(ticks) - 1}"}))
    lease = Lease(path)
    assert not lease.is_alive(lease.read())


def test_a_pid_of_another_container_is_ignored(path, holder):
    process = holder(beat_secs=1000)
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "process": "pid:[1]/5"}))
    lease = Lease(path)
    own_lease = lease.read()
    process.kill()
    process.wait(TIMEOUT_SECS)
    assert lease.is_alive(own_lease)  # only its beat counts, which is recent


def test_a_remote_holder_is_dead_after_a_minute_without_a_beat(path):
    clock = Clock()
    write_remote_lease(path)
    lease = Lease(path, clock=clock)
    assert lease.is_alive(lease.read())
    clock.time_secs = 1059.0
    assert lease.is_alive(lease.read())
    clock.time_secs = 1061.0
    assert not lease.is_alive(lease.read())


@pytest.mark.parametrize("beat", [100.0, 1000.0, 9000.0])
def test_the_age_of_a_beat_by_the_clock_of_another_machine_does_not_matter(path, beat):
    clock = Clock()
    write_remote_lease(path, beat=beat)
    lease = Lease(path, clock=clock)
    assert lease.is_alive(lease.read())
    clock.time_secs = 1059.0
    assert lease.is_alive(lease.read())
    clock.time_secs = 1061.0
    assert not lease.is_alive(lease.read())


@pytest.mark.parametrize("shift_secs", [7200.0, -7200.0])
def test_a_change_of_the_system_clock_makes_no_living_process_dead(path, monkeypatch, shift_secs):
    """The clock of the reader, or of the holder, jumps between two beats."""
    real = time.time
    write_remote_lease(path, beat=real())
    lease = Lease(path)
    assert lease.is_alive(lease.read())
    monkeypatch.setattr(time, "time", lambda: real() + shift_secs)
    assert lease.is_alive(lease.read())
    write_remote_lease(path, beat=real() + shift_secs)
    assert lease.is_alive(lease.read())


@pytest.mark.parametrize("skew", [-3600.0, 3600.0])
def test_clocks_that_differ_neither_kill_nor_keep_alive(path, skew):
    clock = Clock()
    lease = Lease(path, clock=clock)
    for _ in range(100):
        write_remote_lease(path, beat=clock.time_secs + skew)
        assert lease.is_alive(lease.read())
        clock.time_secs += 5.0
    clock.time_secs += 50.0
    assert lease.is_alive(lease.read())
    clock.time_secs += 11.0
    assert not lease.is_alive(lease.read())


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"host": "a"}', '{"host": 1, "pid": "x", "started": null}']
)
def test_an_unreadable_file_is_no_holder(path, text):
    path.write_text(text)
    assert Lease(path).read() is None
    path.unlink()
    assert Lease(path).read() is None


def test_a_key_of_a_later_version_is_ignored(path):
    write_remote_lease(path, colour="green")
    assert Lease(path).read().host == "elsewhere"


def test_a_full_disk_warns_once_and_training_continues(path, monkeypatch, caplog):
    def raise_disk_full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(lease_module.os, "replace", raise_disk_full)
    with Lease(path, beat_secs=0.001).held(step=lambda: 0):
        wait_until(lambda: caplog.records)
        never_set = threading.Event()
        never_set.wait(0.05)
    [message] = [r.getMessage() for r in caplog.records]
    assert "No space left on device" in message and list(path.parent.iterdir()) == []


def test_without_a_directory_nothing_is_held():
    with hold_lease(None, lambda: 0):
        pass


def test_the_start_time_of_a_process_is_read(tmp_path):
    before = time.time()
    module = "ctl.supervision.process_identity"
    code = (
        f"import time; print(time.time()); time.sleep(1); from {module} import process_start_time as p; "
        "print(p())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, check=True,
        timeout=TIMEOUT_SECS,
    )  # fmt: skip
    first_line, started = map(float, result.stdout.split())
    assert before - 0.1 <= started <= first_line + 0.1
    assert process_start_time() == pytest.approx(process_start_time(), abs=0.5)
    assert process_mark(os.getpid()) and process_mark(2**22 + 1) == ""


def test_a_trainer_holds_the_lease_during_training_and_writes_the_reason_of_the_end(tmp_path):
    leases = []

    class Watched(Small):
        def after_loop(self, step, means):
            leases.append(Lease(tmp_path / "LOCK").read())
            if step == 4:
                raise ValueError("enough")

    trainer = Watched(
        model_dir=str(tmp_path), strategy="default", intervals=every_step(steps_per_loop=1), writers=[]
    )
    trainer.train(2)
    assert {lease.state for lease in leases} == {"training"} and Lease(tmp_path / "LOCK").read().step == 2
    assert Lease(tmp_path / "LOCK").read().reason == "done"
    with pytest.raises(ValueError, match="enough"):
        trainer.train(10)
    ended = Lease(tmp_path / "LOCK").read()
    assert (ended.state, ended.reason, ended.step) == ("ended", "failed: ValueError", 4)


def test_a_living_holder_is_named_and_keeps_the_lease(path, holder):
    process = holder()
    for call in (lambda: Lease(path).check_is_free(), lambda: Lease(path).held(step=int).__enter__()):
        with pytest.raises(ctl.UsageError, match=f"is in use: process {process.pid} on "):
            call()
    assert Lease(path).read().pid == process.pid


def test_the_lease_of_a_dead_holder_is_free_at_once(path, holder):
    process = holder()
    process.kill()
    process.wait(TIMEOUT_SECS)
    with Lease(path).held(step=lambda: 9):
        assert Lease(path).read().pid == os.getpid()


def replace_with_remote_lease(path, **changes):
    """Writes the lease of another machine with an atomic rename, as its process would."""
    content = {"host": "far", "pid": 7, "process": "x/1", "started": time.time(), "beat": time.time(),
               "state": "training", **changes}  # fmt: skip
    path.with_name("LOCK.new").write_text(json.dumps(content))
    path.with_name("LOCK.new").rename(path)


def test_a_holder_on_another_machine_that_still_beats_keeps_the_lease(path):
    replace_with_remote_lease(path)
    beats = threading.Timer(0.1, lambda: replace_with_remote_lease(path, started=1.0, beat=time.time() + 1))
    beats.start()
    with pytest.raises(ctl.UsageError, match="process 7 on far"):
        Lease(path, beat_secs=0.02, stale_secs=TIMEOUT_SECS).check_is_free()


def test_a_holder_on_another_machine_without_beats_is_dead(path, caplog):
    replace_with_remote_lease(path)
    with Lease(path, beat_secs=0.02, stale_secs=0.2).held(step=lambda: 0):
        assert Lease(path).read().host != "far"
    assert any("waiting up to" in m for m in caplog.messages)


def test_the_next_chief_of_an_elastic_job_takes_over_from_another_machine_at_once(path, monkeypatch):
    monkeypatch.setenv("CTL_HVD_SECRET", "s3cret")
    monkeypatch.setenv("CTL_ELASTIC", "1:3")
    with Lease(path).held(step=lambda: 0):
        job = Lease(path).read().job
    assert job and "s3cret" not in path.read_text()
    replace_with_remote_lease(path, job=job)
    with Lease(path, beat_secs=0.02, stale_secs=TIMEOUT_SECS).held(step=lambda: 0):
        assert Lease(path).read().host != "far"


@pytest.mark.parametrize("variable", ["CTL_HVD_SECRET", "CTL_ELASTIC"])
def test_a_chief_of_another_job_is_not_an_earlier_one(path, monkeypatch, variable):
    monkeypatch.setenv("CTL_HVD_SECRET", "s3cret")
    monkeypatch.setenv("CTL_ELASTIC", "1:3")
    job = lease_module._elastic_job()
    monkeypatch.setenv(variable, "another" if variable == "CTL_HVD_SECRET" else "")
    write_remote_lease(path, job=job)
    assert job and Lease(path).is_alive(Lease(path).read())
