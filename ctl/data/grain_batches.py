"""Global batches of a Grain `IterDataset` or `DataLoader`, with the position of Grain's own iterator.

Grain need not be installed. Every worker reads the global batches, so the pipeline must not be sharded.
"""

import base64
import json
import logging
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from ctl.data.python_batches import IteratedBatches

_MOST_STATES = 4096  # more than the number of batches that are read ahead of the steps
_log = logging.getLogger("ctl")


class GrainBatches(IteratedBatches):
    """Batches of a Grain pipeline. Their position is the state of Grain's iterator.

    Args:
      data: An `IterDataset` or `DataLoader` of global batches.
      name: Name of the data, for messages.
    """

    mode = "iterator"

    def __init__(self, data: Any, name: str):
        self._data = data
        self._num_before = 0  # number of batches before the next pass
        self._states: OrderedDict[int, str] = OrderedDict()  # by the number of batches before the position
        super().__init__(lambda: self._with_states(iter(data), self._num_before), name)

    def start_at(self, before: int, skipped: int, state: Any) -> bool:
        """Starts the next pass in the saved state. Without one, the batches are read and skipped."""
        self._num_before = before
        if state is None or not skipped:
            return False
        iterator = iter(self._data)
        try:
            iterator.set_state(_decoded(state))
        except Exception as e:  # Grain compares descriptions of the sampler and the source, for example
            _log.warning(
                "Grain cannot continue at the saved position (%s: %s). The run reads and skips %d batches.",
                type(e).__name__,
                str(e).splitlines()[0][:200] if str(e) else "no message",
                skipped,
            )
            return False
        self._next = self._with_states(iterator, before + skipped)
        return True

    def state_at(self, num_batches: int) -> Any:
        """Returns the state of Grain's iterator after `num_batches` batches, or None."""
        return self._states.get(num_batches)

    def _with_states(self, iterator: Any, count: int) -> Iterator[Any]:
        for batch in iterator:
            count += 1
            self._states[count] = _encoded(iterator.get_state())
            self._states.move_to_end(count)
            while len(self._states) > _MOST_STATES:
                self._states.popitem(last=False)
            yield batch
        self._num_before = count


def is_grain_pipeline(value: Any) -> bool:
    """Returns True for a Grain `IterDataset` or `DataLoader`."""
    return bool(_grain_classes(value) & {"IterDataset", "DataLoader"})


def is_grain_map_dataset(value: Any) -> bool:
    """Returns True for a Grain `MapDataset`, a random-access source."""
    return "MapDataset" in _grain_classes(value)


def _grain_classes(value: Any) -> set[str]:
    """Returns the names of the classes of Grain from which the class of `value` is derived."""
    return {c.__name__ for c in type(value).__mro__ if c.__module__.split(".")[0] == "grain"}


def _encoded(state: Any) -> str:
    """Returns the state as JSON. It is bytes for a `DataLoader` and a dictionary for a dataset."""
    if isinstance(state, bytes):
        return json.dumps({"bytes": base64.b64encode(state).decode("ascii")})
    return json.dumps({"value": state}, default=int)  # NumPy integers


def _decoded(text: str) -> Any:
    state = json.loads(text)
    return base64.b64decode(state["bytes"]) if "bytes" in state else state["value"]
