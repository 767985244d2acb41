"""Detection of passwords, tokens and keys, which must not be written to shared files.

The detection uses names and a few value formats. A message repeats the name, never the value.
"""

import re
from collections.abc import Sequence

from ctl.distribute import job_fingerprint
from ctl.errors import UsageError

# a password in any URL; in http(s) URLs also a user name alone, since it may be a token
_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s:@]*:[^/\s@]+@|\bhttps?://[^/\s@?#]+@", re.IGNORECASE)
_VALUES = re.compile(
    r"-----BEGIN|\bAKIA[0-9A-Z]{16}\b|\bAIza[\w-]{35}|\bgh[pousr]_\w{36}|\bgithub_pat_\w{22}"
    r"|\bhf_\w{30}|\bya29\.\w|(?<![\w-])sk-(?=[\w-]*[0-9])[\w-]{16,}|\bxox[a-z]-[\w-]{10,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{4,}\.[\w-]{4,}|(AccountKey|SharedAccessKey|SharedAccessSignature)=\S"
    r'|"private_key"'
)
_ASSIGNMENT = re.compile(r"(?:^|[\s;&'\"])-{0,2}([A-Za-z][\w.-]*)=([^\s;&]+)")
_FIXES = {
    "kubernetes": "store it in a Secret and use --env_from_secret=NAME=secret:key",
    "vertex": "store it in Secret Manager, from which the program reads it as the job's --service_account",
    "docker": "pass it at the start of the container from the secret store of the platform",
    "slurm": "store it in a file that only you can read, and pass the path to the program",
}


def refuse_secrets_in_program(program: Sequence[str], platform: str) -> None:
    """Raises UsageError if an argument of the program assigns a value to a name of a secret."""
    for argument, next_argument in zip(program, [*program[1:], "-"], strict=False):
        _check_value("the program", argument, platform)
        for name, _ in _ASSIGNMENT.findall(argument):
            is_variable = not argument.startswith("-") and name.upper() == name
            if job_fingerprint.looks_secret(name, of_variable=is_variable):
                _raise_secret_error(
                    f"the program assigns a value to {name}, which looks like a secret", platform
                )
        name = argument.lstrip("-")
        has_value = argument.startswith("--") and "=" not in argument and not next_argument.startswith("-")
        if has_value and job_fingerprint.looks_secret(name):
            _raise_secret_error(
                f"the program assigns a value to {name}, which looks like a secret", platform
            )


def refuse_secrets_in_options(arguments: Sequence[str], platform: str) -> None:
    """Raises UsageError if an option contains a secret, also in a form such as `--label=password=...`."""
    option = ""
    for argument in arguments:
        value = argument
        if argument.startswith("--"):
            option, _, value = argument.partition("=")
        _check_value(option or "the command line", value, platform)
        name, equals, _ = value.partition("=")
        names_a_secret = job_fingerprint.looks_secret(name, of_variable=option == "--env")
        if equals and names_a_secret and option != "--env_from_secret":
            where = option or "the command line"
            _raise_secret_error(f"{where} assigns a value to {name}, which looks like a secret", platform)


def _check_value(where: str, value: str, platform: str) -> None:
    """Raises UsageError for a URL with a password and for the well-known formats of keys."""
    if _URL.search(value):
        _raise_secret_error(f"{where} has a URL with a password or a user in it", platform)
    if _VALUES.search(value):
        _raise_secret_error(f"{where} has a value that looks like a key or a token", platform)


def _raise_secret_error(problem: str, platform: str) -> None:
    raise UsageError(
        f"{problem}; expected no secret, because other users can read the file. Instead, {_FIXES[platform]}"
    )
