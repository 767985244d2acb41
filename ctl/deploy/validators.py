"""Forms of words that platforms ask for: names, images, quantities, variables, durations, buckets.

Each takes a text and returns what it means, or raises UsageError: what came, what was expected.
"""

import re
from collections.abc import Sequence

from ctl.deploy import secret_words
from ctl.errors import UsageError
from ctl.io.console import quoted

_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
# words of examples, which stand for something to fill in
_BLANK = (
    r"(?:PROJECT(?:_ID|_NUMBER)?|BUCKET(?:_NAME)?|REGION|LOCATION|REPO(?:SITORY)?|IMAGE|TAG|NUMBER|EMAIL"
    r"|YOUR_[A-Z_]+)"
)
_HOST = rf"(?:(?:[a-z0-9-]+|{_BLANK})(?:[.-](?:[a-z0-9-]+|{_BLANK}))*)(?::[0-9]{{1,5}})?"
_IMAGE = re.compile(
    rf"(?:{_HOST}/)?(?:{_PART}|{_BLANK})(?:/(?:{_PART}|{_BLANK}))*"
    rf"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{{0,127}}))?(?:@(?P<digest>sha256:[0-9a-f]{{64}}))?"
)
_BUCKET = re.compile(rf"gs://(?:[a-z0-9][a-z0-9._-]{{1,61}}[a-z0-9]|{_BLANK})(?:/[^\s?#]*)?")
_SECS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
# what tells one process from another; the same value in all would make them one
WHO_AM_I = frozenset(
    ("TF_CONFIG", "CLUSTER_SPEC", "CTL_WORKERS", "CTL_TASK_INDEX", "CTL_EVALUATOR", "CTL_HVD_WORKER")
)
_MOST_VARIABLES = 100  # of Vertex AI's ContainerSpec; a manifest with more is no pleasure anywhere


def image(text: str, option: str = "--image") -> str:
    """An image with a tag or a digest, such as us-docker.pkg.dev/p/repo/flowers:1."""
    found = _IMAGE.fullmatch(text)
    if not found:
        raise UsageError(
            f"{option}={quoted(text)} is no image; expected HOST/PROJECT/REPOSITORY/NAME:TAG in lower "
            "case, such as us-central1-docker.pkg.dev/my-project/flower-app/flowers:1"
        )
    if found["tag"] in (None, "latest") and found["digest"] is None:
        came = "the tag latest" if found["tag"] else "no tag"
        raise UsageError(
            f"{option}={quoted(text)} has {came}, so a worker that starts later could run other code; "
            "expected a tag of its own or a digest, such as …/flowers:1"
        )
    return text


def version(option: str, text: str) -> tuple[int, ...]:
    """A version such as 2.21.0 as numbers."""
    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,4}){1,2}", text):
        raise UsageError(f"{option}={quoted(text)} is no version; expected numbers such as 2.21.0")
    return tuple(int(part) for part in text.split("."))


def blanks(texts: Sequence[str]) -> list[str]:
    """Words of examples such as PROJECT and BUCKET, which somebody has to fill in, each once."""
    word = re.compile(rf"(?<![A-Za-z0-9_]){_BLANK}(?![A-Za-z0-9_])")
    return list(dict.fromkeys(found for text in texts for found in word.findall(text)))


def label_name(option: str, text: str, most: int) -> str:
    """A DNS label that begins with a letter, of at most `most` characters."""
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", text) or len(text) > most:
        raise UsageError(
            f"{option}={quoted(text)} cannot be a name there; expected lower-case letters, digits and "
            f"hyphens, a letter first, at most {most} characters, such as flowers-1"
        )
    return text


def variables(given: Sequence[str], platform: str) -> dict[str, str]:
    """NAME=VALUE words as a dictionary; secrets, doubles and who a process is are refused."""
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(
                f"--env={quoted(name if equals else text)} is no variable; expected NAME=VALUE, such as "
                "TF_CPP_MIN_LOG_LEVEL=1"
            )
        if name in found:
            raise UsageError(f"--env={name} came twice; expected one value for each variable")
        if name in WHO_AM_I:
            raise UsageError(
                f"--env={name} says which process one is, and that is set by the platform or by ctl; leave "
                "it out, or each worker would take itself for the same one"
            )
        secret_words.refuse_variable(name, value, platform)
        found[name] = value
    if len(found) > _MOST_VARIABLES:
        raise UsageError(
            f"{len(found)} variables came with --env; expected at most {_MOST_VARIABLES}. Put them into a "
            "file of the image"
        )
    return found


def bucket(option: str, text: str) -> str:
    """A place in Cloud Storage, gs://bucket/path."""
    if not _BUCKET.fullmatch(text):
        raise UsageError(
            f"{option}={quoted(text)} is no place in Cloud Storage; expected gs://BUCKET/PATH, such as "
            "gs://my-bucket/flowers"
        )
    return text


def seconds(option: str, text: str) -> int:
    """A duration such as 90m, 24h or 3600s, in whole seconds."""
    found = re.fullmatch(r"([0-9]{1,9})([smhd])", text)
    if not found or int(found[1]) == 0:
        raise UsageError(
            f"{option}={quoted(text)} is no duration; expected a number above 0 and s, m, h or d, such as "
            "24h"
        )
    return int(found[1]) * _SECS[found[2]]
