"""The flowers model in real jobs: training, prediction, serving without ctl, and an exact resume."""

import json
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import photos as sample
import processes
import pytest
from conftest import ROOT, TIMEOUT_SECS, environment
from polling import wait_until
from test_resume import slowly

pytestmark = pytest.mark.workers
FLOWERS = [sys.executable, "-m", "models.flowers"]
LAUNCH = [sys.executable, "-m", "ctl.launch", "--workers=2", "--"]
SMALL = ["--image_size=24", "--log_every_steps=1", "--steps_per_loop=1"]
COMMANDS = {
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


def rows(model_dir, run_name="train"):
    path = model_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return [(r["step"], r["loss"], r["accuracy"]) for r in records if r["run"] == run_name]


def served(run_program, model_dir, paths):
    """Returns the response of the exported model in a process without ctl."""
    export = str(model_dir / "export" / "saved_model")
    (result,) = run_program(1, ["-c", SERVE, export, *map(str, paths)], fresh=True)
    assert result.code == 0, result.output
    return result.json


def predicted(model_dir, images, *options):
    completed = run(FLOWERS, "--mode=predict", f"--model_dir={model_dir}", f"--images={images}", *options)
    assert completed.code == 0, completed.err
    return [json.loads(line) for line in completed.out.splitlines()]


def assert_same(response, predictions):
    """Compares the response of the SavedModel with the output of --mode=predict."""
    assert not response["ctl"]
    for row in predictions:
        assert row["probability"] == row["probabilities"][row["label"]]
    assert response["labels"] == [row["label"] for row in predictions]
    assert [sample.CLASSES[i] for i in response["classes"]] == response["labels"]
    expected = [list(row["probabilities"].values()) for row in predictions]
    np.testing.assert_allclose(response["probabilities"], expected, atol=1e-5)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Returns a directory with five classes of twelve photos."""
    return sample.make(tmp_path_factory.mktemp("photos"), per_class=12, height=60, width=80)


@pytest.mark.slow
def test_a_model_of_five_classes_at_180_pixels_is_trained_and_served(run_program, tmp_path):
    for module in ("skimage", "sklearn"):
        pytest.importorskip(module, reason="provides the pictures: pip install '.[slow]', or make slow")
    large = sample.make(tmp_path, per_class=60, sources=sample.photographed)
    model_dir = tmp_path / "run"
    completed = run(FLOWERS, f"--data_dir={large}", f"--model_dir={model_dir}", "--train_steps=96")
    assert completed.code == 0, completed.err
    assert "32 examples, 32 per replica" in completed.out
    assert rows(model_dir, "eval")[-1][2] >= 0.85
    paths = [large / name / "0007.jpg" for name in sample.CLASSES]
    predictions = predicted(model_dir, ",".join(map(str, [*paths, large / "LICENSE.txt"])))
    assert predictions.pop()["error"] == "not a JPEG"
    assert [row["path"] for row in predictions] == list(map(str, paths))
    assert_same(served(run_program, model_dir, paths), predictions)


@pytest.mark.parametrize("command", [pytest.param("mirrored", marks=pytest.mark.slow), "two workers"])
def test_several_replicas_export_one_model_that_is_served(run_program, photos, tmp_path, command):
    model_dir = tmp_path / "run"
    options = [*SMALL, f"--data_dir={photos}", f"--model_dir={model_dir}", "--train_steps=4"]
    completed = run(COMMANDS[command], *options)
    assert completed.code == 0, completed.out + completed.err
    assert "8 examples, 4 per replica" in completed.out
    assert {p.name for p in (model_dir / "export").iterdir()} == {"model.keras", "saved_model"}
    assert not list(model_dir.rglob("workertemp*"))
    paths = [photos / "china" / "0003.jpg", photos / "gravel" / "0005.jpg"]
    response = served(run_program, model_dir, paths)
    assert_same(response, predicted(model_dir, ",".join(map(str, paths))))


@pytest.mark.slow
def test_workers_that_check_a_share_of_files_each_skip_the_same_files(photos, tmp_path):
    """Each worker checks every second file; the losses equal those of one device that checks all files."""
    for i in (0, 1, 2, 3):
        (photos / "brick" / f"bad{i}.jpg").write_bytes(b"")
    losses = []
    for name in ("one device", "two workers"):
        model_dir = tmp_path / name.replace(" ", "_")
        completed = run(COMMANDS[name], *SMALL, f"--data_dir={photos}", f"--model_dir={model_dir}",
                        "--train_steps=4", "--export=none")  # fmt: skip
        assert completed.code == 0, completed.out + completed.err
        assert (completed.out + completed.err).count("cannot be used") == 1
        assert "4 of 64 files" in completed.out + completed.err
        losses.append([loss for _, loss, _ in rows(model_dir)])
    assert len(losses[0]) == 4
    np.testing.assert_allclose(*losses, rtol=1e-4)
    for i in (0, 1, 2, 3):
        (photos / "brick" / f"bad{i}.jpg").unlink()


@pytest.mark.parametrize("command", ["one device", pytest.param("two workers", marks=pytest.mark.slow)])
def test_a_run_interrupted_within_an_epoch_resumes_exactly(photos, tmp_path, command):
    """An epoch has six batches; the interruption comes after the third, or a little later."""
    options = [*SMALL, f"--data_dir={photos}", "--train_steps=40", "--export=none"]
    unbroken, interrupted = tmp_path / "unbroken", tmp_path / "broken"
    assert run(COMMANDS[command], *options, f"--model_dir={unbroken}").code == 0
    with (tmp_path / "log").open("w+") as log:
        process = start(slowly(COMMANDS[command]), *options, f"--model_dir={interrupted}", log=log)
        wait_until(lambda: len(rows(interrupted)) >= 3, process, pause_secs=0.005)
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_SECS) == 130
    stopped_at = rows(interrupted)[-1][0]
    assert 3 <= stopped_at < 40
    completed = run(COMMANDS[command], *options, f"--model_dir={interrupted}")
    assert completed.code == 0 and f"resuming at step {stopped_at}" in completed.out, completed.err
    assert rows(interrupted) == rows(unbroken)
    assert rows(interrupted, "eval") == rows(unbroken, "eval")


@pytest.mark.parametrize(
    ("options", "error_message"),
    [
        (["--batch_size_per_replica=8", "--global_batch_size=16"], "expected one of them"),
        (["--data_dir=/nowhere"], "--data_dir=/nowhere does not exist"),
    ],
    ids=["two batch sizes", "no directory"],
)
def test_a_bad_setting_of_flowers_ends_with_2_and_one_line(photos, options, error_message):
    completed = run(FLOWERS, f"--data_dir={photos}", "--train_steps=1", *options)
    assert completed.code == 2 and error_message in completed.err, completed.err
    assert len(completed.err.splitlines()) == 1 and completed.err.startswith("error: ")
