"""The evaluator: each checkpoint once, whatever happens to it, and an end when training has ended."""

import json
import logging
import shutil

import ctl
import pytest
from ctl import app, config
from ctl.checkpoints.watched import UnusableCheckpoint, WatchedCheckpoints
from ctl.distribute.platforms import detection
from ctl.training import following
from ctl.training.following import watched_checkpoints
from ctl.training.task import Task
from small_models import Small, every_step
from test_app import parse_flags

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
    writer = ctl.MemoryWriter()
    options = {"intervals": TWICE, "optimizer": "adam", **options}
    Small(model_dir=str(model_dir), strategy="default", writers=[writer], **options).train(steps)
    return {step: values["loss"] for run, step, values in writer.rows if run == "eval"}


def follow(model_dir, **options):
    """One evaluator in a directory whose training has ended; returns [(step, loss)]."""
    writer = ctl.MemoryWriter()
    trainer = Small(model_dir=str(model_dir), optimizer="adam", writers=[writer], **options)
    trainer.train(10**6)
    assert {run for run, *_ in writer.rows} <= {"eval"}
    return [(step, values["loss"]) for _, step, values in writer.rows]


def files(directory):
    return {p: p.stat().st_mtime_ns for p in sorted(directory.rglob("*"))}


@pytest.mark.parametrize("listed", [True, False])
def test_an_evaluator_has_the_numbers_of_an_evaluation_on_the_spot(tmp_path, as_evaluator, listed):
    several_batches = {"global_batch_size": 4}
    inline = train(tmp_path, **several_batches)
    before = files(tmp_path / "checkpoints")
    as_evaluator(listed)
    assert follow(tmp_path, **several_batches) == sorted(inline.items()) and list(inline) == [2, 4, 6]
    assert files(tmp_path / "checkpoints") == before


def test_an_evaluator_follows_a_training_at_a_url(tmp_path, as_evaluator, capsys):
    url = f"file://{tmp_path}/run"
    inline = train(url, steps=4)
    as_evaluator()
    assert follow(url) == sorted(inline.items()) and list(inline) == [2, 4]
    assert follow(url) == []
    assert set(json.loads((tmp_path / "run/evaluated.json").read_text())["evaluated"]) == {"2", "4"}
    (tmp_path / "run/evaluated.json").unlink()
    Small(model_dir=url, optimizer="adam").train(1)  # with the default writers
    said = capsys.readouterr().out
    assert "eval step 4" in said and not (tmp_path / "run/evaluations.jsonl").exists()


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
    from tensorboard_runs import scalar_steps

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
        "Skipping the checkpoint of step 2: it has been deleted.",
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
    trainer = Small(model_dir=str(tmp_path), optimizer="adam", writers=[])
    trainer.train(1)
    assert trainer.export("keras") == [] and not (tmp_path / "export").exists()


@pytest.mark.parametrize(
    ("arguments", "inline"), [([], False), (["--eval_every_steps=5"], True), (["--keep=3,best=loss"], True)]
)
def test_with_an_evaluator_in_the_cluster_workers_evaluate_only_when_asked(
    monkeypatch, tmp_path, arguments, inline
):
    def evaluates(cluster):
        task = {"type": "worker", "index": 0}
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
        values = parse_flags("--strategy=default", f"--model_dir={tmp_path}", *arguments)
        settings, _ = config.read_command_line(values, {}, ctl.Trainer)
        parts = app._parts(values, settings, {}, detection.read_topology())
        return parts["intervals"].evaluate != ctl.Every()

    assert evaluates({"worker": ["127.0.0.1:1"], "evaluator": ["127.0.0.1:3"]}) == inline
    assert evaluates({"worker": ["127.0.0.1:1"]})


def test_evaluating_or_exporting_only_is_refused_in_an_evaluator_task(
    monkeypatch, tmp_path, as_evaluator, capsys
):
    (tmp_path / "checkpoints").mkdir()
    as_evaluator()
    monkeypatch.setattr("absl.flags.FLAGS", parse_flags("--mode=eval", f"--model_dir={tmp_path}"))
    with pytest.raises(SystemExit) as caught:
        app._main(Small, {})
    assert caught.value.code == 2 and "Leave --mode out" in capsys.readouterr().err


def test_a_signal_to_the_evaluator_is_its_exit_code(tmp_path, as_evaluator, monkeypatch):
    train(tmp_path, steps=2)
    as_evaluator()

    class Received(following.signals.Interruption):
        def __enter__(self):
            self.received = 15
            return self

    monkeypatch.setattr(following.signals, "Interruption", Received)
    with pytest.raises(ctl.Stopped, match="Stopped by SIGTERM after 0 evaluations") as caught:
        follow(tmp_path)
    assert caught.value.exit_code == 143


def watched(trainer):
    task = Task.of(trainer)
    return watched_checkpoints(task, trainer.model_dir, trainer._checkpoints)


def test_the_evaluator_reads_the_checkpoints_of_the_trainer_s_manager(tmp_path):
    settings = {"strategy": "default", "writers": [], "model_dir": str(tmp_path / "run")}
    usual = watched(Small(**settings))
    assert str(usual.directory) == str(tmp_path / "run" / "checkpoints")
    elsewhere = ctl.ChiefOnlyCheckpoints(str(tmp_path / "elsewhere"))
    moved = watched(Small(checkpoints=elsewhere, **settings))
    assert str(moved.directory) == str(tmp_path / "elsewhere")
