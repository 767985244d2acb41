"""A Dockerfile as instructions, and rules for it in the manner of hadolint."""

import json
import re
import shlex
from dataclasses import dataclass

_WORDS = {"FROM", "ENV", "RUN", "WORKDIR", "COPY", "USER", "STOPSIGNAL", "ENTRYPOINT", "CMD"}


@dataclass(frozen=True)
class Instruction:
    word: str
    rest: str


def parse(text: str) -> list[Instruction]:
    """Instructions without comments; lines that end with a backslash are joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines)).splitlines()
    return [Instruction(*line.split(" ", 1)) for line in joined]


def exec_form(instruction: Instruction) -> list[str]:
    words = json.loads(instruction.rest)
    assert isinstance(words, list) and all(isinstance(w, str) for w in words)
    return words


def problems(text: str) -> list[str]:
    """What is wrong, one sentence each."""
    steps = parse(text)
    words = [s.word for s in steps]
    found = [f"{w} is not expected here" for w in words if w not in _WORDS]
    if words[:1] != ["FROM"] or words.count("FROM") != 1:
        found.append("expected one FROM, first")
    found += [p for s in steps for p in _of_step(s)]
    if words[-1] not in ("ENTRYPOINT", "CMD"):
        found.append("the program is not last")
    users = [s.rest for s in steps if s.word == "USER"]
    if not users or not re.fullmatch(r"[1-9][0-9]*:[1-9][0-9]*", users[-1]):
        found.append("the last USER is root, or has no number")
    elif any(s.word in ("RUN", "COPY") for s in steps[words.index("USER") :]):
        found.append("something is written after USER")
    installs = [i for i, s in enumerate(steps) if "pip install" in s.rest]
    code = [i for i, s in enumerate(steps) if s.word == "COPY" and "/app/" in s.rest]
    if not installs or not code or max(installs) > min(code):
        found.append("packages are installed after the program was copied: no caching")
    if installs and "tensorflow" not in steps[installs[0]].rest:
        found.append("the largest layer is not the first")
    return found


def _of_step(step: Instruction) -> list[str]:
    rules = {
        "FROM": _base, "RUN": _run, "WORKDIR": _workdir, "ENTRYPOINT": _program, "CMD": _program,
        "COPY": _copy,
    }  # fmt: skip
    return rules[step.word](step.rest) if step.word in rules else []


def _base(rest: str) -> list[str]:
    image = rest.split(maxsplit=1)[0]
    is_digest = re.search(r"@sha256:[0-9a-f]{64}$", image)
    tag = image.rpartition("/")[2].partition(":")[2]
    return [] if is_digest or (tag and tag != "latest") else ["the base image is not pinned"]


def _run(rest: str) -> list[str]:
    found = []
    if "apt-get install" in rest and "rm -rf /var/lib/apt/lists/*" not in rest:
        found.append("lists of apt stay in the layer")
    if "apt-get install" in rest and "--no-install-recommends" not in rest:
        found.append("apt installs what is only recommended")
    if "sudo" in rest.split() or rest.startswith("cd "):
        found.append("sudo or cd")
    if "pip install" in rest:
        if "--no-cache-dir" not in rest:
            found.append("pip leaves its cache in the layer")
        for word in _requirements(rest):
            if not (word.startswith(("/", "https://", "git+")) or "==" in word):
                found.append(f"{word} has no version")
    return found


def _requirements(rest: str) -> list[str]:
    words, skip = [], False
    for word in shlex.split(rest.partition("pip install")[2].partition("&&")[0]):
        if skip:
            skip = False
        elif word in ("--requirement", "--constraint"):
            skip = True
        elif not word.startswith("-"):
            words.append(word)
    return words


def _workdir(rest: str) -> list[str]:
    return [] if rest.startswith("/") else ["WORKDIR is not absolute"]


def _program(rest: str) -> list[str]:
    return [] if rest.startswith("[") else ["a shell stands between the platform's signals and Python"]


def _copy(rest: str) -> list[str]:
    *sources, target = rest.split()
    found = [f"{s} is outside the directory" for s in sources if s.startswith(("/", "..", "http"))]
    if len(sources) > 1 and not target.endswith("/"):
        found.append("several files are copied to what is no directory")
    return found
