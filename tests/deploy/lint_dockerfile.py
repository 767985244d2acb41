"""A Dockerfile as instructions, and rules for it in the manner of hadolint."""

import json
import re
import shlex
from dataclasses import dataclass

_WORDS = {"FROM", "ENV", "RUN", "WORKDIR", "COPY", "USER", "STOPSIGNAL", "ENTRYPOINT", "CMD"}


@dataclass(frozen=True)
class Instruction:
    keyword: str
    arguments: str


def parse(text: str) -> list[Instruction]:
    """Instructions without comments; lines that end with a backslash are joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines)).splitlines()
    return [Instruction(*line.split(" ", 1)) for line in joined]


def exec_form(instruction: Instruction) -> list[str]:
    command = json.loads(instruction.arguments)
    assert isinstance(command, list) and all(isinstance(w, str) for w in command)
    return command


def problems(text: str) -> list[str]:
    """Returns the problems of a Dockerfile, one sentence each."""
    steps = parse(text)
    keywords = [s.keyword for s in steps]
    messages = [f"{w} is not expected here" for w in keywords if w not in _WORDS]
    if keywords[:1] != ["FROM"] or keywords.count("FROM") != 1:
        messages.append("expected one FROM, first")
    messages += [p for s in steps for p in _of_step(s)]
    if keywords[-1] not in ("ENTRYPOINT", "CMD"):
        messages.append("the program is not last")
    users = [s.arguments for s in steps if s.keyword == "USER"]
    if not users or not re.fullmatch(r"[1-9][0-9]*:[1-9][0-9]*", users[-1]):
        messages.append("the last USER is root, or has no number")
    elif any(s.keyword in ("RUN", "COPY") for s in steps[keywords.index("USER") :]):
        messages.append("something is written after USER")
    installs = [i for i, s in enumerate(steps) if "pip install" in s.arguments]
    code = [i for i, s in enumerate(steps) if s.keyword == "COPY" and "/app/" in s.arguments]
    if not installs or not code or max(installs) > min(code):
        messages.append("packages are installed after the program was copied: no caching")
    if installs and "tensorflow" not in steps[installs[0]].arguments:
        messages.append("the largest layer is not the first")
    return messages


def _of_step(step: Instruction) -> list[str]:
    rules = {
        "FROM": _base, "RUN": _run, "WORKDIR": _workdir, "ENTRYPOINT": _program, "CMD": _program,
        "COPY": _copy,
    }  # fmt: skip
    return rules[step.keyword](step.arguments) if step.keyword in rules else []


def _base(arguments: str) -> list[str]:
    image = arguments.split(maxsplit=1)[0]
    is_digest = re.search(r"@sha256:[0-9a-f]{64}$", image)
    tag = image.rpartition("/")[2].partition(":")[2]
    return [] if is_digest or (tag and tag != "latest") else ["the base image is not pinned"]


def _run(arguments: str) -> list[str]:
    messages = []
    if "apt-get install" in arguments and "rm -rf /var/lib/apt/lists/*" not in arguments:
        messages.append("lists of apt stay in the layer")
    if "apt-get install" in arguments and "--no-install-recommends" not in arguments:
        messages.append("apt installs what is only recommended")
    if "sudo" in arguments.split() or arguments.startswith("cd "):
        messages.append("sudo or cd")
    if "pip install" in arguments:
        if "--no-cache-dir" not in arguments:
            messages.append("pip leaves its cache in the layer")
        for requirement in _requirements(arguments):
            if not (requirement.startswith(("/", "https://", "git+")) or "==" in requirement):
                messages.append(f"{requirement} has no version")
    return messages


def _requirements(arguments: str) -> list[str]:
    requirements, skip = [], False
    for argument in shlex.split(arguments.partition("pip install")[2].partition("&&")[0]):
        if skip:
            skip = False
        elif argument in ("--requirement", "--constraint"):
            skip = True
        elif not argument.startswith("-"):
            requirements.append(argument)
    return requirements


def _workdir(arguments: str) -> list[str]:
    return [] if arguments.startswith("/") else ["WORKDIR is not absolute"]


def _program(arguments: str) -> list[str]:
    return [] if arguments.startswith("[") else ["a shell stands between the platform's signals and Python"]


def _copy(arguments: str) -> list[str]:
    *sources, target = arguments.split()
    messages = [f"{s} is outside the directory" for s in sources if s.startswith(("/", "..", "http"))]
    if len(sources) > 1 and not target.endswith("/"):
        messages.append("several files are copied to what is no directory")
    return messages
