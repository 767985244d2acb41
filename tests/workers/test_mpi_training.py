"""Training with `--communication=mpi` below `mpirun`."""

import json

import pytest
from conftest import PROGRAMS
from mpi_jobs import needs_mpi, run_mpi

FLAGS = ["--train_steps=2", "--steps_per_loop=1", "--log_every_steps=1", "--export=none", "--seed=1"]
FAULTY = [str(PROGRAMS / "faulty.py"), "--train_steps=20", "--steps_per_loop=1", "--global_batch_size=12",
          "--export=none", "--communication=mpi"]  # fmt: skip


def rows_of(model_dir):
    lines = map(json.loads, (model_dir / "metrics.jsonl").read_text().splitlines())
    return [(row["run"], row["step"], row["loss"], row["accuracy"]) for row in lines if "loss" in row]


@needs_mpi
@pytest.mark.slow
def test_mnist_has_the_same_losses_over_mpi_and_over_tcp(tmp_path, run_program):
    program = ["-m", "models.mnist", *FLAGS]
    over_mpi = run_mpi(4, [*program, f"--model_dir={tmp_path}/mpi", "--communication=mpi"])
    assert over_mpi.code == 0, over_mpi.output
    over_tcp = run_program(4, [*program, f"--model_dir={tmp_path}/tcp", "--communication=tcp"])
    assert [result.code for result in over_tcp] == [0] * 4, over_tcp[0].output
    rows = rows_of(tmp_path / "mpi")
    assert [step for run, step, *_ in rows if run == "train"] == [1, 2]
    assert rows == rows_of(tmp_path / "tcp")


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize("fault, expected_code", [("raise@7:1", 1), ("raise@build:1", 1), ("term@7", 143)])
def test_a_fault_of_a_trainer_ends_mpirun_with_its_code(fault, expected_code, tmp_path):
    result = run_mpi(2, [*FAULTY, f"--model_dir={tmp_path}/run"], FAULTS=fault, FAULTS_DIR=str(tmp_path))
    assert result.code == expected_code, result.output
    expected_text = "Stopped by SIGTERM" if expected_code == 143 else "a fault that was asked for"
    assert expected_text in result.output


LATE_PROGRAM = """
import atexit, os, runpy, sys, time
if "1" in (os.environ.get("PMI_RANK"), os.environ.get("OMPI_COMM_WORLD_RANK")):
    atexit.register(time.sleep, 4)  # the last exit function, as it is the first to be registered
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@needs_mpi
@pytest.mark.slow
def test_the_code_is_that_of_the_failed_process_also_if_it_ends_slowly(tmp_path):
    (tmp_path / "late.py").write_text(LATE_PROGRAM)
    program = [str(tmp_path / "late.py"), *FAULTY]
    result = run_mpi(2, program, FAULTS="raise@7:1", FAULTS_DIR=str(tmp_path))
    assert result.code == 1 and "a fault that was asked for" in result.output, result.output


@pytest.mark.workers
def test_communication_over_mpi_outside_of_mpirun_is_an_error_with_exit_code_2(run_program):
    (result,) = run_program(1, ["-m", "models.mnist", "--communication=mpi"])
    assert result.code == 2
    (line,) = [line for line in result.output.splitlines() if "error:" in line]
    assert "communication over MPI outside of mpirun" in line or "pip install" in line
