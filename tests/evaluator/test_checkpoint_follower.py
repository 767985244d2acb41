"""An evaluator's way through a training: which checkpoint is next, when to wait, when to leave."""

import errno
import json
import time

import pytest
from ctl.checkpoints import commit
from ctl.checkpoints.protocol import Manifest
from ctl.checkpoints.watched import WatchedCheckpoints
from ctl.errors import PeerLostError, ReadError
from ctl.evaluator import checkpoint_follower
from ctl.evaluator.checkpoint_follower import Evaluated, Following, Patience
from ctl.supervision.lease import Lease


class World:
    """A clock, a lease and checkpoints that change as the evaluator sleeps or evaluates."""

    def __init__(self, directory):
        self.now, self.did = 1000.0, []
        self.directory = directory / "checkpoints"
        self.lock = directory / "LOCK"
        self.events = {}  # time -> what happens then

    def save(self, step, created=1.0):
        def write_state(prefix):
            with open(f"{prefix}.index", "w") as file:
                file.write("x")

        commit.write_checkpoint(self.directory, Manifest(step=step, created=created), write_state)

    def lease(self, host="elsewhere", **changes):
        content = {
            "host": host, "pid": 1, "process": "", "started": 900.0, "beat": self.now, "step": 2,
            "state": "training", **changes,
        }  # fmt: skip
        self.lock.write_text(json.dumps(content))

    def sleep(self, secs):
        self.now += secs
        for at in sorted(t for t in self.events if t <= self.now):
            self.events.pop(at)()

    def follow(self, stopped=lambda: False, born=1000.0, evaluate=None):
        lease = Lease(self.lock, clock=lambda: self.now)
        way = Following(
            WatchedCheckpoints(self.directory), lease, Evaluated(self.lock.with_name("e.json")),
            born=born, patience=Patience(poll_secs=1.0, begin_secs=600.0), clock=lambda: self.now,
            sleep=self.sleep,
        )  # fmt: skip
        detail = way.run(evaluate or (lambda m: self.did.append((m.step, self.now))), stopped)
        self.count, self.step = way.count, way.step
        return detail


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_checkpoints_are_evaluated_as_they_come_oldest_first(world):
    world.lease()
    world.save(4)
    world.save(2)
    world.events = {
        1010.0: lambda: (world.save(6), world.lease()),
        1050.0: lambda: (world.save(8), world.lease(state="ended", reason="done", step=8)),
    }
    assert world.follow() == "done"
    assert world.did == [(2, 1000.0), (4, 1000.0), (6, 1010.0), (8, 1050.0)]
    assert (world.count, world.step) == (4, 8)


def test_what_was_saved_just_before_the_end_is_evaluated_too(world, monkeypatch):
    look = WatchedCheckpoints.committed

    def nothing_there_yet(self):
        found = look(self)
        if not found:  # between this look and the next thing it does, training saves and ends
            world.save(4)
            world.lease(state="ended", reason="done")
        return found

    monkeypatch.setattr(WatchedCheckpoints, "committed", nothing_there_yet)
    world.lease()
    assert world.follow() == "done"
    assert [step for step, _ in world.did] == [4]


def unreadable(times, good):
    """`good`, but the first so many calls fail as on a disk in trouble."""
    left = [times]

    def read(*args):
        if left[0]:
            left[0] -= 1
            raise OSError(errno.EIO, "Input/output error")
        return good(*args)

    return read


@pytest.mark.parametrize("what", ["read_manifest", "list_steps"])
@pytest.mark.parametrize("times", [1, 20])
def test_the_last_checkpoint_is_evaluated_once_it_can_be_read(world, monkeypatch, what, times):
    monkeypatch.setattr("ctl.io.paths.time.sleep", lambda secs: None)
    world.save(4)
    world.lease(state="ended", reason="done")
    monkeypatch.setattr(commit, what, unreadable(times, getattr(commit, what)))
    assert world.follow() == "done"
    assert [step for step, _ in world.did] == [4]


def test_a_checkpoint_that_cannot_be_restored_for_now_is_tried_again(world):
    fails = [2]

    def evaluate(manifest):
        if fails[0]:
            fails[0] -= 1
            raise ReadError("it cannot be read")
        world.did.append((manifest.step, world.now))

    world.save(4)
    world.lease(state="ended", reason="done")
    assert world.follow(evaluate=evaluate) == "done"
    assert world.did == [(4, 1002.0)]


@pytest.mark.parametrize("what", ["read_manifest", "list_steps"])
def test_what_cannot_be_read_for_a_minute_ends_the_evaluator_for_another_attempt(world, monkeypatch, what):
    monkeypatch.setattr("ctl.io.paths.time.sleep", lambda secs: None)
    world.save(4)
    world.lease(state="ended", reason="done")
    monkeypatch.setattr(commit, what, unreadable(10**9, None))
    with pytest.raises(ReadError, match="cannot be read") as caught:
        world.follow()
    assert world.did == [] and caught.value.exit_code == 134
    assert 1060.0 < world.now <= 1063.0


def test_a_checkpoint_saved_again_at_the_same_step_is_another_one(world):
    world.lease()
    world.save(2)
    world.events = {1005.0: lambda: (world.save(2, created=2.0), world.lease(state="ended", reason="done"))}
    world.follow()
    assert world.did == [(2, 1000.0), (2, 1005.0)]


def test_a_training_that_fell_silent_is_dead_after_a_minute_and_what_it_left_is_evaluated(world):
    world.lease()
    world.events = {1030.0: lambda: world.save(2)}
    with pytest.raises(PeerLostError, match="died after step 2") as caught:
        world.follow()
    assert world.did == [(2, 1030.0)] and caught.value.exit_code == 134
    assert 1060.0 < world.now <= 1062.0


@pytest.mark.parametrize(("code", "reason"), [(134, "failed: PeerLostError"), (143, "stopped by a signal")])
def test_a_training_that_is_to_be_started_again_wants_its_evaluator_again(world, code, reason):
    world.save(2)
    world.lease(state="ended", reason=reason, exit_code=code)
    with pytest.raises(PeerLostError, match=f"not complete: {reason} at step 2"):
        world.follow()
    assert [step for step, _ in world.did] == [2]


def test_a_training_that_failed_for_good_is_an_end_like_any_other(world):
    world.lease(state="ended", reason="failed: NonFiniteError", exit_code=1)
    assert world.follow() == "failed: NonFiniteError"


@pytest.mark.parametrize("left", [{"state": "ended", "reason": "done"}, {}, None])
def test_what_an_earlier_run_left_does_not_make_it_leave_at_once(world, left):
    if left is not None:
        world.lease(beat=500.0, **left)
    world.save(2)
    world.events = {
        1500.0: lambda: world.lease(started=1500.0),
        1520.0: lambda: (world.save(4), world.lease(started=1500.0, state="ended", reason="done")),
    }
    assert world.follow() == "done"
    assert world.did == [(2, 1000.0), (4, 1520.0)]


@pytest.mark.parametrize("left", [{"state": "ended", "reason": "done"}, {}, None])
def test_a_training_that_never_begins_is_waited_for_ten_minutes(world, left):
    if left is not None:
        world.lease(beat=500.0, **left)
    with pytest.raises(PeerLostError, match="No training started in .* within 600 s"):
        world.follow()
    assert 1600.0 < world.now <= 1662.0  # 60 s of it for a beat that might still move


def test_a_training_seen_alive_is_ours_whatever_the_clocks_say(world):
    world.lease(beat=700.0)
    world.events = {
        1003.0: lambda: world.lease(beat=705.0),
        1008.0: lambda: world.lease(beat=710.0, state="ended", reason="done"),
    }
    assert world.follow(born=999.0) == "done" and world.now == 1008.0


def test_a_training_that_begins_and_ends_between_two_polls_is_ours_whatever_the_clocks_say(world):
    world.events = {1003.0: lambda: world.lease(started=1.0, beat=2.0, state="ended", reason="done")}
    assert world.follow(born=999.0) == "done" and world.now == 1003.0


def test_a_signal_ends_it_between_two_checkpoints(world):
    world.lease()
    world.save(2)
    world.save(4)
    assert world.follow(stopped=lambda: bool(world.did)) == "stopped"
    assert [step for step, _ in world.did] == [2]
    world.lease(state="ended", reason="done")
    world.follow()
    assert [step for step, _ in world.did] == [2, 4]


def test_the_list_of_what_is_done_survives_damage_and_a_full_disk(tmp_path, caplog, monkeypatch):
    path = tmp_path / "evaluated.json"
    path.write_text('{"evaluated": ')
    done = Evaluated(path)
    one, two = (Manifest(step=s, created=1.5) for s in (1, 2))
    assert one not in done
    done.add(one)
    assert one in Evaluated(path) and two not in Evaluated(path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_follower.os, "replace", full)
    done.add(two)
    done.add(two)
    assert two in done and two not in Evaluated(path)
    assert [r.getMessage().partition(" (")[0] for r in caplog.records] == [
        f"{path} cannot be read", f"{path} cannot be written",
    ]  # fmt: skip


def wait(world, **more):
    return checkpoint_follower.wait_for_evaluator(
        WatchedCheckpoints(world.directory), world.lock.with_name("e.json"), patience_secs=20.0,
        clock=lambda: world.now, sleep=world.sleep, **more,
    )  # fmt: skip


def done(world, *steps):
    evaluated = Evaluated(world.lock.with_name("e.json"))
    for manifest in WatchedCheckpoints(world.directory).committed():
        if manifest.step in steps:
            evaluated.add(manifest)


def test_the_chief_waits_until_the_newest_checkpoint_is_evaluated(tmp_path):
    world = World(tmp_path)
    for step in (2, 4, 6):
        world.save(step)
    world.events = {1015.0: lambda: done(world, 2), 1030.0: lambda: done(world, 4),
                    1045.0: lambda: done(world, 6)}  # fmt: skip
    assert wait(world)
    assert 1045.0 < world.now < 1050.0  # and time for the evaluator to close its writers
    before = world.now
    assert wait(world) and world.now == before


def test_the_chief_waits_for_a_long_evaluation_while_it_beats(tmp_path):
    world = World(tmp_path)
    world.save(2)
    path = world.lock.with_name("e.json")

    def beat():
        path.write_text(json.dumps({"evaluated": {}, "evaluating": 2, "beat": world.now}))

    world.events = {1000.0 + 15 * i: beat for i in range(1, 6)} | {1085.0: lambda: done(world, 2)}
    assert wait(world) and world.now > 1085.0


def test_an_evaluation_beats_in_the_list(tmp_path):
    world = World(tmp_path)
    world.save(2)
    path = world.lock.with_name("e.json")
    evaluated = Evaluated(path)
    with evaluated.beating(2, beat_secs=0.01):
        while not path.exists():
            time.sleep(0.01)
        assert json.loads(path.read_text())["evaluating"] == 2
    done(world, 2)
    assert json.loads(path.read_text()) == {"evaluated": {"2": 1.0}}


def test_the_chief_does_not_wait_for_checkpoints_that_cannot_be_listed(tmp_path, caplog, monkeypatch):
    def unreadable(self):
        raise ReadError("the directory cannot be read.")

    world = World(tmp_path)
    world.save(2)
    monkeypatch.setattr(WatchedCheckpoints, "committed", unreadable)
    assert not wait(world) and world.now == 1000.0
    assert "the directory cannot be read. Exiting without waiting for the evaluator." in caplog.text


def test_the_chief_does_not_wait_for_ever_nor_for_nothing(tmp_path, caplog):
    world = World(tmp_path)
    assert not wait(world) and world.now == 1000.0
    world.save(2)
    world.save(4)
    world.events = {1015.0: lambda: done(world, 2)}
    assert not wait(world)
    assert 1035.0 <= world.now < 1040.0
    assert "has not evaluated step 4" in caplog.text
