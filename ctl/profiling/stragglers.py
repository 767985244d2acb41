"""Detection of a worker for which the other workers wait.

A worker is reported once if it costs more than a tenth of each step. Durations are summed together with the
votes at the ends of loops. In each window of steps, the time of a worker is the time in which it does not
wait in sums.
"""

import logging
from collections.abc import Callable, Sequence

import numpy as np
from ctl.profiling.loop_observer import CompletedLoop, LoopObserver, ObserverInputs

_log = logging.getLogger("ctl")
_WINDOW_SECS = 0.5  # of training, at least
_WINDOW_STEPS = 5
_WINDOWS = 3  # consecutive ones with the same result
_WINDOWS_ON_ONE_HOST = 12  # workers that share the cores of a host take turns in being slow
_COST = 0.1  # of a step


class Stragglers(LoopObserver):
    """Comparison of the workers. The chief logs the result.

    Args:
      total: Returns `[2]`: seconds that this worker has waited in sums, and for its input.
      addresses: Addresses of all workers.
      index: Index of this worker.
    """

    def __init__(self, total: Callable[[], np.ndarray], addresses: Sequence[str], index: int):
        self._total, self._addresses, self._index = total, addresses, index
        self._sums = np.zeros([2, len(addresses)])  # in this window
        self._before: np.ndarray | None = None  # `total` at the newest vote
        self._steps, self._secs, self._compiled = 0, 0.0, True
        hosts = {address.rpartition(":")[0] for address in addresses}
        self._needed = _WINDOWS if len(hosts) > 1 else _WINDOWS_ON_ONE_HOST
        self._slowest: list[int | None] = []  # results of the newest windows
        self._reported: int | None = None

    def completed(self, loop: CompletedLoop) -> None:
        """Adds the duration of a graph call."""
        self._steps += loop.num_steps
        self._secs += loop.secs or 0.0
        self._compiled |= loop.secs is None

    def values_to_sum(self) -> list[float]:
        """Returns `[2 n]` for n workers: the seconds of this worker since the last call, else zeros."""
        total = self._total()
        secs = np.zeros_like(self._sums)
        secs[:, self._index] = total - (total if self._before is None else self._before)
        self._before = total
        return secs.ravel().tolist()

    def take_sums(self, sums: Sequence[float]) -> None:
        """Adds the seconds of all workers, and compares the workers at the end of a window."""
        self._sums += np.asarray(sums).reshape(self._sums.shape)
        if self._compiled:
            self._begin()
        if self._secs < _WINDOW_SECS or self._steps < _WINDOW_STEPS:
            return
        if np.isnan(self._sums).any():  # a worker has no clock, see StepTimes
            self._begin()
            return
        busy_secs, input_secs = self._secs - self._sums[0], self._sums[1]
        slow = int(np.argmax(busy_secs))
        delay = busy_secs[slow] - np.median(np.delete(busy_secs, slow))
        share = delay / self._secs
        self._slowest = [*self._slowest, slow if share > _COST else None][-self._needed :]
        waits_for_input = (input_secs[slow] - np.median(np.delete(input_secs, slow))) > delay / 2
        is_stable = len(self._slowest) == self._needed and len({*self._slowest}) == 1
        if is_stable and self._slowest[0] != self._reported:
            cause = "input" if waits_for_input else "step"
            self._report(self._slowest[0], share, delay / self._steps, cause)
        self._begin()

    def _begin(self) -> None:
        self._sums[:], self._steps, self._secs, self._compiled = 0.0, 0, 0.0, False

    def _report(self, slow: int | None, share: float, secs: float, cause: str) -> None:
        before, self._reported = self._reported, slow
        if self._index:
            return
        if slow is None:
            _log.info(
                "Worker %d (%s) keeps up with the others again.", before, self._addresses[before or 0]
            )
            return
        _log.warning(
            "Worker %d (%s) is slower than the others, which wait for it: this costs %.0f %% of each step "
            "(%.1f ms). The cause is its %s.",
            slow,
            self._addresses[slow],
            100 * share,
            1e3 * secs,
            cause,
        )


def create_stragglers(inputs: ObserverInputs) -> Stragglers | None:
    """Creates the comparison of the workers, or returns None where their steps are not timed."""
    topology = inputs.world.topology
    if inputs.timer is None or topology.num_workers == 1:
        return None
    return Stragglers(inputs.timer.total, topology.workers, topology.worker_index)
