"""The evaluator: one evaluation of each checkpoint, skipped checkpoints, and the end with the training."""

import json
import logging
import shutil

import ctl
import pytest
from conftest import some_of
from ctl import app, config
from ctl.checkpoints.watched import UnusableCheckpoint, WatchedCheckpoints
from ctl.distribute.platforms import detection
from ctl.training import following
from ctl.training.following import watched_checkpoints
from ctl.training.task import Task
from small_models import Small, every_step
from test_app import parse_flags

CLUSTER = {"worker": ["127.0.0.1:1", "127.0.0.1:2"], "evaluator": ["127.0.0.1:3"]}
EVERY_2 = every_step(save=ctl.Every(steps=2), evaluate=ctl.Every(steps=2))


@pytest.fixture
def as_evaluator(monkeypatch):
    """Returns a function that makes this process an evaluator, listed in the cluster or not."""

    def set_environment(listed=True):
        cluster = {k: v for k, v in CLUSTER.items() if listed or k != "evaluator"}
        task = {"type": "evaluator", "index": 0}
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))

    return set_environment


def train(model_dir, steps=6, **options):
    """Trains with inline evaluations; returns their loss by step."""
    writer = ctl.MemoryWriter()
    options = {"intervals": EVERY_2, "optimizer": "adam", **options}
    Small(model_dir=str(model_dir), strategy="default", writers=[writer], **options).train(steps)
    return {step: values["loss"] for run, step, values in writer.rows if run == "eval"}


def follow(model_dir, **options):
    """Runs an evaluator in the directory of a finished training; returns [(step, loss)]."""
    writer = ctl.MemoryWriter()
    trainer = Small(model_dir=str(model_dir), optimizer="adam", writers=[writer], **options)
    trainer.train(10**6)
    assert {run for run, *_ in writer.rows} <= {"eval"}
    return [(step, values["loss"]) for _, step, values in writer.rows]


def files(directory):
    return {p: p.stat().st_mtime_ns for p in sorted(directory.rglob("*"))}


@pytest.mark.parametrize("listed", some_of([True, False], True))
def test_an_evaluator_has_the_metrics_of_an_inline_evaluation(tmp_path, as_evaluator, listed):
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
    stdout = capsys.readouterr().out
    assert "eval step 4" in stdout and not (tmp_path / "run/evaluations.jsonl").exists()


def test_a_restarted_evaluator_evaluates_only_new_checkpoints(tmp_path, as_evaluator, monkeypatch):
    train(tmp_path, steps=4)
    as_evaluator()
    assert [step for step, _ in follow(tmp_path)] == [2, 4]
    assert follow(tmp_path) == []
    monkeypatch.delenv("TF_CONFIG")
    train(tmp_path, steps=8)
    as_evaluator()
    assert [step for step, _ in follow(tmp_path)] == [6, 8]


def test_the_default_writers_are_a_separate_file_the_console_and_tensorboard(
    tmp_path, as_evaluator, capsys
):
    Small(model_dir=str(tmp_path), strategy="default", intervals=EVERY_2).train(4)
    chief = (tmp_path / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    as_evaluator()
    metrics = Small(model_dir=str(tmp_path)).train(1)
    rows = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert [(row["run"], row["step"]) for row in rows] == [("eval", 2), ("eval", 4)]
    assert metrics == {"eval_loss": rows[-1]["loss"]}
    assert (tmp_path / "metrics.jsonl").read_bytes() == chief
    assert [w for w in capsys.readouterr().out.splitlines() if w.startswith("eval step 4  loss")]
    from tensorboard_runs import scalar_steps

    assert scalar_steps(tmp_path / "logs" / "eval") == [2, 4, 2, 4]  # inline, then by the evaluator
    assert scalar_steps(tmp_path / "logs" / "train") == [1, 2, 3, 4]


def test_damaged_checkpoints_are_skipped_with_one_warning_each(tmp_path, as_evaluator, caplog):
    inline = train(tmp_path, steps=8)
    data = next((tmp_path / "checkpoints" / "ckpt-2").glob("state.data*"))
    data.write_bytes(data.read_bytes()[:-1])
    (tmp_path / "checkpoints" / "ckpt-4" / "manifest.json").write_text("{")
    (tmp_path / "checkpoints" / "tmp-ckpt-9").mkdir()
    as_evaluator()
    assert follow(tmp_path) == [(6, inline[6]), (8, inline[8])]
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 2, warnings
    assert "ckpt-4" in warnings[0]
    assert "step 2: state.data" in warnings[1] and "bytes, expected" in warnings[1]
    assert (tmp_path / "checkpoints" / "tmp-ckpt-9").is_dir()


def test_checkpoints_deleted_before_their_evaluation_are_skipped(
    tmp_path, as_evaluator, monkeypatch, caplog
):
    inline = train(tmp_path, steps=6)
    restore = WatchedCheckpoints.restore

    def delete_and_restore(self, state, step=None):
        if step == 2:
            shutil.rmtree(self.directory / "ckpt-2")
            shutil.rmtree(self.directory / "ckpt-4")
        return restore(self, state, step)

    monkeypatch.setattr(WatchedCheckpoints, "restore", delete_and_restore)
    as_evaluator()
    assert follow(tmp_path) == [(6, inline[6])]
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warnings == [
        "Skipping the checkpoint of step 2: it has been deleted.",
        "Deleted before they were evaluated: steps 4. Keep more checkpoints, or save less often.",
    ]


def test_the_checkpoint_of_another_model_is_an_error_and_no_warning(tmp_path, as_evaluator):
    train(tmp_path, steps=2)
    as_evaluator()
    with pytest.raises(ctl.CheckpointError, match="of another model") as raised:
        follow(tmp_path, framework="module")
    assert not isinstance(raised.value, UnusableCheckpoint)


def test_an_evaluator_that_cannot_evaluate_is_refused(tmp_path, as_evaluator):
    class WithoutEvalStep(Small):
        eval_step = ctl.Trainer.eval_step

    as_evaluator()
    with pytest.raises(ctl.UsageError, match="WithoutEvalStep has no eval_step; to evaluate it needs"):
        WithoutEvalStep(model_dir=str(tmp_path)).train(1)
    with pytest.raises(ctl.UsageError, match="has no model_dir.*--model_dir"):
        Small().train(1)


def test_an_evaluator_exports_no_model(tmp_path, as_evaluator):
    train(tmp_path, steps=2)
    as_evaluator()
    trainer = Small(model_dir=str(tmp_path), optimizer="adam", writers=[])
    trainer.train(1)
    assert trainer.export("keras") == [] and not (tmp_path / "export").exists()


@pytest.mark.parametrize(
    ("arguments", "inline"), [([], False), (["--eval_every_steps=5"], True), (["--keep=3,best=loss"], True)]
)
def test_with_an_evaluator_in_the_cluster_workers_evaluate_only_on_request(
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
    with pytest.raises(SystemExit) as raised:
        app._main(Small, {})
    assert raised.value.code == 2 and "Leave --mode out" in capsys.readouterr().err


def test_a_signal_to_the_evaluator_is_its_exit_code(tmp_path, as_evaluator, monkeypatch):
    train(tmp_path, steps=2)
    as_evaluator()

    class Received(following.signals.Interruption):
        def __enter__(self):
            self._handle(15, None)
            return self

    monkeypatch.setattr(following.signals, "Interruption", Received)
    with pytest.raises(ctl.Stopped, match="Stopped by SIGTERM after 0 evaluations") as raised:
        follow(tmp_path)
    assert raised.value.exit_code == 143


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
