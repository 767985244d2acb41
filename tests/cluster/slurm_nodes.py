"""A real Slurm cluster of three nodes on this machine.

Each node, and the controller, is a set of namespaces (network, process ids, mounts, host name), so that
they change no global state. They end with the process that started them. Needs root and the programs
of Debian's packages slurm-wlm, munge and iproute2.

    with started(folder) as cluster:
        job = cluster.sbatch("job.sbatch")
        cluster.wait_for(job, "RUNNING")
"""

import contextlib
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

NODES = ("n1", "n2", "n3")
NODE_TIMEOUT_SECS = 60  # SlurmdTimeout; longer than the timeout of srun for a dead machine
START_SECS = 300
JOB_SECS = 900
ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED")  # states of jobs that are not restarted
_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged", "ip", "unshare", "nsenter",
             "setpriv")  # fmt: skip
_NAMESPACES = ("--net", "--mount", "--uts", "--pid")
_SLURM_CONF = """ClusterName=tests
SlurmctldHost=head(10.79.0.254)
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmdParameters=config_overrides
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
MpiDefault=none
SlurmdTimeout={timeout}
KillWait=5
SchedulerParameters=sched_interval=2,bf_interval=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName=n[1-3] NodeHostname=n[1-3] NodeAddr=10.79.0.[1-3] CPUs=4 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Returns the reason why this machine cannot run the cluster, or an empty string."""
    if os.geteuid() != 0:
        return "a Slurm cluster needs root"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    programs = [name for name in _PROGRAMS if shutil.which(name, path=path) is None]
    if programs:
        return f"{', '.join(programs)}: not installed (packages slurm-wlm, munge, iproute2)"
    probe = ["unshare", *_NAMESPACES, "--fork", "true"]
    if subprocess.run(probe, capture_output=True, check=False, timeout=START_SECS).returncode != 0:
        return "this machine allows no namespaces"
    return ""


class Cluster:
    """Three nodes and a controller. `folder` is shared and contains their logs."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._machines: dict[str, subprocess.Popen] = {}
        self._environ = os.environ | {
            "SLURM_CONF": f"{folder}/slurm.conf",
            "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin",
        }

    def start(self) -> None:
        """Starts the machines, Slurm on them, and waits until all nodes are idle."""
        (self.folder / "state").mkdir()
        self.folder.chmod(0o755)
        (self.folder / "slurm.conf").write_text(
            _SLURM_CONF.format(folder=self.folder, timeout=NODE_TIMEOUT_SECS)
        )
        addresses = [f"10.79.0.{i + 1} {name}" for i, name in enumerate(NODES)]
        hosts = ["127.0.0.1 localhost", *addresses, "10.79.0.254 head"]
        (self.folder / "hosts").write_text("\n".join(hosts) + "\n")
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        for name in ("head", *NODES):
            self._machines[name] = self._machine(name)
        self._connect()
        self.call("munged", "--force", f"--socket={self.folder}/munge.socket", f"--key-file={key}",
                  f"--log-file={self.folder}/munged.log", f"--pid-file={self.folder}/munged.pid",
                  f"--seed-file={self.folder}/munged.seed")  # fmt: skip
        self.call("slurmctld")
        for name in NODES:
            self.start_node(name)
        self.wait_until(lambda: self.states() == ["idle"] * len(NODES), START_SECS)

    def stop(self) -> None:
        """Ends all machines, each with all its processes."""
        for process in self._machines.values():
            process.kill()
            process.wait(START_SECS)

    def call(self, *command: object, on: str = "head", check: bool = True, **env: str) -> str:
        """Runs a command on a machine; returns its output."""
        result = subprocess.run(
            self._inside(on, *command), env=self._environ | env, capture_output=True, text=True,
            timeout=START_SECS, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert not check or result.returncode == 0, (
            f"{command}: {result.returncode}\n{result.stdout}{result.stderr}"
        )
        return result.stdout + result.stderr

    def start_node(self, name: str) -> None:
        """Starts slurmd."""
        self.call("slurmd", "-N", name, on=name)

    def disconnect(self, name: str) -> None:
        """Disconnects a node from the network. Its processes continue."""
        self.call("ip", "link", "set", f"to-{name}", "down")

    def reconnect(self, name: str) -> None:
        """Reverses `disconnect`."""
        self.call("ip", "link", "set", f"to-{name}", "up")
        self.call("scontrol", "update", f"NodeName={name}", "State=RESUME", check=False)
        self.wait_until(lambda: self.states() == ["idle"] * len(NODES), START_SECS)

    def states(self) -> list[str]:
        """Returns the state of each node, such as "idle" or "down*"."""
        return self.call("sinfo", "--noheader", "--Node", "--format=%t").split()

    def sbatch(self, *arguments: object, **env: str) -> str:
        """Submits a script; returns the number of the job."""
        match = re.search(r"Submitted batch job (\d+)", text := self.call("sbatch", *arguments, **env))
        assert match, text
        return match[1]

    def show(self, job: str) -> dict[str, str]:
        """Returns the fields of `scontrol show job`."""
        text = self.call("scontrol", "show", "job", job)
        return dict(field.split("=", 1) for field in text.split() if "=" in field)

    def wait_for(self, job: str, *states: str, limit_secs: float = JOB_SECS) -> dict[str, str]:
        """Waits until a job is in one of the states; returns its fields."""
        self.wait_until(lambda: self.show(job)["JobState"] in states, limit_secs, job)
        return self.show(job)

    def wait_until(self, condition, limit_secs: float = JOB_SECS, job: str = "") -> None:
        """Polls a condition. Raises with the state of the cluster at the limit, or if the job has ended."""
        deadline = time.monotonic() + limit_secs
        while not condition():
            has_ended = job and self.show(job)["JobState"] in ENDED
            if time.monotonic() > deadline or (has_ended and not condition()):
                shown = self.call("scontrol", "show", "job", job, check=False) if job else ""
                log = (self.folder / "slurmctld.log").read_text()[-2000:]
                raise AssertionError(f"ended, or after {limit_secs} s: {self.states()}\n{shown}\n{log}")
            time.sleep(0.2)

    def pids(self, node: str, *command: str) -> list[int]:
        """Returns the process ids, as on this machine, of processes of a node that start with `command`."""
        pids = []
        namespace = os.readlink(f"/proc/{self._inner(node)}/ns/pid")
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                arguments = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if (
                    arguments[: len(command)] == [*command]
                    and os.readlink(path / "ns" / "pid") == namespace
                ):
                    pids.append(int(path.name))
        return sorted(pids)

    def _machine(self, name: str) -> subprocess.Popen:
        """Starts a process that holds the namespaces. All processes in them end with it."""
        script = f"hostname {name} && mount --bind {self.folder}/hosts /etc/hosts && ip link set lo up && "
        script += f"touch {self.folder}/up-{name} && exec sleep infinity"
        command = ["setpriv", "--pdeathsig=KILL", "unshare", *_NAMESPACES, "--fork", "--kill-child",
                 "--mount-proc", "sh", "-c", script]  # fmt: skip
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=self._environ)
        deadline = time.monotonic() + START_SECS
        while not (self.folder / f"up-{name}").exists():
            assert process.poll() is None and time.monotonic() < deadline, f"{name} did not start"
            time.sleep(0.02)
        return process

    def _inner(self, name: str) -> int:
        pid = self._machines[name].pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def _inside(self, name: str, *command: object) -> list[str]:
        enter = ["nsenter", f"--target={self._inner(name)}", *_NAMESPACES]
        return [*enter, "env", f"--chdir={self.folder}", *map(str, command)]

    def _connect(self) -> None:
        self.call("ip", "link", "add", "bridge0", "type", "bridge")
        self.call("ip", "addr", "add", "10.79.0.254/24", "dev", "bridge0")
        self.call("ip", "link", "set", "bridge0", "up")
        for i, name in enumerate(NODES):
            # created here and moved to both, because the head's namespace has no process id of a node
            ends = f"c{os.getpid() % 10**7}{name}", f"d{os.getpid() % 10**7}{name}"
            _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
            _ip("link", "set", ends[0], "netns", str(self._inner("head")), "name", f"to-{name}")
            _ip("link", "set", ends[1], "netns", str(self._inner(name)), "name", "eth0")
            self.call("ip", "link", "set", f"to-{name}", "master", "bridge0", "up")
            self.call("ip", "addr", "add", f"10.79.0.{i + 1}/24", "dev", "eth0", on=name)
            self.call("ip", "link", "set", "eth0", "up", on=name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=START_SECS)


@contextlib.contextmanager
def started(folder: Path):
    """Yields a running Cluster."""
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
