"""What a rank asks of the others, and whether all ask the same."""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

from ctl.collectives.arithmetic import OPS, dtype_named

FAILED_PRECONDITION = "FAILED_PRECONDITION"
INVALID_ARGUMENT = "INVALID_ARGUMENT"
_MOST_SAID = 3  # tensors of one request, in a sentence


class Layout(NamedTuple):
    """Types and shapes of the tensors of a request, which may come joined."""

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Request:
    """One collective, as one rank asks for it.

    Attributes:
      id: the asking rank's own number for it.
      name: the same on all ranks; requests of one name are paired in the order they came.
      kind: "allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier",
        "add_process_set" or "remove_process_set".
      dtypes, shapes: of its tensors, one or several.
      process_set: number of the set of ranks that take part.
      op, prescale, postscale: of a reduction.
      root: rank that a broadcast comes from.
      splits: rows for each rank in an alltoall; ranks or number of a process set.
      is_inline: the numbers came with the request.
      is_eager: the asking thread waits for it and does nothing else.
      line: where an eager call without a name stands in the program, "train.py:12"; else "".
      names: of its tensors, where they were asked for one by one; another rank may join others.
      plane: what its numbers travel by: "" for the engine's own way, or "tensorflow".
    """

    id: int
    name: str
    kind: str
    dtypes: Sequence[str] = ()
    shapes: Sequence[Sequence[int]] = ()
    process_set: int = 0
    op: int = 1
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    splits: Sequence[int] = ()
    is_inline: bool = False
    is_eager: bool = True
    line: str = ""
    names: Sequence[str] = ()
    plane: str = ""

    def with_id(self, number: int) -> "Request":
        """The same with another `id`; its key and sizes are not computed again."""
        found = copy(self)
        object.__setattr__(found, "id", number)
        return found

    @cached_property
    def key(self) -> tuple:
        """Equal for requests that differ in nothing but their `id`."""
        shapes = tuple(map(tuple, self.shapes))
        parts = self.name, self.kind, tuple(self.dtypes), shapes, self.process_set, self.op, self.root
        how = self.prescale, self.postscale, tuple(self.splits), self.is_inline, self.is_eager, self.line
        return (*parts, *how, tuple(self.names), self.plane)

    def header(self) -> dict[str, Any]:
        """For a message."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(self.sizes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each tensor."""
        tensors = zip(self.dtypes, self.shapes, strict=True)
        return tuple(math.prod(shape) * dtype_named(dtype).itemsize for dtype, shape in tensors)

    def parts(self) -> list["Request"]:
        """One for each of its `names`; their ids follow its own."""
        return [
            replace(self, id=self.id + i, name=name, names=(), dtypes=[dtype], shapes=[shape])
            for i, (name, dtype, shape) in enumerate(
                zip(self.names, self.dtypes, self.shapes, strict=True), start=1
            )
        ]

    def __str__(self) -> str:
        said = [f"{dtype} {list(shape)}" for dtype, shape in zip(self.dtypes, self.shapes, strict=True)]
        more = len(said) - _MOST_SAID
        tensors = ", ".join(said[:_MOST_SAID]) + (f" and {more} more" if more > 0 else "")
        return f"{self.kind} {self.name!r} of {tensors}" if tensors else f"{self.kind} {self.name!r}"


def fault(ranks: Sequence[int], requests: Mapping[int, Request]) -> tuple[str, str] | None:
    """What is wrong with the requests of `ranks` for one name, as (code, sentence); None if nothing."""
    apart = difference(requests)
    if apart:
        return FAILED_PRECONDITION, apart
    first = next(iter(requests.values()))
    if first.kind == "broadcast" and first.root not in ranks:
        return FAILED_PRECONDITION, (
            f"{first.name}: the root rank is {first.root}; expected one of {ranks_named(ranks)}."
        )
    has_rows = first.kind in ("allgather", "alltoall", "reducescatter")
    if has_rows and any(len(shape) == 0 for shape in first.shapes):
        return FAILED_PRECONDITION, (
            f"{first.name}: {first.kind} got a scalar; expected a tensor with rows, e.g. "
            "tf.reshape(x, [1])."
        )
    if first.kind == "alltoall":
        return _fault_of_splits(ranks, requests)
    return None


def _fault_of_splits(ranks: Sequence[int], requests: Mapping[int, Request]) -> tuple[str, str] | None:
    for rank, request in sorted(requests.items()):
        rows, splits = request.shapes[0][0], list(request.splits)
        if not splits:
            said = (
                f"{rows} rows cannot be dealt equally to {len(ranks)} ranks; give splits=, the rows "
                "for each rank"
            )
        elif len(splits) != len(ranks):
            said = f"splits has {len(splits)} entries; expected {len(ranks)}, one per rank"
        elif min(splits) < 0:
            said = f"splits is {splits}; expected numbers of rows >= 0"
        elif sum(splits) != rows:
            said = f"splits adds up to {sum(splits)}; expected the tensor's {rows} rows"
        else:
            continue
        return INVALID_ARGUMENT, f"{request.name}: alltoall on rank {rank}: {said}."
    return None


def difference(requests: Mapping[int, Request]) -> str | None:
    """A sentence on how the requests of ranks for one name contradict each other; None if not."""
    first, *others = requests.values()
    if all(other.key == first.key for other in others):  # a tenth of the time of looking for what differs
        return None
    for what, of in _COMPARED[first.kind if _is_one(requests, "kind") else "any"]:
        if len({of(request) for request in requests.values()}) > 1:
            return f"{first.name}: {what} {_apart(requests, of)}."
    return None


def _is_one(requests: Mapping[int, Request], attribute: str) -> bool:
    return len({getattr(r, attribute) for r in requests.values()}) == 1


def _apart(requests: Mapping[int, Request], of: Any) -> str:
    """ "rank 0: [2, 3]; ranks 1, 2: [3, 3]" """
    groups: dict[Any, list[int]] = {}
    for rank in sorted(requests):
        groups.setdefault(of(requests[rank]), []).append(rank)
    return "; ".join(f"{ranks_named(ranks)}: {_said(value)}" for value, ranks in groups.items())


def ranks_named(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0, 1, 4" """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:16]))
    return f"ranks {shown}" + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")


def _said(value: Any) -> str:
    if isinstance(value, tuple) and len(value) == 1:
        value = value[0]
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _shapes(request: Request) -> tuple:
    return tuple(str(list(shape)) for shape in request.shapes)


def _tails(request: Request) -> tuple:
    return tuple(
        f"[any, {str(list(shape[1:]))[1:]}" if len(shape) else "a scalar" for shape in request.shapes
    )


_ALWAYS = [
    ("ranks ask for different collectives,", lambda r: r.kind),
    ("ranks ask for another number of tensors,", lambda r: len(r.shapes)),
    ("the type of the tensor differs,", lambda r: tuple(r.dtypes)),
    ("the way that numbers travel differs,", lambda r: r.plane or "tcp"),
]
_REDUCED = [
    *_ALWAYS,
    ("the shape of the tensor differs,", _shapes),
    ("the reduction differs,", lambda r: OPS.get(r.op, r.op)),
    ("prescale_factor differs,", lambda r: r.prescale),
    ("postscale_factor differs,", lambda r: r.postscale),
]
_ROWS = [*_ALWAYS, ("all but the first dimension must be equal,", _tails)]
_COMPARED: dict[str, list] = {
    "any": _ALWAYS,
    "allreduce": _REDUCED,
    "reducescatter": _REDUCED,
    "allgather": _ROWS,
    "alltoall": _ROWS,
    "broadcast": [
        *_ALWAYS,
        ("the shape of the tensor differs,", _shapes),
        ("the root rank differs,", lambda r: r.root),
    ],
    "barrier": _ALWAYS,
    "add_process_set": [*_ALWAYS, ("the ranks of the set differ,", lambda r: tuple(r.splits))],
    "remove_process_set": [*_ALWAYS, ("the process set differs,", lambda r: tuple(r.splits))],
}
