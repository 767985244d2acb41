"""The batch script: its Slurm options, and its behaviour at the end of tasks with a simulated srun."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import processes
import pytest
from conftest import PROGRAMS, ROOT, TIMEOUT_SECS, environment
from ctl.deploy import command, slurm
from fake_slurm import pids_of_tasks
from polling import wait_until

PROGRAM = ["--", "python", "-m", "trainer.task", "--model_dir=/shared/run"]


def make_script(capsys, *arguments, code=0):
    """Returns the output of `ctl deploy slurm`: the script and the messages."""
    assert command.main(["slurm", *arguments]) == code
    captured = capsys.readouterr()
    return captured.out, captured.err


def directives(script):
    return re.findall(r"^#SBATCH --(\S+)$", script, re.MULTILINE)


def test_a_task_on_each_machine_has_all_its_gpus(capsys):
    script, message = make_script(capsys, "--nodes=3", "--gpus_per_node=4", "--cpus_per_task=8", *PROGRAM)
    requested = directives(script)
    for directive in ("nodes=3", "ntasks-per-node=1", "gpus-per-node=4", "cpus-per-task=8", "requeue",
                 "open-mode=append", "signal=B:USR1@120"):  # fmt: skip
        assert directive in requested
    assert "gpus-per-task=1" not in requested
    assert "no --time" in message and "sbatch train.sbatch" in message


def test_a_step_gets_the_cpus_that_the_job_asked_for(capsys):
    """Since Slurm 22.05 srun does not take them from sbatch."""
    script, _ = make_script(capsys, "--cpus_per_task=8", *PROGRAM)
    assert "\n  srun --export=ALL --kill-on-bad-exit=1 --distribution=block --cpus-per-task=8 " in script


def test_a_task_for_each_gpu(capsys):
    script, _ = make_script(capsys, "--nodes=2", "--gpus_per_node=4", "--task_per=gpu", *PROGRAM)
    requested = directives(script)
    assert {"ntasks-per-node=4", "gpus-per-task=1"} <= set(requested) and "gpus-per-node=4" not in requested


def test_commands_before_the_program(capsys):
    script, _ = make_script(
        capsys, "--module=cuda/12.4", "--module=python", "--venv=/shared/venv", "--env=A=b c", *PROGRAM
    )
    lines = script.splitlines()
    order = ["export A='b c'", "module load cuda/12.4", "module load python",
             "source /shared/venv/bin/activate || exit 2", "set -u"]  # fmt: skip
    assert [lines.index(line) for line in order] == sorted(lines.index(line) for line in order)
    script, _ = make_script(capsys, "--gpus_per_node=1", "--image=/shared/a.sif", *PROGRAM)
    assert "apptainer exec --nv /shared/a.sif python -m trainer.task" in script


def test_without_a_model_dir_a_warning_says_what_is_lost(capsys):
    assert "a requeued job starts at step 0" in make_script(capsys, "--", "python", "t.py")[1]
    assert "starts at step 0" not in make_script(capsys, *PROGRAM)[1]


@pytest.mark.parametrize(("options", "sentence"), [
    (["--task_per=gpu"], "add --gpus_per_node=N"),
    (["--time=90"], "expected e.g. 04:00:00"),
    (["--time=00:75:00"], "is not a time limit"),
    (["--time=00:01:00"], "is too short for --signal_secs=120; expected at least 00:04:00"),
    (["--time=00:03:59"], "expected at least 00:04:00"),
    (["--memory=lots"], "is not a size"),
    (["--name=a b"], "is not a name"),
    (["--partition=a;b"], "is not a name"),
    (["--module=$(id)"], "is not a module"),
    (["--venv=/a b"], "is not a path"),
    (["--venv=/v", "--image=/i.sif"], "expected one of them"),
    (["--nodes=0"], "whole number from 1"),
    (["--env=API_TOKEN=x"], "API_TOKEN"),
    (["--env=TF_CONFIG={}"], "set by the platform"),
    (["--tasks=2"], "is not an option of `ctl deploy slurm`"),
])  # fmt: skip
def test_invalid_options_are_one_sentence_and_exit_code_2(capsys, tmp_path, options, sentence):
    file = tmp_path / "job"
    out, message = make_script(capsys, *options, f"--output={file}", *PROGRAM, code=2)
    assert sentence in message and not out and not file.exists() and len(message.splitlines()) == 1


class Cluster:
    """A machine with a simulated Slurm and a batch script."""

    def __init__(self, directory, program, tasks=2, *arguments):
        self.directory = directory
        (directory / "bin").mkdir()
        for name in ("srun", "scancel", "scontrol"):
            text = (PROGRAMS / "fake_slurm.py").read_text()
            (directory / "bin" / name).write_text(processes.python_script(text))
            (directory / "bin" / name).chmod(0o755)
        self.script = directory / "job.sbatch"
        arguments = [f"--output={self.script}", *arguments, "--", *program]
        assert command.main(["slurm", *arguments]) == 0
        checked = subprocess.run(["bash", "-n", self.script], capture_output=True, check=False)
        assert (checked.returncode, checked.stderr) == (0, b"")
        self.env = environment(
            FAKE_SLURM=str(directory), FAKE_TASKS=str(tasks), SLURM_JOB_ID="77",
            SLURM_SUBMIT_DIR=str(directory), PATH=f"{directory / 'bin'}:{os.environ['PATH']}",
        )  # fmt: skip

    def start(self, **variables):
        return subprocess.Popen(
            ["bash", self.script], env=self.env | variables, cwd=ROOT, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, **variables):
        process = self.start(**variables)
        output, _ = process.communicate(timeout=TIMEOUT_SECS)
        return process.returncode, output

    def calls(self, name):
        lines = (self.directory / "calls").read_text().splitlines()
        return [arguments[1:] for arguments in map(json.loads, lines) if arguments[0] == name]


def counting(tmp_path, *codes):
    """Returns a program. Its first task ends with these codes, one per start; other tasks end with 0."""
    file = tmp_path / "starts"
    return [
        "bash", "-c",
        f'[ "$SLURM_PROCID" = 0 ] || exit 0; echo x >> {file}; n=$(wc -l < {file}); '
        f"codes=({' '.join(map(str, codes))}); exit ${{codes[n-1]}}",
    ]  # fmt: skip


def test_a_job_that_is_done_is_done(tmp_path):
    cluster = Cluster(tmp_path, counting(tmp_path, 0))
    assert cluster.run()[0] == 0
    [arguments] = cluster.calls("srun")
    assert arguments[:3] == ["--export=ALL", "--kill-on-bad-exit=1", "--distribution=block"]
    assert not cluster.calls("scontrol")


def test_a_lost_task_starts_all_again_and_not_for_ever(tmp_path):
    cluster = Cluster(tmp_path, counting(tmp_path, 134, 137, 0))
    code, output = cluster.run()
    assert code == 0 and len(cluster.calls("srun")) == 3 and "task 0: 134, srun: " in output
    (tmp_path / "again").mkdir()
    cluster = Cluster(tmp_path / "again", counting(tmp_path / "again", 134, 134, 0), 2, "--max_restarts=1")
    assert cluster.run()[0] == 134 and len(cluster.calls("srun")) == 2


def test_progress_gives_restarts_back_and_failures_alike_without_it_end_early(tmp_path):
    gets_on = "n=$(cat n 2> /dev/null || echo 0); echo $((n + 1)) > n; mkdir -p run/checkpoints/ckpt-$n; "
    gets_on += 'sleep 0.2; [ "$n" -lt 5 ] || exit 0; exit 134'
    program = ["bash", "-c", f"cd {tmp_path}; {gets_on}", "x", f"--model_dir={tmp_path}/run"]
    cluster = Cluster(tmp_path, program, 1, "--max_restarts=1")
    code, output = cluster.run()
    assert code == 0 and len(cluster.calls("srun")) == 6, output
    (tmp_path / "again").mkdir()
    stuck = [*counting(tmp_path / "again", *[134] * 9), f"--model_dir={tmp_path}/run"]
    cluster = Cluster(tmp_path / "again", stuck, 1, "--max_restarts=8")
    code, output = cluster.run()
    assert code == 134 and len(cluster.calls("srun")) == 3
    assert "No progress: 3 attempts in a row ended with 134." in output


@pytest.mark.parametrize("flags", [["--model_dir=run"], [], ["--model_dir=gs://bucket/run"]])
def test_failures_alike_before_the_first_checkpoint_end_early_too(tmp_path, flags):
    cluster = Cluster(tmp_path, [*counting(tmp_path, *[134] * 9), *flags], 1, "--max_restarts=3")
    code, output = cluster.run()
    assert code == 134 and len(cluster.calls("srun")) == 3, output
    assert "No progress: 3 attempts in a row ended with 134." in output


@pytest.mark.parametrize(("flag", "attempts"), [("gs://bucket/run", 5), ("run", 3)])
def test_a_long_attempt_is_progress_where_checkpoints_cannot_be_seen(tmp_path, monkeypatch, flag, attempts):
    monkeypatch.setattr(slurm, "_TRAINED_SECS", 0)
    program = [*counting(tmp_path, 134, 134, 134, 134, 0), f"--model_dir={flag}"]
    cluster = Cluster(tmp_path, program, 1, "--max_restarts=8")
    text = cluster.script.read_text().replace("sleep $((restart", "sleep $((0 * restart")
    cluster.script.write_text(text)
    cluster.run()
    assert len(cluster.calls("srun")) == attempts


@pytest.mark.parametrize("code", [1, 2, 127])
def test_an_error_that_comes_again_is_not_tried_again(tmp_path, code):
    cluster = Cluster(tmp_path, counting(tmp_path, code))
    exit_code, output = cluster.run()
    assert exit_code == code and len(cluster.calls("srun")) == 1
    assert f"ended with {code}" in output
    assert not list(tmp_path.glob(".ctl-job*"))


@pytest.mark.parametrize(("array", "job"), [({}, "77"), (
    {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3"}, "70_3",
)])  # fmt: skip
def test_near_the_time_limit_tasks_save_and_the_job_goes_back(tmp_path, array, job):
    saving = "trap 'sleep 1; touch saved-$SLURM_PROCID; exit 143' TERM; touch up-$SLURM_PROCID; "
    program = ["bash", "-c", f"cd {tmp_path}; {saving} while :; do sleep 0.1; done"]
    cluster = Cluster(tmp_path, program)
    process = cluster.start(**array)
    wait_until(lambda: len(list(tmp_path.glob("up-*"))) == 2, process)
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=TIMEOUT_SECS)
    assert process.returncode == 0, output
    assert len(list(tmp_path.glob("saved-*"))) == 2
    assert cluster.calls("scontrol") == [["requeue", job]] and len(cluster.calls("srun")) == 1


def test_a_job_that_slurm_does_not_take_back_has_not_succeeded(tmp_path):
    program = ["bash", "-c", f"trap 'exit 143' TERM; touch {tmp_path}/up; while :; do sleep 0.1; done"]
    process = Cluster(tmp_path, program).start(FAKE_SCONTROL="1")
    wait_until((tmp_path / "up").exists, process)
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=TIMEOUT_SECS)
    assert process.returncode == 143 and "submit the same script again" in output


def test_a_signal_between_two_steps_is_not_lost(tmp_path):
    cluster = Cluster(tmp_path, counting(tmp_path, 134, 137, 134, 0))
    process = cluster.start()
    wait_until(lambda: (tmp_path / "calls").exists() and len(cluster.calls("srun")) == 3, process)
    for line in process.stdout:
        if "after 2 restarts" in line:
            break
    process.send_signal(signal.SIGUSR1)  # within the four seconds until the next step
    process.communicate(timeout=TIMEOUT_SECS)
    assert process.returncode == 0 and len(cluster.calls("srun")) == 3
    assert cluster.calls("scontrol") == [["requeue", "77"]]


def test_a_program_that_ignores_sigterm_is_not_waited_for(tmp_path):
    program = ["bash", "-c", f"trap '' TERM; touch {tmp_path}/up-$SLURM_PROCID; sleep 120"]
    cluster = Cluster(tmp_path, program, 2, "--signal_secs=10")
    process = cluster.start()
    wait_until(lambda: len(list(tmp_path.glob("up-*"))) == 2, process)
    started_secs = time.monotonic()
    process.send_signal(signal.SIGUSR1)
    assert process.wait(TIMEOUT_SECS) == 0 and 4 <= time.monotonic() - started_secs < 40
    assert cluster.calls("scontrol") == [["requeue", "77"]]
    for pid in pids_of_tasks(tmp_path):
        os.killpg(pid, signal.SIGKILL)
    assert "Tasks are still running 5 s after SIGTERM" in process.communicate(timeout=TIMEOUT_SECS)[0]


def without_pauses(cluster):
    text = cluster.script.read_text()
    for old, new in {"sleep 10 >": "sleep 0.1 >", "+ 60))": "+ 0))"}.items():
        assert old in text
        text = text.replace(old, new)
    cluster.script.write_text(text)
    return cluster


def test_a_machine_that_is_dead_when_the_step_starts_is_waited_for(tmp_path):
    cluster = without_pauses(Cluster(tmp_path, counting(tmp_path, 0)))
    (tmp_path / "dead").write_text("5")
    code, output = cluster.run()
    assert code == 0 and len(cluster.calls("srun")) == 6
    assert output.count("srun could not start every task (srun: 233)") == 5
    assert "Slurm replaces a dead machine after 300 s." in output


def test_a_machine_that_slurm_does_not_replace_ends_the_job(tmp_path):
    cluster = without_pauses(Cluster(tmp_path, counting(tmp_path, 0)))
    (tmp_path / "dead").write_text("1000")
    code, output = cluster.run(FAKE_SLURMD_TIMEOUT="1")
    assert code == 233 and "sbatch --exclude=NODE" in output


def test_the_signal_ends_the_wait_for_a_machine(tmp_path):
    cluster = without_pauses(Cluster(tmp_path, counting(tmp_path, 0)))
    (tmp_path / "dead").write_text("1000")
    process = cluster.start()
    assert "srun could not start" in process.stdout.readline()
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=TIMEOUT_SECS)
    assert process.returncode == 0 and cluster.calls("scontrol")[-1] == ["requeue", "77"]


def test_the_code_of_the_task_that_failed_is_named_and_not_that_of_those_srun_ended(tmp_path):
    def program(of_survivor, of_failure):
        survivor = f"trap 'exit {of_survivor}' TERM; > $FAKE_SLURM/up; while :; do sleep 0.1; done"
        fails = f"while [ ! -e $FAKE_SLURM/up ]; do sleep 0.05; done; exit {of_failure}"
        return ["bash", "-c", f'[ "$SLURM_PROCID" = 0 ] && {{ {survivor}; }}; {fails}']

    code, output = Cluster(tmp_path, program(1, 134), 2, "--max_restarts=0").run()
    assert code == 134 and "A task was lost (task 1: 134, srun: 134)" in output  # and not 1, which is final
    (tmp_path / "again").mkdir()
    code, output = Cluster(tmp_path / "again", program(143, 3), 2, "--max_restarts=0").run()
    assert code == 3 and "A task was lost (task 1: 3, srun: 143)" in output


def test_a_code_that_comes_after_sigterm_is_not_final(tmp_path):
    waits = "while :; do sleep 0.1; done"
    program = ["bash", "-c", f"trap 'exit 1' TERM; > {tmp_path}/up-$SLURM_PROCID; {waits}"]
    process = Cluster(tmp_path, program, 2, "--max_restarts=0").start()
    wait_until(lambda: len(list(tmp_path.glob("up-*"))) == 2, process)
    for pid in pids_of_tasks(tmp_path):
        os.killpg(pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=TIMEOUT_SECS)
    assert process.returncode == 1 and "A task was lost (srun: 1)" in output


def test_a_task_that_fails_before_others_begin_is_no_dead_machine(tmp_path):
    cluster = without_pauses(Cluster(tmp_path, counting(tmp_path, 134, 134), 2, "--max_restarts=1"))
    delayed_task = '[ "$SLURM_PROCID" = 0 ] || sleep 100\nstopped_by=\n'  # until it is ended
    cluster.script.write_text(cluster.script.read_text().replace("stopped_by=\n", delayed_task))
    code, output = cluster.run()
    assert code == 134 and "could not start" not in output and "task 0: 134, srun: 143" in output


@pytest.mark.parametrize(("first", "second", "final"), [(134, 1, False), (1, 134, True), (134, 2, True)])
def test_the_1_of_a_survivor_is_not_final_and_that_of_the_first_task_is(tmp_path, first, second, final):
    wait = f'trap "" TERM; while [ ! -e {tmp_path}/first ]; do sleep 0.05; done; sleep 3; exit {second}'
    program = ["bash", "-c", f'[ "$SLURM_PROCID" = 0 ] && {{ {wait}; }}; > {tmp_path}/first; exit {first}']
    code, output = Cluster(tmp_path, program, 2, "--max_restarts=0").run(FAKE_PATIENCE="1")
    assert ("which a restart does not correct" in output) == final
    assert code == (2 if second == 2 else first)


def test_tasks_that_get_usr1_themselves_send_the_job_back(tmp_path):
    program = ["bash", "-c", f"trap 'exit 143' USR1; touch {tmp_path}/up-$SLURM_PROCID; "
               "while :; do sleep 0.1; done"]  # fmt: skip
    cluster = Cluster(tmp_path, program)
    process = cluster.start()
    wait_until(lambda: len(list(tmp_path.glob("up-*"))) == 2, process)
    for pid in pids_of_tasks(tmp_path):
        os.killpg(pid, signal.SIGUSR1)
    process.communicate(timeout=TIMEOUT_SECS)
    assert process.returncode == 0 and cluster.calls("scontrol") == [["requeue", "77"]]


@pytest.mark.parametrize("home", ["home", None])
def test_reports_of_tasks_go_where_they_can_be_written(tmp_path, home):
    home = str(tmp_path / home) if home else "/proc"
    code, output = Cluster(tmp_path, counting(tmp_path, 1)).run(SLURM_SUBMIT_DIR="/proc", HOME=home)
    expected = (
        (1, "which a restart does not correct")
        if home != "/proc"
        else (2, "expected one writable directory")
    )
    assert code == expected[0] and expected[1] in output
    assert not list(tmp_path.rglob(".ctl-job*"))


def test_the_number_of_an_array_task_is_part_of_the_program(capsys, tmp_path):
    program = ["bash", "-c", 'printf "%s\\n" "$@" > "$0"', f"{tmp_path}/words",
               "--model_dir=/a b/run-$SLURM_ARRAY_TASK_ID", "${SLURM_ARRAY_TASK_ID}x$HOME",
               "$SLURM_ARRAY_TASK_IDS"]  # fmt: skip
    cluster = Cluster(tmp_path, program, 1)
    assert "sbatch --array=0-2" in capsys.readouterr().out
    array = {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3"}
    assert cluster.run(**array)[0] == 0
    arguments = (tmp_path / "words").read_text().splitlines()
    assert arguments == ["--model_dir=/a b/run-3", "3x$HOME", "$SLURM_ARRAY_TASK_IDS"]
    code, output = cluster.run()
    assert code == 2 and "sbatch --array=0-2" in output


@pytest.mark.workers
def test_two_tasks_train_together_save_on_the_signal_and_resume(tmp_path):
    model_dir = tmp_path / "run"
    program = [sys.executable, "-m", "models.mnist", f"--model_dir={model_dir}", "--train_steps=2000",
               "--global_batch_size=32", "--export=none", "--steps_per_loop=5",
               "--log_every_steps=5"]  # fmt: skip
    cluster = Cluster(tmp_path, program)
    job = str(os.getpid())  # its ports are not those of the same test in another process
    process = cluster.start(SLURM_JOB_ID=job)
    wait_until((model_dir / "metrics.jsonl").exists, process)
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=TIMEOUT_SECS)
    assert process.returncode == 0 and "2 workers" in output, output
    assert cluster.calls("scontrol") == [["requeue", job]]
    [saved] = [int(p.name.split("-")[1]) for p in (model_dir / "checkpoints").glob("ckpt-*")]
    text = cluster.script.read_text().replace("--train_steps=2000", f"--train_steps={saved + 5}")
    cluster.script.write_text(text)
    code, output = cluster.run(SLURM_JOB_ID=job)
    assert code == 0, output
    assert f"resuming at step {saved} " in output and f"done at step {saved + 5}" in output
