"""What `ctl profile` prints: where the time of a step goes, and what would shorten it; no TensorFlow."""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PROFILE_VARIABLE = "CTL_PROFILE"  # a path for JSON, or NO_PATH
NO_PATH = "-"
_WORTH = 0.1  # share of a step from which a part is worth a change


def requested(environ: Mapping[str, str] = os.environ) -> str | None:
    """The path for JSON that `ctl profile` was given, "" without one; None if nothing is to be measured."""
    found = environ.get(PROFILE_VARIABLE)
    return "" if found == NO_PATH else found or None


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """Seconds of one step, as measured.

    Attributes:
      step: completed steps at the measurement.
      training: of the graph call, as training goes; input_wait: that it waits for its batch.
      cached: the same steps with a batch that is there already.
      alone: the same without any sum over replicas, on the slowest worker; None: not measured.
      fastest: `alone` on the fastest worker.
      sums: the sums alone, nothing beside them; sums_16_bit: in bfloat16.
      compiled: `alone` with jit_compile, where that is off and possible.
      host: Python between two graph calls; saving: its share of a save.
      one_save: a whole save; save_every: steps between two.
      sync_every: as set; None: not possible here.
      in_memory: the examples are arrays, whose rows are gathered for each batch.
    """

    model: str
    step: int
    workers: int
    replicas: int
    global_batch_size: int
    steps_per_loop: int
    wire_dtype: str | None
    jit_compile: bool
    training: float
    input_wait: float
    cached: float
    alone: float | None = None
    fastest: float | None = None
    sums: float | None = None
    sums_16_bit: float | None = None
    compiled: float | None = None
    host: float = 0.0
    one_save: float = 0.0
    save_every: float | None = None
    sync_every: int | None = None
    in_memory: bool = False

    @property
    def saving(self) -> float:
        """Seconds of a save that fall on one step."""
        return self.one_save / self.save_every if self.save_every else 0.0

    @property
    def input(self) -> float:
        """Seconds in which a step waits for its batch."""
        return min(self.input_wait, self.training)

    @property
    def communication(self) -> float:
        """Seconds by which the sums over replicas make a step longer, as a share of what is no input."""
        if self.alone is None or self.alone >= self.cached:
            return 0.0
        return (1.0 - self.alone / self.cached) * (self.training - self.input)

    @property
    def computing(self) -> float:
        """The rest of the graph call."""
        return self.training - self.input - self.communication

    @property
    def hidden(self) -> float | None:
        """The share of the sums that runs while something is computed; None: not known."""
        if not self.sums or self.alone is None:
            return None
        return min(1.0, max(0.0, 1.0 - (self.cached - self.alone) / self.sums))

    @property
    def whole(self) -> float:
        """Seconds of a step with all that belongs to it."""
        return self.training + self.host + self.saving

    def parts(self) -> dict[str, float]:
        """Seconds by part; communication with several replicas only."""
        found = {"waiting for input": self.input, "computing": self.computing}
        if self.replicas > 1:
            found["communicating"] = self.communication
        return {**found, "host": self.host, "saving": self.saving}

    def as_json(self) -> dict[str, Any]:
        """The measurements, the parts and the advice."""
        return {
            **dataclasses.asdict(self),
            "parts": self.parts(),
            "hidden": self.hidden,
            "whole": self.whole,
            "advice": advice(self),
        }


def profile_text(profile: StepProfile) -> str:
    """The table and the sentence."""
    several = f"{profile.replicas} replicas, " if profile.replicas > 1 else ""
    if profile.workers > 1:
        several = f"{profile.workers} workers, {several}"
    lines = [
        f"ctl profile: {profile.model} at step {profile.step}; {several}"
        f"global batch {profile.global_batch_size}",
        f"  {'':<18}  ms a step  share",
    ]
    for name, secs in [*profile.parts().items(), ("all", profile.whole)]:
        share = 100 * secs / profile.whole
        line = f"  {name:<18}  {secs * 1e3:>9.3f}  {share:>3.0f} %  {_remark(profile, name)}"
        lines.append(line.rstrip())
    return "\n".join([*lines, advice(profile)])


def _remark(profile: StepProfile, name: str) -> str:
    if name == "waiting for input":
        return f"  {profile.cached * 1e3:.3f} ms a step in all with the batch at hand"
    if name == "communicating" and profile.alone is None:
        return "  not measured"
    if name == "communicating" and profile.sums and profile.hidden is not None:
        alone = f"{profile.sums * 1e3:.3f} ms alone"
        return f"  {alone}; {100 * profile.hidden:.0f} % hidden behind computing"
    if name == "computing" and profile.alone and profile.fastest:
        late = profile.alone / profile.fastest - 1
        return f"  the slowest worker takes {100 * late:.0f} % longer" if late > _WORTH else ""
    if name == "saving" and profile.save_every:
        return f"  {profile.one_save * 1e3:.0f} ms every {profile.save_every:.0f} steps"
    return ""


def advice(profile: StepProfile) -> str:
    """One sentence: the part that is worth a change, what to try, and what it would bring."""
    parts = profile.parts()
    del parts["computing"]
    name = max(parts, key=lambda n: parts[n])
    share = parts[name] / profile.whole
    if share < _WORTH:
        return _of_computing(profile)
    what = {
        "waiting for input": _of_input,
        "communicating": _of_communication,
        "host": _of_host,
        "saving": _of_saving,
    }[name](profile)
    subject = {"host": "Python between graph calls", "communicating": "Communication"}.get(
        name, name.capitalize()
    )
    return f"{subject} is {100 * share:.0f} % of a step: {what}."


def _faster(profile: StepProfile, saved: float) -> str:
    """How much faster steps come when each is `saved` seconds shorter."""
    return f"about {profile.whole / max(profile.whole - saved, 1e-9):.2f} x as fast"


def _of_input(profile: StepProfile) -> str:
    if profile.in_memory:
        program = (
            "" if profile.replicas > 1 else ", or --jit_compile=loop, which gathers them in the program"
        )
        return (
            "the rows of each batch are gathered from arrays in memory; try smaller types (uint8 images, "
            f"converted in the step){program}; without the wait, steps are "
            f"{_faster(profile, profile.input)}"
        )
    return (
        "try more readers (num_parallel_calls=tf.data.AUTOTUNE in map and interleave), cache() or a larger "
        f"prefetch(); without the wait, steps are {_faster(profile, profile.input)}"
    )


def _of_communication(profile: StepProfile) -> str:
    batch = 2 * profile.global_batch_size
    gain = 2 * profile.whole / (2 * profile.whole - profile.communication)
    larger = (
        f"a global batch of {batch} (with accumulate_steps=2 where memory is short) brings about "
        f"{gain:.2f} x the examples per second"
    )
    if profile.sync_every == 1:
        gain_16 = _faster(profile, profile.communication * 15 / 16)
        larger += f"; --sync_every=16, which changes the numbers, makes steps {gain_16}"
    if profile.wire_dtype or not (profile.sums and profile.sums_16_bit):
        return larger
    saved = min(profile.communication, profile.sums - profile.sums_16_bit)
    if saved < 0.02 * profile.whole:
        return f"wire_dtype='bfloat16' brings next to nothing, and {larger}"
    return f"with wire_dtype='bfloat16' steps are {_faster(profile, saved)}, and {larger}"


def _of_host(profile: StepProfile) -> str:
    if profile.steps_per_loop > 1:
        return (
            "log more rarely (--log_every_steps), and look at after_loop and callbacks; without it, steps "
            f"are {_faster(profile, profile.host)}"
        )
    return f"with --steps_per_loop=10 steps are {_faster(profile, 0.9 * profile.host)}"


def _of_saving(profile: StepProfile) -> str:
    return (
        f"with --save_every_steps={2 * round(profile.save_every or 1)} steps are "
        f"{_faster(profile, profile.saving / 2)}, and --background_save writes files during training"
    )


def _of_computing(profile: StepProfile) -> str:
    """Nothing around the computation is worth a change."""
    share = f"Computing is {100 * profile.computing / profile.whole:.0f} % of a step"
    if profile.replicas > 1:
        share = (
            f"{share} and communication {100 * profile.communication / profile.whole:.0f} %, no bottleneck"
        )
    if profile.compiled and profile.alone and profile.alone - profile.compiled > 0.05 * profile.whole:
        gain = _faster(profile, profile.alone - profile.compiled)
        return f"{share}: with --jit_compile steps are {gain}."
    off = " (--jit_compile brings nothing)" if profile.compiled else ""
    half = profile.whole / (profile.whole - profile.computing / 2)
    return (
        f"{share}: twice as many replicas are at most {half:.2f} x as fast; else try mixed precision, or a "
        f"smaller model{off}."
    )
