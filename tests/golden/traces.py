"""Recorded losses and weights of the cases of cases.py, in traces.json.

    python tests/golden/traces.py

records them anew, after a change that is meant to change numbers. Each number is hexadecimal. On the same
versions and kind of processor the tests compare each bit; elsewhere they allow `TOLERANCE`.
"""

import json
import platform
from pathlib import Path

import keras
import pytest
import tensorflow as tf
from compare_commits import CASES, JOBS, ROOT, outcome

FILE = Path(__file__).with_name("traces.json")
TOLERANCE = 1e-3
EXTENSIONS = {"avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile"}  # select other kernels


def environment() -> dict[str, str]:
    """Returns the versions and the kind of processor that the bits depend on."""
    cpuinfo = Path("/proc/cpuinfo")
    cpu_flags = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    return {
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "machine": " ".join([platform.machine(), *sorted(EXTENSIONS & cpu_flags)]),
    }


def assert_equal(expected: dict, actual: dict, *, exact: bool) -> None:
    """Raises AssertionError if losses or weights differ by a bit, or by more than TOLERANCE."""
    if exact:
        assert actual == expected
        return
    losses = [[float.fromhex(loss) for loss in trace["losses"]] for trace in (actual, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=TOLERANCE, abs=TOLERANCE)


def main() -> None:
    outcomes = {}
    for name in [*CASES, *JOBS]:
        outcomes[name] = outcome(ROOT, name)
        print(name, flush=True)
    recorded = {"environment": environment(), "cases": outcomes}
    FILE.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
