"""Every strategy, framework and optimizer, compared with the same training in float64 NumPy.

As a program: one task of a job. The chief writes the final weights.

python tests/programs/matrix.py mirrored weights.json keras3-sgd,module-adam [two_cpus]
"""

import json
import os
import sys
import textwrap
from pathlib import Path

import numpy as np
import processes

STEPS = 40
COLUMNS = [(f, o) for f in ("keras3", "tf_keras", "module") for o in ("sgd", "adam")]
EXACT = 1e-5
# row of the table -> (strategy name, arguments of `ctl launch` or None, two CPUs per worker)
ROWS = {
    "default": ("default", None, False),
    "one_device": ("one_device", None, False),
    "mirrored, 2 replicas": ("mirrored", None, True),
    "central_storage, 2 replicas": ("central_storage", None, True),
    "multi_worker, 2 workers": ("multi_worker", ["--workers=2"], False),
    "multi_worker, chief and 1 worker": ("multi_worker", ["--workers=1", "--chief"], False),
    "multi_worker, 2 workers with 2 replicas": ("multi_worker", ["--workers=2"], True),
    "parameter_server, 1 worker, 1 ps": ("parameter_server", ["--workers=1", "--ps=1", "--chief"], False),
}  # fmt: skip


def reference(optimizer: str) -> list[np.ndarray]:
    """Returns the weights of an MLP of 8, 16 and 4 units after STEPS steps in float64 NumPy."""
    from ctl import from_arrays
    from small_models import BATCH, examples, initial_weights

    x, y = examples()
    numbers = from_arrays(np.arange(len(x)), BATCH).replica_batches(
        seed=0, start=0, total=None, replicas=range(1), num_replicas=1
    )
    weights = [w.astype(np.float64) for w in initial_weights()]
    m, v = ([np.zeros_like(w) for w in weights] for _ in range(2))
    for t, rows in enumerate(numbers.take(STEPS).as_numpy_iterator(), 1):
        for i, g in enumerate(_gradients(weights, x[rows].astype(np.float64), y[rows])):
            if optimizer == "sgd":
                weights[i] = weights[i] - 0.1 * g
                continue
            m[i], v[i] = 0.9 * m[i] + 0.1 * g, 0.999 * v[i] + 0.001 * g * g
            rate = 1e-2 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
            weights[i] = weights[i] - rate * m[i] / (np.sqrt(v[i]) + 1e-7)
    return weights


def _gradients(weights, x, y) -> list[np.ndarray]:
    w1, b1, w2, b2 = weights
    hidden = np.tanh(x @ w1 + b1)
    logits = hidden @ w2 + b2
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    d_logits = p / len(y)
    d_hidden = d_logits @ w2.T * (1 - hidden**2)
    return [x.T @ d_hidden, d_hidden.sum(axis=0), hidden.T @ d_logits, d_logits.sum(axis=0)]


def verdict(weights: list, expected: list[np.ndarray]) -> str:
    """Returns "exact" or the largest error, in the format of docs/strategies.md."""
    error = max(float(np.abs(np.asarray(a) - b).max()) for a, b in zip(weights, expected, strict=True))
    return "exact" if error <= EXACT else f"off by {error:.0e}"


def run_row(row: str, directory: Path, environment: dict[str, str], columns=COLUMNS) -> list[str]:
    """Runs a row of the table in separate processes. Returns the cells of the columns."""
    strategy_name, job, two_cpus = ROWS[row]
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "weights.json"
    column_names = ",".join(map("-".join, columns))
    program = [
        sys.executable,
        str(Path(__file__)),
        strategy_name,
        str(path),
        column_names,
        *["two_cpus"][: int(two_cpus)],
    ]
    if job is not None:
        program = [sys.executable, "-m", "ctl", "launch", *job, f"--log_dir={directory}", "--", *program]
    result = processes.run(program, env=environment)
    if result.returncode or not path.exists():
        output = result.stdout[-2000:] + result.stderr[-2000:]
        raise RuntimeError(f"{row} ended with {result.returncode}:\n{output}")
    weights_by_column = json.loads(path.read_text())
    expected = {o: reference(o) for o in ("sgd", "adam")}
    return [verdict(weights_by_column[f"{f} {o}"], expected[o]) for f, o in columns]


def cell(verdicts: list[str]) -> str:
    """Returns the verdicts of all columns, or a single verdict if they are equal."""
    return verdicts[0] if len(set(verdicts)) == 1 else ", ".join(verdicts)


def table(cells: dict[str, list[str]]) -> str:
    """Returns the rows as a Markdown list, grouped by verdict."""
    rows: dict[str, list[str]] = {}
    for row, verdicts in cells.items():
        rows.setdefault(cell(verdicts), []).append(row)
    items = [f"- {verdict_text}: {'; '.join(names)}" for verdict_text, names in rows.items()]
    return "\n".join(textwrap.fill(item, 118, subsequent_indent="  ") for item in items)


def main(strategy_name: str, path: str, columns: list[list[str]], two_cpus: bool) -> None:
    import ctl
    import tensorflow as tf

    if two_cpus and strategy_name == "multi_worker":
        import two_cpus_per_worker  # noqa: F401
    strategy = ctl.make_strategy(
        strategy_name, num_virtual_devices=2 if two_cpus and strategy_name != "multi_worker" else 0
    )
    from small_models import Small, every_step, weights

    tf.get_logger().setLevel("ERROR")
    weights_by_column = {}
    for framework, optimizer in columns:
        trainer = Small(framework, optimizer, strategy=strategy, writers=[],
                        intervals=every_step(steps_per_loop=8, log=ctl.Every()))  # fmt: skip
        trainer.train(STEPS)
        weights_by_column[f"{framework} {optimizer}"] = [w.tolist() for w in weights(trainer)]
        if trainer.topology.is_chief:
            Path(path).write_text(json.dumps(weights_by_column))


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    main(*sys.argv[1:3], [c.split("-") for c in sys.argv[3].split(",")], "two_cpus" in sys.argv)
