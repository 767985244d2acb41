"""A run may begin with another's model: what matches by name and shape, and a list of what does not."""

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
    """Another head; everything else has the names and shapes of `Small`."""

    def __init__(self, classes=4, **options):
        super().__init__(optimizer="adam", **options)
        self.classes = classes

    def build(self):
        self.model = keras.Sequential([
            keras.Input((8,)), keras.layers.Dense(16, activation="tanh", name="body"),
            keras.layers.Dense(self.classes, name="head"),
        ])  # fmt: skip
        self.optimizer = keras.optimizers.Adam(1e-2)
        self.seen = keras.metrics.Mean(name="seen")


OPTIONS = dict(strategy="default", writers=[], intervals=every_step(save=ctl.Every(steps=2)))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """(model_dir, values) of a run of 6 steps."""
    trainer = WithHead(model_dir=str(tmp_path_factory.mktemp("source") / "run"), **OPTIONS)
    trainer.train(6)
    return trainer.model_dir, values(trainer)


def begun(where, classes=4, **options):
    trainer = WithHead(classes, **{**OPTIONS, **options})
    trainer.init_from = where
    trainer.prepare()
    return trainer


@pytest.mark.parametrize("place", ["", "/checkpoints", "/checkpoints/ckpt-6"])
def test_the_model_is_that_of_the_checkpoint_and_nothing_else_is(source, place, caplog):
    where, expected = source
    caplog.set_level(logging.INFO, "ctl")
    trainer = begun(where + place)
    fresh = values(begun(None))
    for name, value in values(trainer).items():
        there = expected if name.startswith("model/") else fresh
        np.testing.assert_array_equal(value, there[name], err_msg=name)
    assert trainer.step == 0
    [said] = [r.getMessage() for r in caplog.records if "variables from" in r.getMessage()]
    assert "4 of 4 variables" in said and "ckpt-6" in said and "not loaded" not in said


def test_an_older_one_by_its_own_path(source):
    where, expected = source
    kernel = "model/sequential/body/kernel"
    found = values(begun(f"{where}/checkpoints/ckpt-2"))
    name = next(n for n in found if n.endswith("body/kernel"))
    assert not np.array_equal(found[name], expected[name]), kernel


def test_a_newer_one_that_cannot_be_read_is_not_passed_over(source, monkeypatch):
    where, _ = source
    good = commit.read_manifest

    def read(path):
        if path.name == "ckpt-6":
            raise OSError(errno.EIO, "Input/output error")
        return good(path)

    monkeypatch.setattr("ctl.io.paths.time.sleep", lambda secs: None)
    monkeypatch.setattr(commit, "read_manifest", read)
    with pytest.raises(ReadError) as caught:
        warm_start.find_source(where)
    assert caught.value.exit_code == 134


@pytest.mark.parametrize("times", [2, 100])
def test_a_listing_that_fails_for_a_moment_is_read_again(source, monkeypatch, times):
    left, good = [times], Path.iterdir

    def entries(self):
        if left[0]:
            left[0] -= 1
            raise PermissionError(errno.EACCES, "Permission denied")
        return good(self)

    monkeypatch.setattr("ctl.io.paths.time.sleep", lambda secs: None)
    monkeypatch.setattr(Path, "iterdir", entries)
    if times == 2:
        assert warm_start.find_source(source[0])[1].step == 6
        return
    with pytest.raises(ReadError, match="cannot be read") as caught:
        warm_start.find_source(source[0])
    assert caught.value.exit_code == 134


TOGETHER = """
import errno, json, os, sys
import ctl
from ctl.checkpoints import commit, restoring
from ctl.io import paths
from small_models import Small, digest, every_step

restoring.VISIBILITY_TIMEOUT_SECS = 20.0 if sys.argv[3] == "1" else 0.5
where, fault, times = sys.argv[1], sys.argv[2], int(sys.argv[3])
second = json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1
trainer = Small(strategy="multi_worker", optimizer="adam", writers=[], intervals=every_step())
trainer.init_from = where
if second:  # it sees the newest checkpoint late, or cannot read it
    directories, manifest, left = commit._checkpoint_directories, commit.read_manifest, [times]

    def passes():
        left[0] -= 1
        return left[0] < 0

    def listed(directory):
        return [p for p in directories(directory) if p.name != "ckpt-4" or passes()]

    def read(path):
        if path.name == "ckpt-4" and not passes():
            raise OSError(errno.EIO, "Input/output error")
        return manifest(path)

    paths.call_with_retries.__defaults__ = ((0.01, 0.01),)
    faults = (listed, manifest) if fault == "late" else (directories, read)
    commit._checkpoint_directories, commit.read_manifest = faults
try:
    trainer.prepare()
    print(json.dumps({"digest": digest(trainer)}), flush=True)
except ctl.CheckpointError as e:
    print(json.dumps({"code": e.exit_code, "said": str(e)}), flush=True)
"""


@pytest.fixture(scope="module")
def four_steps(tmp_path_factory):
    trainer = Small(model_dir=str(tmp_path_factory.mktemp("four") / "run"), optimizer="adam", **OPTIONS)
    trainer.train(4)
    return trainer.model_dir, digest(trainer)


@pytest.mark.workers
@pytest.mark.parametrize("fault", ["late", "unreadable"])
def test_all_workers_begin_with_the_checkpoint_that_the_chief_chose(run_program, four_steps, fault):
    where, expected = four_steps
    found = run_program(2, ["-c", TOGETHER, where, fault, "1"])
    assert [r.json for r in found] == [{"digest": expected}] * 2, found[1].output


@pytest.mark.workers
def test_where_one_worker_cannot_read_the_checkpoint_no_worker_begins(run_program, four_steps):
    found = run_program(2, ["-c", TOGETHER, four_steps[0], "unreadable", "1000"])
    assert [r.json["code"] for r in found] == [134, 134], found[1].output
    assert "Worker 1 could not restore" in found[0].json["said"]


def test_what_does_not_match_is_listed_and_stays_as_built(source, caplog):
    where, expected = source
    caplog.set_level(logging.INFO, "ctl")
    trainer = begun(where, classes=7)
    fresh = begun(None, classes=7)
    for (name, value), other in zip(values(trainer).items(), values(fresh).values(), strict=True):
        if "body" in name and name.startswith("model/"):
            np.testing.assert_array_equal(value, expected[name])
        elif "head" not in name:
            np.testing.assert_array_equal(value, other)
    said = "\n".join(r.getMessage() for r in caplog.records)
    assert "Loaded 2 of 4 variables" in said
    assert "head/kernel: float32[16, 4] in the checkpoint, float32[16, 7] in this model" in said


def test_a_run_that_has_a_checkpoint_goes_on_from_that(source, tmp_path):
    where, _ = source
    begun(where, model_dir=str(tmp_path / "b")).train(3)
    again = begun("/nowhere", model_dir=str(tmp_path / "b"))  # may be gone by then
    assert again.step == 3


def test_nothing_that_matches_is_an_error_and_changes_nothing(source, tmp_path, monkeypatch):
    where, _ = source
    trainer = Small(framework="module", optimizer="adam", **OPTIONS)
    trainer.prepare()
    before = values(trainer)
    with pytest.raises(ctl.CheckpointError, match="does not fit this model") as caught:
        warm_start.load_initial_values(where, trainer._prepared_trainer.state, ["model"])
    assert "not loaded: model/w0: not in the checkpoint" in str(caught.value)
    assert_same(before, values(trainer))


def test_a_wrong_place_is_a_usage_error(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for place in ("nowhere", "empty", "file", "empty/ckpt-3"):
        with pytest.raises(ctl.UsageError, match="--init_from is .*which has no checkpoint"):
            begun(str(tmp_path / place))


@pytest.mark.parametrize("damage", ["truncated", "manifest empty"])
def test_a_damaged_one_is_passed_over_or_an_error(source, tmp_path, damage):
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


def test_reading_that_fails_midway_leaves_every_variable_as_it_was(source, tmp_path, monkeypatch):
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
        warm_start.load_initial_values(str(tmp_path / "c"), state, ["model", "optimizer", "seen"])
    assert_same(before, values(trainer))


def test_a_checkpoint_without_keys_says_so(source, tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "_serialize", lambda checkpoint: None)
    trainer = WithHead(model_dir=str(tmp_path / "d"), **OPTIONS)
    trainer.train(2)
    with pytest.raises(ctl.CheckpointError, match="has no key for its tensor"):
        begun(str(tmp_path / "d"))
