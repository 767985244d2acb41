"""Screenshots of TensorBoard with a real run."""

import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, TIMEOUT_SECS, environment

CHROMIUM = shutil.which("chromium") and shutil.which("chromedriver")


@pytest.mark.slow
@pytest.mark.workers
@pytest.mark.skipif(not CHROMIUM, reason="requires chromium and chromedriver (Debian: chromium-driver)")
def test_tensorboard_shows_curves_hparams_text_and_graph_of_a_run(tmp_path):
    model_dir, pictures = tmp_path / "run", tmp_path / "pictures"
    train = ["-m", "models.mnist", f"--model_dir={model_dir}", "--train_steps=40", "--export=none",
             "--log_every_steps=10", "--eval_every_steps=10"]  # fmt: skip
    for arguments in (train, ["docs/tensorboard_check.py", str(model_dir), str(pictures)]):
        completed = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, env=environment(), timeout=TIMEOUT_SECS,
            check=False, capture_output=True, text=True,
        )  # fmt: skip
        assert completed.returncode == 0, completed.stdout + completed.stderr
    assert {p.stem for p in pictures.iterdir()} == {
        "timeseries", "scalars", "custom_scalars", "hparams", "text", "graphs",
    }  # fmt: skip
