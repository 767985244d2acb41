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
from ctl.supervision import lease as lease_module
from ctl.supervision.lease import Lease
from launching import wait_for
from small_models import Small, every_step
from test_lease import TIMEOUT_SECS, elsewhere, far


@pytest.fixture
def path(tmp_path):
    return tmp_path / "LOCK"


def take_over(path):
    """Another job's holder, as if this one had been silent for too long."""
    far(path, host="thief", pid=99)


def test_a_holder_that_was_taken_over_learns_it_and_leaves_the_other_s_lease_alone(path):
    lost = pytest.raises(ctl.errors.LeaseLostError, match="taken over by process 99 on thief")
    with lost as raised, Lease(path, beat_secs=1000).held(step=lambda: 1) as lease:
        lease.check_now()
        take_over(path)
        lease.check()  # confirmed a moment ago: not read again
        lease.check_now()
    assert raised.value.exit_code == 134 and Lease(path).read().host == "thief"


def test_a_beat_never_overwrites_another_holder(path):
    held = Lease(path, beat_secs=0.01).held(step=lambda: 1)
    with pytest.raises(ctl.errors.LeaseLostError), held as lease:
        first = Lease(path).read().beat
        wait_for(lambda: Lease(path).read().beat != first)

        def is_found_out():  # a beat that was just being written comes first
            if Lease(path).read().host != "thief":
                take_over(path)
            return "ctl-lease" not in [t.name for t in threading.enumerate()]

        wait_for(is_found_out)
        assert Lease(path).read().host == "thief"
        lease.check()  # the beat found out


HELD = []


@pytest.fixture(autouse=True)
def held_leases(monkeypatch):
    """Leases that this process holds, the newest last."""
    held = Lease.held
    monkeypatch.setattr(Lease, "held", lambda lease, step: HELD.append(lease) or held(lease, step))


class TakenOver(Small):
    """Is taken for dead, and another job takes its model_dir over, in `when`."""

    def steal(self):
        take_over(Path(self.model_dir) / "LOCK")
        HELD[-1]._confirmed_secs = float("-inf")  # as after a freeze

    def eval_data(self, batch_size):
        if self.when == "evaluation":
            self.steal()
        return super().eval_data(batch_size)

    def after_loop(self, step, means):
        if self.when == "hook":
            self.log("before", 1.0)
            self.steal()
            self.log("after", 2.0)


def written(directory):
    events = sorted((directory / "logs").rglob("events*"))
    return (directory / "metrics.jsonl").read_text(), [(p.name, p.stat().st_size) for p in events]


@pytest.mark.parametrize("when", ["evaluation", "hook"])
def test_a_fenced_job_writes_no_metrics(when, tmp_path):
    intervals = every_step(evaluate=ctl.Every(steps=2), log=ctl.Every(steps=2), steps_per_loop=2)
    trainer = TakenOver(strategy="default", model_dir=str(tmp_path), intervals=intervals)
    trainer.when = "never"
    trainer.train(2)
    before = written(tmp_path)
    trainer.when = when
    with pytest.raises(ctl.errors.LeaseLostError, match="ends without writing"):
        trainer.train(6)
    text, events = written(tmp_path)
    rows = [json.loads(line) for line in text.removeprefix(before[0]).splitlines()]
    names = [(row["step"], name) for row in rows for name in row if name not in ("step", "run", "time")]
    assert not [name for name in names if name[1] == "after" or name == (4, "loss")]
    assert (4, "before") in names if when == "hook" else not rows
    assert len(events) >= len(before[1])


RACES = """
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
def test_of_many_that_begin_at_once_one_trains(path, before):
    if before:
        elsewhere(path, state=before)
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACES, str(path)], env=environment(), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for _ in range(6)
    ]  # fmt: skip
    try:
        for racer in racers:
            racer.stdin.write("go\n")
            racer.stdin.flush()
        said = sorted(racer.stdout.readline() for racer in racers)
        assert said == ["held\n"] + ["refused\n"] * 5
    finally:
        for racer in racers:
            racer.communicate("end\n", timeout=TIMEOUT_SECS)
    assert [p.name for p in path.parent.iterdir()] == ["LOCK"]


def test_a_claim_that_a_killed_process_left_is_removed(path, monkeypatch):
    monkeypatch.setattr(lease_module, "_CLAIM_SECS", 0.2)
    path.with_name(".LOCK-claim").touch()
    with Lease(path).held(step=lambda: 0):
        assert Lease(path).read().pid == os.getpid()
    assert [p.name for p in path.parent.iterdir()] == ["LOCK"]


@pytest.mark.parametrize("ahead_secs", [0.0, 3600.0])
def test_a_dead_host_is_waited_for_once(path, caplog, monkeypatch, ahead_secs):
    """By this process, and by those that it starts; whatever the dead one's clock said."""
    far(path, beat=time.time() + ahead_secs)
    how = {"beat_secs": 0.02, "stale_secs": 0.3}
    Lease(path, **how).check_is_free()
    Lease(path, **how).check_is_free()
    assert sum("waiting up to" in m for m in caplog.messages) == 1
    monkeypatch.setenv(lease_module.DEAD_HOLDERS, lease_module.dead_holders())
    monkeypatch.setattr(lease_module, "_dead", set())  # as in another process
    Lease(path, **how).check_is_free()
    assert sum("waiting up to" in m for m in caplog.messages) == 1
    far(path, beat=time.time() + ahead_secs + 1)  # it beats again
    reader = Lease(path)
    assert reader.is_alive(reader.read())


def test_machines_of_one_name_are_told_apart(path):
    with Lease(path).held(step=lambda: 0):
        content = json.loads(path.read_text())
    boot, _, rest = content["process"].partition(":")
    assert boot and rest.startswith("pid:[")
    path.write_text(json.dumps({**content, "process": f"another-boot:{rest}", "pid": 2**22 + 1}))
    lease = Lease(path)
    assert lease.is_alive(lease.read())  # nobody can look for that process here


def test_a_run_whose_model_dir_was_taken_over_saves_nothing_more(tmp_path):
    """It notices before it saves, even where its own beat has not yet come round."""
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


def test_nothing_is_saved_while_nobody_can_tell_whose_the_directory_is(tmp_path, caplog):
    """A LOCK that is there and cannot be read: the save fails, and the next one is tried."""
    lock, away = tmp_path / "LOCK", tmp_path / "aside"

    class Unreadable(Small):
        def after_loop(self, step, means):
            if step == 3:
                lock.rename(away)
                lock.mkdir()
            if step == 5:
                lock.rmdir()
                away.rename(lock)

    trainer = Unreadable(
        model_dir=str(tmp_path), strategy="default", writers=[],
        intervals=every_step(steps_per_loop=1, save=ctl.Every(steps=2)),
    )  # fmt: skip
    trainer.train(6)
    assert [p.name for p in sorted((tmp_path / "checkpoints").iterdir())] == ["ckpt-2", "ckpt-6"]
    assert any("step 4" in m for m in caplog.messages)
