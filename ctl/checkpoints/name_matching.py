"""Which variable of a model is which of a saved one, by their paths.

A path is like "model/encoder_2/dense~1/kernel": "~" stands before a number that Keras gave, "_" before one
that a user chose. Layers that a user has named are the same only with the same name. Keras counts the
layers of a process, so the numbers that it gave may be shifted as a whole; where it is not clear by how
much, the two are ambiguous.
"""

import re
from collections import defaultdict
from collections.abc import Mapping

_NUMBER = re.compile(r"~(\d+)")
_LISTED = 6


class Ambiguous(ValueError):
    """Several variables might be meant; the text names those on both sides."""


def matching_names(here: Mapping[str, str], there: Mapping[str, str]) -> dict[str, str]:
    """Name here -> name there, of those that are the same; both map names to paths.

    Raises Ambiguous.
    """
    saved = _groups(there)
    found: dict[str, str] = {}
    for base, mine in _groups(here).items():
        theirs = saved.get(base, [])
        numbers, others = [n for n, _ in mine], [n for n, _ in theirs]
        if not theirs:
            continue
        repeated = len(set(numbers)) < len(mine) or len(set(others)) < len(theirs)
        aligned = numbers == others or numbers[0] == others[0]
        shifted = len(mine) == len(theirs) and not set(numbers) & set(others)
        if shifted or numbers == others:
            found |= {a: b for (_, a), (_, b) in zip(mine, theirs, strict=True)}
        elif aligned and not repeated:
            names = dict(theirs)
            found |= {name: names[number] for number, name in mine if number in names}
        else:
            raise Ambiguous(f"{_listed(mine, here)} here, {_listed(theirs, there)} there")
    return found


def _groups(paths: Mapping[str, str]) -> dict[str, list[tuple[tuple[int, ...], str]]]:
    """Path without the numbers of Keras -> (these numbers, name), ascending."""
    groups = defaultdict(list)
    for name, path in paths.items():
        groups[_NUMBER.sub("", path)].append((_numbers(path), name))
    return {base: sorted(members, key=lambda m: m[0]) for base, members in groups.items()}


def _numbers(path: str) -> tuple[int, ...]:
    """The number of each part of a path; the first of its kind has none, which is 0."""
    found = [_NUMBER.search(part) for part in path.split("/")]
    return tuple(int(match[1]) if match else 0 for match in found)


def _listed(members: list, paths: Mapping[str, str]) -> str:
    shown = [paths[name].replace("~", "_") for _, name in members[:_LISTED]]
    more = f" and {len(members) - _LISTED} more" if len(members) > _LISTED else ""
    return ", ".join(shown) + more
