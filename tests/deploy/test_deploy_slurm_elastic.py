"""The batch script of `ctl deploy slurm --elastic`, with substitutes for the launcher and scontrol."""

import os
import signal
import subprocess

import pytest
from ctl.deploy import command
from polling import wait_until
from test_deploy_slurm import PROGRAM, make_script

TIMEOUT_SECS = 600
CTL = """#!/bin/sh
echo "$@" >> "$DIR/launches"
trap 'echo TERM >> "$DIR/launches"; exit 143' TERM
if [ "$(head -n 1 "$DIR/codes")" = wait ]; then touch "$DIR/waits"; sleep 60 & wait $!; fi
code=$(head -n 1 "$DIR/codes"); sed -i 1d "$DIR/codes"; exit "$code"
"""
SCONTROL = """#!/bin/sh
case "$*" in
  "show hostnames n[1-2]") echo n1; echo n2;;
  "requeue 7") touch "$DIR/requeued";;
  *) exit 1;;
esac
"""


@pytest.fixture
def start(capsys, tmp_path):
    """A function `start(codes, *options)` that starts the script. `codes` are the launcher's exit codes."""
    processes = []

    def start_script(codes, *options, nodes="n[1-2]"):
        script, _ = make_script(capsys, "--elastic=2:3", "--nodes=2", *options, *PROGRAM)
        (tmp_path / "job.sbatch").write_text(script)
        (tmp_path / "codes").write_text("".join(f"{code}\n" for code in codes))
        for name, text in (("ctl", CTL), ("scontrol", SCONTROL)):
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        path = f"{tmp_path}:{os.environ['PATH']}"
        environ = {"PATH": path, "DIR": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": nodes}
        processes.append(
            subprocess.Popen(["bash", tmp_path / "job.sbatch"], env=environ, start_new_session=True)
        )
        return processes[-1]

    yield start_script
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(TIMEOUT_SECS)


def test_the_launcher_gets_all_machines_and_variables_go_along(start, tmp_path):
    assert start([0], "--env=A=b c").wait(TIMEOUT_SECS) == 0
    launcher = "launch --workers=2:3 --max_restarts=0 -H n1:2,n2:2 --"
    program = "env A=b c python -m trainer.task --model_dir=/shared/run"
    assert (tmp_path / "launches").read_text() == f"{launcher} {program}\n"


@pytest.mark.parametrize(
    ("codes", "code", "count"), [([134, 0], 0, 2), ([134, 134, 134], 134, 2), ([2, 0], 2, 1)]
)
def test_the_launcher_is_started_again_if_too_few_workers_remained(start, tmp_path, codes, code, count):
    assert start(codes, "--max_restarts=1").wait(TIMEOUT_SECS) == code
    assert len((tmp_path / "launches").read_text().splitlines()) == count


def test_near_the_time_limit_the_workers_save_and_the_job_is_requeued(start, tmp_path):
    process = start(["wait"])
    wait_until((tmp_path / "waits").exists, process)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(TIMEOUT_SECS) == 0 and (tmp_path / "requeued").exists()
    assert (tmp_path / "launches").read_text().splitlines()[1:] == ["TERM"]


def test_a_job_without_machines_ends_with_2(start, tmp_path):
    assert start([0], nodes="").wait(TIMEOUT_SECS) == 2
    assert not (tmp_path / "launches").exists()


def test_the_script_keeps_the_job_without_a_lost_machine(capsys):
    script, _ = make_script(capsys, "--elastic=1:4", *PROGRAM)
    assert "\n#SBATCH --no-kill\n" in script and "srun" not in script


@pytest.mark.parametrize(("options", "sentence"), [
    (["--elastic=3"], "is not a range; expected MIN:MAX"),
    (["--elastic=3:2"], "expected MIN:MAX with 1 <= MIN <= MAX"),
    (["--elastic=1:2", "--gpus_per_node=1"], "elastic training uses CPUs"),
    (["--elastic=1:2", "--image=a.sif"], "run outside of an image"),
    (["--elastic=1:2", "--module=cuda/12"], "no other variable of a module"),
])  # fmt: skip
def test_options_that_an_elastic_job_does_not_support_are_refused(capsys, options, sentence):
    _, message = make_script(capsys, *options, *PROGRAM, code=2)
    assert sentence in message


@pytest.mark.parametrize("option", ["--elastic=1:2", "--elastic"])
def test_a_platform_without_a_launcher_refuses_elastic_jobs_with_the_reason(capsys, option):
    assert command.main(["vertex", "--image=ghcr.io/me/a:1", option, *PROGRAM]) == 2
    message = capsys.readouterr().err
    assert "an elastic job needs a launcher that replaces workers" in message
    assert "--elastic is not supported by `ctl deploy vertex`" in message
