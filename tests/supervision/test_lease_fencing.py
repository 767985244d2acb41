"""LOCK under hostile conditions: takeovers of frozen holders, races at the start, dead hosts."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import ctl
import pytest
from conftest import environment
from ctl.supervision import claim_file
from ctl.supervision import lease as lease_module
from ctl.supervision.lease import Lease
from polling import wait_until
from small_models import Small, every_step
from test_lease import TIMEOUT_SECS, replace_with_remote_lease, write_remote_lease


@pytest.fixture
def path(tmp_path):
    return tmp_path / "LOCK"


def take_over(path):
    """Writes the lease of another job, as after a long silence of this one."""
    replace_with_remote_lease(path, host="thief", pid=99)


def test_a_holder_detects_a_takeover_and_keeps_the_lease_of_the_other_job(path):
    lost = pytest.raises(ctl.errors.LeaseLostError, match="taken over by process 99 on thief")
    with lost as raised, Lease(path, beat_secs=1000).held(step=lambda: 1) as lease:
        lease.check_now()
        take_over(path)
        lease.check()  # confirmed recently: the file is not read
        lease.check_now()
    assert raised.value.exit_code == 134 and Lease(path).read().host == "thief"


def test_a_beat_never_overwrites_another_holder(path):
    held_lease = Lease(path, beat_secs=0.01).held(step=lambda: 1)
    with pytest.raises(ctl.errors.LeaseLostError), held_lease as lease:
        first = Lease(path).read().beat
        wait_until(lambda: Lease(path).read().beat != first)

        def is_detected():  # a beat in flight is written first
            if Lease(path).read().host != "thief":
                take_over(path)
            return "ctl-lease" not in [t.name for t in threading.enumerate()]

        wait_until(is_detected)
        assert Lease(path).read().host == "thief"
        lease.check()  # the beat has detected it


HELD_LEASES = []


@pytest.fixture(autouse=True)
def held_leases(monkeypatch):
    """Records the leases that this process holds. The newest is last."""
    original_held = Lease.held
    monkeypatch.setattr(
        Lease, "held", lambda lease, step: HELD_LEASES.append(lease) or original_held(lease, step)
    )


class TakenOver(Small):
    """Trainer of a model_dir that another job takes over during `when`."""

    def steal(self):
        take_over(Path(self.model_dir) / "LOCK")
        HELD_LEASES[-1]._confirmed_secs = float("-inf")  # as after a freeze

    def eval_data(self, batch_size):
        if self.takeover_point == "evaluation":
            self.steal()
        return super().eval_data(batch_size)

    def after_loop(self, step, means):
        if self.takeover_point == "hook":
            self.log("before", 1.0)
            self.steal()
            self.log("after", 2.0)


def written_metrics(directory):
    events = sorted((directory / "logs").rglob("events*"))
    return (directory / "metrics.jsonl").read_text(), [(p.name, p.stat().st_size) for p in events]


@pytest.mark.parametrize("takeover_point", ["evaluation", "hook"])
def test_a_fenced_job_writes_no_metrics(takeover_point, tmp_path):
    intervals = every_step(evaluate=ctl.Every(steps=2), log=ctl.Every(steps=2), steps_per_loop=2)
    trainer = TakenOver(strategy="default", model_dir=str(tmp_path), intervals=intervals)
    trainer.takeover_point = "never"
    trainer.train(2)
    before = written_metrics(tmp_path)
    trainer.takeover_point = takeover_point
    with pytest.raises(ctl.errors.LeaseLostError, match="ends without writing"):
        trainer.train(6)
    text, events = written_metrics(tmp_path)
    rows = [json.loads(line) for line in text.removeprefix(before[0]).splitlines()]
    names = [(row["step"], name) for row in rows for name in row if name not in ("step", "run", "time")]
    assert not [name for name in names if name[1] == "after" or name == (4, "loss")]
    assert (4, "before") in names if takeover_point == "hook" else not rows
    assert len(events) >= len(before[1])


RACER_PROGRAM = """
import sys
import ctl
from ctl.supervision.lease import Lease
sys.stdin.readline()
try:
    with Lease(sys.argv[1]).held(step=lambda: 0):
        print("held", flush=True)
        sys.stdin.readline()
except ctl.UsageError as e:
    print("refused" if "is in use" in str(e) else e, flush=True)
"""


@pytest.mark.parametrize("before", [None, "ended"])
def test_one_of_many_simultaneous_jobs_trains(path, before):
    if before:
        write_remote_lease(path, state=before)
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER_PROGRAM, str(path)], env=environment(), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for _ in range(6)
    ]  # fmt: skip
    try:
        for racer in racers:
            racer.stdin.write("go\n")
            racer.stdin.flush()
        outputs = sorted(racer.stdout.readline() for racer in racers)
        assert outputs == ["held\n"] + ["refused\n"] * 5
    finally:
        for racer in racers:
            racer.communicate("end\n", timeout=TIMEOUT_SECS)
    assert [p.name for p in path.parent.iterdir()] == ["LOCK"]


def test_the_claim_of_a_killed_process_is_removed(path, monkeypatch):
    monkeypatch.setattr(claim_file, "_CLAIM_SECS", 0.2)
    path.with_name(".LOCK-claim").touch()
    with Lease(path).held(step=lambda: 0):
        assert Lease(path).read().pid == os.getpid()
    assert [p.name for p in path.parent.iterdir()] == ["LOCK"]


@pytest.mark.parametrize("ahead_secs", [0.0, 3600.0])
def test_a_dead_host_is_waited_for_once(path, caplog, monkeypatch, ahead_secs):
    """Applies to this process and to its children, for every clock of the dead host."""
    replace_with_remote_lease(path, beat=time.time() + ahead_secs)
    options = {"beat_secs": 0.02, "stale_secs": 0.3}
    Lease(path, **options).check_is_free()
    Lease(path, **options).check_is_free()
    assert sum("waiting up to" in m for m in caplog.messages) == 1
    monkeypatch.setenv(lease_module.DEAD_HOLDERS, lease_module.dead_holders())
    monkeypatch.setattr(lease_module, "_dead", set())  # as in another process
    Lease(path, **options).check_is_free()
    assert sum("waiting up to" in m for m in caplog.messages) == 1
    replace_with_remote_lease(path, beat=time.time() + ahead_secs + 1)  # it beats again
    reader = Lease(path)
    assert reader.is_alive(reader.read())


def test_machines_of_one_name_are_distinguished(path):
    with Lease(path).held(step=lambda: 0):
        content = json.loads(path.read_text())
    boot, _, namespace = content["process"].partition(":")
    assert boot and namespace.startswith("pid:[")
    path.write_text(json.dumps({**content, "process": f"another-boot:{namespace}", "pid": 2**22 + 1}))
    lease = Lease(path)
    assert lease.is_alive(lease.read())  # that process is not visible here


def test_a_run_does_not_save_after_a_takeover_of_its_model_dir(tmp_path):
    """The run checks the lease before it saves, even between two beats."""
    steps = []

    class Frozen(Small):
        def after_loop(self, step, means):
            steps.append(step)
            if step == 3:
                take_over(tmp_path / "LOCK")

    trainer = Frozen(
        model_dir=str(tmp_path), strategy="default", writers=[],
        intervals=every_step(steps_per_loop=1, save=ctl.Every(steps=2)),
    )  # fmt: skip
    with pytest.raises(ctl.errors.LeaseLostError):
        trainer.train(10)
    assert [p.name for p in sorted((tmp_path / "checkpoints").iterdir())] == ["ckpt-2"]
    assert Lease(tmp_path / "LOCK").read().host == "thief" and steps[-1] == 4


def test_a_save_fails_while_the_lease_is_unreadable(tmp_path, caplog):
    """The next save is tried again."""
    lock, moved_path = tmp_path / "LOCK", tmp_path / "aside"

    class Unreadable(Small):
        def after_loop(self, step, means):
            if step == 3:
                lock.rename(moved_path)
                lock.mkdir()
            if step == 5:
                lock.rmdir()
                moved_path.rename(lock)

    trainer = Unreadable(
        model_dir=str(tmp_path), strategy="default", writers=[],
        intervals=every_step(steps_per_loop=1, save=ctl.Every(steps=2)),
    )  # fmt: skip
    trainer.train(6)
    assert [p.name for p in sorted((tmp_path / "checkpoints").iterdir())] == ["ckpt-2", "ckpt-6"]
    assert any("step 4" in m for m in caplog.messages)
