"""Hosts with a real sshd on one machine: network, mount, UTS, IPC and PID namespaces, joined by a bridge.

    with SshHosts(directory, ["hosta", "hostb"]) as hosts:
        hosts.popen(["ssh", "hosta", "true"])     # on a further machine, "launch"
        hosts.disconnect("hosta"); hosts.reconnect("hosta"); hosts.stop("hosta"); hosts.start("hosta")

Each host has its own /etc, home directory, /run, /dev/shm and boot ID; all other files are shared. It needs
root and the packages openssh-server and iproute2.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

PROGRAMS = ("ip", "ssh", "ssh-keygen", "sshd", "nsenter", "unshare")
LAUNCH = "launch"
_TIMEOUT_SECS = 300
_SBIN = "/usr/sbin:/sbin"
_SSHD_CONFIG = """Port 22
HostKey /etc/ssh/test_host_key
AuthorizedKeysFile /etc/ssh/test_authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
"""
_SSH_CONFIG = """Host *
IdentityFile /etc/ssh/test_key
UserKnownHostsFile /etc/ssh/test_known_hosts
"""
_ENTER = """
mount --make-rprivate / && mount -t tmpfs tmpfs /run
mount --bind "$1/etc" /etc && hostname "$2" && shift 2 && exec "$@"
"""
_BOOT = """
mount --make-rprivate / && mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs /run && mkdir /run/sshd
cat /proc/sys/kernel/random/uuid > /run/boot_id && mount --bind /run/boot_id /proc/sys/kernel/random/boot_id
mount --bind "$1/etc" /etc && hostname "$2" && exec "$3" -D -e
"""


def missing() -> str:
    """Returns the reason why this machine cannot create such hosts, or an empty string."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    path = f"{os.environ['PATH']}:{_SBIN}"
    missing_programs = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if missing_programs:
        return f"needs the programs {', '.join(missing_programs)} (packages openssh-server and iproute2)"
    name = f"ctl{os.getpid()}try"
    result = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return f"network namespaces cannot be made: {result.stderr.strip()}" if result.returncode else ""


class SshHosts:
    """Hosts that a machine called "launch" reaches by ssh without a password.

    Attributes:
      directory: Has a folder per host, with `etc` and `home`.
      address: IPv4 addresses by host.
    """

    def __init__(self, directory: Path, names: list[str]):
        self.directory = directory
        self._names = [*names, LAUNCH]
        self.address = {name: f"10.78.0.{i}" for i, name in enumerate(self._names, 1)}
        self._prefix = f"ctl{os.getpid()}"
        self._processes: dict[str, subprocess.Popen] = {}
        self._relay: subprocess.Popen | None = None

    def __enter__(self) -> "SshHosts":
        try:
            self._make_keys()
            for name in self._names:
                self._make_files(name)
            self._make_network()
            for name in self._names[:-1]:
                self.start(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end_relay()
        for name in list(self._processes):
            self.stop(name)
        for name in ["switch", *self._names]:
            _run("ip", "netns", "del", self._namespace(name), check=False)

    def start(self, name: str) -> None:
        """Starts a host; returns once its sshd answers."""
        log = (self.directory / name / "sshd.log").open("wb")
        sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:{_SBIN}")
        self._processes[name] = subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{self._namespace(name)}", "unshare", "--mount", "--uts", "--ipc",
             "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc",
             "sh", "-ec", _BOOT, "sh", self.directory / name, name, sshd],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env={"PATH": f"/usr/bin:/bin:{_SBIN}"},
        )  # fmt: skip
        log.close()
        deadline = time.monotonic() + _TIMEOUT_SECS
        while self.run("ssh", "-o", "BatchMode=yes", name, "true").returncode:
            log_text = (self.directory / name / "sshd.log").read_text()
            assert time.monotonic() < deadline and self._processes[name].poll() is None, log_text
            time.sleep(0.1)

    def stop(self, name: str) -> None:
        """Ends a host with all its processes, without a notification of its peers."""
        process = self._processes.pop(name)
        process.kill()
        process.wait(_TIMEOUT_SECS)

    def disconnect(self, name: str) -> None:
        """Disconnects a host from the network."""
        _run("ip", "-n", self._namespace("switch"), "link", "set", name, "down")

    def reconnect(self, name: str) -> None:
        """Connects the host to the network again, without a delay."""
        _run("ip", "-n", self._namespace("switch"), "link", "set", name, "master", "bridge", "up")
        _run("ip", "-n", self._namespace("switch"), "link", "del", "slow", check=False)

    def delay(self, name: str, secs: float) -> None:
        """Delays all frames to and from a host, until `reset`."""
        switch = self._namespace("switch")
        _run("ip", "-n", switch, "link", "add", "slow", "type", "veth", "peer", "name", "slowport")
        _run("ip", "-n", switch, "link", "set", "slowport", "master", "bridge", "up")
        _run("ip", "-n", switch, "link", "set", "slow", "up")
        _run("ip", "-n", switch, "link", "set", name, "nomaster")
        self._relay = subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{switch}", sys.executable,
             Path(__file__).parent / "slow_link.py", name, "slow", f"{secs}"],
            stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self._relay.stdout.readline() == b"ready\n"

    def _end_relay(self) -> None:
        if self._relay is not None:
            self._relay.kill()
            self._relay.communicate(timeout=_TIMEOUT_SECS)
            self._relay = None

    def etc(self, name: str) -> Path:
        """The /etc of a host."""
        return self.directory / name / "etc"

    def home(self, name: str) -> Path:
        """The home directory of its only account."""
        return self.directory / name / "home"

    def set_hosts(self, name: str, *lines: str) -> None:
        """Writes /etc/hosts of one host: the given lines, then all other hosts."""
        given_names = {name_or_address for line in lines for name_or_address in line.split()}
        other_hosts = [
            f"{address} {host}" for host, address in self.address.items() if host not in given_names
        ]
        (self.etc(name) / "hosts").write_text(
            "\n".join(["127.0.0.1 localhost", *lines, *other_hosts]) + "\n"
        )

    def popen(self, command: list, name: str = LAUNCH, **options) -> subprocess.Popen:
        """Starts a command on "launch"; the process ID is that of the command itself."""
        return subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{self._namespace(name)}", "unshare", "--mount", "--uts",
             "sh", "-ec", _ENTER, "sh", self.directory / name, name, *command],
            **options,
        )  # fmt: skip

    def run(self, *command, timeout_secs: float = 60, **options) -> subprocess.CompletedProcess:
        """Runs a command on "launch"."""
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE,
                   "text": True, **options}  # fmt: skip
        with self.popen([*command], **options) as process:
            try:
                out, err = process.communicate(timeout=timeout_secs)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def reset(self) -> None:
        """Reverts files and connections, starts stopped hosts, and restarts hosts with a changed config."""
        for name in list(self._processes):
            if (self.etc(name) / "ssh" / "sshd_config").read_text() != _SSHD_CONFIG:
                self.stop(name)
        self._end_relay()
        for name in self._names:
            self._make_ssh_files(name)
            self.set_hosts(name)
            self.set_login(name, "/bin/bash")
            self.reconnect(name)
            shutil.rmtree(self.home(name))
            self.home(name).mkdir()
        for name in self._names[:-1]:
            if name not in self._processes:
                self.start(name)

    def _namespace(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def _make_keys(self) -> None:
        for name in ["user", *self._names]:
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.directory / f"{name}.key")

    def _make_files(self, name: str) -> None:
        """Copies the whole /etc: a bind mount of one file disappears when the file is replaced outside."""
        self.home(name).mkdir(parents=True)
        etc = self.etc(name)
        _run("cp", "-a", "/etc", etc)
        (etc / "ssh").mkdir(exist_ok=True)
        self._make_ssh_files(name)
        (etc / "nsswitch.conf").write_text("passwd: files\nshadow: files\nhosts: files\n")
        self.set_hosts(name)
        self.set_login(name, "/bin/bash")
        shadow = etc / "shadow"  # sshd without PAM refuses a locked account
        shadow.write_text("root:x:19000::::::\n" + shadow.read_text())

    def _make_ssh_files(self, name: str) -> None:
        etc = self.etc(name)
        for source, target, mode in (
            (f"{name}.key", "test_host_key", 0o600),
            ("user.key", "test_key", 0o600),
            ("user.key.pub", "test_authorized_keys", 0o644),
        ):
            shutil.copy(self.directory / source, etc / "ssh" / target)
            (etc / "ssh" / target).chmod(mode)
        keys = {n: (self.directory / f"{n}.key.pub").read_text().split()[:2] for n in self._names}
        lines = [" ".join([f"{n},{self.address[n]}", *key]) for n, key in keys.items()]
        (etc / "ssh" / "test_known_hosts").write_text("\n".join(lines) + "\n")
        (etc / "ssh" / "sshd_config").write_text(_SSHD_CONFIG)  # read when sshd starts
        (etc / "ssh" / "ssh_config").write_text(_SSH_CONFIG)

    def set_login(self, name: str, shell: str) -> None:
        """Sets the login shell of a host."""
        (self.etc(name) / "passwd").write_text(
            f"root:x:0:0:root:{self.home(name)}:{shell}\nsshd:x:101:65534::/run/sshd:/usr/sbin/nologin\n"
            "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
        )

    def _make_network(self) -> None:
        switch = self._namespace("switch")
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for name, address in self.address.items():
            namespace = self._namespace(name)
            _run("ip", "netns", "add", namespace)
            ends = ["eth0", "type", "veth", "peer", "name", name, "netns", switch]
            _run("ip", "-n", namespace, "link", "add", *ends)
            _run("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run("ip", "-n", namespace, "link", "set", device, "up")
            _run("ip", "-n", switch, "link", "set", name, "master", "bridge", "up")


def _run(*command, check: bool = True) -> None:
    environ = {**os.environ, "PATH": f"{os.environ['PATH']}:{_SBIN}"}
    subprocess.run(command, check=check, timeout=_TIMEOUT_SECS, capture_output=not check, env=environ)
