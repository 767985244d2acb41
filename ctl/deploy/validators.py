"""Converters of option values. Each takes a string, and returns the value or raises an error.

They check the format only (characters, lengths, required parts). The platform checks the existence of a
machine type, a region or a GPU.
"""

import argparse
import re
from collections.abc import Callable, Sequence

from ctl.errors import UsageError
from ctl.io.console import quoted
from ctl.launch.option_values import whole_number

# Placeholders of examples, which the user has to replace
BLANK = (
    r"(?:PROJECT(?:_ID|_NUMBER)?|BUCKET(?:_NAME)?|REGION|LOCATION|REPO(?:SITORY)?|IMAGE|TAG|NUMBER|EMAIL"
    r"|YOUR_[A-Z_]+)"
)
_PART = rf"(?:[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*|{BLANK})"
_HOST = rf"(?:(?:[a-z0-9-]+|{BLANK})(?:[.-](?:[a-z0-9-]+|{BLANK}))*)(?::[0-9]{{1,5}})?"
_IMAGE = re.compile(
    rf"(?:{_HOST}/)?{_PART}(?:/{_PART})*"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_SECS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
# Variables that identify a process. A common value would give all processes the same identity
IDENTITY_VARIABLES = frozenset(
    ("TF_CONFIG", "CLUSTER_SPEC", "CTL_WORKERS", "CTL_TASK_INDEX", "CTL_EVALUATOR", "CTL_HVD_WORKER")
)
_MAX_VARIABLES = 100  # limit of Vertex AI's ContainerSpec


def form(pattern: str, expected: str, *, hides_value: bool = False) -> Callable[[str], str]:
    """Returns a converter for strings that match `pattern`.

    With `hides_value` an error message repeats only NAME of NAME=VALUE.
    """

    def convert(word: str) -> str:
        if not re.fullmatch(pattern, word):
            came = word.partition("=")[0] if hides_value else word
            raise argparse.ArgumentTypeError(f"{quoted(came)} is {expected}")
        return word

    return convert


def whole_option(least: int, most: int = 10**9) -> Callable[[str], object]:
    """Returns a converter for integers from `least` to `most`."""
    convert = whole_number(least, most)

    def wrapped(word: str) -> object:
        try:
            return convert(word)
        except ValueError as e:
            raise argparse.ArgumentTypeError(f"{quoted(word)} came, {e}") from None

    return wrapped


def image(word: str) -> str:
    """Returns an image name with a tag or a digest, such as us-docker.pkg.dev/p/repo/flowers:1."""
    found = _IMAGE.fullmatch(word)
    if not found:
        raise argparse.ArgumentTypeError(
            f"{quoted(word)} is no image; expected HOST/PROJECT/REPOSITORY/NAME:TAG in lower case, such as "
            "us-central1-docker.pkg.dev/my-project/flower-app/flowers:1"
        )
    if found["tag"] in (None, "latest") and found["digest"] is None:
        came = "the tag latest" if found["tag"] else "no tag"
        raise argparse.ArgumentTypeError(
            f"{quoted(word)} has {came}, so a worker that starts later could run other code; expected a "
            "tag of its own or a digest, such as .../flowers:1"
        )
    return word


def seconds(word: str) -> int:
    """Returns a duration such as 90m, 24h or 3600s (seconds)."""
    found = re.fullmatch(r"([0-9]{1,9})([smhd])", word)
    if not found or int(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{quoted(word)} is no duration; expected e.g. 90m, 24h or 7d")
    return int(found[1]) * _SECS[found[2]]


variable = form(
    r"(?s)[A-Za-z_][A-Za-z0-9_]*=.*",
    "no variable; expected NAME=VALUE, such as TF_CPP_MIN_LOG_LEVEL=1",
    hides_value=True,
)


def blanks(texts: Sequence[str]) -> list[str]:
    """Returns the distinct placeholders of examples in the texts, such as PROJECT and BUCKET."""
    word = re.compile(rf"(?<![A-Za-z0-9_]){BLANK}(?![A-Za-z0-9_])")
    return list(dict.fromkeys(found for text in texts for found in word.findall(text)))


def named_values(option: str, words: Sequence[str]) -> dict[str, str]:
    """Returns NAME=VALUE strings as a dictionary. Raises UsageError for a duplicate name."""
    found: dict[str, str] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name in found:
            raise UsageError(f"{option}={name} came twice; expected one value for each name")
        found[name] = value
    return found


def variables(words: Sequence[str]) -> dict[str, str]:
    """Returns the variables of `--env`. Raises UsageError for variables that identify a process."""
    found = named_values("--env", words)
    for name in IDENTITY_VARIABLES & set(found):
        came = f"--env={name} says which process one is, and is set by the platform or ctl"
        raise UsageError(f"{came}; leave it out, or every process would have the same role and index")
    if len(found) > _MAX_VARIABLES:
        came = f"{len(found)} variables came with --env; expected at most {_MAX_VARIABLES}"
        raise UsageError(f"{came}. Put them into a file of the image")
    return found
