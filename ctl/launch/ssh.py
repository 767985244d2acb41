"""The ssh command that connects to another machine, and the classification of ssh's own errors.

    ssh_command("host2", SshOptions(port=2222))

The command line holds two paths, of this interpreter and of `remote_entry.py`, and no text of the user:
login shells such as fish and csh do not quote as sh does, and other users of the machine can read it.
Programs, arguments and variables follow over the connection (`ctl.launch.remote_process`).
"""

import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ctl.collectives.settings import EQUAL_VARIABLES
from ctl.errors import UsageError
from ctl.launch import remote_entry

EXIT_UNREACHABLE = 255  # of ssh itself: it could not connect, or lost the connection

_SSH_SETTINGS = {
    "BatchMode": "yes",  # a password cannot be typed
    "StrictHostKeyChecking": "yes",
    "ConnectTimeout": "15",
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "6",
}
_INHERITED = ("PATH", "PYTHONPATH", *EQUAL_VARIABLES)
_NOT_QUOTABLE = re.compile(r"[\\!\n\r]")  # fish reads backslashes within quotes, csh exclamation marks
_PERMANENT = re.compile(
    r"Permission denied|Host key verification failed|Too many authentication failures"
    r"|Name or service not known|No address associated with hostname|not known"
    r"|Bad configuration option|Bad owner or permissions|no matching .* found|Unable to negotiate"
)
_REFUSED = re.compile(
    r"(kex|ssh)_exchange_identification|Connection (closed|reset) by|Exceeded MaxStartups|banner exchange"
)
_ADVICE = re.compile(r"^(\s*$|Warning:|\*\*|debug\d:|Killed by signal|@)")


@dataclass(frozen=True)
class SshOptions:
    """Settings in addition to ~/.ssh/config: a port, and the file of a private key."""

    port: int | None = None
    identity: str | None = None

    @property
    def arguments(self) -> list[str]:
        """The command-line arguments of ssh."""
        port = ["-p", str(self.port)] if self.port else []
        return [*port, *(["-i", self.identity] if self.identity else [])]


def ssh_command(host: str, options: SshOptions | None = None) -> list[str]:
    """Returns the command that runs `ctl.launch.remote` on a host.

    Args:
      host: "host" or "user@host", checked by `ctl.launch.hosts`.
      options: Port and private key, in addition to ~/.ssh/config.

    Returns:
      The program and its arguments.

    Raises:
      UsageError: A path of this installation contains a character that login shells read differently.
    """
    paths = [sys.executable, os.path.abspath(remote_entry.__file__)]
    for path in paths:
        if _NOT_QUOTABLE.search(path):
            raise UsageError(
                f"the path {path!r} cannot be passed to the login shell of {host}; expected a path without "
                "backslash, exclamation mark and line break. Install the environment elsewhere."
            )
    settings = [argument for key, value in _SSH_SETTINGS.items() for argument in ("-o", f"{key}={value}")]
    arguments = options.arguments if options else ()
    return ["ssh", *settings, *arguments, "-T", "--", host, f"exec {shlex.join(paths)}"]


def remote_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns `environ` with the variables that every remote process inherits from the launcher."""
    inherited = {name: os.environ[name] for name in _INHERITED if os.environ.get(name)}
    return {**inherited, **environ, "PYTHONUNBUFFERED": "1"}


def error_line(text: str) -> str:
    """Returns the last line of stderr with an error, without its full stop, or an empty string."""
    lines = [line.strip() for line in text.splitlines() if not _ADVICE.match(line)]
    return lines[-1][:300].rstrip(".") if lines else ""


def is_permanent(text: str) -> bool:
    """Returns True for an error of ssh that a retry does not correct, such as a wrong key."""
    return bool(_PERMANENT.search(text))


def is_refused(text: str) -> bool:
    """Returns True if sshd closed the connection before the login, as with too many connections."""
    return bool(_REFUSED.search(text))


def installation_paths() -> str:
    """Returns the paths that must exist on every host, for messages."""
    return f"{sys.executable} and {Path(remote_entry.__file__).parent}"
