"""The README's first command: MNIST on two real workers, and the files that it writes."""

import json
import subprocess
import sys

import numpy as np
import processes
import pytest
from conftest import ROOT, TIMEOUT_SECS, environment

pytestmark = pytest.mark.workers

PREDICT = """
import json, sys, keras, numpy as np, tensorflow as tf
export, data = sys.argv[1:]
with np.load(data) as content:
    x, y = content["x_test"], content["y_test"].astype("int64")
loaded = keras.models.load_model(f"{export}/model.keras")
saved = tf.saved_model.load(f"{export}/saved_model")
served = saved.serve(tf.constant(x, tf.float32)).numpy()
logits = loaded.predict(x, verbose=0)
before = [w.copy() for w in loaded.get_weights()]
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
loaded.compile(keras.optimizers.Adam(1e-4), loss)
history = loaded.fit(x, y, epochs=2, batch_size=100, verbose=0, shuffle=False).history["loss"]
print(json.dumps({
    "accuracy": float((logits.argmax(1) == y).mean()),
    "difference": float(np.abs(logits - served).max()),
    "logits": logits[:5].tolist(), "losses": history,
    "moved": any((a != b).any() for a, b in zip(before, loaded.get_weights())),
}))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns (model_dir, console output) of a finished run of 200 steps."""
    model_dir = tmp_path_factory.mktemp("mnist") / "run"
    completed = processes.run(
        [sys.executable, "-m", "ctl.launch", "--workers=2", "--", sys.executable, "-m",
         "models.mnist", f"--model_dir={model_dir}", "--train_steps=200", "--eval_every_steps=100",
         "--keep=2,best=accuracy", "--save_every_steps=50"],
        cwd=ROOT, env=environment(), timeout=TIMEOUT_SECS,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stdout[-3000:]
    return model_dir, completed.stdout


def rows(model_dir, run_name):
    lines = map(json.loads, (model_dir / "metrics.jsonl").read_text().splitlines())
    return [row for row in lines if row["run"] == run_name]


def test_two_workers_reach_94_percent_on_the_shipped_test_images(run):
    last = rows(run[0], "eval")[-1]
    assert last["step"] == 200
    assert last["accuracy"] >= 0.94


def test_the_console_ends_with_a_summary_and_shows_no_start_up_noise(run):
    model_dir, output = run
    summary = output[output.rindex("done at step 200") :]
    for text in (
        "steps/s",
        "eval accuracy",
        f"{model_dir}/checkpoints",
        f"{model_dir}/logs",
        f"{model_dir}/export/model.keras",
        f"tensorboard --logdir {model_dir}/logs",
    ):
        assert text in summary
    assert "2 workers, 2 replicas" in output
    for noise in ("oneDNN", "cuda drivers", "absl::InitializeLog", "cuInit"):
        assert noise not in output


def test_only_the_chief_s_files_remain(run):
    model_dir = run[0]
    assert not [p for p in model_dir.rglob("*") if "workertemp" in p.name or p.name.startswith("tmp-")]
    assert {p.name for p in model_dir.iterdir()} == {
        "LOCK", "checkpoints", "config.json", "export", "logs", "metrics.jsonl", "run_id", "workers",
    }  # fmt: skip
    assert {p.name for p in (model_dir / "workers").iterdir()} == {
        "attempts.jsonl", "job_0.log", "job_1.log",
    }  # fmt: skip
    assert {p.name for p in (model_dir / "logs").iterdir()} == {"train", "eval"}


def test_the_newest_and_the_best_checkpoint_are_kept(run):
    steps = {int(p.name[5:]) for p in (run[0] / "checkpoints").iterdir()}
    scores = {row["step"]: row["accuracy"] for row in rows(run[0], "eval")}
    best = max(scores, key=lambda step: (scores[step], step))
    assert steps == {150, 200, best}


def test_the_exported_model_predicts_the_same_in_a_fresh_process_and_trains_on(run):
    model_dir = run[0]
    data = ROOT / "models" / "data" / "mnist_small.npz"
    command = [sys.executable, "-c", PREDICT, str(model_dir / "export"), str(data)]
    completed = subprocess.run(
        command, env=environment(), timeout=TIMEOUT_SECS, check=True, capture_output=True, text=True
    )
    result = json.loads(completed.stdout.splitlines()[-1])
    assert result["accuracy"] == pytest.approx(rows(model_dir, "eval")[-1]["accuracy"], abs=1e-6)
    assert result["difference"] <= 1e-4
    assert result["moved"]
    assert result["losses"][-1] < result["losses"][0]
    assert np.isfinite(result["logits"]).all()
