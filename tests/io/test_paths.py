"""Detection of object stores, and changes of files without renames."""

import builtins
import io
import json
import os
from pathlib import Path

import ctl
import numpy as np
import pytest
import tensorflow as tf
from ctl.io import paths
from ctl.metrics import publishing
from ctl.metrics.jsonl import JsonlWriter
from ctl.metrics.protocol import Started
from ctl.training import callback_runner
from small_models import Small, every_step
from tensorboard_runs import attempt, scalar_steps

MOUNTS = b"""\
/dev/vda / ext4 rw 0 0
bucket /mnt/data\\040of\\040mine fuse.gcsfuse rw 0 0
/dev/vdb /mnt/data\\040of\\040mine/disk xfs rw 0 0
mountpoint-s3 /mnt/s3 fuse rw 0 0
sshfs#host /mnt/ssh fuse rw 0 0
my-bucket /mnt/gke fuse rw 0 0
"""


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Returns a directory that counts as a bucket. Renaming fails the test."""
    monkeypatch.setenv(paths.STORES, str(tmp_path))
    for owner, name in ((os, "rename"), (os, "replace"), (Path, "rename"), (Path, "replace")):
        monkeypatch.setattr(owner, name, lambda *_: pytest.fail("renamed"))
    return tmp_path


@pytest.mark.parametrize(
    ("path", "has_rename"),
    [
        ("/gcs/bucket/run", False), ("/gcsx/run", True), ("/mnt/data of mine/run", False),
        ("/mnt/data of mine/disk/run", True), ("/mnt/data of mine2", True), ("/mnt/s3", False),
        ("/mnt/ssh/run", True), ("/mnt/gke/run", False), ("/named/run", False), ("/named2/run", True),
    ],
)  # fmt: skip
def test_an_object_store_is_recognized_by_its_prefix_its_mount_or_a_variable(monkeypatch, path, has_rename):
    builtin_open = builtins.open

    def mounts(file, *args, **options):
        return io.BytesIO(MOUNTS) if file == "/proc/self/mounts" else builtin_open(file, *args, **options)

    monkeypatch.setattr(builtins, "open", mounts)
    monkeypatch.setenv(paths.STORES, "/other:/named/")
    assert paths.has_rename(Path(path)) == has_rename


def test_a_small_file_is_replaced_atomically(store):
    path = store / "a.json"
    for text in ("short", "x" * 3000, "y"):
        paths.write_atomically(path, json.dumps(text))
        assert json.loads(path.read_text()) == text
    assert [p.name for p in store.iterdir()] == ["a.json"]


def test_files_that_are_not_listed_stay_and_missing_files_are_no_error(store, monkeypatch):
    (store / "d" / "inner").mkdir(parents=True)
    for name in ("old", "new"):
        (store / "d" / name).touch()
    list_directory, (remaining, inner) = Path.iterdir, ("old", "inner")
    monkeypatch.setattr(
        Path, "iterdir",
        lambda p: iter([p / remaining, p / inner, p / "ghost"]) if p.name == "d" else list_directory(p),
    )  # fmt: skip
    paths.remove_tree(store / "d")
    assert os.listdir(store / "d") == ["new"]


def test_lines_beyond_the_step_are_dropped_without_renaming(store):
    path = store / "metrics.jsonl"
    lines = [json.dumps({"step": s, "run": "train"}) for s in (1, 2, 3, 4, 2)]
    path.write_text("\n".join(lines) + '\n{"step": 5, "ru')
    JsonlWriter(path).note(Started(2, None, None))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 2]


def test_events_beyond_the_step_are_hidden_without_renaming(store):
    attempt(store, 0, [1, 2, 3, 4])
    for _ in range(2):
        attempt(store, 2, [3])
    assert scalar_steps(store / "train") == [1, 2, 3]


def test_a_growing_file_is_synced_periodically_in_a_store_only(store, monkeypatch, tmp_path_factory):
    synced, clock_secs = [], [0.0]

    def fsync(number):
        if os.path.samestat(os.fstat(number), path.stat()):  # excludes threads of earlier tests
            synced.append(clock_secs[0])

    monkeypatch.setattr(os, "fsync", fsync)
    for path in (store / "a", tmp_path_factory.mktemp("disk") / "a"):
        clock_secs[0] = 0
        published = publishing.Publishing(30.0, lambda: clock_secs[0])
        with open(path, "w") as file:
            for clock_secs[0] in range(0, 100, 10):
                file.write("x")
                file.flush()
                published.after_flush(path)
        assert synced == [30, 60, 90]


def test_the_best_weights_survive_an_interrupted_write(store):
    path = store / "best.npz"
    assert callback_runner._loaded(path) is None
    np.savez(path, np.arange(3))
    (array,) = callback_runner._loaded(path)
    assert array.tolist() == [0, 1, 2]
    path.write_bytes(path.read_bytes()[:-5])
    assert callback_runner._loaded(path) is None


def test_early_stopping_in_a_store_restores_the_best_weights(store):
    class Stopping(Small):
        def build(self):
            super().build()
            self.callbacks = [ctl.EarlyStopping("loss", patience=2, restore_best=True)]

    options = dict(strategy="default", writers=[], intervals=every_step(evaluate=ctl.Every(steps=1)))
    trainer = Stopping(model_dir=str(store), **options)
    trainer.train(3)
    assert callback_runner._loaded(store / "best" / "early_stopping.npz") is not None
    assert [p.name for p in (store / "best").iterdir()] == ["early_stopping.npz"]
    resumed = Stopping(model_dir=str(store), **options)
    resumed.prepare()
    assert resumed._prepared_trainer.callbacks._best_weights is not None


def test_a_run_at_a_url_is_locked_saved_and_exported():
    model_dir = "ram://files/run"
    trainer = Small(model_dir=model_dir, strategy="default", intervals=every_step(), writers=[])
    trainer.train(2, export=("keras", "saved_model"))
    lock = paths.path(f"{model_dir}/LOCK").read_bytes()  # ram:// appends, other file systems overwrite
    assert lock.count(b'"state": "training"') >= 1 and lock.rstrip().endswith(b"}")
    assert json.loads(lock[lock.rindex(b"{") :])["state"] == "ended"
    loaded = tf.saved_model.load(f"{model_dir}/export/saved_model")
    assert loaded.serve(tf.zeros([2, 8])).shape == (2, 4)
    assert paths.path(f"{model_dir}/export/model.keras").stat().st_size > 0
    resumed = Small(model_dir=model_dir, strategy="default", writers=[])
    resumed.prepare()
    assert resumed.step == 2
