"""Elastic runs of the job of leaving.py, and checks of their results."""

import json
import re
from pathlib import Path

import numpy as np
import training
from conftest import PROGRAMS

FLAGS = ("--dropout=0", "--save_every_steps=0")
_FACTS = re.compile(r"\[(\d+)\]<stdout>:(\{.*\})")


def run(monkeypatch, model_dir, *flags, workers="1:3", **options):
    """Runs an elastic job. Returns its result and the JSON lines of its processes."""
    command = training.command

    def command_of(*arguments, **options_of_command):
        return [
            str(PROGRAMS / "leaving.py") if word == str(PROGRAMS / "faulty.py") else word
            for word in command(*arguments, **options_of_command)
        ]

    with monkeypatch.context() as patch:
        patch.setattr(training, "command", command_of)
        result = training.run(model_dir, *FLAGS, *flags, workers=workers, **options)
    return result, [json.loads(text) for _, text in _FACTS.findall(result.output)]


def check_is_exact(model_dir: Path, expected: Path) -> None:
    """Checks losses, weights and slots within a tolerance, and that each example was used once."""
    losses, expected_losses = training.trace(model_dir), training.trace(expected)
    assert list(losses) == list(expected_losses) == list(range(1, training.STEPS + 1))
    np.testing.assert_allclose(list(losses.values()), list(expected_losses.values()), rtol=0, atol=1e-5)
    restored, values = training.tensors(model_dir), training.tensors(expected)
    assert restored.keys() == values.keys()
    for name, value in values.items():
        np.testing.assert_allclose(restored[name], value, rtol=0, atol=1e-5, err_msg=name)
    (counts,) = (value for name, value in restored.items() if name.startswith("seen/"))
    assert counts.tolist() == [1.0] * len(counts)


def sizes_of(facts: list[dict]) -> list[int]:
    """Returns the numbers of workers in the order of time, without repetitions."""
    sizes = [f["size"] for f in sorted(facts, key=lambda f: f["time"]) if "size" in f]
    return [size for i, size in enumerate(sizes) if not i or sizes[i - 1] != size]
