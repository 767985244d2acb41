"""Requests for collectives, and checks that the requests of all ranks are consistent."""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

from ctl.collectives.arithmetic import OPS, to_numpy_dtype

FAILED_PRECONDITION = "FAILED_PRECONDITION"
INVALID_ARGUMENT = "INVALID_ARGUMENT"
_MAX_DESCRIBED = 3  # tensors per request in an error message


class Layout(NamedTuple):
    """Dtypes and shapes of the tensors of a request, which may be concatenated."""

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Request:
    """Request of one rank for a collective.

    Attributes:
      id: Number of the request, unique on the rank.
      name: Name of the collective. Requests of different ranks with the same name are paired in order.
      kind: "allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier",
        "add_process_set" or "remove_process_set".
      dtypes, shapes: Dtypes and shapes of the tensors.
      process_set: Number of the set of participating ranks.
      op, prescale, postscale: Reduction and its scale factors.
      root: Source rank of a broadcast.
      splits: Rows for each rank in an alltoall; ranks or number of a process set.
      is_inline: True if the message with the request contains the data.
      is_eager: True if the requesting thread is blocked until the end of the collective.
      line: Program line of an eager call without a name, such as "train.py:12"; else "".
      names: Names of the fused calls. Other ranks may fuse different calls.
      plane: Data plane: "" for the engine's own plane, or "tensorflow".
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
        """Returns a copy with another `id`, which keeps the cached keys and sizes."""
        request = copy(self)
        object.__setattr__(request, "id", number)
        return request

    @cached_property
    def key(self) -> tuple:
        """Hashable key. Requests that differ only in their `id` have equal keys."""
        return self.signature, self.is_inline

    @cached_property
    def signature(self) -> tuple:
        """Hashable key without `is_inline`, which depends on the other pending requests of the rank."""
        shapes = tuple(map(tuple, self.shapes))
        parts = self.name, self.kind, tuple(self.dtypes), shapes, self.process_set, self.op, self.root
        options = self.prescale, self.postscale, tuple(self.splits), self.is_eager, self.line
        return (*parts, *options, tuple(self.names), self.plane)

    def header(self) -> dict[str, Any]:
        """Returns the fields as a message header."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def size(self) -> int:
        """Size of all tensors (bytes)."""
        return sum(self.sizes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Size of each tensor (bytes)."""
        tensors = zip(self.dtypes, self.shapes, strict=True)
        return tuple(math.prod(shape) * to_numpy_dtype(dtype).itemsize for dtype, shape in tensors)

    def parts(self) -> list["Request"]:
        """Returns a separate request for each of `names`. Their ids follow the id of this request."""
        return [
            replace(self, id=self.id + i, name=name, names=(), dtypes=[dtype], shapes=[shape])
            for i, (name, dtype, shape) in enumerate(
                zip(self.names, self.dtypes, self.shapes, strict=True), start=1
            )
        ]

    def __str__(self) -> str:
        descriptions = [
            f"{dtype} {list(shape)}" for dtype, shape in zip(self.dtypes, self.shapes, strict=True)
        ]
        num_omitted = len(descriptions) - _MAX_DESCRIBED
        tensors = ", ".join(descriptions[:_MAX_DESCRIBED]) + (
            f" and {num_omitted} more" if num_omitted > 0 else ""
        )
        return f"{self.kind} {self.name!r} of {tensors}" if tensors else f"{self.kind} {self.name!r}"


def find_error(ranks: Sequence[int], requests: Mapping[int, Request]) -> tuple[str, str] | None:
    """Checks the requests of `ranks` for one name. Returns the error (code, message), or None."""
    difference_message = describe_difference(requests)
    if difference_message:
        return FAILED_PRECONDITION, difference_message
    first = next(iter(requests.values()))
    if first.kind == "broadcast" and first.root not in ranks:
        return FAILED_PRECONDITION, (
            f"{first.name}: the root rank is {first.root}; expected one of {format_ranks(ranks)}."
        )
    has_rows = first.kind in ("allgather", "alltoall", "reducescatter")
    if has_rows and any(len(shape) == 0 for shape in first.shapes):
        return FAILED_PRECONDITION, (
            f"{first.name}: {first.kind} got a scalar; expected a tensor with rows, e.g. "
            "tf.reshape(x, [1])."
        )
    if first.kind == "alltoall":
        return _find_splits_error(ranks, requests)
    return None


def _find_splits_error(ranks: Sequence[int], requests: Mapping[int, Request]) -> tuple[str, str] | None:
    for rank, request in sorted(requests.items()):
        rows, splits = request.shapes[0][0], list(request.splits)
        if not splits:
            problem = (
                f"the tensor has {rows} rows; expected a multiple of {len(ranks)}, the number of ranks, or "
                "splits= with the number of rows for each rank"
            )
        elif len(splits) != len(ranks):
            problem = f"splits has {len(splits)} entries; expected {len(ranks)}, one per rank"
        elif min(splits) < 0:
            problem = f"splits is {splits}; expected numbers of rows >= 0"
        elif sum(splits) != rows:
            problem = f"splits adds up to {sum(splits)}; expected the tensor's {rows} rows"
        else:
            continue
        return INVALID_ARGUMENT, f"{request.name}: alltoall on rank {rank}: {problem}."
    return None


def describe_difference(requests: Mapping[int, Request]) -> str | None:
    """Returns a message about the differences between requests for one name, or None."""
    first, *other_requests = requests.values()
    if all(other.key == first.key for other in other_requests):  # ten times faster than the loop below
        return None
    for property_name, get_property in _COMPARED[first.kind if _is_equal(requests, "kind") else "any"]:
        if len({get_property(request) for request in requests.values()}) > 1:
            return f"{first.name}: {property_name} {_describe_values(requests, get_property)}."
    return None


def _is_equal(requests: Mapping[int, Request], attribute: str) -> bool:
    return len({getattr(r, attribute) for r in requests.values()}) == 1


def _describe_values(requests: Mapping[int, Request], get_property: Any) -> str:
    """Returns text such as "rank 0: [2, 3]; ranks 1, 2: [3, 3]"."""
    groups: dict[Any, list[int]] = {}
    for rank in sorted(requests):
        groups.setdefault(get_property(requests[rank]), []).append(rank)
    return "; ".join(f"{format_ranks(ranks)}: {_format_value(value)}" for value, ranks in groups.items())


def format_ranks(ranks: Sequence[int]) -> str:
    """Returns text such as "rank 3" or "ranks 0, 1, 4"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:16]))
    return f"ranks {shown}" + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")


def _format_value(value: Any) -> str:
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
    ("ranks request different collectives,", lambda r: r.kind),
    ("the number of tensors differs,", lambda r: len(r.shapes)),
    ("the type of the tensor differs,", lambda r: tuple(r.dtypes)),
    ("the data plane differs,", lambda r: r.plane or "tcp"),
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
