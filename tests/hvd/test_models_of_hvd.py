"""The examples in Horovod's style, as their docstrings start them."""

import re
import sys

import processes
import pytest
from conftest import ROOT, environment, some_of

RUNS = {
    "mnist_tape": ["--steps=60", "--batch_size=32"],
    "mnist_keras": ["--epochs=1", "--batch_size=64"],
    "synthetic_benchmark": ["--model=SmallCNN", "--image-size=32", "--batch-size=4", "--num-iters=2",
                            "--num-batches-per-iter=2", "--num-warmup-batches=1", "--fp16-allreduce"],
}  # fmt: skip


ALL = [(model, ranks) for model in RUNS for ranks in (2, 3)]


@pytest.mark.parametrize("example", some_of(ALL, ("mnist_tape", 2), ("synthetic_benchmark", 2)))
def test_an_example_runs(example, tmp_path):
    model, ranks = example
    options = [f"--checkpoint_dir={tmp_path}/ckpt"] if model == "mnist_tape" else []
    result = processes.run(
        [sys.executable, "-m", "ctl.launch.horovodrun_cli", "-np", str(ranks),
         sys.executable, "-m", f"models.horovod.{model}", *RUNS[model], *options],
        cwd=ROOT, env=environment(CUDA_VISIBLE_DEVICES=""),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    if model == "synthetic_benchmark":
        assert f"Total img/sec on {ranks} CPU(s)" in result.stdout
        assert len(re.findall(r"Iter #\d: [\d.]+ img/sec per CPU", result.stdout)) == 2
    else:
        (percent,) = re.findall(r"([\d.]+) % of 1000 test images", result.stdout)
        assert float(percent) > 60.0  # a tenth is chance; one epoch over ranks, few steps
    if model == "mnist_tape":
        assert (tmp_path / "ckpt" / "checkpoint").exists()
    assert "[1]<stdout>" not in result.stdout
