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


def pattern_option(pattern: str, expected: str, *, hides_value: bool = False) -> Callable[[str], str]:
    """Returns a converter for strings that match `pattern`.

    With `hides_value` an error message repeats only NAME of NAME=VALUE.
    """

    def convert(value: str) -> str:
        if not re.fullmatch(pattern, value):
            shown_value = value.partition("=")[0] if hides_value else value
            raise argparse.ArgumentTypeError(f"{quoted(shown_value)} is {expected}")
        return value

    return convert


range_option = pattern_option("[0-9]{1,4}:[0-9]{1,4}", "not a range; expected MIN:MAX, such as 2:4")


def integer_option(minimum: int, maximum: int = 10**9) -> Callable[[str], object]:
    """Returns a converter for integers from `minimum` to `maximum`."""
    convert = whole_number(minimum, maximum)

    def wrapped(value: str) -> object:
        try:
            return convert(value)
        except ValueError as e:
            raise argparse.ArgumentTypeError(f"received {quoted(value)}; {e}") from None

    return wrapped


def image(name: str) -> str:
    """Returns an image name with a tag or a digest, such as us-docker.pkg.dev/p/repo/flowers:1."""
    match = _IMAGE.fullmatch(name)
    if not match:
        raise argparse.ArgumentTypeError(
            f"{quoted(name)} is not an image; expected HOST/PROJECT/REPOSITORY/NAME:TAG in lower case, "
            "such as "
            "us-central1-docker.pkg.dev/my-project/flower-app/flowers:1"
        )
    if match["tag"] in (None, "latest") and match["digest"] is None:
        problem = "the tag latest" if match["tag"] else "no tag"
        raise argparse.ArgumentTypeError(
            f"{quoted(name)} has {problem}, so a worker that starts later could run other code; expected a "
            "unique tag or a digest, such as .../flowers:1"
        )
    return name


def seconds(duration: str) -> int:
    """Returns a duration such as 90m, 24h or 3600s (seconds)."""
    match = re.fullmatch(r"([0-9]{1,9})([smhd])", duration)
    if not match or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(
            f"{quoted(duration)} is not a duration; expected e.g. 90m, 24h or 7d"
        )
    return int(match[1]) * _SECS[match[2]]


variable = pattern_option(
    r"(?s)[A-Za-z_][A-Za-z0-9_]*=.*",
    "not a variable; expected NAME=VALUE, such as TF_CPP_MIN_LOG_LEVEL=1",
    hides_value=True,
)


def find_placeholders(texts: Sequence[str]) -> list[str]:
    """Returns the distinct placeholders of examples in the texts, such as PROJECT and BUCKET."""
    pattern = re.compile(rf"(?<![A-Za-z0-9_]){BLANK}(?![A-Za-z0-9_])")
    return list(dict.fromkeys(placeholder for text in texts for placeholder in pattern.findall(text)))


def parse_assignments(option: str, assignments: Sequence[str]) -> dict[str, str]:
    """Returns NAME=VALUE strings as a dictionary. Raises UsageError for a duplicate name."""
    value_by_name: dict[str, str] = {}
    for assignment in assignments:
        name, _, value = assignment.partition("=")
        if name in value_by_name:
            raise UsageError(f"{option}={name} was given twice; expected one value per name")
        value_by_name[name] = value
    return value_by_name


def parse_variables(assignments: Sequence[str]) -> dict[str, str]:
    """Returns the variables of `--env`. Raises UsageError for variables that identify a process."""
    value_by_name = parse_assignments("--env", assignments)
    for name in IDENTITY_VARIABLES & set(value_by_name):
        problem = f"--env={name} identifies the process and is set by the platform or ctl"
        raise UsageError(f"{problem}; omit it, because every process would have the same role and index")
    if len(value_by_name) > _MAX_VARIABLES:
        problem = f"{len(value_by_name)} variables were given with --env; expected at most {_MAX_VARIABLES}"
        raise UsageError(f"{problem}. Put them into a file of the image")
    return value_by_name
