"""Matching of the variables of a model with those of a checkpoint, by their paths.

In a path such as "model/encoder_2/dense~1/kernel", "~" precedes a number that Keras assigned, and "_" one
that the user chose. Names that the user chose must be equal. Keras numbers the layers of a process, so the
numbers that it assigned may all be shifted by the same amount. If the shift is unclear, the match is
ambiguous.
"""

import re
from collections import defaultdict
from collections.abc import Mapping

_NUMBER = re.compile(r"~(\d+)")
_MAX_LISTED = 6


class Ambiguous(ValueError):
    """An error for variables with several possible matches; the message lists those of both sides."""


def matching_names(model_paths: Mapping[str, str], saved_paths: Mapping[str, str]) -> dict[str, str]:
    """Returns the names in the checkpoint of the variables that exist on both sides.

    Args:
      model_paths: Name -> path of the variables of the model.
      saved_paths: Name -> path of the variables in the checkpoint.

    Returns:
      Name in the model -> name in the checkpoint.

    Raises:
      Ambiguous: If variables have several possible matches.
    """
    saved_groups = _group_by_unnumbered_path(saved_paths)
    saved_name_by_name: dict[str, str] = {}
    for base, members in _group_by_unnumbered_path(model_paths).items():
        saved_members = saved_groups.get(base, [])
        if not saved_members:
            continue
        numbers, saved_numbers = [n for n, _ in members], [n for n, _ in saved_members]
        has_duplicates = any(len(set(group)) < len(group) for group in (numbers, saved_numbers))
        has_same_start = numbers[0] == saved_numbers[0]
        is_shifted = len(members) == len(saved_members) and not set(numbers) & set(saved_numbers)
        if is_shifted or numbers == saved_numbers:
            pairs = zip(members, saved_members, strict=True)
            saved_name_by_name |= {name: saved_name for (_, name), (_, saved_name) in pairs}
        elif has_same_start and not has_duplicates:
            name_by_number = dict(saved_members)
            saved_name_by_name |= {
                name: name_by_number[number] for number, name in members if number in name_by_number
            }
        else:
            raise Ambiguous(
                f"{_listed(members, model_paths)} in this model, "
                f"{_listed(saved_members, saved_paths)} in the checkpoint"
            )
    return saved_name_by_name


def _group_by_unnumbered_path(paths: Mapping[str, str]) -> dict[str, list[tuple[tuple[int, ...], str]]]:
    """Returns path without the numbers of Keras -> (these numbers, name), ascending by the numbers."""
    groups = defaultdict(list)
    for name, path in paths.items():
        groups[_NUMBER.sub("", path)].append((_numbers(path), name))
    return {base: sorted(members, key=lambda m: m[0]) for base, members in groups.items()}


def _numbers(path: str) -> tuple[int, ...]:
    """Returns the number of each part of a path, 0 for a part without a number."""
    matches = [_NUMBER.search(part) for part in path.split("/")]
    return tuple(int(match[1]) if match else 0 for match in matches)


def _listed(members: list, paths: Mapping[str, str]) -> str:
    names = [paths[name].replace("~", "_") for _, name in members[:_MAX_LISTED]]
    suffix = f" and {len(members) - _MAX_LISTED} more" if len(members) > _MAX_LISTED else ""
    return ", ".join(names) + suffix
