"""Jobs of mpirun for tests. They are skipped without mpi4py or mpirun."""

import importlib.util
import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, TIMEOUT_SECS, Result, environment

MPIRUN = shutil.which("mpirun", path=os.path.dirname(sys.executable)) or shutil.which("mpirun")
needs_mpi = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None or MPIRUN is None,
    reason="mpi4py or mpirun is missing: pip install 'tf-ctl[mpi]' mpich",
)


def run_mpi(count, arguments, *, starter=None, **extra):
    """Runs `python arguments` with mpirun, or the command `starter` in place of `mpirun -np count`."""
    command = [*(starter or [MPIRUN, "-np", str(count)]), sys.executable, *arguments]
    completed = subprocess.run(
        command, check=False, cwd=ROOT, env=environment(**extra), timeout=TIMEOUT_SECS, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return Result(completed.returncode, completed.stdout)
