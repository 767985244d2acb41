"""Pods of the elastic job of `ctl deploy kubernetes` on one machine, with its script, key and variables.

    with Pods(directory, manifest, ["pod0", "pod1", "pod1b"], environ) as pods:
        pods.start("pod1"); pods.delete("pod1"); pods.terminate("pod0")

Each pod has its own network, processes, /etc and home directory. Its processes are those of user 1000,
without privileges. /etc/hosts replaces the name server.
"""

import os
import signal
import subprocess
from pathlib import Path

from conftest import ROOT
from ssh_hosts import SshHosts

USER = 1000
_BOOT = """
mount --make-rprivate / && mount -t tmpfs tmpfs /dev/shm
mount --bind "$1/etc" /etc && hostname "$2" && shift 2
exec unshare --user --map-user=1000 --map-group=1000 setpriv --no-new-privs "$@"
"""


def read_job(manifest: dict) -> tuple[str, str, list[str], dict[str, str]]:
    """Returns the name of the job, the script, the command and the variables of a manifest."""
    job, config_map = (
        next(item for item in manifest["items"] if item["kind"] == kind) for kind in ("Job", "ConfigMap")
    )
    [container] = job["spec"]["template"]["spec"]["containers"]
    [script] = config_map["data"].values()
    variables = {variable["name"]: variable["value"] for variable in container.get("env", ())}
    return job["metadata"]["name"], script, [*container["command"], *container["args"]], variables


class Pods(SshHosts):
    """Pods with the names "pod0", "pod1", ... The number is the index in the job.

    Args:
      directory: An empty directory.
      manifest: Manifest of `ctl deploy kubernetes --format=json`.
      names: Names of the pods. A name such as "pod1b" is that of a replacement, with the same index.
      environ: Variables of the image.
    """

    def __init__(self, directory: Path, manifest: dict, names: list[str], environ: dict[str, str]):
        super().__init__(directory, names)
        self._prefix += "pods"  # hosts of other tests of this process have namespaces, too
        self._job, self._script, self._command, variables = read_job(manifest)
        self._environ = {**environ, **variables}
        self._running: list[str] = []

    def __enter__(self) -> "Pods":
        try:
            self._make_keys()
            for name in self.address:
                self._make_files(name)
            self._make_network()
        except BaseException:
            self.__exit__()
            raise
        return self

    def start(self, name: str, *, is_listed: bool = True) -> subprocess.Popen:
        """Starts a pod. Returns its process, which ends with the exit code of the pod.

        Args:
          name: Name of the pod.
          is_listed: False if `publish` adds its address to the list later.
        """
        self._running.append(name)
        if is_listed:
            self.publish()
        variables = {**self._environ, "JOB_COMPLETION_INDEX": name[3], "HOME": str(self.home(name))}
        with self.log(name).open("wb") as log:
            self._processes[name] = subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{self._namespace(name)}", "unshare", "--mount", "--uts",
                 "--ipc", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc",
                 "sh", "-ec", _BOOT, "sh", self.directory / name, name, *self._command],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=variables, cwd=ROOT,
            )  # fmt: skip
        return self._processes[name]

    def log(self, name: str) -> Path:
        """The log of a pod."""
        return self.directory / name / "log"

    def delete(self, name: str) -> None:
        """Kills all processes of a pod and removes its address from the list."""
        self.stop(name)
        self._running.remove(name)
        self.publish()

    def terminate(self, name: str) -> None:
        """Sends SIGTERM to the first process of a pod, as Kubernetes does."""
        parent = self._processes[name].pid
        [child] = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        os.kill(int(child), signal.SIGTERM)

    def publish(self) -> None:
        """Writes the list of addresses."""
        lines = [f"{self.address[name]} {self._job}" for name in self._running]
        for name in self.address:
            (self.etc(name) / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")

    def _make_files(self, name: str) -> None:
        super()._make_files(name)
        etc = self.etc(name)
        with (etc / "passwd").open("a") as passwd:
            passwd.write(f"trainer:x:{USER}:{USER}::{self.home(name)}:/bin/sh\n")
        files = etc / "ctl-elastic"
        files.mkdir()
        (files / "start.sh").write_text(self._script)
        (files / "ssh-privatekey").write_bytes((self.directory / "user.key").read_bytes())
        (files / "ssh-privatekey").chmod(0o444)  # ssh refuses this mode
