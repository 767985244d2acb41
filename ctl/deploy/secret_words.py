"""What must not get into a file that people keep and share: passwords, tokens, keys.

Names decide, and a few forms of values. A message repeats the name, never the value.
"""

import re
from collections.abc import Sequence

from ctl.distribute import job_fingerprint
from ctl.errors import UsageError

# a password in any URL; in those of the web also a name alone, since tokens are given as one
_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s:@]*:[^/\s@]+@|\bhttps?://[^/\s@?#]+@", re.IGNORECASE)
_VALUES = re.compile(
    r"-----BEGIN|\bAKIA[0-9A-Z]{16}\b|\bAIza[\w-]{35}|\bgh[pousr]_\w{36}|\bgithub_pat_\w{22}"
    r"|\bhf_\w{30}|\bya29\.\w|(?<![\w-])sk-(?=[\w-]*[0-9])[\w-]{16,}|\bxox[a-z]-[\w-]{10,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{4,}\.[\w-]{4,}|(AccountKey|SharedAccessKey|SharedAccessSignature)=\S"
    r'|"private_key"'
)
_GIVEN = re.compile(r"(?:^|[\s;&'\"])-{0,2}([A-Za-z][\w.-]*)=([^\s;&]+)")
_CURES = {
    "kubernetes": "keep it in a Secret and write --env_from_secret=NAME=secret:key",
    "vertex": "keep it in Secret Manager and let the program read it there, as the job's --service_account",
    "docker": "give it when the container starts, from the platform's store of secrets",
    "slurm": "keep it in a file that only you can read, and give the program its path",
}


def refuse_in_program(program: Sequence[str], platform: str) -> None:
    """UsageError when a word of the program gives a value to what looks like a secret."""
    for i, word in enumerate(program):
        refuse_in_value("the program", word, platform)
        for name, _ in _GIVEN.findall(word):
            is_variable = not word.startswith("-") and name.upper() == name
            if job_fingerprint.looks_secret(name, of_variable=is_variable):
                _refuse(name, "the program", platform)
        following = program[i + 1] if i + 1 < len(program) else "-"
        bare = word.lstrip("-")
        is_given = word.startswith("--") and "=" not in word and not following.startswith("-")
        if is_given and job_fingerprint.looks_secret(bare):
            _refuse(bare, "the program", platform)


def refuse_in_options(words: Sequence[str], platform: str) -> None:
    """UsageError when an option has a secret in it; for names such as `--label=password=…` as well."""
    option = ""
    for word in words:
        value = word
        if word.startswith("--"):
            option, _, value = word.partition("=")
        refuse_in_value(option or "the line", value, platform)
        name, equals, _ = value.partition("=")
        names_a_secret = option not in ("--env", "--env_from_secret")  # which have their own messages
        if equals and names_a_secret and job_fingerprint.looks_secret(name):
            _refuse(name, option or "the line", platform)


def refuse_variable(name: str, value: str, platform: str) -> None:
    """UsageError when an environment variable has the name or the value of a secret."""
    if job_fingerprint.looks_secret(name, of_variable=True):
        _refuse(name, "--env", platform)
    refuse_in_value(f"--env={name}", value, platform)


def refuse_in_value(where: str, value: str, platform: str) -> None:
    """UsageError for a URL with a password in it, and for the well-known forms of keys."""
    if _URL.search(value):
        raise UsageError(
            f"{where} has a URL with a password or a user in it; expected one without, since the file can "
            f"be read by others. Instead, {_CURES[platform]}"
        )
    if _VALUES.search(value):
        raise UsageError(
            f"{where} has what looks like a key or a token; expected none, since the file can be read by "
            f"others. Instead, {_CURES[platform]}"
        )


def _refuse(name: str, where: str, platform: str) -> None:
    raise UsageError(
        f"{where} gives a value to {name}, which looks like a secret; expected none, since the file can be "
        f"read by others. Instead, {_CURES[platform]}"
    )
