"""`ctlrun --mpi`: command lines of Open MPI and MPICH, refused options, and a job."""

import sys

import pytest
from ctl.errors import UsageError
from ctl.launch import horovodrun_cli, mpirun
from ctl.launch.horovodrun_options import parse_ctlrun
from ctl.launch.hosts import Host
from ctl.launch.mpirun import Mpirun
from mpi_jobs import MPIRUN, needs_mpi, run_mpi

COMMAND = ["python", "train.py"]


def command_of(*arguments, is_open_mpi=False, hosts=None):
    options, command = parse_ctlrun([*arguments, *COMMAND])
    environ = {"CTL_COLLECTIVES": "mpi"}
    return mpirun.build_mpirun_command(Mpirun("/bin/mpirun", is_open_mpi), options, hosts, command, environ)


def test_command_lines_of_both_kinds_of_mpirun():
    hosts = [Host("host1", 2), Host("host2", 1)]
    arguments = ["--mpi", "-np", "3", "--mpi-args=--bind-to 'core x'"]
    own_arguments = ["--bind-to", "core x", *COMMAND]
    assert command_of(*arguments) == ["/bin/mpirun", "-np", "3", *own_arguments]
    assert command_of(*arguments, hosts=hosts) == [
        "/bin/mpirun", "-np", "3", "-hosts", "host1:2,host2:1", *own_arguments,
    ]  # fmt: skip
    assert command_of(*arguments, hosts=hosts, is_open_mpi=True) == [
        "/bin/mpirun", "-np", "3", "-H", "host1:2,host2:1", "-x", "CTL_COLLECTIVES", *own_arguments,
    ]  # fmt: skip
    assert command_of("--mpi", hosts=hosts)[:3] == ["/bin/mpirun", "-np", "3"]


@pytest.mark.parametrize(
    ("arguments", "error_message"),
    [
        (["--mpi"], "-np is missing"),
        (["--mpi", "-np", "2", "--mpi-args='"], "expected arguments of mpirun"),
    ],
)
def test_an_invalid_command_line_is_refused(arguments, error_message):
    with pytest.raises(UsageError, match=error_message):
        command_of(*arguments)


@pytest.mark.parametrize("option", ["--min-np=2", "--output-filename=d", "--bind_gpus"])
def test_options_of_the_other_launcher_are_refused_with_mpi(option, capsys):
    assert horovodrun_cli.main(["--mpi", "-np", "2", option, sys.executable, "-c", ""]) == 2
    name = option.partition("=")[0]
    assert f"ctlrun: {name} was given with --mpi, but mpirun starts the ranks" in capsys.readouterr().err


def test_a_missing_mpirun_is_named(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert horovodrun_cli.main(["--mpi", "-np", "2", sys.executable, "-c", ""]) == 2
    assert "mpirun was not found on PATH; install MPI" in capsys.readouterr().err


@needs_mpi
def test_mpirun_of_mpich_is_found():
    assert mpirun.find_mpirun() == Mpirun(MPIRUN, is_open_mpi=False)


@needs_mpi
@pytest.mark.slow
def test_ctlrun_starts_a_script_of_horovod_over_mpi():
    starter = [sys.executable, "-m", "ctl.launch.horovodrun_cli", "--mpi", "-np", "2"]
    result = run_mpi(2, ["tests/programs/mpi_hvd.py"], starter=starter)
    assert result.code == 0, result.output
    assert result.json == {
        "size": 2, "sum": 3.0, "paths": ["mpi"], "built": True, "enabled": True, "threads": True,
        "gloo": False, "half": 3.0,
    }  # fmt: skip
