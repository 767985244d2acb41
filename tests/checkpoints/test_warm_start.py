"""Warm start from another run's model: matching by name and shape, and a list of skipped variables."""

import errno
import logging
from pathlib import Path

import ctl
import keras
import numpy as np
import pytest
from ctl.checkpoints import commit, snapshot, warm_start
from ctl.errors import ReadError
from small_models import Small, digest, every_step
from test_checkpoints import DAMAGES, assert_same, values


class WithHead(Small):
    """A model with another head; the other names and shapes are those of `Small`."""

    def __init__(self, classes=4, **options):
        super().__init__(optimizer="adam", **options)
        self.classes = classes

    def build(self):
        self.model = keras.Sequential([
            keras.Input((8,)), keras.layers.Dense(16, activation="tanh", name="body"),
            keras.layers.Dense(self.classes, name="head"),
        ])  # fmt: skip
        self.optimizer = keras.optimizers.Adam(1e-2)
        self.mean_loss = keras.metrics.Mean(name="mean_loss")


OPTIONS = dict(strategy="default", writers=[], intervals=every_step(save=ctl.Every(steps=2)))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Returns (model_dir, values) of a run of 6 steps."""
    trainer = WithHead(model_dir=str(tmp_path_factory.mktemp("source") / "run"), **OPTIONS)
    trainer.train(6)
    return trainer.model_dir, values(trainer)


def warm_started(source_dir, classes=4, **options):
    trainer = WithHead(classes, **{**OPTIONS, **options})
    trainer.init_from = source_dir
    trainer.prepare()
    return trainer


@pytest.mark.parametrize("subdirectory", ["", "/checkpoints", "/checkpoints/ckpt-6"])
def test_only_the_model_is_loaded_from_the_checkpoint(source, subdirectory, caplog):
    source_dir, expected = source
    caplog.set_level(logging.INFO, "ctl")
    trainer = warm_started(source_dir + subdirectory)
    fresh = values(warm_started(None))
    for name, value in values(trainer).items():
        expected_values = expected if name.startswith("model/") else fresh
        np.testing.assert_array_equal(value, expected_values[name], err_msg=name)
    assert trainer.step == 0
    [message] = [r.getMessage() for r in caplog.records if "variables from" in r.getMessage()]
    assert "4 of 4 variables" in message and "ckpt-6" in message and "not loaded" not in message


def test_an_older_checkpoint_is_loaded_by_its_path(source):
    source_dir, expected = source
    kernel = "model/sequential/body/kernel"
    loaded = values(warm_started(f"{source_dir}/checkpoints/ckpt-2"))
    name = next(n for n in loaded if n.endswith("body/kernel"))
    assert not np.array_equal(loaded[name], expected[name]), kernel


def test_an_unreadable_newer_checkpoint_is_an_error(source, monkeypatch):
    source_dir, _ = source
    read_manifest = commit.read_manifest

    def read(path):
        if path.name == "ckpt-6":
            raise OSError(errno.EIO, "Input/output error")
        return read_manifest(path)

    monkeypatch.setattr("ctl.io.paths.time.sleep", lambda secs: None)
    monkeypatch.setattr(commit, "read_manifest", read)
    with pytest.raises(ReadError) as raised:
        warm_start.find_source(source_dir)
    assert raised.value.exit_code == 134


@pytest.mark.parametrize("times", [2, 100])
def test_a_transient_error_of_a_directory_listing_is_retried(source, monkeypatch, times):
    failures_left, iterdir = [times], Path.iterdir

    def entries(self):
        if failures_left[0]:
            failures_left[0] -= 1
            raise PermissionError(errno.EACCES, "Permission denied")
        return iterdir(self)

    monkeypatch.setattr("ctl.io.paths.time.sleep", lambda secs: None)
    monkeypatch.setattr(Path, "iterdir", entries)
    if times == 2:
        assert warm_start.find_source(source[0])[1].step == 6
        return
    with pytest.raises(ReadError, match="cannot be read") as raised:
        warm_start.find_source(source[0])
    assert raised.value.exit_code == 134


WARM_START_OF_TWO_WORKERS = """
import errno, json, os, sys
import ctl
from ctl.checkpoints import commit, restoring
from ctl.io import paths
from small_models import Small, digest, every_step

restoring.VISIBILITY_TIMEOUT_SECS = 20.0 if sys.argv[3] == "1" else 0.5
source_dir, fault, times = sys.argv[1], sys.argv[2], int(sys.argv[3])
is_second = json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1
trainer = Small(strategy="multi_worker", optimizer="adam", writers=[], intervals=every_step())
trainer.init_from = source_dir
if is_second:  # the newest checkpoint becomes visible late, or is unreadable
    directories, read_manifest, faults_left = commit._checkpoint_directories, commit.read_manifest, [times]

    def is_fault_over():
        faults_left[0] -= 1
        return faults_left[0] < 0

    def late_directories(directory):
        return [p for p in directories(directory) if p.name != "ckpt-4" or is_fault_over()]

    def unreadable_manifest(path):
        if path.name == "ckpt-4" and not is_fault_over():
            raise OSError(errno.EIO, "Input/output error")
        return read_manifest(path)

    paths.call_with_retries.__defaults__ = ((0.01, 0.01),)
    faults = (late_directories, read_manifest) if fault == "late" else (directories, unreadable_manifest)
    commit._checkpoint_directories, commit.read_manifest = faults
try:
    trainer.prepare()
    print(json.dumps({"digest": digest(trainer)}), flush=True)
except ctl.CheckpointError as e:
    print(json.dumps({"code": e.exit_code, "error": str(e)}), flush=True)
"""


@pytest.fixture(scope="module")
def four_steps(tmp_path_factory):
    keras.utils.clear_session()  # layers are numbered as in the new processes that read the checkpoint
    trainer = Small(model_dir=str(tmp_path_factory.mktemp("four") / "run"), optimizer="adam", **OPTIONS)
    trainer.train(4)
    return trainer.model_dir, digest(trainer)


@pytest.mark.workers
@pytest.mark.parametrize("fault", ["late", "unreadable"])
def test_all_workers_start_with_the_checkpoint_of_the_chief(run_program, four_steps, fault):
    source_dir, expected = four_steps
    results = run_program(2, ["-c", WARM_START_OF_TWO_WORKERS, source_dir, fault, "1"])
    assert [r.json for r in results] == [{"digest": expected}] * 2, results[1].output


@pytest.mark.workers
def test_no_worker_starts_if_one_worker_cannot_read_the_checkpoint(run_program, four_steps):
    results = run_program(2, ["-c", WARM_START_OF_TWO_WORKERS, four_steps[0], "unreadable", "1000"])
    assert [r.json["code"] for r in results] == [134, 134], results[1].output
    assert "Worker 1 could not restore" in results[0].json["error"]


def test_variables_that_do_not_match_are_listed_and_not_changed(source, caplog):
    source_dir, expected = source
    caplog.set_level(logging.INFO, "ctl")
    trainer = warm_started(source_dir, classes=7)
    fresh = warm_started(None, classes=7)
    for (name, value), other in zip(values(trainer).items(), values(fresh).values(), strict=True):
        if "body" in name and name.startswith("model/"):
            np.testing.assert_array_equal(value, expected[name])
        elif "head" not in name:
            np.testing.assert_array_equal(value, other)
    log = "\n".join(r.getMessage() for r in caplog.records)
    assert "Loaded 2 of 4 variables" in log
    assert "head/kernel: float32[16, 4] in the checkpoint, float32[16, 7] in this model" in log


def test_a_run_with_a_checkpoint_resumes_from_it(source, tmp_path):
    source_dir, _ = source
    warm_started(source_dir, model_dir=str(tmp_path / "b")).train(3)
    resumed = warm_started("/nowhere", model_dir=str(tmp_path / "b"))  # init_from is not read at a resume
    assert resumed.step == 3


def test_a_checkpoint_without_matching_variables_is_an_error(source, tmp_path, monkeypatch):
    source_dir, _ = source
    trainer = Small(framework="module", optimizer="adam", **OPTIONS)
    trainer.prepare()
    before = values(trainer)
    with pytest.raises(ctl.CheckpointError, match="does not fit this model") as raised:
        warm_start.load_initial_values(source_dir, trainer._prepared_trainer.state, ["model"])
    assert "not loaded: model/w0: not in the checkpoint" in str(raised.value)
    assert_same(before, values(trainer))


def test_a_directory_without_checkpoints_is_a_usage_error(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for name in ("nowhere", "empty", "file", "empty/ckpt-3"):
        with pytest.raises(ctl.UsageError, match="--init_from is .*which has no checkpoint"):
            warm_started(str(tmp_path / name))


@pytest.mark.parametrize("damage", ["truncated", "manifest empty"])
def test_a_damaged_checkpoint_is_skipped_or_an_error(source, tmp_path, damage):
    import shutil

    copy = shutil.copytree(source[0], tmp_path / "copy") / "checkpoints"
    DAMAGES[damage](copy / "ckpt-6")
    assert warm_start.find_source(str(copy))[1].step == 4
    with pytest.raises(ctl.CheckpointError, match="is damaged"):
        warm_start.find_source(str(copy / "ckpt-6"))
    for step in (2, 4):
        DAMAGES[damage](copy / f"ckpt-{step}")
    with pytest.raises(ctl.CheckpointError, match="is damaged"):
        warm_start.find_source(str(copy))


def test_a_read_that_fails_midway_changes_no_variable(source, tmp_path, monkeypatch):
    """The files agree with the manifest, and TensorFlow cannot read one of the tensors."""
    monkeypatch.setattr("ctl.io.paths.call_with_retries.__defaults__", ((0.01,),))
    trainer = WithHead(model_dir=str(tmp_path / "c"), **OPTIONS)
    trainer.train(2)
    manager, state = trainer._prepared_trainer.checkpointing.manager, trainer._prepared_trainer.state
    data = next((tmp_path / "c").glob("checkpoints/ckpt-2/state.data*"))
    content, last = data.read_bytes(), [v for n, v in values(trainer).items() if v.size > 9][-1]
    assert content.count(last.tobytes()) == 1  # the tensors before it can be read
    data.write_bytes(content.replace(last.tobytes(), bytes(last.nbytes)))
    monkeypatch.setattr("ctl.checkpoints.commit.find_damage", lambda path, manifest: None)
    for variable in state.variables.values():
        variable.assign(variable + 1 if variable.dtype.is_floating else variable)
    before = values(trainer)
    with pytest.raises(ctl.CheckpointError, match="cannot be read"):
        manager.restore(state)
    assert_same(before, values(trainer))
    with pytest.raises(ctl.CheckpointError, match="cannot be read"):
        warm_start.load_initial_values(str(tmp_path / "c"), state, ["model", "optimizer", "mean_loss"])
    assert_same(before, values(trainer))


def test_a_checkpoint_without_keys_is_an_error(source, tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "_serialize", lambda checkpoint: None)
    trainer = WithHead(model_dir=str(tmp_path / "d"), **OPTIONS)
    trainer.train(2)
    with pytest.raises(ctl.CheckpointError, match="has no key for its tensor"):
        warm_started(str(tmp_path / "d"))


class Numbered(Small):
    """Trains a model whose layers have numbers."""

    def __init__(self, first, **options):
        super().__init__(**options)
        self.first = first

    def build(self):
        layers = [keras.layers.Dense(4, name=f"dense_{self.first + i}") for i in range(2)]
        self.model = keras.Sequential([keras.Input((8,)), *layers], name="net")
        self.optimizer = keras.optimizers.SGD(0.1)


def test_numbers_that_overlap_are_refused_with_the_names_of_both_sides(tmp_path):
    trainer = Numbered(1, model_dir=str(tmp_path), **OPTIONS)
    trainer.train(2)
    begun = Numbered(2, init_from=trainer.model_dir, **OPTIONS)
    message = "matched: .*dense_2/kernel, .*dense_3/kernel in this model, .*dense_1/kernel, .*dense_2/k"
    with pytest.raises(ctl.CheckpointError, match=message) as raised:
        begun.prepare()
    assert raised.value.exit_code == 2
    shifted = Numbered(8, init_from=trainer.model_dir, **OPTIONS)
    shifted.prepare()
    assert digest(shifted) == digest(trainer)


def test_a_permanent_error_of_a_directory_listing_is_a_read_error(tmp_path, monkeypatch):
    def fail(path):
        raise OSError(errno.ENAMETOOLONG, "File name too long")

    monkeypatch.setattr(warm_start, "_find_undamaged", fail)
    with pytest.raises(ReadError, match="runs/a cannot be read: File name too long"):
        warm_start.find_source("runs/a")
