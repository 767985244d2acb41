"""Following of a training by an evaluator: order of checkpoints, waiting, and the end."""

import errno
import json

import pytest
from ctl.checkpoints import commit
from ctl.checkpoints.protocol import Manifest
from ctl.checkpoints.watched import WatchedCheckpoints
from ctl.errors import PeerLostError, ReadError
from ctl.evaluator import checkpoint_follower
from ctl.evaluator.checkpoint_follower import Evaluated, Following, Patience
from ctl.supervision.lease import Lease
from polling import wait_until


class World:
    """A manual clock, a lease and checkpoints that change while the evaluator sleeps."""

    def __init__(self, directory):
        self.now_secs, self.evaluations = 1000.0, []
        self.directory = directory / "checkpoints"
        self.lock = directory / "LOCK"
        self.events = {}  # time -> function to call

    def save(self, step, created=1.0):
        def write_state(prefix):
            with open(f"{prefix}.index", "w") as file:
                file.write("x")

        commit.write_checkpoint(self.directory, Manifest(step=step, created=created), write_state)

    def lease(self, host="elsewhere", **changes):
        content = {
            "host": host, "pid": 1, "process": "", "started": 900.0, "beat": self.now_secs, "step": 2,
            "state": "training", **changes,
        }  # fmt: skip
        self.lock.write_text(json.dumps(content))

    def sleep(self, secs):
        self.now_secs += secs
        for at in sorted(t for t in self.events if t <= self.now_secs):
            self.events.pop(at)()

    def follow(self, stopped=lambda: False, born=1000.0, evaluate=None):
        lease = Lease(self.lock, clock=lambda: self.now_secs)
        follower = Following(
            WatchedCheckpoints(self.directory), lease, Evaluated(self.lock.with_name("e.json")),
            born=born, patience=Patience(poll_secs=1.0, begin_secs=600.0), clock=lambda: self.now_secs,
            sleep=self.sleep,
        )  # fmt: skip
        record = lambda manifest: self.evaluations.append((manifest.step, self.now_secs))  # noqa: E731
        detail = follower.run(evaluate or record, stopped)
        self.count, self.step = follower.count, follower.step
        return detail


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_checkpoints_are_evaluated_in_the_order_of_their_steps(world):
    world.lease()
    world.save(4)
    world.save(2)
    world.events = {
        1010.0: lambda: (world.save(6), world.lease()),
        1050.0: lambda: (world.save(8), world.lease(state="ended", reason="done", step=8)),
    }
    assert world.follow() == "done"
    assert world.evaluations == [(2, 1000.0), (4, 1000.0), (6, 1010.0), (8, 1050.0)]
    assert (world.count, world.step) == (4, 8)


def test_a_checkpoint_saved_just_before_the_end_is_evaluated(world, monkeypatch):
    list_committed = WatchedCheckpoints.committed

    def committed_before_last_save(self):
        checkpoints = list_committed(self)
        if not checkpoints:  # training saves and ends after the first listing
            world.save(4)
            world.lease(state="ended", reason="done")
        return checkpoints

    monkeypatch.setattr(WatchedCheckpoints, "committed", committed_before_last_save)
    world.lease()
    assert world.follow() == "done"
    assert [step for step, _ in world.evaluations] == [4]


def unreadable(times, function):
    """Returns a wrapper of `function` that raises an input/output error in the first `times` calls."""
    failures_left = [times]

    def read(*args):
        if failures_left[0]:
            failures_left[0] -= 1
            raise OSError(errno.EIO, "Input/output error")
        return function(*args)

    return read


@pytest.mark.parametrize("function_name", ["read_manifest", "list_steps"])
@pytest.mark.parametrize("times", [1, 20])
def test_the_last_checkpoint_is_evaluated_when_it_is_readable(world, monkeypatch, function_name, times):
    monkeypatch.setattr("ctl.io.paths.time.sleep", lambda secs: None)
    world.save(4)
    world.lease(state="ended", reason="done")
    monkeypatch.setattr(commit, function_name, unreadable(times, getattr(commit, function_name)))
    assert world.follow() == "done"
    assert [step for step, _ in world.evaluations] == [4]


def test_a_checkpoint_that_cannot_be_restored_is_retried(world):
    failures_left = [2]

    def evaluate(manifest):
        if failures_left[0]:
            failures_left[0] -= 1
            raise ReadError("it cannot be read")
        world.evaluations.append((manifest.step, world.now_secs))

    world.save(4)
    world.lease(state="ended", reason="done")
    assert world.follow(evaluate=evaluate) == "done"
    assert world.evaluations == [(4, 1002.0)]


@pytest.mark.parametrize("function_name", ["read_manifest", "list_steps"])
def test_read_errors_for_a_minute_end_the_evaluator_with_a_retry_code(world, monkeypatch, function_name):
    monkeypatch.setattr("ctl.io.paths.time.sleep", lambda secs: None)
    world.save(4)
    world.lease(state="ended", reason="done")
    monkeypatch.setattr(commit, function_name, unreadable(10**9, None))
    with pytest.raises(ReadError, match="cannot be read") as raised:
        world.follow()
    assert world.evaluations == [] and raised.value.exit_code == 134
    assert 1060.0 < world.now_secs <= 1063.0


def test_a_checkpoint_saved_again_at_the_same_step_is_evaluated_again(world):
    world.lease()
    world.save(2)
    world.events = {1005.0: lambda: (world.save(2, created=2.0), world.lease(state="ended", reason="done"))}
    world.follow()
    assert world.evaluations == [(2, 1000.0), (2, 1005.0)]


def test_a_training_without_heartbeats_is_lost_after_a_minute_and_its_checkpoints_are_evaluated(world):
    world.lease()
    world.events = {1030.0: lambda: world.save(2)}
    with pytest.raises(PeerLostError, match="died after step 2") as raised:
        world.follow()
    assert world.evaluations == [(2, 1030.0)] and raised.value.exit_code == 134
    assert 1060.0 < world.now_secs <= 1062.0


@pytest.mark.parametrize(("code", "reason"), [(134, "failed: PeerLostError"), (143, "stopped by a signal")])
def test_a_training_that_will_be_restarted_also_restarts_its_evaluator(world, code, reason):
    world.save(2)
    world.lease(state="ended", reason=reason, exit_code=code)
    with pytest.raises(PeerLostError, match=f"not complete: {reason} at step 2"):
        world.follow()
    assert [step for step, _ in world.evaluations] == [2]


def test_a_training_that_failed_permanently_ends_the_evaluator(world):
    world.lease(state="ended", reason="failed: NonFiniteError", exit_code=1)
    assert world.follow() == "failed: NonFiniteError"


@pytest.mark.parametrize("lease", [{"state": "ended", "reason": "done"}, {}, None])
def test_the_lease_of_an_earlier_run_does_not_end_the_evaluator(world, lease):
    if lease is not None:
        world.lease(beat=500.0, **lease)
    world.save(2)
    world.events = {
        1500.0: lambda: world.lease(started=1500.0),
        1520.0: lambda: (world.save(4), world.lease(started=1500.0, state="ended", reason="done")),
    }
    assert world.follow() == "done"
    assert world.evaluations == [(2, 1000.0), (4, 1520.0)]


@pytest.mark.parametrize("lease", [{"state": "ended", "reason": "done"}, {}, None])
def test_the_evaluator_waits_ten_minutes_for_a_training_that_never_starts(world, lease):
    if lease is not None:
        world.lease(beat=500.0, **lease)
    with pytest.raises(PeerLostError, match="No training started in .* within 600 s"):
        world.follow()
    assert 1600.0 < world.now_secs <= 1662.0  # including 60 s for a heartbeat that may still change


def test_a_training_with_changing_heartbeats_is_followed_despite_clock_skew(world):
    world.lease(beat=700.0)
    world.events = {
        1003.0: lambda: world.lease(beat=705.0),
        1008.0: lambda: world.lease(beat=710.0, state="ended", reason="done"),
    }
    assert world.follow(born=999.0) == "done" and world.now_secs == 1008.0


def test_a_training_between_two_polls_is_followed_despite_clock_skew(world):
    world.events = {1003.0: lambda: world.lease(started=1.0, beat=2.0, state="ended", reason="done")}
    assert world.follow(born=999.0) == "done" and world.now_secs == 1003.0


def test_a_signal_ends_the_evaluator_between_two_checkpoints(world):
    world.lease()
    world.save(2)
    world.save(4)
    assert world.follow(stopped=lambda: bool(world.evaluations)) == "stopped"
    assert [step for step, _ in world.evaluations] == [2]
    world.lease(state="ended", reason="done")
    world.follow()
    assert [step for step, _ in world.evaluations] == [2, 4]


def test_the_list_of_evaluated_steps_survives_damage_and_a_full_disk(tmp_path, caplog, monkeypatch):
    path = tmp_path / "evaluated.json"
    path.write_text('{"evaluated": ')
    evaluated = Evaluated(path)
    first, second = (Manifest(step=s, created=1.5) for s in (1, 2))
    assert first not in evaluated
    evaluated.add(first)
    assert first in Evaluated(path) and second not in Evaluated(path)

    def raise_disk_full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_follower.os, "replace", raise_disk_full)
    evaluated.add(second)
    evaluated.add(second)
    assert second in evaluated and second not in Evaluated(path)
    assert [r.getMessage().partition(" (")[0] for r in caplog.records] == [
        f"{path} cannot be read", f"{path} cannot be written",
    ]  # fmt: skip


def wait_for_evaluator(world, **options):
    return checkpoint_follower.wait_for_evaluator(
        WatchedCheckpoints(world.directory), world.lock.with_name("e.json"), patience_secs=20.0,
        clock=lambda: world.now_secs, sleep=world.sleep, **options,
    )  # fmt: skip


def mark_evaluated(world, *steps):
    evaluated = Evaluated(world.lock.with_name("e.json"))
    for manifest in WatchedCheckpoints(world.directory).committed():
        if manifest.step in steps:
            evaluated.add(manifest)


def test_the_chief_waits_until_the_newest_checkpoint_is_evaluated(tmp_path):
    world = World(tmp_path)
    for step in (2, 4, 6):
        world.save(step)
    world.events = {1015.0: lambda: mark_evaluated(world, 2), 1030.0: lambda: mark_evaluated(world, 4),
                    1045.0: lambda: mark_evaluated(world, 6)}  # fmt: skip
    assert wait_for_evaluator(world)
    assert 1045.0 < world.now_secs < 1050.0  # includes time for the evaluator to close its writers
    before_secs = world.now_secs
    assert wait_for_evaluator(world) and world.now_secs == before_secs


def test_the_chief_waits_for_a_long_evaluation_with_heartbeats(tmp_path):
    world = World(tmp_path)
    world.save(2)
    path = world.lock.with_name("e.json")

    def beat():
        path.write_text(json.dumps({"evaluated": {}, "evaluating": 2, "beat": world.now_secs}))

    world.events = {1000.0 + 15 * i: beat for i in range(1, 6)} | {1085.0: lambda: mark_evaluated(world, 2)}
    assert wait_for_evaluator(world) and world.now_secs > 1085.0


def test_an_evaluation_writes_heartbeats_to_the_list(tmp_path):
    world = World(tmp_path)
    world.save(2)
    path = world.lock.with_name("e.json")
    evaluated = Evaluated(path)
    with evaluated.beating(2, beat_secs=0.01):
        wait_until(path.exists)
        assert json.loads(path.read_text())["evaluating"] == 2
    mark_evaluated(world, 2)
    assert json.loads(path.read_text()) == {"evaluated": {"2": 1.0}}


def test_the_chief_does_not_wait_for_checkpoints_that_cannot_be_listed(tmp_path, caplog, monkeypatch):
    def raise_read_error(self):
        raise ReadError("the directory cannot be read.")

    world = World(tmp_path)
    world.save(2)
    monkeypatch.setattr(WatchedCheckpoints, "committed", raise_read_error)
    assert not wait_for_evaluator(world) and world.now_secs == 1000.0
    assert "the directory cannot be read. Exiting without waiting for the evaluator." in caplog.text


def test_the_chief_waits_with_a_timeout_and_only_for_existing_checkpoints(tmp_path, caplog):
    world = World(tmp_path)
    assert not wait_for_evaluator(world) and world.now_secs == 1000.0
    world.save(2)
    world.save(4)
    world.events = {1015.0: lambda: mark_evaluated(world, 2)}
    assert not wait_for_evaluator(world)
    assert 1035.0 <= world.now_secs < 1040.0
    assert "has not evaluated step 4" in caplog.text
