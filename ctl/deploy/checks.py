"""Checks that Vertex AI and Kubernetes share: parameter servers, and the program's --strategy."""

from ctl.deploy.args import CommandLine
from ctl.errors import UsageError

GPU_IMAGE = "the image needs the CUDA libraries: `ctl deploy docker --gpu` puts them in"
_ONE_PROCESS = ("default", "one_device", "mirrored", "central_storage")


def check_parameter_servers(line: CommandLine) -> None:
    """UsageError when there are parameter servers and nobody who trains."""
    if line.options.ps and line.options.workers < 2:
        raise UsageError(
            "--ps came with the chief alone, which does not train; expected --workers=2 or more"
        )


def program_warnings(line: CommandLine, cure: str) -> list[str]:
    """A program that is missing, and a --strategy that does not fit; `cure` makes parameter servers."""
    ps, workers, name = line.options.ps, line.options.workers, line.flag("strategy")
    program, found = f"the program has --strategy={name}", []
    if ps and name not in (None, "auto", "parameter_server"):
        found.append(f"{program}, which has no use for parameter servers, but --ps={ps} came")
    if not ps and name == "parameter_server":
        found.append(f"{program}, but there are none: give {cure}")
    if workers > 1 and name in _ONE_PROCESS:
        found.append(f"{program}, so {workers} workers would each train alone")
    if not line.program:
        found.append("no program came after `--`: the image's own runs, with the flags it has there")
    return found
