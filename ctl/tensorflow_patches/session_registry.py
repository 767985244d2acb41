"""List of the sessions of TensorFlow 1 graphs.

Purpose: Collectives in graphs signal their completion to the session that runs them. TensorFlow has no
  list of sessions.
Replaces: `_extend_graph` of `tensorflow.python.client.session.BaseSession`, which every run calls.
Versions: TensorFlow 2.16 and later.
Upstream issue: none known.
Switch: `session_registry`. Without the patch a collective in a session raises RuntimeError.
"""

import functools
from collections.abc import Callable
from typing import Any

from ctl.tensorflow_patches import switches

_MARK = "_of_hvd"


def record_sessions(record: Callable[[Any], None]) -> None:
    """Calls `record(session)` at each run of a session from now on; idempotent."""
    from tensorflow.python.client import session

    extend = session.BaseSession._extend_graph
    if hasattr(extend, _MARK) or not switches.is_enabled("session_registry"):
        return

    @functools.wraps(extend)
    def extend_and_record(self: Any) -> None:
        record(self)
        extend(self)

    extend_and_record.__dict__[_MARK] = True
    session.BaseSession._extend_graph = extend_and_record
