"""srun, scancel and scontrol for one machine. The name of the program selects the command.

$FAKE_SLURM is a directory: `calls` has a line for each call, `pids` the running tasks, and `starting`
exists while running tasks may be missing in `pids`. Tasks receive the variables that srun 22.05 was
observed to set.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

DIRECTORY = Path(os.environ.get("FAKE_SLURM", "."))


def record_call(arguments):
    with open(DIRECTORY / "calls", "a") as file:
        file.write(json.dumps(arguments) + "\n")


def srun(arguments):
    options = [w for w in arguments if w.startswith("--")][: next(
        i for i, w in enumerate(arguments) if not w.startswith("--")
    )]  # fmt: skip
    program = arguments[len(options) :]
    count = int(os.environ["FAKE_TASKS"])
    dead = DIRECTORY / "dead"  # number of attempts in which srun does not reach a machine
    if dead.exists() and (num_failures := int(dead.read_text())):
        dead.write_text(str(num_failures - 1))
        return 233
    (DIRECTORY / "starting").touch()
    tasks = []
    for i in range(count):
        task_variables = {
            "SLURM_PROCID": i, "SLURM_LOCALID": i, "SLURM_NODEID": 0, "SLURM_NTASKS": count,
            "SLURM_STEP_NUM_TASKS": count, "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_STEP_ID": 0,
            "SLURM_STEP_TASKS_PER_NODE": count,
        }  # fmt: skip
        env = os.environ | {k: str(v) for k, v in task_variables.items()}
        tasks.append(subprocess.Popen(program, env=env, start_new_session=True))
    (DIRECTORY / "pids").write_text(" ".join(str(t.pid) for t in tasks))
    (DIRECTORY / "starting").unlink()
    codes = dict.fromkeys(range(count))
    while None in codes.values():  # --kill-on-bad-exit: the other tasks receive SIGTERM
        for i, task in enumerate(tasks):
            if codes[i] is None and (code := task.poll()) is not None:
                codes[i] = 128 - code if code < 0 else code
                if code and not os.environ.get("FAKE_PATIENCE"):
                    terminate_tasks([t for j, t in enumerate(tasks) if codes[j] is None])
        time.sleep(0.02)
    return max(codes.values())


def pids_of_tasks(directory):
    """Returns the process ids of the tasks of the newest step, after all of them have started."""
    while (directory / "starting").exists():
        time.sleep(0.02)
    return [int(pid) for pid in (directory / "pids").read_text().split()]


def terminate_tasks(tasks):
    for task in tasks:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(task.pid, signal.SIGTERM)


def scancel(arguments):
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]
    assert arguments == ["--signal=TERM", job], arguments
    for pid in pids_of_tasks(DIRECTORY):
        with contextlib.suppress(ProcessLookupError):  # between two steps
            os.killpg(pid, signal.SIGTERM)
    return 0


def scontrol(arguments):
    if arguments == ["show", "config"]:
        print(f"SlurmdTimeout           = {os.environ.get('FAKE_SLURMD_TIMEOUT', '300')} sec")
        return 0
    return int(os.environ.get("FAKE_SCONTROL", "0"))


if __name__ == "__main__":
    name = Path(sys.argv[0]).name
    record_call([name, *sys.argv[1:]])
    sys.exit({"srun": srun, "scancel": scancel, "scontrol": scontrol}[name](sys.argv[1:]))
