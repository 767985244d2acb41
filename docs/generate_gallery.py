"""Trains the example models and writes their results and curves into docs/gallery.md.

    python docs/generate_gallery.py                    # all: some 20 minutes on two cores
    python docs/generate_gallery.py language resnet    # only these; the others stay

Needs matplotlib (`pip install tf-ctl[docs]`). Each model is trained by the command on the page; the
numbers are those of its metrics.jsonl.
"""

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "gallery.md"
IMAGES = ROOT / "docs" / "images"
HEAD = """# Gallery

<!-- Written by `python docs/generate_gallery.py`; the numbers are those of its runs. -->

Each model is one file in [models/](../models) and runs on any strategy. Results are of the evaluation at
the end, on two cores without a GPU. Data ships with the models, or is made up.
"""


@dataclass(frozen=True)
class Shown:
    """One model of the page.

    Attributes:
      description: One or two sentences.
      options: Options of the run, without --model_dir.
      curve: Metric of training and evaluation that the plot shows.
      has_text: True to show the output of --mode=predict.
    """

    description: str
    options: tuple[str, ...]
    curve: str
    has_text: bool = False


MODELS = {
    "language": Shown(
        "A decoder-only transformer that predicts the next byte of a text: AdamW, warm-up and cosine,\n"
        "clipping, accumulation, bfloat16, moving averages. Its SavedModel continues prompts.",
        ("--train_steps=1500", "--global_batch_size=32", "--eval_every_steps=250", "--log_every_steps=50"),
        "bits_per_byte",
        has_text=True,
    ),
    "resnet": Shown(
        "A residual network like ResNet-18, for an .npz or folders of pictures: synchronised\n"
        "BatchNormalization, label smoothing, top-k accuracy, a confusion matrix.",
        ("--train_steps=200", "--eval_every_steps=50", "--log_every_steps=10"),
        "accuracy",
    ),
    "recommender": Shown(
        "Two towers with tables of 100,000 rows, to which names are hashed; sparse gradients. Judged by\n"
        "hit rate and NDCG among 100 items; runs on parameter servers, too.",
        ("--train_steps=2000", "--eval_every_steps=250", "--log_every_steps=50"),
        "ndcg_10",
    ),
    "simclr": Shown(
        "Features without labels: `self.gather` compares each image with those of all replicas. A linear\n"
        "classifier judges the features.",
        ("--train_steps=400", "--eval_every_steps=50", "--log_every_steps=20"),
        "accuracy",
    ),
    "gan": Shown(
        "Digits made up by a small DCGAN: two optimizers in one step.",
        ("--train_steps=600", "--log_every_steps=20"),
        "discriminator_accuracy",
    ),
    "cartpole": Shown(
        "A policy that balances a pole; the step makes its own data.",
        ("--train_steps=80", "--global_batch_size=32", "--log_every_steps=5"),
        "game_length",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    chosen = parser.parse_args().models or list(MODELS)
    unknown = set(chosen) - set(MODELS)
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))}; expected {', '.join(MODELS)}")
    for name in chosen:
        with tempfile.TemporaryDirectory() as folder:
            section = train_and_describe(name, MODELS[name], Path(folder))
        sections = {**known_sections(), name: section}
        PAGE.write_text(HEAD + "".join("\n" + sections[model] for model in MODELS if model in sections))


def known_sections() -> dict[str, str]:
    """Returns name of a model -> its current section of the page."""
    text = PAGE.read_text() if PAGE.is_file() else ""
    parts = re.split(r"^(?=## models\.)", text, flags=re.MULTILINE)[1:]
    return {part.split()[1].removeprefix("models."): part.rstrip() + "\n" for part in parts}


def train_and_describe(name: str, shown: Shown, folder: Path) -> str:
    """Runs a model and returns its section of the page."""
    arguments = ["-m", f"models.{name}", f"--model_dir={folder}", *shown.options]
    start = time.monotonic()
    run(arguments)
    minutes = (time.monotonic() - start) / 60
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    draw_curve(name, shown, rows)
    last = newest(rows)
    step = last.pop("step")
    numbers = ", ".join(f"{key} {value:.4g}" for key, value in last.items())
    command = f"python -m models.{name} --model_dir=/tmp/{name} {' '.join(shown.options)}"
    today = datetime.datetime.now(tz=datetime.timezone.utc).date()
    text = [
        f"## models.{name}\n",
        f"{shown.description}\n",
        f"```sh\n{command}\n```\n",
        f"After {step:,} steps and {minutes:.1f} minutes ({today}): {numbers}.\n",
        f"![{shown.curve} by step](images/gallery_{name}.svg)\n",
    ]
    if shown.has_text:
        output = run([*arguments, "--mode=predict", "--temperature=0.5", "--length=240"])
        lines = [json.loads(line)["text"] for line in output.splitlines() if line.startswith("{")]
        text.append(f"```text\n{textwrap.shorten(one_line(lines[0]), 140, placeholder=' …')}\n```\n")
    return "\n".join(text)


def one_line(text: str) -> str:
    return " ".join(re.sub(r"[^\x20-\x7e]", " ", text).split())


def run(arguments: list[str]) -> str:
    """Runs a Python program and returns its output. Exits if the program fails."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    options = {"cwd": ROOT, "env": environ, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.run([sys.executable, *arguments], check=False, **options)
    if process.returncode:
        raise SystemExit(f"{' '.join(arguments)} ended with {process.returncode}")
    return process.stdout


def newest(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Step and metrics of the last evaluation; without one, of training."""
    evaluated = [row for row in rows if row["run"] == "eval"]
    row = (evaluated or [row for row in rows if row["run"] == "train"])[-1]
    left_out = ("time", "run", "examples_per_sec", "steps_per_sec", "learning_rate")
    return {k: v for k, v in row.items() if k not in left_out and not k.startswith("gradient_norm")}


def draw_curve(name: str, shown: Shown, rows: list[dict[str, Any]]) -> None:
    """Draws the curve."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = name
    figure, axes = pyplot.subplots(figsize=(6, 2.6))
    for run_name, label in (("train", "training"), ("eval", "evaluation")):
        points = [(r["step"], r[shown.curve]) for r in rows if r["run"] == run_name and shown.curve in r]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, marker="." if run_name == "eval" else "")
    axes.set_xlabel("step")
    axes.set_ylabel(shown.curve)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(IMAGES / f"gallery_{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
