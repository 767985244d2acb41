"""Checks of parameter servers and of the program's --strategy, shared by Vertex AI and Kubernetes."""

from ctl.deploy.args import CommandLine
from ctl.errors import UsageError

GPU_IMAGE = "the image needs the CUDA libraries: `ctl deploy docker --gpu` puts them in"
_ONE_PROCESS = ("default", "one_device", "mirrored", "central_storage")


def check_parameter_servers(line: CommandLine) -> None:
    """Raises UsageError if there are parameter servers but only a chief, which does not train then."""
    if line.options.ps and line.options.workers < 2:
        raise UsageError(
            "--ps came with the chief alone, which does not train; expected --workers=2 or more"
        )


def program_warnings(line: CommandLine, cure: str) -> list[str]:
    """Returns warnings for a missing program and an unsuitable --strategy.

    Args:
      line: The command line.
      cure: Options that create parameter servers, for the message.
    """
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
