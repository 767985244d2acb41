"""The evaluator: each checkpoint once, whatever happens to it, and an end when training has ended."""

import json
import logging
import shutil
import types

import ctl
import pytest
from ctl import app, evaluator, following
from ctl.checkpoints import commit
from ctl.checkpoints.protocol import Manifest
from ctl.checkpoints.watched import UnusableCheckpoint, WatchedCheckpoints
from ctl.following import Evaluated, Following, Patience
from ctl.lease import Lease
from small_models import Small, every_step
from test_app import parsed

CLUSTER = {"worker": ["127.0.0.1:1", "127.0.0.1:2"], "evaluator": ["127.0.0.1:3"]}
TWICE = every_step(save=ctl.Every(steps=2), evaluate=ctl.Every(steps=2))


@pytest.fixture
def as_evaluator(monkeypatch):
    """Makes this process an evaluator, listed in the cluster or not."""

    def become(listed=True):
        cluster = {k: v for k, v in CLUSTER.items() if listed or k != "evaluator"}
        task = {"type": "evaluator", "index": 0}
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))

    return become


def train(model_dir, steps=6, **options):
    """Trains with evaluations on the spot; returns step -> loss of these."""
    report = ctl.MemoryReport()
    options = {"intervals": TWICE, "optimizer": "adam", **options}
    Small(model_dir=str(model_dir), strategy="default", reports=[report], **options).train(steps)
    return {step: values["loss"] for run, step, values in report.rows if run == "eval"}


def follow(model_dir, **options):
    """One evaluator in a directory whose training has ended; returns [(step, loss)]."""
    report = ctl.MemoryReport()
    trainer = Small(model_dir=str(model_dir), optimizer="adam", reports=[report], **options)
    trainer.train(10**6)
    assert {run for run, *_ in report.rows} <= {"eval"}
    return [(step, values["loss"]) for _, step, values in report.rows]


def files(directory):
    return {p: p.stat().st_mtime_ns for p in sorted(directory.rglob("*"))}


@pytest.mark.parametrize("listed", [True, False])
def test_an_evaluator_has_the_numbers_of_an_evaluation_on_the_spot(tmp_path, as_evaluator, listed):
    inline = train(tmp_path)
    before = files(tmp_path / "checkpoints")
    as_evaluator(listed)
    assert follow(tmp_path) == sorted(inline.items()) and list(inline) == [2, 4, 6]
    assert files(tmp_path / "checkpoints") == before


def test_an_evaluator_started_again_does_only_what_is_new(tmp_path, as_evaluator, monkeypatch):
    train(tmp_path, steps=4)
    as_evaluator()
    assert [step for step, _ in follow(tmp_path)] == [2, 4]
    assert follow(tmp_path) == []
    monkeypatch.delenv("TF_CONFIG")
    train(tmp_path, steps=8)
    as_evaluator()
    assert [step for step, _ in follow(tmp_path)] == [6, 8]


def test_the_default_reports_are_a_file_of_its_own_the_console_and_tensorboard(
    tmp_path, as_evaluator, capsys
):
    Small(model_dir=str(tmp_path), strategy="default", intervals=TWICE).train(4)
    chief = (tmp_path / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    as_evaluator()
    numbers = Small(model_dir=str(tmp_path)).train(1)
    rows = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert [(row["run"], row["step"]) for row in rows] == [("eval", 2), ("eval", 4)]
    assert numbers == {"eval_loss": rows[-1]["loss"]}
    assert (tmp_path / "metrics.jsonl").read_bytes() == chief
    assert [w for w in capsys.readouterr().out.splitlines() if w.startswith("eval step 4  loss")]
    from test_report_tensorboard_resume import scalar_steps

    assert scalar_steps(tmp_path / "logs" / "eval") == [2, 4, 2, 4]  # on the spot, then ours
    assert scalar_steps(tmp_path / "logs" / "train") == [1, 2, 3, 4]


def test_what_is_damaged_is_passed_over_with_one_line(tmp_path, as_evaluator, caplog):
    inline = train(tmp_path, steps=8)
    data = next((tmp_path / "checkpoints" / "ckpt-2").glob("state.data*"))
    data.write_bytes(data.read_bytes()[:-1])
    (tmp_path / "checkpoints" / "ckpt-4" / "manifest.json").write_text("{")
    (tmp_path / "checkpoints" / "tmp-ckpt-9").mkdir()
    as_evaluator()
    assert follow(tmp_path) == [(6, inline[6]), (8, inline[8])]
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(said) == 2, said
    assert "ckpt-4" in said[0] and "step 2: state.data" in said[1] and "bytes, expected" in said[1]
    assert (tmp_path / "checkpoints" / "tmp-ckpt-9").is_dir()


def test_what_is_deleted_while_it_waits_its_turn_is_passed_over(
    tmp_path, as_evaluator, monkeypatch, caplog
):
    inline = train(tmp_path, steps=6)
    restore = WatchedCheckpoints.restore

    def restore_when_it_is_gone(self, state, step=None):
        if step == 2:
            shutil.rmtree(self.directory / "ckpt-2")
            shutil.rmtree(self.directory / "ckpt-4")
        return restore(self, state, step)

    monkeypatch.setattr(WatchedCheckpoints, "restore", restore_when_it_is_gone)
    as_evaluator()
    assert follow(tmp_path) == [(6, inline[6])]
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert said == [
        "Passing over the checkpoint of step 2: it was deleted meanwhile.",
        "Deleted before they were evaluated: steps 4. Keep more checkpoints, or save less often.",
    ]


def test_the_checkpoint_of_another_model_is_an_error_not_a_line(tmp_path, as_evaluator):
    train(tmp_path, steps=2)
    as_evaluator()
    with pytest.raises(ctl.CheckpointError, match="of another model") as caught:
        follow(tmp_path, framework="module")
    assert not isinstance(caught.value, UnusableCheckpoint)


def test_an_evaluator_that_cannot_evaluate_is_refused(tmp_path, as_evaluator):
    class Mute(Small):
        eval_step = ctl.Trainer.eval_step

    as_evaluator()
    with pytest.raises(ctl.UsageError, match="Mute has no eval_step; to evaluate it needs"):
        Mute(model_dir=str(tmp_path)).train(1)
    with pytest.raises(ctl.UsageError, match="no model_dir says where they are.*--model_dir"):
        Small().train(1)


def test_an_evaluator_exports_nothing(tmp_path, as_evaluator):
    train(tmp_path, steps=2)
    as_evaluator()
    trainer = Small(model_dir=str(tmp_path), optimizer="adam", reports=[])
    trainer.train(1)
    assert trainer.export("keras") == [] and not (tmp_path / "export").exists()


@pytest.mark.parametrize(
    ("arguments", "inline"),
    [([], False), (["--eval_every_steps=5"], True), (["--keep=3,best=loss"], True)],
)
def test_with_an_evaluator_in_the_cluster_workers_evaluate_only_when_asked(
    monkeypatch, tmp_path, arguments, inline
):
    def evaluates(cluster):
        task = {"type": "worker", "index": 0}
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
        values = parsed("--strategy=default", f"--model_dir={tmp_path}", *arguments)
        return app._options(values)["intervals"].evaluate != ctl.Every()

    assert evaluates({"worker": ["127.0.0.1:1"], "evaluator": ["127.0.0.1:3"]}) == inline
    assert evaluates({"worker": ["127.0.0.1:1"]})


def test_evaluating_or_exporting_only_is_refused_in_an_evaluator_task(
    monkeypatch, tmp_path, as_evaluator, capsys
):
    (tmp_path / "checkpoints").mkdir()
    as_evaluator()
    monkeypatch.setattr("absl.flags.FLAGS", parsed("--mode=eval", f"--model_dir={tmp_path}"))
    with pytest.raises(SystemExit) as caught:
        app._main(Small, {})
    assert caught.value.code == 2 and "Leave --mode out" in capsys.readouterr().err


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

        commit.write(self.directory, Manifest(step=step, created=created), write_state)

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
        return way.run(evaluate or (lambda m: self.did.append((m.step, self.now))), stopped)


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


def test_a_checkpoint_saved_again_at_the_same_step_is_another_one(world):
    world.lease()
    world.save(2)
    world.events = {
        1005.0: lambda: (world.save(2, created=2.0), world.lease(state="ended", reason="done"))
    }
    world.follow()
    assert world.did == [(2, 1000.0), (2, 1005.0)]


def test_a_training_that_fell_silent_is_dead_after_a_minute_and_what_it_left_is_evaluated(world):
    world.lease()
    world.events = {1030.0: lambda: world.save(2)}
    with pytest.raises(ctl.PeerLostError, match="died without a word after step 2") as caught:
        world.follow()
    assert world.did == [(2, 1030.0)] and caught.value.exit_code == 134
    assert 1060.0 < world.now <= 1062.0


@pytest.mark.parametrize(
    ("code", "reason"), [(134, "failed: PeerLostError"), (143, "stopped by a signal")]
)
def test_a_training_that_is_to_be_started_again_wants_its_evaluator_again(world, code, reason):
    world.save(2)
    world.lease(state="ended", reason=reason, exit_code=code)
    with pytest.raises(ctl.PeerLostError, match=f"not complete: {reason} at step 2"):
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
    with pytest.raises(ctl.PeerLostError, match="No training began in .* within 600 s"):
        world.follow()
    assert 1600.0 < world.now <= 1617.0  # 15 s of it for a beat that might still move


def test_a_training_seen_alive_is_ours_whatever_the_clocks_say(world):
    world.lease(beat=700.0)
    world.events = {
        1003.0: lambda: world.lease(beat=705.0),
        1008.0: lambda: world.lease(beat=710.0, state="ended", reason="done"),
    }
    assert world.follow(born=999.0) == "done" and world.now == 1008.0


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

    monkeypatch.setattr(following.os, "replace", full)
    done.add(two)
    done.add(two)
    assert two in done and two not in Evaluated(path)
    assert [r.getMessage().partition(" (")[0] for r in caplog.records] == [
        f"{path} cannot be read", f"{path} cannot be written",
    ]  # fmt: skip


def test_a_signal_to_the_evaluator_is_its_exit_code(tmp_path, as_evaluator, monkeypatch):
    train(tmp_path, steps=2)
    as_evaluator()

    class Received:
        def __enter__(self):
            return types.SimpleNamespace(received=15)

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(evaluator.signals, "Signals", Received)
    with pytest.raises(ctl.Stopped, match="Stopped by SIGTERM after 0 evaluations") as caught:
        follow(tmp_path)
    assert caught.value.exit_code == 143
