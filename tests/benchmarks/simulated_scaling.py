"""Efficiency of training by number of workers, simulated with the schedules of the engine.

    python tests/benchmarks/simulated_scaling.py --plot=docs/images/simulated_scaling.svg

Efficiency is the share of linear speed. Each worker has its own machine with one CPU core like those of
this machine. A step takes the CPU time of one worker without sums, measured here, and the simulated time
of an all-reduce of the gradients (`tests/simulation/`) with the algorithm that `ctl` selects and the costs
of `measured_costs.py`. Latency and rates are assumed. Sums do not overlap with the computation. They are
repeated without rank 0, except for the method `negotiated`.
"""

import functools
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import communication
from absl import app, flags
from ctl.collectives.allreduce import select_algorithm
from ctl.collectives.transfer_costs import NetworkCosts

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "simulation"))

from exchange_records import record_schedule
from measured_costs import network_costs
from virtual_clock import Costs, simulate

_STEPS = flags.DEFINE_integer("steps", 30, "Steps of a measurement.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Measurements of the computation.")
_PLOT = flags.DEFINE_string("plot", "", "Path of a chart (requires matplotlib).")
_WORKERS = flags.DEFINE_list("workers", ["8", "64", "1024", "4096"], "Numbers of workers in the table.")
_STEP_MS = flags.DEFINE_list("step_ms", [], "MODEL:MS of earlier measurements. Empty: measure all models.")
MODELS = {"cnn": 2_770_634, "deep": 24_949_690}  # parameters
METHODS = {  # dtype, steps per sum, whether rank 0 negotiates each sum
    "float32": ("float32", 1, False), "bfloat16": ("bfloat16", 1, False),
    "sync_every=16": ("float32", 16, False), "negotiated": ("float32", 1, True),
}  # fmt: skip
GIGABITS = (1, 10, 100)
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}
_LATENCY_SECS = 25e-6  # assumed for one hop in a data centre


def measure_step(model: str) -> float:
    """Returns the CPU time of a step of one worker on one core (seconds)."""
    times = []
    for _ in range(_ROUNDS.value):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "ms.json")
            arguments = ["--only=none", f"--model={model}", f"--steps={_STEPS.value}", "--workers=1"]
            command = [sys.executable, communication.__file__, *arguments, "--one_core", f"--out={path}"]
            subprocess.run(command, check=True, capture_output=True)
            times.append(json.loads(path.read_text()) / 1e3)
    return statistics.median(times)


record_cached = functools.cache(record_schedule)


def efficiency(step_secs: float, model: str, gigabits: float, method: str, workers: int) -> float:
    """Returns the share of linear speed."""
    dtype, steps_per_sum, is_negotiated = METHODS[method]
    if workers == 1:
        return 1.0
    num_bytes = MODELS[model] * _ITEM_BYTES[dtype]
    network = NetworkCosts(_LATENCY_SECS, 8e-9 / gigabits)
    is_wide = dtype == "bfloat16"
    algorithm = select_algorithm(workers, num_bytes, network.rounded(), is_wide=is_wide)
    schedule = record_cached("allreduce", algorithm, workers, num_bytes, dtype)
    wire = {"latency_secs": network.latency_secs, "wire_byte_secs": network.byte_secs}
    costs = Costs(**network_costs(dtype), **wire)
    sum_secs = simulate(schedule, costs, is_negotiated=is_negotiated).seconds
    return step_secs / (step_secs + sum_secs / steps_per_sum)


def plot(step_secs: float, path: str) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "simulated_scaling"
    from matplotlib import pyplot

    largest = max(map(int, _WORKERS.value))
    counts = [2**k for k in range(largest.bit_length())]
    figure, all_axes = pyplot.subplots(1, len(GIGABITS), figsize=(10, 3.4), sharey=True)
    for axes, gigabits in zip(all_axes, GIGABITS, strict=True):
        for method in METHODS:
            shares = [100 * efficiency(step_secs, "deep", gigabits, method, n) for n in counts]
            axes.plot(counts, shares, label=method)
        axes.set(xlabel="workers", xscale="log", title=f"{gigabits} Gbit/s", ylim=(0, 105))
        axes.set_xticks([1, 10, 100, 1000])
        axes.grid(alpha=0.3)
    all_axes[0].set_ylabel("% of linear speed")
    all_axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main(_: list[str]) -> None:
    if _PLOT.value:
        import matplotlib  # noqa: F401  fails before the measurements
    step_secs = {name: float(ms) / 1e3 for name, ms in (text.split(":") for text in _STEP_MS.value)}
    step_secs = step_secs or {model: measure_step(model) for model in MODELS}
    print("CPU per step:", ", ".join(f"{name} {1e3 * secs:.1f} ms" for name, secs in step_secs.items()))
    counts = [*map(int, _WORKERS.value)]
    print(f"{'model':6}{'Gbit/s':>7}  {'method':14}", *(f"{n:>7,}" for n in counts))
    for model, method, gigabits in itertools.product(step_secs, METHODS, GIGABITS):
        shares = [100 * efficiency(step_secs[model], model, gigabits, method, n) for n in counts]
        print(f"{model:6}{gigabits:7}  {method:14}", *(f"{share:6.0f}%" for share in shares))
    if _PLOT.value:
        plot(step_secs["deep"], _PLOT.value)


if __name__ == "__main__":
    app.run(main)
