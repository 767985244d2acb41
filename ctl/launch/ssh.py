"""The ssh command that starts a process on another machine: a list of words, no shell on our side.

    ssh_command(["python", "train.py"], host="host2", environ={"TF_CONFIG": "..."}, directory="/work")

ssh hands its last word to the login shell over there. That word is quoted, goes to the same directory,
sets the environment and runs the command under `ctl.launch.remote`.
"""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ctl.collectives.settings import EQUAL_VARIABLES

EXIT_UNREACHABLE = 255  # ssh's own: the host cannot be reached, or not any more

_SSH_SETTINGS = {
    "BatchMode": "yes",  # nobody is there to type a password
    "StrictHostKeyChecking": "yes",
    "ConnectTimeout": "15",
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "6",
}


@dataclass(frozen=True)
class SshOptions:
    """What differs from ~/.ssh/config: a port, the file of a private key."""

    port: int | None = None
    identity: str | None = None

    @property
    def words(self) -> list[str]:
        """Options of ssh."""
        port = ["-p", str(self.port)] if self.port else []
        return [*port, *(["-i", self.identity] if self.identity else [])]


def ssh_command(
    command: Sequence[str],
    *,
    host: str,
    environ: Mapping[str, str],
    directory: str,
    options: SshOptions | None = None,
    reads_environ: bool = False,
) -> list[str]:
    """The words that run `command` on `host`.

    Args:
      host: "host" or "user@host", checked by `ctl.launch.hosts`.
      environ: part of these words; anybody on that machine can read it while the process runs.
      directory: to work in, the same path over there, as is that of this interpreter.
      reads_environ: the first line of the input will be JSON with more variables.
    """
    settings = [word for key, value in _SSH_SETTINGS.items() for word in ("-o", f"{key}={value}")]
    variables = [f"{key}={value}" for key, value in environ.items()]
    more = ["--environ"] if reads_environ else []
    remote = [sys.executable, "-m", "ctl.launch.remote", *more, "--", *command]
    words = shlex.join(["exec", "env", *variables, *remote])
    last = f"cd {shlex.quote(directory)} && {words}"
    return ["ssh", *settings, *(options.words if options else ()), "-T", "--", host, last]


def remote_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ`, where the modules are, and the settings of collectives; nothing else of ours."""
    ours = {name: os.environ[name] for name in ("PYTHONPATH", *EQUAL_VARIABLES) if os.environ.get(name)}
    return {**environ, "PYTHONUNBUFFERED": "1", **ours}
