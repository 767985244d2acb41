"""srun, scancel and scontrol for one machine, as one program that goes by the name it is called by.

$FAKE_SLURM is a directory: `calls` has a line for each call, `pids` the tasks that run, and `starting`
exists while tasks may run that are not in `pids` yet. Tasks get the variables that srun 22.05 was seen to
give them.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

place = Path(os.environ.get("FAKE_SLURM", "."))


def note(words):
    with open(place / "calls", "a") as file:
        file.write(json.dumps(words) + "\n")


def srun(words):
    options = [w for w in words if w.startswith("--")][: next(
        i for i, w in enumerate(words) if not w.startswith("--")
    )]  # fmt: skip
    program = words[len(options) :]
    count = int(os.environ["FAKE_TASKS"])
    dead = place / "dead"  # as many attempts in which srun does not reach a machine
    if dead.exists() and (left := int(dead.read_text())):
        dead.write_text(str(left - 1))
        return 233
    (place / "starting").touch()
    tasks = []
    for i in range(count):
        place_of_task = {
            "SLURM_PROCID": i, "SLURM_LOCALID": i, "SLURM_NODEID": 0, "SLURM_NTASKS": count,
            "SLURM_STEP_NUM_TASKS": count, "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_STEP_ID": 0,
            "SLURM_STEP_TASKS_PER_NODE": count,
        }  # fmt: skip
        env = os.environ | {k: str(v) for k, v in place_of_task.items()}
        tasks.append(subprocess.Popen(program, env=env, start_new_session=True))
    (place / "pids").write_text(" ".join(str(t.pid) for t in tasks))
    (place / "starting").unlink()
    codes = dict.fromkeys(range(count))
    while None in codes.values():  # --kill-on-bad-exit: the others get SIGTERM
        for i, task in enumerate(tasks):
            if codes[i] is None and (code := task.poll()) is not None:
                codes[i] = 128 - code if code < 0 else code
                if code and not os.environ.get("FAKE_PATIENCE"):
                    end([t for j, t in enumerate(tasks) if codes[j] is None])
        time.sleep(0.02)
    return max(codes.values())


def pids_of_tasks(place):
    """The numbers of the tasks of the newest step, once all of them are started."""
    while (place / "starting").exists():
        time.sleep(0.02)
    return [int(pid) for pid in (place / "pids").read_text().split()]


def end(tasks):
    for task in tasks:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(task.pid, signal.SIGTERM)


def scancel(words):
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]
    assert words == ["--signal=TERM", job], words
    for pid in pids_of_tasks(place):
        with contextlib.suppress(ProcessLookupError):  # between two steps
            os.killpg(pid, signal.SIGTERM)
    return 0


def scontrol(words):
    if words == ["show", "config"]:
        print(f"SlurmdTimeout           = {os.environ.get('FAKE_SLURMD_TIMEOUT', '300')} sec")
        return 0
    return int(os.environ.get("FAKE_SCONTROL", "0"))


if __name__ == "__main__":
    name = Path(sys.argv[0]).name
    note([name, *sys.argv[1:]])
    sys.exit({"srun": srun, "scancel": scancel, "scontrol": scontrol}[name](sys.argv[1:]))
