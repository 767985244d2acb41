"""Flowers as people run it: it learns, predicts, is served without ctl, and resumes to the bit."""

import json
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import photos as sample
import processes
import pytest
from conftest import ROOT, TIMEOUT_SECS, environment
from test_resume import slowly

pytestmark = pytest.mark.workers
FLOWERS = [sys.executable, "-m", "models.flowers"]
LAUNCH = [sys.executable, "-m", "ctl.launch", "--workers=2", "--"]
SMALL = ["--image_size=24", "--log_every_steps=1", "--steps_per_loop=1"]
PLACES = {
    "one device": [*FLOWERS, "--global_batch_size=8", "--cache=none"],
    "mirrored": [*FLOWERS, "--batch_size_per_replica=4", "--strategy=mirrored", "--num_virtual_devices=2"],
    "two workers": [*LAUNCH, *FLOWERS, "--batch_size_per_replica=4", "--cache=none"],
}  # fmt: skip
SERVE = """
import json, sys, tensorflow as tf
export, *paths = sys.argv[1:]
serve = tf.saved_model.load(export).signatures["serving_default"]
content = [open(p, "rb").read() for p in paths]
answer = {k: v.numpy() for k, v in serve(image_bytes=tf.constant(content)).items()}
print(json.dumps({
    "probabilities": answer["probabilities"].tolist(), "classes": answer["class_index"].tolist(),
    "labels": [n.decode() for n in answer["class_name"]], "ctl": "ctl" in sys.modules,
}))
"""


def start(command, *options, log=subprocess.PIPE):
    return processes.start(
        [*command, *map(str, options)], cwd=ROOT, env=environment(), text=True, stdout=log,
        stderr=subprocess.STDOUT if log != subprocess.PIPE else subprocess.PIPE,
    )  # fmt: skip


def run(command, *options):
    process = start(command, *options)
    try:
        out, err = process.communicate(timeout=TIMEOUT_SECS)
    finally:
        if process.poll() is None:
            process.kill()
    return SimpleNamespace(code=process.returncode, out=out, err=err)


def rows(model_dir, which="train"):
    path = model_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [(r["step"], r["loss"], r["accuracy"]) for r in found if r["run"] == which]


def served(run_program, model_dir, paths):
    """What the exported model answers in a process that knows nothing of ctl."""
    export = str(model_dir / "export" / "saved_model")
    (result,) = run_program(1, ["-c", SERVE, export, *map(str, paths)], fresh=True)
    assert result.code == 0, result.output
    return result.json


def predicted(model_dir, images, *options):
    done = run(FLOWERS, "--mode=predict", f"--model_dir={model_dir}", f"--images={images}", *options)
    assert done.code == 0, done.err
    return [json.loads(line) for line in done.out.splitlines()]


def assert_same(answer, found):
    """What the SavedModel serves is what --mode=predict printed."""
    assert not answer["ctl"]
    for row in found:
        assert row["probability"] == row["probabilities"][row["label"]]
    assert answer["labels"] == [row["label"] for row in found]
    assert [sample.CLASSES[i] for i in answer["classes"]] == answer["labels"]
    expected = [list(row["probabilities"].values()) for row in found]
    np.testing.assert_allclose(answer["probabilities"], expected, atol=1e-5)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Five classes of twelve photos."""
    return sample.make(tmp_path_factory.mktemp("photos"), per_class=12, height=60, width=80)


@pytest.mark.slow
def test_it_learns_five_classes_at_180_pixels_and_serves_what_it_predicts(run_program, tmp_path):
    for module in ("skimage", "sklearn"):
        pytest.importorskip(module, reason="its pictures are needed: pip install '.[slow]', or make slow")
    large = sample.make(tmp_path, per_class=60, sources=sample.photographed)
    model_dir = tmp_path / "run"
    done = run(FLOWERS, f"--data_dir={large}", f"--model_dir={model_dir}", "--train_steps=64")
    assert done.code == 0, done.err
    assert "32 examples, 32 per replica" in done.out
    assert rows(model_dir, "eval")[-1][2] >= 0.85
    paths = [large / name / "0007.jpg" for name in sample.CLASSES]
    found = predicted(model_dir, ",".join(map(str, [*paths, large / "LICENSE.txt"])))
    assert found.pop()["error"] == "not a JPEG"
    assert [row["path"] for row in found] == list(map(str, paths))
    assert_same(served(run_program, model_dir, paths), found)


@pytest.mark.parametrize("place", [pytest.param("mirrored", marks=pytest.mark.slow), "two workers"])
def test_several_replicas_leave_one_model_that_is_served(run_program, photos, tmp_path, place):
    model_dir = tmp_path / "run"
    options = [*SMALL, f"--data_dir={photos}", f"--model_dir={model_dir}", "--train_steps=4"]
    done = run(PLACES[place], *options)
    assert done.code == 0, done.out + done.err
    assert "8 examples, 4 per replica" in done.out
    assert {p.name for p in (model_dir / "export").iterdir()} == {"model.keras", "saved_model"}
    assert not list(model_dir.rglob("workertemp*"))
    paths = [photos / "china" / "0003.jpg", photos / "gravel" / "0005.jpg"]
    answer = served(run_program, model_dir, paths)
    assert_same(answer, predicted(model_dir, ",".join(map(str, paths))))


@pytest.mark.slow
def test_workers_that_look_at_a_share_each_leave_out_the_same_files(photos, tmp_path):
    """Each looks at every second file only; the numbers are those of one device that looks at all."""
    for i in (0, 1, 2, 3):
        (photos / "brick" / f"bad{i}.jpg").write_bytes(b"")
    losses = []
    for place in ("one device", "two workers"):
        model_dir = tmp_path / place.replace(" ", "_")
        done = run(PLACES[place], *SMALL, f"--data_dir={photos}", f"--model_dir={model_dir}",
                   "--train_steps=4", "--export=none")  # fmt: skip
        assert done.code == 0, done.out + done.err
        assert (done.out + done.err).count("cannot be used") == 1
        assert "4 of 64 files" in done.out + done.err
        losses.append([loss for _, loss, _ in rows(model_dir)])
    assert len(losses[0]) == 4
    np.testing.assert_allclose(*losses, rtol=1e-4)
    for i in (0, 1, 2, 3):
        (photos / "brick" / f"bad{i}.jpg").unlink()


@pytest.mark.parametrize("place", ["one device", pytest.param("two workers", marks=pytest.mark.slow)])
def test_a_run_interrupted_within_an_epoch_goes_on_as_if_it_was_not(photos, tmp_path, place):
    """An epoch has six batches; the interruption comes after the third, or a little later."""
    options = [*SMALL, f"--data_dir={photos}", "--train_steps=40", "--export=none"]
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    assert run(PLACES[place], *options, f"--model_dir={unbroken}").code == 0
    with (tmp_path / "log").open("w+") as log:
        process = start(slowly(PLACES[place]), *options, f"--model_dir={broken}", log=log)
        deadline = time.monotonic() + TIMEOUT_SECS
        while len(rows(broken)) < 3:
            assert process.poll() is None and time.monotonic() < deadline, log.name
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_SECS) == 130
    stopped_at = rows(broken)[-1][0]
    assert 3 <= stopped_at < 40
    done = run(PLACES[place], *options, f"--model_dir={broken}")
    assert done.code == 0 and f"resuming at step {stopped_at}" in done.out, done.err
    assert rows(broken) == rows(unbroken)
    assert rows(broken, "eval") == rows(unbroken, "eval")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--batch_size_per_replica=8", "--global_batch_size=16"], "expected one of them"),
        (["--data_dir=/nowhere"], "--data_dir=/nowhere does not exist"),
    ],
    ids=["two batch sizes", "no directory"],
)
def test_a_bad_setting_of_flowers_ends_with_2_and_one_line(photos, options, words):
    done = run(FLOWERS, f"--data_dir={photos}", "--train_steps=1", *options)
    assert done.code == 2 and words in done.err, done.err
    assert len(done.err.splitlines()) == 1 and done.err.startswith("error: ")
