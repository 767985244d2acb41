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
      mpi_comm: None; there is no MPI here.

    Raises ValueError if the argument is not a list of ranks.
    """

    mpi_comm = None

    def __init__(self, ranks_or_comm: Iterable[int]):
        if not isinstance(ranks_or_comm, Iterable) or isinstance(ranks_or_comm, (str, bytes)):
            raise ValueError(
                f"ProcessSet got {ranks_or_comm!r}; expected a list of ranks (there is no MPI here)."
            )
        found = list(ranks_or_comm)
        if any(not isinstance(r, int) or isinstance(r, bool) for r in found):
            raise ValueError(f"ProcessSet got {found!r}; expected ranks, e.g. [0, 1].")
        self.ranks: list[int] | None = sorted(found)
        self.process_set_id: int | None = None

    def included(self) -> bool | None:
        """Returns True if this process is a member, or None before the set is registered."""
        if self.process_set_id is None or _engine is None:
            return None
        return _engine.ranks.rank in _ranks(self.process_set_id)

    def size(self) -> int | None:
        """Returns the number of members, or None before the set is registered."""
        if self.process_set_id is None or _engine is None:
            return None
        return len(_ranks(self.process_set_id))

    def rank(self) -> int | None:
        """Returns the index of this process in the set, or None before the set is registered.

        Raises ValueError on a rank that is not a member. `broadcast` and similar functions take ranks
        among *all*.
        """
        if self.process_set_id is None or _engine is None:
            return None
        ranks = _ranks(self.process_set_id)
        if _engine.ranks.rank not in ranks:
            raise ValueError(f"rank {_engine.ranks.rank} is not in the process set {self}.")
        return ranks.index(_engine.ranks.rank)

    def members(self) -> Members:
        """Implements `calls.CollectiveGroup`."""
        return Members(initialized(_engine), *ranks_of(self))

    def check_registered(self) -> None:
        """Implements `calls.CollectiveGroup`."""
        if _engine is not None and self.process_set_id not in _known:
            ranks_of(self)

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm=None)"

    __repr__ = __str__


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0

_engine: Engine | None = None
_known: dict[int, tuple[int, ...]] = {}
_objects: list[ProcessSet] = []


def begin(engine: Engine) -> None:
    """Registers the set of all ranks after they have connected."""
    global _engine  # noqa: PLW0603
    _engine = engine
    _known.clear()
    _known[0] = tuple(range(engine.ranks.size))
    global_process_set.ranks = list(_known[0])


def all_share_memory() -> bool:
    """Returns True if the current group sends tensors between ranks through shared memory only."""
    return _engine is not None and _engine.all_share_memory and _engine.plane is None


def end_process_sets() -> None:
    """Removes all registered sets, because this process has left the group."""
    global _engine  # noqa: PLW0603
    _engine = None
    for made in _objects:
        made.process_set_id = None
    _objects.clear()
    _known.clear()


def add_static(process_sets: Any) -> None:
    """Registers the sets given to `init`.

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
    sets = [one if isinstance(one, ProcessSet) else ProcessSet(one) for one in process_sets]
    twice = [one.ranks for i, one in enumerate(sets) if one.ranks in [s.ranks for s in sets[:i]]]
    if twice:
        raise ValueError(f"init() got two process sets of the ranks {twice[0]}; expected different sets.")
    for given in sets:
        ranks = tuple(given.ranks or ())
        number = next((number for number, known in _known.items() if known == ranks), None)
        if number is None:
            _add(given)
        elif given.process_set_id != number:  # all ranks, or a set of an earlier call
            given.process_set_id = number
            _objects.append(given)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Registers a further set. All ranks, members or not, call this with the same ranks.

    Raises ValueError if there is a set of these ranks already, or without
    HOROVOD_DYNAMIC_PROCESS_SETS=1 (or `init(process_sets="dynamic")`).
    """
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    _check_dynamic("add_process_set")
    if not _add(made):
        raise ValueError(f"there is a process set of the ranks {made.ranks} already.")
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a set and returns True if that is possible. All ranks call this. The global set remains."""
    number = process_set.process_set_id
    if not number:
        return False
    _check_dynamic("remove_process_set")
    engine = initialized(_engine)
    name = f"remove_process_set.{process_set.ranks}"
    pending = engine.submit("remove_process_set", name, splits=[number])
    engine.wait(pending)
    _known.pop(number, None)
    for made in [made for made in _objects if made.process_set_id == number]:
        made.process_set_id = None
        _objects.remove(made)
    process_set.process_set_id = None
    return engine.ranks.size == 1 or (pending.response or {}).get("number") == number


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """Returns number -> ranks of every registered set."""
    initialized(_engine)
    return {number: list(ranks) for number, ranks in _known.items()}


def ranks_of(process_set: ProcessSet | None) -> tuple[int, tuple[int, ...]]:
    """Returns (number, ranks) of a set that this rank may use. None represents all ranks.

    Raises ValueError for a set that is not registered, and tf.errors.InvalidArgumentError if this rank
    is not a member.
    """
    engine = initialized(_engine)
    number = 0 if process_set is None else process_set.process_set_id
    if number is None or number not in _known:
        raise ValueError(
            f"{process_set} is not known; give it to hvd.init(process_sets=[...]) or to "
            "hvd.add_process_set()."
        )
    if engine.ranks.rank not in _known[number]:
        text = f"rank {engine.ranks.rank} is not in the process set {process_set}."
        raise create_exception("INVALID_ARGUMENT", text)
    return number, _known[number]


def _ranks(number: int) -> tuple[int, ...]:
    if number not in _known:
        raise ValueError(f"there is no process set {number} any more.")
    return _known[number]


def initialized(engine: Engine | None) -> Engine:
    """Returns the runtime. Raises ValueError before `init()`."""
    if engine is None:
        raise ValueError("ctl.hvd has not been initialized; call hvd.init() first.")
    return engine


def _check_dynamic(what: str) -> None:
    if os.environ.get(_DYNAMIC, "").strip() in ("", "0"):
        raise ValueError(
            f'{what}() needs {_DYNAMIC}=1 in the environment, or hvd.init(process_sets="dynamic").'
        )


def _add(made: ProcessSet) -> bool:
    engine = initialized(_engine)
    ranks = tuple(made.ranks or ())
    wrong = [r for r in ranks if not 0 <= r < engine.ranks.size]
    if wrong or not ranks or len(set(ranks)) < len(ranks):
        raise ValueError(
            f"a process set of the ranks {list(ranks)}; expected different ranks from 0 to "
            f"{engine.ranks.size - 1}."
        )
    pending = engine.submit("add_process_set", f"add_process_set.{len(_known)}", splits=list(ranks))
    engine.wait(pending)
    number = (pending.response or {}).get("number", -1)
    if engine.ranks.size == 1:
        number = -1 if ranks in _known.values() else max(_known) + 1
    if number < 0:
        return False
    _known[number] = ranks
    made.process_set_id = number
    _objects.append(made)
    return True
