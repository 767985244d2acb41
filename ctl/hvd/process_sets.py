"""Process sets: subsets of the ranks with their own collectives."""

import os
from collections.abc import Iterable, Sequence
from typing import Any

from ctl.collectives.calls import Members
from ctl.collectives.engine import Engine
from ctl.collectives.failures import create_exception
from ctl.errors import UsageError

_DYNAMIC = "HOROVOD_DYNAMIC_PROCESS_SETS"


class ProcessSet:
    """A subset of the ranks, registered by `init` or `add_process_set`.

    Args:
      ranks_or_comm: The ranks.

    Attributes:
      ranks: The ranks, sorted.
      process_set_id: Number of the set, None until it is registered.
      mpi_comm: None, because MPI is not used.

    Raises ValueError if the argument is not a list of ranks.
    """

    mpi_comm = None

    def __init__(self, ranks_or_comm: Iterable[int]):
        if not isinstance(ranks_or_comm, Iterable) or isinstance(ranks_or_comm, (str, bytes)):
            raise ValueError(
                f"ProcessSet got {ranks_or_comm!r}; expected a list of ranks (MPI is not supported)."
            )
        ranks = list(ranks_or_comm)
        if any(not isinstance(r, int) or isinstance(r, bool) for r in ranks):
            raise ValueError(f"ProcessSet got {ranks!r}; expected ranks, e.g. [0, 1].")
        self.ranks: list[int] | None = sorted(ranks)
        self.process_set_id: int | None = None

    def included(self) -> bool | None:
        """Returns True if this process is a member, or None before the set is registered."""
        if self.process_set_id is None or _engine is None:
            return None
        return _engine.ranks.rank in _lookup_ranks(self.process_set_id)

    def size(self) -> int | None:
        """Returns the number of members, or None before the set is registered."""
        if self.process_set_id is None or _engine is None:
            return None
        return len(_lookup_ranks(self.process_set_id))

    def rank(self) -> int | None:
        """Returns the index of this process in the set, or None before the set is registered.

        Arguments such as `root_rank` of `broadcast` are global ranks instead. Raises ValueError on a rank
        that is not a member.
        """
        if self.process_set_id is None or _engine is None:
            return None
        ranks = _lookup_ranks(self.process_set_id)
        if _engine.ranks.rank not in ranks:
            raise ValueError(f"rank {_engine.ranks.rank} is not in the process set {self}.")
        return ranks.index(_engine.ranks.rank)

    def members(self) -> Members:
        """Implements `calls.CollectiveGroup`."""
        return Members(require_engine(_engine), *resolve_process_set(self))

    def check_registered(self) -> None:
        """Implements `calls.CollectiveGroup`."""
        if _engine is not None and self.process_set_id not in _ranks_by_number:
            resolve_process_set(self)

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm=None)"

    __repr__ = __str__


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0

_engine: Engine | None = None
_ranks_by_number: dict[int, tuple[int, ...]] = {}
_registered_sets: list[ProcessSet] = []


def register_global_set(engine: Engine) -> None:
    """Registers the set of all ranks of a new group."""
    global _engine  # noqa: PLW0603
    _engine = engine
    _ranks_by_number.clear()
    _ranks_by_number[0] = tuple(range(engine.ranks.size))
    global_process_set.ranks = list(_ranks_by_number[0])


def all_share_memory() -> bool:
    """Returns True if the current group sends tensors between ranks through shared memory only."""
    return _engine is not None and _engine.all_share_memory and _engine.plane is None


def end_process_sets() -> None:
    """Unregisters all sets after this process has left the group."""
    global _engine  # noqa: PLW0603
    _engine = None
    for registered_set in _registered_sets:
        registered_set.process_set_id = None
    _registered_sets.clear()
    _ranks_by_number.clear()


def add_static_sets(process_sets: Any) -> None:
    """Registers the process sets of `init`. Collective.

    Raises UsageError if the argument is not a list of sets, and ValueError for equal sets.
    """
    if process_sets is None:
        return
    if isinstance(process_sets, str):
        if process_sets != "dynamic":
            raise UsageError(
                f"init() got process_sets={process_sets!r}; expected a list of hvd.ProcessSet, or "
                '"dynamic".'
            )
        os.environ[_DYNAMIC] = "1"
        return
    sets = [
        ranks_or_set if isinstance(ranks_or_set, ProcessSet) else ProcessSet(ranks_or_set)
        for ranks_or_set in process_sets
    ]
    repeated_ranks = [
        ranks_or_set.ranks
        for i, ranks_or_set in enumerate(sets)
        if ranks_or_set.ranks in [s.ranks for s in sets[:i]]
    ]
    if repeated_ranks:
        raise ValueError(
            f"init() got two process sets of the ranks {repeated_ranks[0]}; expected different sets."
        )
    for process_set in sets:
        ranks = tuple(process_set.ranks or ())
        number = next(
            (number for number, registered_ranks in _ranks_by_number.items() if registered_ranks == ranks),
            None,
        )
        if number is None:
            _register(process_set)
        elif process_set.process_set_id != number:  # all ranks, or a set of an earlier call
            process_set.process_set_id = number
            _registered_sets.append(process_set)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Registers an additional set. All ranks, including ranks that are not members, call this function.

    Raises ValueError if a set of these ranks exists already, or without
    HOROVOD_DYNAMIC_PROCESS_SETS=1 (or `init(process_sets="dynamic")`).
    """
    new_set = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    _check_dynamic("add_process_set")
    if not _register(new_set):
        raise ValueError(f"a process set of the ranks {new_set.ranks} already exists.")
    return new_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a set. Returns False for the global set and for unregistered sets. All ranks call this."""
    number = process_set.process_set_id
    if not number:
        return False
    _check_dynamic("remove_process_set")
    engine = require_engine(_engine)
    name = f"remove_process_set.{process_set.ranks}"
    pending = engine.submit("remove_process_set", name, splits=[number])
    engine.wait(pending)
    _ranks_by_number.pop(number, None)
    for registered_set in [
        registered_set for registered_set in _registered_sets if registered_set.process_set_id == number
    ]:
        registered_set.process_set_id = None
        _registered_sets.remove(registered_set)
    process_set.process_set_id = None
    return engine.ranks.size == 1 or (pending.response or {}).get("number") == number


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """Returns the ranks of every registered set by its number."""
    require_engine(_engine)
    return {number: list(ranks) for number, ranks in _ranks_by_number.items()}


def check_set(process_set: Any) -> ProcessSet:
    """Returns a process set. Raises UsageError for other types."""
    if not isinstance(process_set, ProcessSet):
        raise UsageError(
            f"process_set is {process_set!r:.80}; expected a hvd.ProcessSet, such as the result of "
            "hvd.add_process_set([0, 1])."
        )
    return process_set


def resolve_process_set(process_set: ProcessSet | None) -> tuple[int, tuple[int, ...]]:
    """Returns the number and the ranks of a set of which this rank is a member. None is the global set.

    Raises ValueError for a set that is not registered, and tf.errors.InvalidArgumentError if this rank
    is not a member.
    """
    engine = require_engine(_engine)
    number = 0 if process_set is None else check_set(process_set).process_set_id
    if number is None or number not in _ranks_by_number:
        raise ValueError(
            f"{process_set} is not registered; pass it to hvd.init(process_sets=[...]) or to "
            "hvd.add_process_set()."
        )
    if engine.ranks.rank not in _ranks_by_number[number]:
        text = f"rank {engine.ranks.rank} is not in the process set {process_set}."
        raise create_exception("INVALID_ARGUMENT", text)
    return number, _ranks_by_number[number]


def _lookup_ranks(number: int) -> tuple[int, ...]:
    if number not in _ranks_by_number:
        raise ValueError(f"process set {number} has been removed.")
    return _ranks_by_number[number]


def require_engine(engine: Engine | None) -> Engine:
    """Returns the engine. Raises ValueError if it is None, before `init()`."""
    if engine is None:
        raise ValueError("ctl.hvd has not been initialized; call hvd.init() first.")
    return engine


def _check_dynamic(function_name: str) -> None:
    if os.environ.get(_DYNAMIC, "").strip() in ("", "0"):
        raise ValueError(
            f"{function_name}() requires the environment variable {_DYNAMIC}=1, or "
            'hvd.init(process_sets="dynamic").'
        )


def _register(new_set: ProcessSet) -> bool:
    engine = require_engine(_engine)
    ranks = tuple(new_set.ranks or ())
    invalid_ranks = [r for r in ranks if not 0 <= r < engine.ranks.size]
    if invalid_ranks or not ranks or len(set(ranks)) < len(ranks):
        raise ValueError(
            f"a process set has the ranks {list(ranks)}; expected distinct ranks from 0 to "
            f"{engine.ranks.size - 1}."
        )
    pending = engine.submit(
        "add_process_set", f"add_process_set.{len(_ranks_by_number)}", splits=list(ranks)
    )
    engine.wait(pending)
    number = (pending.response or {}).get("number", -1)
    if engine.ranks.size == 1:
        number = -1 if ranks in _ranks_by_number.values() else max(_ranks_by_number) + 1
    if number < 0:
        return False
    _ranks_by_number[number] = ranks
    new_set.process_set_id = number
    _registered_sets.append(new_set)
    return True
