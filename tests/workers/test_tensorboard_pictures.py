"""TensorBoard shows a real run; the pictures are kept where the test says."""

import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, TIMEOUT_SECS, environment

CHROMIUM = shutil.which("chromium") and shutil.which("chromedriver")


@pytest.mark.slow
@pytest.mark.workers
@pytest.mark.skipif(not CHROMIUM, reason="needs chromium and chromedriver (Debian: chromium-driver)")
def test_tensorboard_shows_curves_hparams_text_and_graph_of_a_run(tmp_path):
    model_dir, pictures = tmp_path / "run", tmp_path / "pictures"
    train = ["-m", "models.mnist", f"--model_dir={model_dir}", "--train_steps=40", "--export=none",
             "--log_every_steps=10", "--eval_every_steps=10"]  # fmt: skip
    for arguments in (train, ["docs/tensorboard_check.py", str(model_dir), str(pictures)]):
        done = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, env=environment(), timeout=TIMEOUT_SECS,
            check=False, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    assert {p.stem for p in pictures.iterdir()} == {
        "timeseries", "scalars", "custom_scalars", "hparams", "text", "graphs",
    }  # fmt: skip
