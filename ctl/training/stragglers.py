"""Which worker the others wait for: named once, when it costs more than a tenth of each step.

The numbers travel with what workers agree on at ends of loops. In each window of steps, a worker's own
time is what it did not wait in sums; the slowest has the longest.
"""

import logging
from collections.abc import Callable, Sequence

import numpy as np
from ctl.training.observers import CompletedLoop, LoopObserver

_log = logging.getLogger("ctl")
_WINDOW_SECS = 0.5  # of training, at least
_WINDOW_STEPS = 5
_WINDOWS = 3  # in a row with the same answer
_WINDOWS_ON_ONE_HOST = 12  # workers that share the cores of a host take turns in being slow
_COST = 0.1  # of a step


class Stragglers(LoopObserver):
    """Compares the workers; the chief writes to the log.

    Args:
      total: () -> `[2]`, seconds until now that this worker has waited in sums, and for its input.
      addresses: of all workers; index: this one's.
    """

    def __init__(self, total: Callable[[], np.ndarray], addresses: Sequence[str], index: int):
        self._total, self._addresses, self._index = total, addresses, index
        self._sums = np.zeros([2, len(addresses)])  # of this window
        self._before: np.ndarray | None = None  # `total` when it began
        self._steps, self._secs, self._compiled = 0, 0.0, True
        hosts = {address.rpartition(":")[0] for address in addresses}
        self._needed = _WINDOWS if len(hosts) > 1 else _WINDOWS_ON_ONE_HOST
        self._found: list[int | None] = []  # the answers of the newest windows
        self._named: int | None = None

    def completed(self, loop: CompletedLoop) -> None:
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
        own, inputs = self._secs - self._sums[0], self._sums[1]
        slow = int(np.argmax(own))
        late = own[slow] - np.median(np.delete(own, slow))
        share = late / self._secs
        self._found = [*self._found, slow if share > _COST else None][-self._needed :]
        waits = (inputs[slow] - np.median(np.delete(inputs, slow))) > late / 2
        if len(self._found) == self._needed and len({*self._found}) == 1 and self._found[0] != self._named:
            self._tell(self._found[0], share, late / self._steps, "its input" if waits else "its step")
        self._begin()

    def _begin(self) -> None:
        self._sums[:], self._steps, self._secs, self._compiled = 0.0, 0, 0.0, False

    def _tell(self, slow: int | None, share: float, secs: float, what: str) -> None:
        before, self._named = self._named, slow
        if self._index:
            return
        if slow is None:
            _log.info(
                "Worker %d (%s) keeps up with the others again.", before, self._addresses[before or 0]
            )
            return
        _log.warning(
            "Worker %d (%s) is slower than the others, which wait for it: this costs %.0f %% of each step "
            "(%.1f ms). It is %s that takes longer.",
            slow,
            self._addresses[slow],
            100 * share,
            1e3 * secs,
            what,
        )
