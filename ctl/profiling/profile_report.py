"""Report of `ctl profile`: time of a step by part, with advice. Does not import TensorFlow."""

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PROFILE_VARIABLE = "CTL_PROFILE"  # path of a JSON file, or NO_PATH
NO_PATH = "-"
_MIN_SHARE = 0.1  # of a step: smaller parts are not worth a change


def requested(environ: Mapping[str, str] = os.environ) -> str | None:
    """Returns the path of the JSON file, "" for a report without one, or None if no report is requested."""
    path = environ.get(PROFILE_VARIABLE)
    return "" if path == NO_PATH else path or None


@dataclass(frozen=True)
class WorkerTimes:
    """Timers of one worker, averages per step (seconds).

    Attributes:
      graph_call: Time in graph calls.
      host: Time in Python between graph calls.
      communication: Time between local gradients and their sum, part of `graph_call`; NaN if unknown.
      input_wait: Time until the next batch is available, part of `graph_call`; NaN if unknown.
    """

    graph_call: float
    host: float
    communication: float = math.nan
    input_wait: float = math.nan

    @property
    def is_complete(self) -> bool:
        """False without timers in the graph, as with deterministic operations."""
        return not math.isnan(self.communication + self.input_wait)

    @property
    def computing(self) -> float:
        """Time in graph calls without input and communication; NaN if these are unknown."""
        secs = self.graph_call - self.input_wait - self.communication
        return max(0.0, secs) if self.is_complete else math.nan


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """Average times of a step (seconds), and the settings that the advice depends on.

    Attributes:
      step: Completed steps at the end of the measurement.
      times: Timers of each worker.
      steps_per_loop: Steps of the longest graph call.
      can_send_16_bits: `wire_dtype` has an effect, and is not set.
      sync_every: Its value, or None if it cannot be set.
      in_memory: The examples are arrays, and each batch gathers its rows.
      one_save: Median time of a save, 0 if none was measured.
      save_every: Steps between two saves, None without saves.
    """

    model: str
    step: int
    replicas: int
    global_batch_size: int
    times: tuple[WorkerTimes, ...]
    steps_per_loop: int
    can_send_16_bits: bool = False
    jit_compile: bool = False
    sync_every: int | None = None
    in_memory: bool = False
    one_save: float = 0.0
    save_every: float | None = None

    @property
    def slowest(self) -> int:
        """Index of the slowest worker, which the others wait for in the sum of the gradients."""
        return min(range(len(self.times)), key=lambda i: self.times[i].communication)

    @property
    def saving(self) -> float:
        """Time of a save divided by the number of steps between two saves."""
        return self.one_save / self.save_every if self.save_every else 0.0

    @property
    def step_secs(self) -> float:
        """Time of a step with host and saving."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Returns the time of each part, on the slowest worker."""
        times = self.times[self.slowest]
        if times.is_complete:
            parts = {"waiting for input": times.input_wait, "computing": times.computing}
            if self.replicas > 1:
                parts["communicating"] = times.communication
        else:
            parts = {"graph calls": times.graph_call}
        parts["host"] = times.host
        return {**parts, "saving": self.saving} if self.saving else parts

    def as_json(self) -> dict[str, Any]:
        """Returns the times, the parts and the advice as JSON values."""
        fields = dataclasses.asdict(self)
        for times in fields["times"]:
            times.update({name: None for name, secs in times.items() if math.isnan(secs)})
        results = {"slowest": self.slowest, "parts": self.parts(), "step_secs": self.step_secs}
        return {**fields, "workers": len(self.times), **results, "advice": advice(self)}


def profile_text(profile: StepProfile) -> str:
    """Returns the table of parts, the table of workers if there are several, and the advice."""
    counts = [(len(profile.times), "workers"), (profile.replicas, "replicas")]
    several = "".join(f"{count} {name}, " for count, name in counts if count > 1)
    lines = [
        f"ctl profile: {profile.model} at step {profile.step}; {several}"
        f"global batch {profile.global_batch_size}",
        f"  {'':<18}  ms a step  share",
    ]
    for name, secs in [*profile.parts().items(), ("all", profile.step_secs)]:
        share = 100 * secs / profile.step_secs
        line = f"  {name:<18}  {secs * 1e3:>9.3f}  {share:>3.0f} %  {_remark(profile, name)}"
        lines.append(line.rstrip())
    if len(profile.times) > 1:
        lines += _worker_lines(profile)
    return "\n".join([*lines, advice(profile)])


def _remark(profile: StepProfile, name: str) -> str:
    if name == "saving" and profile.save_every:
        return f"  {profile.one_save * 1e3:.0f} ms every {profile.save_every:.0f} steps"
    if name == "graph calls":
        parts = "input, computing and communication" if profile.replicas > 1 else "input and computing"
        return f"  {parts}, which cannot be measured separately here"
    return ""


def _worker_lines(profile: StepProfile) -> list[str]:
    """Returns the times of each worker (milliseconds per step)."""
    lines = [f"  {'':<18}  {'input':>9}  {'computing':>9}  {'communicating':>13}  {'host':>9}"]
    for index, times in enumerate(profile.times):
        name = f"worker {index}{', slowest' if index == profile.slowest and times.is_complete else ''}"
        line = f"  {name:<18}  {_milliseconds(times.input_wait, 9)}  {_milliseconds(times.computing, 9)}"
        line += f"  {_milliseconds(times.communication, 13)}  {_milliseconds(times.host, 9)}"
        lines.append(line)
    return lines


def _milliseconds(secs: float, width: int) -> str:
    return f"{'-':>{width}}" if math.isnan(secs) else f"{secs * 1e3:>{width}.3f}"


def advice(profile: StepProfile) -> str:
    """Returns one sentence: the part that is worth a change, and settings that shorten it."""
    parts = profile.parts()
    parts.pop("computing", parts.pop("graph calls", 0.0))
    name = max(parts, key=lambda n: parts[n])
    share = parts[name] / profile.step_secs
    if share < _MIN_SHARE:
        return _computing_advice(profile)
    proposal = {
        "waiting for input": _input_advice,
        "communicating": _communication_advice,
        "host": _host_advice,
        "saving": _saving_advice,
    }[name](profile, parts[name])
    subject = {"host": "Python between graph calls", "communicating": "Communication"}.get(
        name, name.capitalize()
    )
    return f"{subject} is {100 * share:.0f} % of a step: {proposal}."


def _speedup(profile: StepProfile, saved_secs: float) -> str:
    """Returns the speed of steps that take `saved_secs` less, relative to the measured speed."""
    return f"about {profile.step_secs / max(profile.step_secs - saved_secs, 1e-9):.2f} x as fast"


def _input_advice(profile: StepProfile, secs: float) -> str:
    if profile.in_memory:
        program = (
            "" if profile.replicas > 1 else ", or --jit_compile=loop, which gathers them in the program"
        )
        return (
            "the rows of each batch are gathered from arrays in memory; try smaller types (uint8 images, "
            f"converted in the step){program}; without the wait, steps are {_speedup(profile, secs)}"
        )
    return (
        "try more readers (num_parallel_calls=tf.data.AUTOTUNE in map and interleave), cache() or a larger "
        f"prefetch(); without the wait, steps are {_speedup(profile, secs)}"
    )


def _communication_advice(profile: StepProfile, secs: float) -> str:
    batch_size = 2 * profile.global_batch_size
    gain = 2 * profile.step_secs / (2 * profile.step_secs - secs)
    proposals = [
        f"a global batch of {batch_size} (with accumulate_steps=2 where memory is short) brings about "
        f"{gain:.2f} x the examples per second"
    ]
    if profile.sync_every == 1:
        speedup = _speedup(profile, secs * 15 / 16)
        proposals.append(f"--sync_every=16, which changes the numbers, makes steps {speedup}")
    if profile.can_send_16_bits:
        proposals.append("wire_dtype='bfloat16' sends half of the bytes")
    return "; ".join(proposals)


def _host_advice(profile: StepProfile, secs: float) -> str:
    if profile.steps_per_loop > 1:
        return (
            "log less often (--log_every_steps), and check after_loop and callbacks; without it, steps are "
            f"{_speedup(profile, secs)}"
        )
    return f"with --steps_per_loop=10 steps are {_speedup(profile, 0.9 * secs)}"


def _saving_advice(profile: StepProfile, secs: float) -> str:
    return (
        f"with --save_every_steps={2 * round(profile.save_every or 1)} steps are "
        f"{_speedup(profile, secs / 2)}, and --background_save writes files during training"
    )


def _computing_advice(profile: StepProfile) -> str:
    """Returns the advice for steps in which no other part is worth a change."""
    parts, step_secs = profile.parts(), profile.step_secs
    if "graph calls" in parts:
        share = 100 * parts["graph calls"] / step_secs
        return f"Graph calls are {share:.0f} % of a step: host and saving are no bottleneck."
    text = f"Computing is {100 * parts['computing'] / step_secs:.0f} % of a step"
    if profile.replicas > 1:
        text += f" and communication {100 * parts['communicating'] / step_secs:.0f} %, no bottleneck"
    gain = step_secs / (step_secs - parts["computing"] / 2)
    compilation = "" if profile.jit_compile else "--jit_compile=step, "
    return (
        f"{text}: twice as many replicas are at most {gain:.2f} x as fast; else try {compilation}mixed "
        "precision, or a smaller model."
    )
