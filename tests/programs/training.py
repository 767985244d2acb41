"""Runs of the job of faulty.py, and functions that read their results."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import processes
import tensorflow as tf
from conftest import PROGRAMS, ROOT, TIMEOUT_SECS, Result, environment

STEPS = 40
OPTIONS = ("--global_batch_size=12", "--steps_per_loop=1", "--log_every_steps=1", "--save_every_steps=5",
           "--export=none")  # fmt: skip


def command(model_dir, *options, workers=0, launcher=()):
    """Returns the command of the job. `workers` is 0 without launcher, or "found" to detect the hosts."""
    job = [sys.executable, str(PROGRAMS / "faulty.py"), f"--model_dir={model_dir}",
           f"--train_steps={STEPS}", *OPTIONS, *options]  # fmt: skip
    count = [] if workers == "found" else [f"--workers={workers}"]
    launch = [sys.executable, "-m", "ctl.launch", *count, *launcher, "--"]
    return [*launch, *job] if workers else job


@contextmanager
def started(model_dir, *options, workers=0, launcher=(), faults="", **env):
    """Starts the job with its output in a file beside model_dir. Kills it and its workers at the end."""
    model_dir = Path(model_dir)
    marks = model_dir.with_name(f"{model_dir.name}-marks")
    marks.mkdir(exist_ok=True)
    variables = environment(FAULTS=faults, FAULTS_DIR=str(marks), **env)
    with open(output_of(model_dir), "ab") as file:
        process = processes.start(
            command(model_dir, *options, workers=workers, launcher=launcher), stdout=file,
            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=variables, cwd=ROOT,
        )  # fmt: skip
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(TIMEOUT_SECS)


def output_of(model_dir):
    model_dir = Path(model_dir)
    return model_dir.with_name(f"{model_dir.name}.out")


def run(model_dir, *options, **options_of_start) -> Result:
    """Runs the job until it ends."""
    before = output_of(model_dir).stat().st_size if output_of(model_dir).exists() else 0
    with started(model_dir, *options, **options_of_start) as process:
        code = process.wait(TIMEOUT_SECS)
    return Result(code, output_of(model_dir).read_bytes()[before:].decode(errors="replace"))


def trace(model_dir, run="train"):
    """Returns the loss by step."""
    path = Path(model_dir) / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    steps = [r["step"] for r in rows if r["run"] == run]
    assert steps == sorted(set(steps)), f"steps come twice or backwards: {steps}"
    return {r["step"]: r["loss"] for r in rows if r["run"] == run}


def saved(model_dir):
    """Returns the steps of the committed checkpoints."""
    manifests = Path(model_dir).glob("checkpoints/ckpt-*/manifest.json")
    return sorted(int(p.parent.name.partition("-")[2]) for p in manifests)


def tensors(model_dir, step=STEPS):
    """Returns name -> value of one checkpoint, read with plain TensorFlow."""
    reader = tf.train.load_checkpoint(f"{model_dir}/checkpoints/ckpt-{step}/state")
    names = [n for n in reader.get_variable_to_shape_map() if "OBJECT_GRAPH" not in n]
    return {n: reader.get_tensor(n) for n in names}


def assert_bit_identical(model_dir, unbroken, step=STEPS):
    """Checks that weights, slots, seeds, step and every loss equal those of the unbroken run."""
    assert trace(model_dir) == trace(unbroken)
    restored, expected = tensors(model_dir, step), tensors(unbroken, step)
    assert restored.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(restored[name], value), name


def pids(model_dir):
    """Returns task index -> pid of the processes that train in model_dir, without the launcher."""
    pid_by_index = {}
    for pid in (int(path.name) for path in Path("/proc").glob("[0-9]*")):
        arguments = processes.words_of(pid)
        if f"--model_dir={model_dir}" in arguments and "ctl.launch" not in arguments:
            config = processes.variables_of(pid).get("TF_CONFIG")
            pid_by_index[json.loads(config)["task"]["index"] if config else 0] = pid
    return pid_by_index


def send(pid, name):
    os.kill(pid, getattr(signal, f"SIG{name}"))
