"""Cost model of a step by the number of workers: fitted to measurements, then extrapolated.

    python tests/benchmarks/cost_model.py --rounds=2 --plot=docs/images/cost_model.svg

The measurements are steps of `communication.py` over `tcp` with 1, 2, 4 and 8 workers on this machine. n
workers share its cores, so computation and sums of a worker take max(1, n / cores) times as long:

    ms = max(1, n / cores) * (compute + 2 (n - 1) / n * bytes / bandwidth) + 2 (n - 1) * latency

with one `compute` per network, one bandwidth and one latency, fitted by least squares of relative errors.
The extrapolation assumes a separate machine like this one for each worker: `compute` is the step measured
with one worker, the bandwidth is the slower of network and fit, the latency is assumed, without overlap.
"""

import argparse
import itertools
import os
import statistics
from types import SimpleNamespace

import communication
import numpy as np

WORKERS, LARGE_COUNTS = (1, 2, 4, 8), (8, 64, 1024)
NETS = {"cnn": 2_770_634, "deep": 24_949_690}  # summed parameters
GIGABITS = (10, 100)
LATENCY = 25e-6  # assumed for one hop in a data centre (seconds)
# name: (bytes per parameter, steps per sum)
METHODS = {"float32": (4, 1), "bfloat16": (2, 1), "float32, sync_every=16": (4, 16)}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS, help="must include 1")
    parser.add_argument("--plot", help="path of a chart (requires matplotlib)")
    flags = parser.parse_args()
    if flags.plot:
        import matplotlib  # noqa: F401  fails before the measurements
    cases = list(itertools.product(NETS, flags.workers))
    times_by_case = {case: [] for case in cases}
    for _ in range(flags.rounds):
        for net, workers in cases:
            times_by_case[net, workers].append(measured(net, workers, flags.steps))
    seconds = {case: statistics.median(times) / 1e3 for case, times in times_by_case.items()}
    fit = fitted(seconds, os.cpu_count())
    report(seconds, fit)
    if flags.plot:
        plot(seconds, fit, flags.plot)


def measured(net, workers, steps):
    """Returns the milliseconds of a step."""
    flags = SimpleNamespace(model=net, workers=workers, steps=steps, network=None, optimizer="SGD")
    with communication.network(flags) as addresses:
        return communication.run("none" if workers == 1 else "tcp", flags, addresses)


def row(net, workers, cores):
    """Returns the coefficients of a step: `compute` of each network, seconds per byte, latency."""
    slowdown = max(1.0, workers / cores)
    computes = [slowdown * (net == name) for name in NETS]
    return [*computes, slowdown * 2 * (workers - 1) / workers * 4 * NETS[net], 2.0 * (workers - 1)]


def fitted(seconds, cores):
    """Fits non-negative parameters.

    Returns `cores`, `parameters` in the order of `row`, and relative `errors` by case.
    """
    rows = np.array([row(*case, cores) for case in seconds]) / np.array([*seconds.values()])[:, None]
    columns = list(range(rows.shape[1]))
    while True:
        values, *_ = np.linalg.lstsq(rows[:, columns], np.ones(len(rows)), rcond=None)
        if values.min() >= 0:
            break
        columns.remove(columns[int(np.argmin(values))])
    parameters = np.zeros(rows.shape[1])
    parameters[columns] = values
    errors = dict(zip(seconds, rows @ parameters - 1, strict=True))
    return SimpleNamespace(cores=cores, parameters=parameters, errors=errors)


def extrapolated_secs(net, gigabits, method, workers, seconds, fit):
    """Returns seconds of a step if each worker has its own machine."""
    width, steps_per_sum = METHODS[method]
    per_byte = max(8e-9 / gigabits, fit.parameters[-2])
    transfer_secs = 2 * (workers - 1) / workers * width * NETS[net] * per_byte
    return seconds[net, 1] + (transfer_secs + 2 * (workers - 1) * LATENCY) / steps_per_sum


def report(seconds, fit):
    *computes, per_byte, latency = fit.parameters
    compute_times = ", ".join(f"{net} {1e3 * c:.2f} ms" for net, c in zip(NETS, computes, strict=True))
    speed = f"{1e-9 / per_byte:.2f} GB/s" if per_byte else "no limit"
    print(f"compute: {compute_times}; bandwidth {speed}; latency {1e6 * latency:.0f} us; {fit.cores} cores")
    print(f"\n{'net':6}{'workers':>8}{'measured ms':>13}{'fit ms':>9}{'error':>8}")
    for (net, workers), secs in seconds.items():
        error = fit.errors[net, workers]
        print(f"{net:6}{workers:8}{1e3 * secs:13.1f}{1e3 * secs * (1 + error):9.1f}{100 * error:+7.0f}%")
    print(f"\nExtrapolated share of linear speed; {1e6 * LATENCY:.0f} us per hop assumed")
    print(f"{'net':6}{'Gbit/s':>7}  {'method':24}", *(f"{n:>7}" for n in LARGE_COUNTS))
    for net, gigabits, method in itertools.product(NETS, GIGABITS, METHODS):
        variant = net, gigabits, method
        shares = [seconds[net, 1] / extrapolated_secs(*variant, n, seconds, fit) for n in LARGE_COUNTS]
        print(f"{net:6}{gigabits:7}  {method:24}", *(f"{100 * share:6.0f}%" for share in shares))


def plot(seconds, fit, path):
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "cost_model"
    from matplotlib import pyplot

    figure, (measured_axes, extrapolated_axes) = pyplot.subplots(1, 2, figsize=(10, 4))
    workers = sorted({n for _, n in seconds})
    for index, net in enumerate(NETS):
        color, times = f"C{index}", [1e3 * seconds[net, n] for n in workers]
        measured_axes.plot(workers, times, "o", color=color, label=f"{net}, measured")
        line = [float(np.dot(row(net, n, fit.cores), fit.parameters)) * 1e3 for n in workers]
        measured_axes.plot(workers, line, "-", color=color, label=f"{net}, fit")
    measured_axes.set(xlabel=f"workers on {fit.cores} cores", ylabel="ms per step", yscale="log",
                      title="Measured")  # fmt: skip
    counts = [2**k for k in range(11)]
    for index, (gigabits, method) in enumerate(itertools.product(GIGABITS, METHODS)):
        times = [extrapolated_secs("deep", gigabits, method, n, seconds, fit) for n in counts]
        shares = [100 * seconds["deep", 1] / secs for secs in times]
        extrapolated_axes.plot(counts, shares, "-" if gigabits == 100 else "--", color=f"C{index % 3}",
                               label=f"{gigabits} Gbit/s, {method}")  # fmt: skip
    extrapolated_axes.set(xlabel="workers on separate machines", ylabel="% of linear speed", xscale="log",
                          title="Extrapolated: deep", ylim=(0, 105))  # fmt: skip
    measured_axes.legend(fontsize=7)
    extrapolated_axes.legend(fontsize=6, ncol=2, loc="lower center")
    for axes in (measured_axes, extrapolated_axes):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
