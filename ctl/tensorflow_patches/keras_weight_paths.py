"""Paths of the variables of a Keras model in its weights file.

Purpose: Keras names the groups of a `.weights.h5` file after attributes and classes, and has no public
  function that returns the path of a variable.
Uses: `_walk_saveable` and `_get_unique_name` of `keras.src.saving.saving_lib`, `_walk_trackable` and
  `_is_keras_trackable` of `tf_keras.src.saving.saving_lib`, and the lists of a layer's own variables.
Versions: Keras 3.0 and later, tf_keras 2.16 and later. Without these functions there are no paths.
Upstream issue: none.
Switch: none, as these are reads and calls.
"""

import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any


def weight_paths(model: Any) -> dict[str, tuple[Any, str]]:
    """Returns path -> (variable, name of its layer), such as "layers/dense/vars/0" -> (kernel, "dense").

    Empty for objects that are not Keras models.
    """
    names = {c.__module__.partition(".")[0] for c in type(model).__mro__}
    framework = next((name for name in ("tf_keras", "keras") if name in names), "")
    if not framework or not hasattr(model, "layers"):
        return {}
    walk, is_saveable = _functions(framework)
    if walk is None:
        return {}
    paths: dict[str, tuple[Any, str]] = {}
    for owner, path in _saveables(model, walk, is_saveable, is_flat=framework == "tf_keras"):
        for number, variable in enumerate(_own_variables(owner)):
            paths[f"{path}/vars/{number}".lstrip("/")] = variable, str(getattr(owner, "name", ""))
    return paths


def _functions(framework: str) -> tuple[Any, Callable[[Any], bool]]:
    """Returns the function that walks over the parts of an object, and the test for parts with weights."""
    library = importlib.import_module(f"{framework}.src.saving.saving_lib")
    if framework == "tf_keras":
        return getattr(library, "_walk_trackable", None), getattr(library, "_is_keras_trackable", bool)
    walk = getattr(library, "_walk_saveable", None) or getattr(library, "_walk_trackable", None)
    try:
        saveable: Any = importlib.import_module("keras.src.saving.keras_saveable").KerasSaveable
    except ImportError:
        return None, bool
    return walk, lambda value: isinstance(value, saveable)


def _saveables(
    model: Any,
    walk: Callable[[Any], Iterable[tuple[str, Any]]],
    is_saveable: Callable[[Any], bool],
    *,
    is_flat: bool,
) -> Iterator[tuple[Any, str]]:
    """Yields the parts of a model with their paths, in the order in which Keras saves them.

    Args:
      model: The model.
      walk: Yields the attributes of a part with their names.
      is_saveable: Returns True for parts with weights.
      is_flat: True for tf_keras, which ignores lists in lists, and parts of a list that it has visited.
    """
    visited: set[int] = set()

    def visit(owner: Any, path: str) -> Iterator[tuple[Any, str]]:
        if id(owner) in visited:
            return
        visited.add(id(owner))
        yield owner, path
        for name, child in walk(owner):
            yield from visit_child(child, f"{path}/{name}".lstrip("/"))

    def visit_child(child: Any, path: str) -> Iterator[tuple[Any, str]]:
        if is_saveable(child):
            yield from visit(child, path)
        elif isinstance(child, (list, dict, tuple, set)):
            yield from visit_container(child, path)

    def visit_container(container: Any, path: str, outer: tuple = ()) -> Iterator[tuple[Any, str]]:
        if any(container is other for other in outer):
            return
        counts: dict[str, int] = {}
        for item in list(container.values()) if isinstance(container, Mapping) else list(container):
            if is_saveable(item):
                if is_flat and id(item) in visited:
                    continue
                name = _unique_name(_snake_case(type(item).__name__), counts)
                yield from visit(item, f"{path}/{name}")
            elif isinstance(item, (list, dict, tuple)) and not is_flat:
                name = _unique_name("container", counts)
                yield from visit_container(item, f"{path}/{name}", (*outer, container))

    yield from visit(model, "")


def _own_variables(owner: Any) -> list[Any]:
    """Returns the variables of a layer without those of its parts, in the order of the file."""
    for names in (
        ("_trainable_variables", "_non_trainable_variables"),  # Keras 3
        ("_trainable_weights", "_non_trainable_weights"),  # tf_keras
    ):
        lists = [vars(owner).get(name) for name in names] if hasattr(owner, "__dict__") else [None]
        if all(isinstance(values, (list, tuple)) for values in lists):
            return [variable for values in lists for variable in values or ()]
    return []


def _unique_name(name: str, counts: dict[str, int]) -> str:
    counts[name] = counts.get(name, -1) + 1
    return f"{name}_{counts[name]}" if counts[name] else name


def _snake_case(name: str) -> str:
    """Returns the name of a class as Keras writes it in names of layers."""
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()
