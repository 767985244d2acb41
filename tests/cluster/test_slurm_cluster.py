"""Script of `ctl deploy slurm` on a real Slurm cluster: time limits, lost machines, arrays, signals."""

import json
import math
import os
import re
import shlex
import signal
import sys
import time

import pytest
import slurm_nodes
from conftest import PROGRAMS, ROOT
from ctl.deploy import command
from training import OPTIONS, STEPS, assert_bit_identical, saved, trace

pytestmark = pytest.mark.cluster
SIGNAL_SECS = 20
RING_OPTION = "--communication=ring"  # "auto" measures, and may select another path in each run
ENDLESS_PROGRAM = ["bash", "-c", 'trap "" TERM; [ "${SLURM_RESTART_COUNT:-0}" = 0 ] || exit 0; touch "$0"; '
                "while :; do sleep 0.2; done"]  # fmt: skip


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    reason = slurm_nodes.missing()
    if reason:
        pytest.skip(reason)
    with slurm_nodes.started(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def deploy(folder, *options, program):
    """Writes the script of a program into a folder."""
    script = folder / "job.sbatch"
    line = ["slurm", *options, f"--env=PYTHONPATH={ROOT}:{PROGRAMS}", f"--output={script}", "--", *program]
    assert command.main(line) == 0
    return script


def faulty(model_dir, *options):
    """The command of a job of 40 steps."""
    return [sys.executable, str(PROGRAMS / "faulty.py"), f"--model_dir={model_dir}",
            f"--train_steps={STEPS}", *OPTIONS, *options]  # fmt: skip


def submit(cluster, script, *options, **env):
    """Submits a script from its folder."""
    log = f"--output={script.parent}/%x-%A_%a-%j.log"
    return cluster.sbatch(f"--chdir={script.parent}", log, *options, script, **env)


def log_of(script):
    """The output of all jobs of a script."""
    return "\n".join(path.read_text(errors="replace") for path in sorted(script.parent.glob("*.log")))


def limit_time(cluster, job):
    """Reduces the time limit of a running job so that Slurm signals it within a minute."""
    started = time.mktime(time.strptime(cluster.show(job)["StartTime"], "%Y-%m-%dT%H:%M:%S"))
    minutes = math.ceil((time.time() - started + SIGNAL_SECS + 5) / 60)
    cluster.call("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")


def wait_for_requeue(cluster, job):
    """Waits until a job with a reduced time limit is requeued, and gives it ten minutes again: on a busy
    machine, the start of TensorFlow alone would reach the reduced limit, every time."""
    cluster.wait_until(lambda: int(cluster.show(job)["Restarts"]) > 0, job=job)
    cluster.call("scontrol", "update", f"JobId={job}", "TimeLimit=10")


def assert_completed(cluster, job, script):
    fields = cluster.wait_for(job, *slurm_nodes.ENDED)
    assert fields["JobState"] == "COMPLETED", f"{fields}\n{log_of(script)[-6000:]}"
    return fields


def test_the_documented_commands_train_on_two_machines(cluster, tmp_path):
    text = (ROOT / "docs" / "deploy" / "slurm.md").read_text()
    block = re.search(r"```sh\n(.*?)```", text, re.DOTALL)[1].replace("\\\n", " ")
    deploy_command, test_command, submit_command, _ = map(shlex.split, block.splitlines())
    arguments = [argument for argument in deploy_command[2:] if not argument.startswith("--gpus_per_node")]
    at = arguments.index("--")
    options = [w.replace("/shared/venv", sys.prefix).replace("=16", "=2") for w in arguments[:at]]
    options = [w.replace("=flowers.sbatch", f"={tmp_path}/flowers.sbatch") for w in options]
    program = ["python", "-m", "models.mnist", f"--model_dir={tmp_path}/run", "--train_steps=20",
               "--export=none", "--global_batch_size=32"]  # fmt: skip
    assert command.main([*options, f"--env=PYTHONPATH={ROOT}", "--", *program]) == 0
    script = tmp_path / "flowers.sbatch"
    assert "to start at" in cluster.call(*test_command[:-1], script)
    assert submit_command == ["sbatch", "flowers.sbatch"]
    job = submit(cluster, script)
    assert_completed(cluster, job, script)
    output = log_of(script)
    assert "2 workers" in output and "done at step 20" in output


def test_a_job_at_its_time_limit_resumes_with_the_losses_of_an_unbroken_one(cluster, tmp_path, unbroken):
    run = tmp_path / "run"
    script = deploy(tmp_path, "--nodes=2", "--time=00:10:00", f"--signal_secs={SIGNAL_SECS}",
                    "--env=PAUSE_SECS=2", program=faulty(run, RING_OPTION))  # fmt: skip
    job = submit(cluster, script)
    cluster.wait_until(lambda: len(trace(run)) >= 3, job=job)
    limit_time(cluster, job)
    wait_for_requeue(cluster, job)
    assert "requeueing job" in log_of(script)
    assert len(trace(run)) < STEPS
    assert_completed(cluster, job, script)
    assert_bit_identical(run, unbroken(2, RING_OPTION))


def test_a_node_lost_in_training_is_replaced(cluster, tmp_path, unbroken):
    run = tmp_path / "run"
    script = deploy(tmp_path, "--nodes=2", "--env=PAUSE_SECS=1", program=faulty(run, RING_OPTION))
    job = submit(cluster, script)
    cluster.wait_until(lambda: saved(run), job=job)
    cluster.disconnect("n2")
    try:
        cluster.wait_until(lambda: cluster.show(job)["Restarts"] == "1", job=job)
        cluster.wait_for(job, "RUNNING")
        assert cluster.show(job)["NodeList"] == "n[1,3]"
        assert_completed(cluster, job, script)
    finally:
        cluster.reconnect("n2")
    assert_bit_identical(run, unbroken(2, RING_OPTION))


def test_a_node_that_is_dead_when_the_step_starts_is_replaced(cluster, tmp_path):
    program = ["bash", "-c", f'echo "$SLURMD_NODENAME" >> {tmp_path}/nodes']
    script = deploy(tmp_path, "--nodes=2", program=program)
    cluster.disconnect("n2")
    try:
        job = submit(cluster, script)
        fields = assert_completed(cluster, job, script)
    finally:
        cluster.reconnect("n2")
    assert fields["Restarts"] == "1" and fields["NodeList"] == "n[1,3]"
    assert "srun could not start every task" in log_of(script)


def test_each_task_of_an_array_trains_and_is_requeued_separately(cluster, tmp_path, unbroken):
    script = deploy(tmp_path, "--time=00:10:00", f"--signal_secs={SIGNAL_SECS}", "--env=PAUSE_SECS=2",
                    program=faulty(f"{tmp_path}/run-$SLURM_ARRAY_TASK_ID"))  # fmt: skip
    array = submit(cluster, script, "--array=0-2")
    runs = [tmp_path / f"run-{i}" for i in range(3)]
    cluster.wait_until(lambda: all(len(trace(run)) >= 3 for run in runs), job=f"{array}_0")
    jobs = [cluster.show(f"{array}_{i}")["JobId"] for i in range(3)]
    assert array in jobs  # the number of the array is that of one of its tasks
    limited = f"{array}_{jobs.index(array)}"
    limit_time(cluster, limited)
    wait_for_requeue(cluster, limited)
    for i, run in enumerate(runs):
        fields = assert_completed(cluster, f"{array}_{i}", script)
        assert (int(fields["Restarts"]) > 0) == (jobs[i] == array)
        assert_bit_identical(run, unbroken(0))
    assert "was lost" not in log_of(script)  # as if a task received the signal of another one


def test_a_job_without_the_environment_of_its_user_trains(cluster, tmp_path):
    values = '"$WORD $SLURM_NTASKS $(type -p python)"'
    program = ["bash", "-c", f"echo {values} > {tmp_path}/task-$SLURM_PROCID"]
    script = deploy(tmp_path, "--nodes=2", "--env=WORD=a b", f"--venv={sys.prefix}", program=program)
    job = submit(cluster, script, "--export=NONE")
    assert_completed(cluster, job, script)
    expected = f"a b 2 {sys.prefix}/bin/python\n"
    assert [(tmp_path / f"task-{i}").read_text() for i in range(2)] == [expected] * 2


def test_a_program_that_ignores_sigterm_does_not_keep_the_job_from_the_queue(cluster, tmp_path):
    script = deploy(tmp_path, "--nodes=2", "--time=00:10:00", f"--signal_secs={SIGNAL_SECS}",
                    program=[*ENDLESS_PROGRAM, f"{tmp_path}/up"])  # fmt: skip
    job = submit(cluster, script)
    cluster.wait_until((tmp_path / "up").exists, job=job)
    limit_time(cluster, job)
    fields = assert_completed(cluster, job, script)
    assert fields["Restarts"] == "1" and "Tasks are still running 10 s after SIGTERM" in log_of(script)


def test_usr1_sent_to_the_tasks_saves_and_requeues(cluster, tmp_path, unbroken):
    run = tmp_path / "run"
    script = deploy(tmp_path, "--nodes=2", "--env=PAUSE_SECS=0.5", program=faulty(run, RING_OPTION))
    job = submit(cluster, script)
    cluster.wait_until(lambda: len(trace(run)) >= 3, job=job)
    cluster.call("scancel", "--signal=USR1", job)
    cluster.wait_until(lambda: cluster.show(job)["Restarts"] == "1", job=job)
    assert len(trace(run)) == max(saved(run)) < STEPS
    assert_completed(cluster, job, script)
    assert_bit_identical(run, unbroken(2, RING_OPTION))


RANKS_PROGRAM = """
import pathlib
import ctl.hvd as hvd
import tensorflow as tf
directory = pathlib.Path(__file__).parent
hvd.init()
total = hvd.allreduce(tf.ones(3), op=hvd.Sum)
(directory / f"up-{hvd.rank()}").touch()
while hvd.allreduce(tf.constant(float((directory / "killed").exists())), op=hvd.Sum) == 0:
    pass  # all ranks end after the same call
print("ranks", int(total[0]), flush=True)
"""


def test_ranks_of_ctl_hvd_start_again_after_a_lost_one(cluster, tmp_path):
    script_of_ranks = tmp_path / "ranks.py"
    script_of_ranks.write_text(RANKS_PROGRAM)
    script = deploy(tmp_path, "--nodes=2", program=[sys.executable, str(script_of_ranks)])
    job = submit(cluster, script)
    cluster.wait_until(lambda: len(list(tmp_path.glob("up-*"))) == 2, job=job)
    [pid] = cluster.pids("n2", sys.executable, str(script_of_ranks))
    os.kill(pid, signal.SIGKILL)
    cluster.wait_until(lambda: "A task was lost (task 1: 137, srun: " in log_of(script), job=job)
    (tmp_path / "killed").touch()
    assert_completed(cluster, job, script)
    assert log_of(script).count("ranks 2\n") == 2


TOPOLOGY_PROGRAM = """
import json, os
from ctl.distribute.platforms.detection import read_topology
from ctl.io.rendezvous import listening_socket, split_address
topology = read_topology()
listening_socket(*split_address(topology.address)).close()
record = [os.environ["SLURM_STEP_ID"], topology.worker_index, topology.address, topology.workers]
print(json.dumps([*record, os.environ["SLURMD_NODENAME"]]), flush=True)
"""


@pytest.mark.parametrize("distribution", ["block", "cyclic", "plane=2"])
def test_ranks_agree_on_all_hosts_and_two_steps_have_their_own_ports(cluster, tmp_path, distribution):
    (tmp_path / "topology.py").write_text(TOPOLOGY_PROGRAM)
    step = f"srun --overlap --distribution={distribution} {sys.executable} {tmp_path}/topology.py &\n"
    script = tmp_path / "job.sbatch"
    directives = "#SBATCH --nodes=2 --ntasks=5"
    script.write_text(f"#!/bin/bash\n{directives}\nexport PYTHONPATH={ROOT}\n{step}{step}wait\n")
    job = submit(cluster, script)
    assert_completed(cluster, job, script)
    rows = [json.loads(line) for line in log_of(script).splitlines() if line.startswith("[")]
    assert len(rows) == 10, log_of(script)
    for _, index, address, workers, node in rows:
        assert address == workers[index] and address.startswith(f"{node}:")
    lists = {step: workers for step, _, _, workers, _ in rows}
    assert len({tuple(row[3]) for row in rows}) == len(lists) == 2
    assert not set(lists["0"]) & set(lists["1"])
