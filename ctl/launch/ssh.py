"""The command line that starts a worker on another machine: a list of words, no shell on our side.

    line(["python", "train.py"], host="host2", environ={"TF_CONFIG": "..."}, directory="/work")

ssh hands its last word to the login shell over there. That word is quoted, goes to the same directory,
sets what the worker has to know and runs the command under `ctl.launch.remote`.
"""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

EXIT_UNREACHABLE = 255  # ssh's own: the host cannot be reached, or not any more

_OPTIONS = {
    "BatchMode": "yes",  # nobody is there to type a password
    "StrictHostKeyChecking": "yes",
    "ConnectTimeout": "15",
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "6",
}


@dataclass(frozen=True)
class Door:
    """How ssh gets in, where it is not as ~/.ssh/config has it: a port, the file of a private key."""

    port: int | None = None
    identity: str | None = None

    @property
    def words(self) -> list[str]:
        """Options of ssh."""
        port = ["-p", str(self.port)] if self.port else []
        return [*port, *(["-i", self.identity] if self.identity else [])]


def line(
    command: Sequence[str], *, host: str, environ: Mapping[str, str], directory: str,
    door: Door | None = None, is_told_more: bool = False,
) -> list[str]:  # fmt: skip
    """The words that run `command` on `host`.

    Args:
      host: "host" or "user@host", checked by `ctl.launch.hosts`.
      environ: passed on in these words; anybody on that machine can read it while the worker runs.
      directory: to work in, the same path over there, as is that of this interpreter.
      is_told_more: the first line of the input will be JSON with more of the environment.
    """
    options = [word for key, value in _OPTIONS.items() for word in ("-o", f"{key}={value}")]
    options += door.words if door else []
    settings = [f"{key}={value}" for key, value in environ.items()]
    more = ["--environ"] if is_told_more else []
    watched = [sys.executable, "-m", "ctl.launch.remote", *more, "--", *command]
    words = shlex.join(["exec", "env", *settings, *watched])
    return ["ssh", *options, "-T", "--", host, f"cd {shlex.quote(directory)} && {words}"]


def passed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """What a remote worker gets beside its own place: where its modules are, and nothing else."""
    path = os.environ.get("PYTHONPATH")
    return {**environ, "PYTHONUNBUFFERED": "1", **({"PYTHONPATH": path} if path else {})}
