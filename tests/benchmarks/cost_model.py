"""What a step costs by the number of workers: a model fitted to measurements here, then used on paper.

    python tests/benchmarks/cost_model.py --rounds=2 --plot=docs/images/cost_model.svg

Measured are steps of `communication.py` over `tcp` with 1, 2, 4 and 8 workers on this machine. n workers
share its cores, so what one computes or adds up takes max(1, n / cores) times as long:

    ms = max(1, n / cores) * (compute + 2 (n - 1) / n * bytes / bandwidth) + 2 (n - 1) * latency

with a `compute` for each net, and one bandwidth and latency, fitted by least squares of relative errors.
On paper each worker has a machine of its own like this one: `compute` is the step measured with one worker,
the slower of network and fitted bandwidth counts, latency is assumed, and nothing overlaps.
"""

import argparse
import itertools
import os
import statistics
from types import SimpleNamespace

import communication
import numpy as np

WORKERS, PAPER = (1, 2, 4, 8), (8, 64, 1024)
NETS = {"cnn": 2_770_634, "deep": 24_949_690}  # numbers that are summed
GIGABITS = (10, 100)
LATENCY = 25e-6  # assumed, of one hop in a data centre; seconds
WAYS = {"float32": (4, 1), "bfloat16": (2, 1), "float32, sync_every=16": (4, 16)}  # bytes, steps per sum


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS, help="1 among them")
    parser.add_argument("--plot", help="where to write a picture (needs matplotlib)")
    flags = parser.parse_args()
    if flags.plot:
        import matplotlib  # noqa: F401  before minutes of measuring
    cases = list(itertools.product(NETS, flags.workers))
    found = {case: [] for case in cases}
    for _ in range(flags.rounds):
        for net, workers in cases:
            found[net, workers].append(measured(net, workers, flags.steps))
    seconds = {case: statistics.median(times) / 1e3 for case, times in found.items()}
    fit = fitted(seconds, os.cpu_count())
    report(seconds, fit)
    if flags.plot:
        plot(seconds, fit, flags.plot)


def measured(net, workers, steps):
    """Milliseconds of a step."""
    flags = SimpleNamespace(model=net, workers=workers, steps=steps, network=None, optimizer="SGD")
    with communication.network(flags) as places:
        return communication.run("none" if workers == 1 else "tcp", flags, places)


def row(net, workers, cores):
    """What each parameter counts for in a step: `compute` of each net, seconds per byte, latency."""
    share = max(1.0, workers / cores)
    computes = [share * (net == name) for name in NETS]
    return [*computes, share * 2 * (workers - 1) / workers * 4 * NETS[net], 2.0 * (workers - 1)]


def fitted(seconds, cores):
    """`cores`, `parameters` in the order of `row`, and relative `errors` by case; none is negative."""
    rows = np.array([row(*case, cores) for case in seconds]) / np.array([*seconds.values()])[:, None]
    kept = list(range(rows.shape[1]))
    while True:
        values, *_ = np.linalg.lstsq(rows[:, kept], np.ones(len(rows)), rcond=None)
        if values.min() >= 0:
            break
        kept.remove(kept[int(np.argmin(values))])
    parameters = np.zeros(rows.shape[1])
    parameters[kept] = values
    errors = dict(zip(seconds, rows @ parameters - 1, strict=True))
    return SimpleNamespace(cores=cores, parameters=parameters, errors=errors)


def on_paper(net, workers, gigabits, way, seconds, fit):
    """Seconds of a step where each worker has a machine of its own."""
    width, every = WAYS[way]
    per_byte = max(8e-9 / gigabits, fit.parameters[-2])
    travel = 2 * (workers - 1) / workers * width * NETS[net] * per_byte
    return seconds[net, 1] + (travel + 2 * (workers - 1) * LATENCY) / every


def report(seconds, fit):
    *computes, per_byte, latency = fit.parameters
    words = ", ".join(f"{net} {1e3 * c:.2f} ms" for net, c in zip(NETS, computes, strict=True))
    speed = f"{1e-9 / per_byte:.2f} GB/s" if per_byte else "no limit"
    print(f"compute: {words}; bandwidth {speed}; latency {1e6 * latency:.0f} us; {fit.cores} cores")
    print(f"\n{'net':6}{'workers':>8}{'measured ms':>13}{'fit ms':>9}{'error':>8}")
    for (net, workers), secs in seconds.items():
        error = fit.errors[net, workers]
        print(f"{net:6}{workers:8}{1e3 * secs:13.1f}{1e3 * secs * (1 + error):9.1f}{100 * error:+7.0f}%")
    print(f"\nOn paper, share of the speed of so many lone workers; {1e6 * LATENCY:.0f} us per hop assumed")
    print(f"{'net':6}{'Gbit/s':>7}  {'way':24}", *(f"{n:>7}" for n in PAPER))
    for net, gigabits, way in itertools.product(NETS, GIGABITS, WAYS):
        shares = [seconds[net, 1] / on_paper(net, n, gigabits, way, seconds, fit) for n in PAPER]
        print(f"{net:6}{gigabits:7}  {way:24}", *(f"{100 * share:6.0f}%" for share in shares))


def plot(seconds, fit, path):
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "cost_model"
    from matplotlib import pyplot

    figure, (here, paper) = pyplot.subplots(1, 2, figsize=(10, 4))
    workers = sorted({n for _, n in seconds})
    for place, net in enumerate(NETS):
        color, times = f"C{place}", [1e3 * seconds[net, n] for n in workers]
        here.plot(workers, times, "o", color=color, label=f"{net}, measured")
        line = [float(np.dot(row(net, n, fit.cores), fit.parameters)) * 1e3 for n in workers]
        here.plot(workers, line, "-", color=color, label=f"{net}, fit")
    here.set(xlabel=f"workers on {fit.cores} cores", ylabel="ms per step", yscale="log", title="Measured")
    counts = [2**k for k in range(11)]
    for place, (gigabits, way) in enumerate(itertools.product(GIGABITS, WAYS)):
        times = [on_paper("deep", n, gigabits, way, seconds, fit) for n in counts]
        shares = [100 * seconds["deep", 1] / secs for secs in times]
        paper.plot(counts, shares, "-" if gigabits == 100 else "--", color=f"C{place % 3}",
                   label=f"{gigabits} Gbit/s, {way}")  # fmt: skip
    paper.set(xlabel="workers, a machine each", ylabel="% of linear speed", xscale="log",
              title="On paper: deep", ylim=(0, 105))  # fmt: skip
    here.legend(fontsize=7)
    paper.legend(fontsize=6, ncol=2, loc="lower center")
    for axes in (here, paper):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
