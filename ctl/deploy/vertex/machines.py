"""Which GPUs go with which machine types of Vertex AI training, and how many.

From "Configure compute resources for custom training", read 2026-11; the service may know more.
"""

import re
from dataclasses import dataclass

from ctl.errors import UsageError
from ctl.io.console import quoted

# Machine types that have their GPUs built in -> the GPU, and how many
_BUILT_IN = {
    r"a2-highgpu-([1248])g": "NVIDIA_TESLA_A100",
    r"a2-megagpu-(16)g": "NVIDIA_TESLA_A100",
    r"a2-ultragpu-([1248])g": "NVIDIA_A100_80GB",
    r"a3-highgpu-([1248])g": "NVIDIA_H100_80GB",
    r"a3-megagpu-(8)g": "NVIDIA_H100_MEGA_80GB",
    r"a3-ultragpu-(8)g": "NVIDIA_H200_141GB",
    r"a4-highgpu-(8)g": "NVIDIA_B200",
    r"a4x-highgpu-(4)g": "NVIDIA_GB200",
    r"g2-standard-(4|8|12|16|24|32|48|96)": "NVIDIA_L4",
    r"g4-standard-(48|96|192|384)": "NVIDIA_RTX_PRO_6000",
}
_BY_CPUS = {  # of g2 and g4, whose names tell CPUs
    "4": 1,
    "8": 1,
    "12": 1,
    "16": 1,
    "32": 1,
    "24": 2,
    "48": 4,
    "96": 8,
}
_G4_BY_CPUS = {"48": 1, "96": 2, "192": 4, "384": 8}
# For N1: the fewest GPUs for so many CPUs, and the most there are
_ON_N1 = {
    "NVIDIA_TESLA_T4": ({16: 1, 32: 2, 96: 4}, 4),
    "NVIDIA_TESLA_P4": ({16: 1, 32: 2, 96: 4}, 4),
    "NVIDIA_TESLA_P100": ({16: 1, 32: 2, 64: 4}, 4),
    "NVIDIA_TESLA_V100": ({8: 1, 16: 2, 32: 4, 96: 8}, 8),
}
_N1 = re.compile(r"n1-(standard-(?:4|8|16|32|64|96)|highmem-(?:2|4|8|16|32|64|96)|highcpu-(?:16|32|64|96))")
_MACHINE = re.compile(r"[a-z][a-z0-9]*-[a-z]+-?[a-z0-9-]*[a-z0-9]")
KNOWN = (*sorted(_ON_N1), *sorted(set(_BUILT_IN.values())))


@dataclass(frozen=True)
class Machine:
    """A machine type and its GPUs; `gpu` is empty and `count` 0 without."""

    machine_type: str
    gpu: str = ""
    count: int = 0

    def spec(self) -> dict:
        """The MachineSpec of the API."""
        gpus = {"acceleratorType": self.gpu, "acceleratorCount": self.count} if self.count else {}
        return {"machineType": self.machine_type, **gpus}


def read(option: str, machine_type: str, accelerator: str | None) -> Machine:
    """A machine as asked for, with the GPUs that are built in.

    Args:
      option: how the machine type was given, for messages.
      machine_type: such as "n1-standard-8".
      accelerator: TYPE or TYPE:COUNT, or None.

    Raises UsageError for a GPU that Vertex AI does not know, or that this machine cannot have.
    """
    if not _MACHINE.fullmatch(machine_type):
        raise UsageError(
            f"{option}={quoted(machine_type)} is no machine type; expected one such as n1-standard-8"
        )
    built_in = _built_in(machine_type)
    if accelerator is None:
        return built_in or Machine(machine_type)
    gpu, count = _accelerator(accelerator)
    if built_in:
        if (gpu, count) != (built_in.gpu, built_in.count):
            raise UsageError(
                f"--accelerator={gpu}:{count} came with {machine_type}, which has {built_in.gpu}:"
                f"{built_in.count} built in; leave --accelerator out"
            )
        return built_in
    if gpu not in _ON_N1:
        families = sorted({re.split("[(]", p)[0].rstrip("-") for p, g in _BUILT_IN.items() if g == gpu})
        raise UsageError(
            f"--accelerator={gpu} came with {machine_type}; expected a machine type that has it built in, "
            f"of {' or '.join(families)}"
        )
    return Machine(machine_type, gpu, _count_on_n1(machine_type, gpu, count))


def _built_in(machine_type: str) -> Machine | None:
    for pattern, gpu in _BUILT_IN.items():
        found = re.fullmatch(pattern, machine_type)
        if found:
            by_cpus = {"g2": _BY_CPUS, "g4": _G4_BY_CPUS}.get(machine_type[:2])
            return Machine(machine_type, gpu, by_cpus[found[1]] if by_cpus else int(found[1]))
    if re.match(r"(a[234]x?|g[24])-", machine_type):
        raise UsageError(
            f"{quoted(machine_type)} is no machine type that Vertex AI trains on; expected e.g. "
            "a2-highgpu-1g, a3-highgpu-8g or g2-standard-12"
        )
    return None


def _accelerator(text: str) -> tuple[str, int]:
    gpu, _, count = text.partition(":")
    if gpu.startswith("TPU"):
        raise UsageError(
            f"--accelerator={gpu} is a TPU; expected a GPU, since this job is for GPUs and CPUs"
        )
    if gpu not in KNOWN:
        like = [k for k in KNOWN if gpu.upper().replace("-", "_").removeprefix("NVIDIA_") in k and gpu]
        gone = " (K80 is not offered any more)" if "K80" in gpu else ""
        raise UsageError(
            f"--accelerator={quoted(gpu)} is no GPU of Vertex AI{gone}; expected one of "
            f"{', '.join(like or KNOWN)}, with :COUNT"
        )
    if count and not re.fullmatch("[0-9]{1,2}", count):
        raise UsageError(
            f"--accelerator={quoted(text)} has the count {quoted(count)}; expected e.g. {gpu}:2"
        )
    return gpu, int(count or 1)


def _count_on_n1(machine_type: str, gpu: str, count: int) -> int:
    if not _N1.fullmatch(machine_type):
        raise UsageError(
            f"--accelerator={gpu} came with {machine_type}; expected an N1 machine from n1-standard-4, "
            "n1-highmem-2 or n1-highcpu-16 on"
        )
    cpus = int(machine_type.rpartition("-")[2])
    least_for, most = _ON_N1[gpu]
    least = next((n for limit, n in least_for.items() if cpus <= limit), None)
    if least is None or (gpu == "NVIDIA_TESLA_P100" and cpus == 64 and "highcpu" not in machine_type):
        raise UsageError(
            f"--accelerator={gpu} came with {machine_type}, which is too large for it; "
            "expected a smaller machine type"
        )
    allowed = [n for n in (1, 2, 4, 8) if least <= n <= most]
    if count not in allowed:
        raise UsageError(
            f"--accelerator={gpu}:{count} came with {machine_type}; expected a count of "
            f"{' or '.join(map(str, allowed))} there"
        )
    return count
