"""Checks of parameter servers and of the program's --strategy, shared by Vertex AI and Kubernetes."""

from ctl.deploy.args import CommandLine
from ctl.errors import UsageError

GPU_IMAGE = "the image requires the CUDA libraries, which `ctl deploy docker --gpu` installs"
_ONE_PROCESS = ("default", "one_device", "mirrored", "central_storage")


def check_parameter_servers(line: CommandLine) -> None:
    """Raises UsageError if there are parameter servers but only a chief, which does not train then."""
    if line.options.ps and line.options.workers < 2:
        raise UsageError(
            "--ps requires a worker besides the chief, which does not train; expected --workers=2 or more"
        )


def program_warnings(line: CommandLine, fix: str) -> list[str]:
    """Returns warnings for a missing program and an unsuitable --strategy.

    Args:
      line: The command line.
      fix: Options that create parameter servers, for the message.
    """
    ps, workers, strategy = line.options.ps, line.options.workers, line.flag("strategy")
    program, warnings = f"the program has --strategy={strategy}", []
    if ps and strategy not in (None, "auto", "parameter_server"):
        warnings.append(f"{program}, which does not use the parameter servers of --ps={ps}")
    if not ps and strategy == "parameter_server":
        warnings.append(f"{program}, but there are no parameter servers; add {fix}")
    if workers > 1 and strategy in _ONE_PROCESS:
        warnings.append(f"{program}, so each of the {workers} workers would train alone")
    if not line.program:
        warnings.append("no program was given after `--`; the ENTRYPOINT and CMD of the image are used")
    return warnings
