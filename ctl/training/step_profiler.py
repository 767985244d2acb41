"""What the time of a step goes to, measured once in a training that goes on unchanged (`ctl profile`).

The batch of the next step is taken and the same steps run on it again and again: with the sums over
replicas, without them, compiled. Differences tell what each costs. Then every variable gets its value
back, and the step is made with that batch, by the trace that trains.
"""

import contextlib
import functools
import json
import logging
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.checkpoints import snapshot
from ctl.checkpoints.protocol import NullCheckpoints
from ctl.data import held_batch
from ctl.data.batches import Batches
from ctl.distribute import parameter_servers
from ctl.distribute.engine_all_reduce import wire_dtype_of
from ctl.errors import CtlError
from ctl.io import paths
from ctl.metrics.protocol import SharesLogged, TextLogged
from ctl.step import sum_free
from ctl.supervision import heartbeat
from ctl.training import preparation, profile_report, run_metadata
from ctl.training.graph_loop import StepLoop
from ctl.training.loop_length import LoopTimes
from ctl.training.profile_report import StepProfile
from ctl.training.session import Session
from ctl.training.step_trace import StepTrace
from ctl.training.trainer_protocol import TrainerProtocol

_log = logging.getLogger("ctl")
_CALL_SECS = 0.3  # of one measured call, if a step is shorter
_ROUNDS = 5  # a median of so many
_TRACED_STEPS = 5


def _unmeasured(trainer: TrainerProtocol) -> str:
    """Why steps cannot be measured; empty where they can."""
    if parameter_servers.is_used(trainer.strategy):
        return "measures workers in step, not those of parameter servers."
    if trainer.jit_compile == "loop":
        return "measures single steps, of which --jit_compile=loop has none. Use --jit_compile=step here."
    return ""


def new_trace(trainer: TrainerProtocol, steps: str) -> StepTrace | None:
    """Of `steps`, such as "100:110"; None where there is none to make, or no directory for it."""
    if not (steps and (trainer.log_dir or trainer.model_dir)):
        return None
    where = f"{run_metadata.log_dir(trainer)}/train/plugins/profile"
    return StepTrace(steps, where, f"worker_{trainer.topology.worker_index}")


class StepProfiler:
    """Measures once in a process, where `ctl profile` asks the chief for it; the others take part.

    Attributes:
      times: of the loops so far.
      trace: of the steps after the measurement; None where there is no directory for it.
    """

    def __init__(self, trainer: TrainerProtocol, session: Session):
        self._trainer, self._session, self.times = trainer, session, LoopTimes()
        self.trace: StepTrace | None = None
        self._saves: list[float] = []
        self._first: tuple[int, np.ndarray] | None = None  # step, seconds waited, after the first loop
        self._json = profile_report.requested() if trainer.topology.is_chief else None
        self._waits = self._json is not None and not session.profiled
        if self._waits and (unmeasured := _unmeasured(trainer)):
            self._waits = False
            _log.warning("ctl profile %s", unmeasured)

    def took(self, steps: int, start: float, end: float) -> None:
        """A loop ran, by the clock; not the first one, which compiles."""
        self.times.took(steps, start, end)
        if self._first is None:
            self._first = self._waited()

    def _waited(self) -> tuple[int, np.ndarray]:
        times = self._session.step_times
        return self._session.step, np.full(2, np.nan) if times is None else times.total()

    def _input_wait(self) -> float:
        """Seconds of a step in which it waits for its batch, on the worker that waits longest."""
        (step, total), (first, before) = self._waited(), self._first or self._waited()
        place = self._trainer.topology
        here = np.zeros(place.num_workers)
        here[place.worker_index] = (total - before)[1] / max(1, step - first)
        return float(np.max(self._session.agreement.sum(here)))

    def is_due(self) -> bool:
        """On the chief: enough loops have run; true once."""
        if not self._waits or self.times.typical() is None:
            return False
        self._waits = False
        return True

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Around a save."""
        start = time.perf_counter()
        yield
        self._saves.append(time.perf_counter() - start)

    def close(self) -> None:
        """The run has ended."""
        if self._waits:
            _log.warning(
                "ctl profile: the run ended before there was enough to measure: %s. Give more steps.",
                LoopTimes.ENOUGH,
            )

    def run(self, graph_loop: StepLoop, batches: Batches, packed: tf.Tensor) -> tuple[tf.Tensor, int]:
        """One step of training as `graph_loop.run` makes it, after a measurement with its batch."""
        self._session.profiled = True
        self.trace = None
        taken = held_batch.take(batches, self._session.agreement.sum)
        if taken is None:  # the data have ended
            return graph_loop.run(batches, 1, packed)
        with heartbeat.here.doing(heartbeat.COMPILING), _random_state_kept():
            found = self._measured(held_batch.without_end(batches, taken, self._trainer.strategy))
        if found is not None:
            self.trace = self._new_trace()
            if self._trainer.topology.is_chief:
                self._show(found)
        return graph_loop.run(held_batch.once(batches, taken, self._trainer.strategy), 1, packed)

    def _new_trace(self) -> StepTrace | None:
        first = self._session.step + 1  # after the step that is made next
        if self._trainer.config.profile:
            return None
        return new_trace(self._trainer, f"{first}:{first + _TRACED_STEPS}")

    def _show(self, found: StepProfile) -> None:
        text = profile_report.profile_text(found)
        print(text, flush=True)
        if self.trace is not None:
            print(f"trace of the next {_TRACED_STEPS} steps: {self.trace.path.parent}", flush=True)
        if self._session.running is not None:
            indented = "\n".join(f"    {line}" for line in text.splitlines())
            self._session.running.note(TextLogged(found.step, "ctl profile", indented))
            shares = {name: secs / found.whole for name, secs in found.parts().items()}
            self._session.running.note(SharesLogged(found.step, "time shares", shares))
        if self._json:
            try:
                paths.write_whole(paths.path(self._json), json.dumps(found.as_json(), indent=1) + "\n")
            except OSError as e:
                _log.warning("%s cannot be written (%s); training goes on.", self._json, e.strerror or e)

    def _measured(self, batches: Batches) -> StepProfile | None:
        """All measurements; every variable has its value again afterwards."""
        trainer = self._trainer
        averages = False
        training, host = self.times.typical() or (0.0, 0.0)
        input_wait = self._input_wait()
        training, host, steps = self._chiefs(
            [training, host, max(1, min(self.times.longest, int(_CALL_SECS / max(training, 1e-9))))]
        )
        variants = None
        try:
            variants = Variants(trainer, self._session, batches)
            secs = variants.seconds(int(steps), 1 if training > 2.0 else _ROUNDS)
            one_save = self._one_save()
        except (CtlError, tf.errors.OpError, ValueError) as e:
            if trainer.topology.num_workers > 1:
                raise
            _log.warning("ctl profile cannot measure this step: %s", e)
            return None
        finally:
            if variants is not None:
                variants.restore()
        return StepProfile(
            model=type(trainer).__name__,
            step=self._session.step,
            workers=trainer.topology.num_workers,
            replicas=trainer.topology.num_replicas,
            global_batch_size=trainer.global_batch_size,
            steps_per_loop=int(self.times.longest),
            wire_dtype=trainer.gradients.wire_dtype,
            jit_compile=trainer.jit_compile == "step",
            training=training,
            input_wait=max(0.0, training - secs["cached"]) if math.isnan(input_wait) else input_wait,
            host=host,
            one_save=one_save,
            save_every=self._save_every(batches, training + host),
            sync_every=trainer.config.sync_every if averages else None,
            in_memory=batches.mode == "indexed",
            **secs,
        )

    def _chiefs(self, values: list[float]) -> list[float]:
        """The chief's, on all workers."""
        mine = values if self._trainer.topology.is_chief else [0.0] * len(values)
        return [float(v) for v in self._session.agreement.sum(mine)]

    def _one_save(self) -> float:
        """Seconds of a save: the median of those that were, else of one into a temporary directory."""
        if isinstance(self._session.manager, NullCheckpoints):
            return 0.0
        if not self._saves:
            with tempfile.TemporaryDirectory(prefix="ctl-profile-") as directory, self.saving():
                snapshot.write_plainly(self._session.state, f"{directory}/state")
        return statistics.median(self._saves)

    def _save_every(self, batches: Batches, step_secs: float) -> float | None:
        """Steps between two saves; None where there are none, or nobody knows."""
        every = self._trainer.intervals.save
        if isinstance(self._session.manager, NullCheckpoints):
            return None
        if every.secs:
            return max(1.0, every.secs / step_secs)
        return every.steps or (every.epochs and every.epochs * (batches.steps_per_epoch or 0)) or None


class Variants:
    """The same step in several ways, on one batch.

    Traces here are others than the one that trains, whose random operations keep their states.
    """

    def __init__(self, trainer: TrainerProtocol, session: Session, batches: Batches):
        self._strategy, self._batches, self._sum = trainer.strategy, batches, session.agreement.sum
        self._several, self._workers = trainer.topology.num_replicas > 1, trainer.topology.num_workers
        self._index, self._every = trainer.topology.worker_index, trainer.config.sync_every
        step_loops: dict[str, StepLoop] = {"cached": preparation.new_train_loop(trainer, session)}
        step_loops["cached"].trace(batches)
        compiles = trainer.jit_compile == "off" and trainer.gradients.accumulate_steps == 1
        self._sums: list[sum_free.SumOfStep] = []
        first = trainer.topology.worker_index * trainer.topology.num_local_replicas
        with sum_free.without_sums(first) as sums:
            for name, wanted in (("alone", self._several), ("compiled", compiles)):
                if wanted:
                    jit = trainer.jit_compile == "step" or name == "compiled"
                    loop = preparation.new_train_loop(trainer, session, jit_compile=jit)
                    if self._everywhere(functools.partial(loop.trace, batches)):
                        step_loops[name] = loop
                if name == "alone":
                    self._sums = list(sums)
        self._loops = step_loops
        variables = [
            *session.state.variables.values(),
            *(v for s in step_loops.values() for v in s.variables()),
        ]
        parts = [p for v in variables for p in self._strategy.experimental_local_results(v)]
        self._values = [(p, tf.identity(p)) for p in {id(p): p for p in parts}.values()]

    def restore(self) -> None:
        """Every variable gets the value that it had."""
        for variable, value in self._values:
            variable.assign(value)

    def seconds(self, steps: int, rounds: int) -> dict[str, float]:
        """Name of a field of `StepProfile` -> seconds of a step; none of what could not be run."""
        calls: dict[str, Callable[[int], Any]] = {n: self._call(loop) for n, loop in self._loops.items()}
        if self._sums and (sums := sum_free.of_last_trace(self._sums)):
            calls["sums"] = sum_free.sums_alone(self._strategy, sums)
            if wire_dtype_of(self._strategy, "bfloat16"):
                calls["sums_16_bit"] = sum_free.sums_alone(self._strategy, sums, "bfloat16")
        found: dict[str, list[float]] = {}
        for name, call in list(calls.items()):  # the first call also compiles
            if not self._everywhere(functools.partial(self._timed, call, 1), name in _WITH_SUMS):
                del calls[name]
        for _ in range(rounds):  # in turns, so that all see the same noise
            for name, call in calls.items():
                found.setdefault(name, []).append(self._timed(call, steps))
        medians = {name: statistics.median(secs) for name, secs in found.items()}
        if "sums" in medians and not wire_dtype_of(self._strategy, "bfloat16"):
            medians["sums_16_bit"] = medians["sums"]  # they travel as they are
        for name in [n for n in ("sums", "sums_16_bit") if n in medians]:
            medians[name] /= self._every  # weights are averaged once in so many steps
        return self._of_workers(medians)

    def _of_workers(self, medians: dict[str, float]) -> dict[str, float]:
        """Steps without sums take as long as on the slowest worker."""
        for name in [n for n in ("alone", "compiled") if n in medians]:
            here = np.zeros(self._workers)
            here[self._index] = medians[name]
            everywhere = self._sum(here)
            medians[name] = float(max(everywhere))
            if name == "alone":
                medians["fastest"] = float(min(everywhere))
        if not self._several and "compiled" in medians:
            medians["alone"] = medians["cached"]
        return medians

    def _call(self, loop: StepLoop) -> Callable[[int], Any]:
        return lambda steps: np.asarray(loop.run(self._batches, steps, loop.totals.zeros())[0])

    def _timed(self, call: Callable[[int], Any], steps: int) -> float:
        """Seconds of a step; all workers begin at once, with the values that the run has."""
        self.restore()
        self._sum([0.0])
        start = time.perf_counter()
        call(steps)
        return (time.perf_counter() - start) / steps

    def _everywhere(self, act: Callable[[], Any], together: bool = False) -> bool:
        """Whether it could be done on all workers; `together`: they wait for each other within."""
        try:
            act()
        except Exception as e:
            if together:
                raise
            _log.debug("ctl profile leaves out what cannot be traced or run: %s", e)
            return not self._sum([1.0])[0]
        return not self._sum([0.0])[0]


_WITH_SUMS = ("cached", "sums", "sums_16_bit")


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    """Tracing a step may draw from the generators of Python and NumPy."""
    pythons, numpys = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)
