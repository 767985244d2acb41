"""What looks wrong on every platform and may still be meant.

lint.strategy(asked, ps=0, workers=2, each="pods", cure="--ps=N")
-> ["the program has --strategy=mirrored, so 2 pods would each train alone"]
"""

from ctl.deploy.args import Asked

NO_PROGRAM = "no program came after `--`: the image's own runs, with the flags it has there"
GPU_IMAGE = "the image needs the CUDA libraries: `ctl deploy docker --gpu` puts them in"
_ALONE = ("default", "one_device", "mirrored", "central_storage")


def strategy(asked: Asked, *, ps: int, workers: int, each: str, cure: str) -> list[str]:
    """Where the program's `--strategy` and the machines do not fit.

    Args:
      asked: the line.
      ps: parameter servers.
      workers: processes that train, the chief among them.
      each: what the platform calls their machines.
      cure: options that make parameter servers.
    """
    name, found = asked.flag("strategy"), []
    if ps and name not in (None, "auto", "parameter_server"):
        found.append(
            f"--ps={ps} came, but the program has --strategy={name}, which has no use for parameter servers"
        )
    if not ps and name == "parameter_server":
        found.append(f"the program has --strategy=parameter_server, but there are none: {cure}")
    if workers > 1 and name in _ALONE:
        found.append(f"the program has --strategy={name}, so {workers} {each} would each train alone")
    return found
