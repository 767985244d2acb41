"""Progress of a job: the step of its newest complete checkpoint, determined without TensorFlow.

newest_step("/tmp/mnist")      -> 500, or None
"""

import json
import re
from pathlib import Path

_CHECKPOINT = re.compile(r"ckpt-(0|[1-9][0-9]{0,17})", re.ASCII)


def flag_value(flag: str, command: list[str]) -> str | None:
    """Returns the value of the last `--flag` of a command, with `=` or as the next argument, or None."""
    value, pattern = None, re.compile(rf"--?{flag}(?:=(.*))?", re.DOTALL)
    for argument, next_argument in zip(command, [*command[1:], None], strict=True):
        match = pattern.fullmatch(argument)
        if match:
            value = next_argument if match[1] is None else match[1]
    return value


def local_model_dir(command: list[str]) -> Path | None:
    """Returns the --model_dir of a command if it is a local path, else None."""
    model_dir = flag_value("model_dir", command)
    return Path(model_dir) if model_dir and "://" not in model_dir else None


def newest_step(model_dir: str | Path | None) -> int | None:
    """Returns the highest step with a matching manifest, or None without checkpoints or a directory."""
    if model_dir is None:
        return None
    try:
        names = [p.name for p in (Path(model_dir) / "checkpoints").iterdir()]
    except (OSError, ValueError):
        return None
    steps = sorted((int(m[1]) for m in map(_CHECKPOINT.fullmatch, names) if m), reverse=True)
    for step in steps:
        manifest = Path(model_dir) / "checkpoints" / f"ckpt-{step}" / "manifest.json"
        try:
            content = json.loads(manifest.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(content, dict) and content.get("step") == step:
            return step
    return None
