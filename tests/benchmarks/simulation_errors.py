"""Error of the simulated CPU time of collectives, compared with the engine in processes of this machine.

    python tests/benchmarks/simulation_errors.py --ranks=2,4,8,16 --fitted_ranks=2,4,8 --sockets

Measures the CPU time per call like `collective_scaling.py`, the mean of the ranks except rank 0, which also
coordinates. The time of a rank is the minimum of the rounds, because other work increases it. Fits the
`Costs` of `tests/simulation/virtual_clock.py` to the measurements with `--fitted_ranks` by least squares of
relative errors, and prints measured and simulated times of all. `--measurements=PATH,...` stores the
measurements in the first file. If files exist, it uses the minimum of a case in them instead. `repeated` is
the algorithm that `ctl` selects, without requests to rank 0; the other algorithms contain them.
"""

import dataclasses
import json
import statistics
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import collective_scaling
import numpy as np
from absl import app, flags
from ctl.collectives.allreduce import select_algorithm

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "simulation"))

from exchange_records import ALGORITHMS, record_schedule
from virtual_clock import Costs, simulate

FLAGS = flags.FLAGS
_FITTED_RANKS = flags.DEFINE_list("fitted_ranks", ["2", "4", "8"], "Numbers of ranks for the fit.")
_COMPARED = flags.DEFINE_list("compared", [*ALGORITHMS["allreduce"], "repeated"], "Algorithms.")
_MEASUREMENTS = flags.DEFINE_list("measurements", [], "Files of the measurements (JSON).")
_MAX_INLINE_BYTES = 128 << 10  # of all ranks; the engine sends smaller vectors to rank 0
_GOAL = 0.2  # error
_UNIT_COSTS = {  # one of them is 1
    "call": Costs(call_secs=1),
    "request": Costs(request_secs=1),
    "exchange": Costs(exchange_secs=1),
    "moved byte": Costs(sent_byte_secs=1, stored_byte_secs=1),
    "reduced byte": Costs(reduced_byte_secs=1),
    "copied byte": Costs(copied_byte_secs=1),
}
Case = tuple[str, int, int]  # algorithm, ranks, bytes


def measure_cases(counts: list[int], sizes: list[int]) -> dict[Case, float]:
    """Returns the CPU time per call (seconds)."""
    secs_by_case = {}
    for count in counts:
        for size in sizes:
            if size * count <= _MAX_INLINE_BYTES:
                continue
            calls = max(5, min(FLAGS.calls, (256 << 20) // size))
            by_rank = collective_scaling.measure_all(count, size, calls)[1:]
            for algorithm in _COMPARED.value:
                ms = statistics.mean(min(times[algorithm]) for times in by_rank)
                secs_by_case[algorithm, count, size] = ms / 1e3
                print(f"measured: {algorithm} {count} {size} {ms:.3f} ms", flush=True)
    return secs_by_case


def simulate_case(case: Case, all_costs: Iterable[Costs], dtype: str) -> list[float]:
    """Returns the CPU time of a call, the mean of the ranks except rank 0, for each of the costs."""
    algorithm, count, size = case
    is_negotiated = algorithm != "repeated"
    is_wide = dtype == "bfloat16"
    selected = algorithm if is_negotiated else select_algorithm(count, size, is_wide=is_wide)
    schedule = record_schedule("allreduce", selected, count, size, dtype)
    simulated = [simulate(schedule, costs, is_negotiated=is_negotiated) for costs in all_costs]
    return [float(one.cpu_secs[1:].mean()) for one in simulated]


def fit_costs(secs_by_case: Mapping[Case, float], dtype: str) -> Costs:
    """Fits non-negative costs."""
    rows = np.array([simulate_case(case, _UNIT_COSTS.values(), dtype) for case in secs_by_case])
    rows /= np.array([*secs_by_case.values()])[:, None]
    columns = list(range(rows.shape[1]))
    while True:
        values, *_ = np.linalg.lstsq(rows[:, columns], np.ones(len(rows)), rcond=None)
        if values.min() >= 0:
            break
        columns.remove(columns[int(np.argmin(values))])
    call, request, exchange, moved, reduced, copied = np.bincount(columns, values, rows.shape[1])
    return Costs(
        call_secs=call,
        request_secs=request,
        exchange_secs=exchange,
        sent_byte_secs=moved,
        stored_byte_secs=moved,
        reduced_byte_secs=reduced,
        copied_byte_secs=copied,
    )


def report(secs_by_case: Mapping[Case, float], costs: Costs, fitted: list[int], dtype: str) -> None:
    """Prints the costs, and the error of each case (ms)."""
    print({name: f"{secs:.3g}" for name, secs in dataclasses.asdict(costs).items() if secs})
    print(f"{'ranks':>5} {'bytes':>10} {'algorithm':>9} {'measured':>9} {'simulated':>9} {'error':>6}")
    errors: dict[str, list[float]] = {"fitted": [], "not fitted": []}
    for (algorithm, count, size), secs in sorted(secs_by_case.items(), key=lambda item: item[0][1:]):
        (simulated_secs,) = simulate_case((algorithm, count, size), [costs], dtype)
        error, use = simulated_secs / secs - 1, "fitted" if count in fitted else "not fitted"
        errors[use].append(abs(error))
        times = f"{1e3 * secs:9.3f} {1e3 * simulated_secs:9.3f}"
        print(f"{count:5} {size:10,} {algorithm:>9} {times} {100 * error:+5.0f}%  {use}")
    for use, sizes in errors.items():
        if sizes:
            median, largest = 100 * statistics.median(sizes), 100 * max(sizes)
            print(f"{use}: median error {median:.0f}%, largest {largest:.0f}%, at most {100 * _GOAL:.0f}%: "
                  f"{sum(size <= _GOAL for size in sizes)} of {len(sizes)}")  # fmt: skip


def main(_: list[str]) -> None:
    FLAGS.algorithms = _COMPARED.value
    paths = [*map(Path, _MEASUREMENTS.value)]
    secs_by_case: dict[Case, float] = {}
    for path in filter(Path.exists, paths):
        for algorithm, count, size, secs in json.loads(path.read_text()):
            case = algorithm, count, size
            if algorithm in _COMPARED.value:
                secs_by_case[case] = min(secs, secs_by_case.get(case, secs))
    if not secs_by_case:
        secs_by_case = measure_cases([*map(int, FLAGS.ranks)], [*map(int, FLAGS.bytes)])
        if paths:
            paths[0].write_text(json.dumps([[*case, secs] for case, secs in secs_by_case.items()]))
    fitted = [*map(int, _FITTED_RANKS.value)]
    costs = fit_costs({case: secs for case, secs in secs_by_case.items() if case[1] in fitted}, FLAGS.dtype)
    report(secs_by_case, costs, fitted, FLAGS.dtype)


if __name__ == "__main__":
    app.run(main)
