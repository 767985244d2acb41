"""Numbers that a call returns, readable where they are shown."""

from typing import Any


class Results(dict[str, Any]):
    """A dictionary like any other, whose `repr` has six digits instead of 17.

    >>> Results(loss=0.2244170904159546)
    {'loss': 0.224417}
    """

    def __repr__(self) -> str:
        return repr({name: _short(value) for name, value in self.items()})


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value
