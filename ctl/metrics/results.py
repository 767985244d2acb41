"""Dictionary of results with a short `repr`."""

from collections.abc import Mapping
from typing import Any

from ctl.metrics.protocol import RunEnd


class Results(dict[str, Any]):
    """A dictionary with six digits per float in its `repr`.

    >>> Results({"loss": 0.2244170904159546})
    {'loss': 0.224417}

    Attributes:
      end: Cause of the end of a training, such as `ctl.RunEnd.DONE` or `ctl.RunEnd.TIME_LIMIT`. None for
        an evaluation.
    """

    def __init__(self, values: Mapping[str, Any], end: RunEnd | None = None) -> None:
        super().__init__(values)
        self.end = end

    def __repr__(self) -> str:
        return repr({name: _rounded(value) for name, value in self.items()})


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value
