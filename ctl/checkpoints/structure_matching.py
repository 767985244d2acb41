"""Matching of the variables of models with those that another program has saved.

A checkpoint of TensorFlow is matched by the attributes that lead from a model to its variables, as
`tf.train.Checkpoint.restore` does, and by the names of variables. A weights file of Keras is matched by its
paths, and by the names of layers. The result that assigns most variables of the same shape is chosen. If
two results contradict each other and none assigns all variables, the match is ambiguous.
"""

import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from ctl.checkpoints import name_matching
from ctl.checkpoints.external_weights import ExternalWeights, Spec
from ctl.checkpoints.tracked_state import TrackedState, is_optimizer, layers_numbered_by_keras, weights_of
from ctl.distribute.keras_objects import unwrap
from ctl.tensorflow_patches import keras_weight_paths

_NUMBER = re.compile(r"(.*)_(\d+)")
_MAX_PREFIX = 3  # leading parts of names that may differ, such as the names of nested models


@dataclass(frozen=True)
class _Model:
    """A model of the trainer.

    Attributes:
      attribute: Name of the trainer's attribute.
      value: The model, as TensorFlow tracks it.
      name_by_id: Identity of a variable -> its name in `TrackedState.variables`.
      paths: Name -> path of the variable within the model.
      specs: Name -> shape and dtype.
    """

    attribute: str
    value: Any
    name_by_id: Mapping[int, str]
    paths: Mapping[str, str]
    specs: Mapping[str, Spec]


def weights_by_model(state: TrackedState, attributes: Iterable[str]) -> dict[str, list[str]]:
    """Returns attribute -> names of the weights of the model, without seeds and metrics."""
    return {model.attribute: list(model.specs) for model in _models(state, attributes)}


def match_weights(
    weights: ExternalWeights, state: TrackedState, attributes: Iterable[str]
) -> dict[str, str]:
    """Returns name of a variable -> key in the file. Shapes may differ.

    Args:
      weights: The saved variables.
      state: The variables of the trainer.
      attributes: Names of the trainer's attributes with the models.

    Raises:
      Ambiguous: If variables have several possible matches.
    """
    key_by_model = {
        model.attribute: (model, _match_model(weights, model)) for model in _models(state, attributes)
    }
    return _merged(weights, list(key_by_model.values()))


def _models(state: TrackedState, attributes: Iterable[str]) -> Iterator[_Model]:
    values = tf.train.TrackableView.children(state.checkpoint)
    name_by_id = {id(variable): name for name, variable in state.variables.items()}
    for attribute in attributes:
        value = values[attribute]
        weights = [unwrap(variable) for variable in weights_of(value)]
        names = {id(v): name_by_id[id(v)] for v in weights if id(v) in name_by_id}
        specs = {
            name_by_id[id(v)]: Spec(tuple(v.shape.as_list()), v.dtype.name)
            for v in weights
            if id(v) in name_by_id
        }
        paths = {name: state.paths[name].partition("/")[2] for name in specs}
        yield _Model(attribute, value, names, paths, specs)


def _match_model(weights: ExternalWeights, model: _Model) -> dict[str, str]:
    """Returns name -> key for one model."""
    if weights.is_keras_file:
        return _chosen(weights, model, [_by_file_path(weights, model), *_by_layer_name(weights, model)])
    children = weights.nodes[0].children if weights.nodes else {}
    if model.attribute in children:
        index = children[model.attribute]
        names = _by_variable_name(weights, model, weights.keys_below(index))
        matches = _chosen(weights, model, [_by_structure(weights, model, index), *names])
        if matches:
            return matches
    starts = [0, *dict.fromkeys(children.values())] if weights.nodes else []
    by_structure = [_by_structure(weights, model, index) for index in starts]
    names = _by_variable_name(weights, model, weights.names.keys())
    return _chosen(weights, model, [*by_structure, *names])


def _by_structure(weights: ExternalWeights, model: _Model, index: int) -> dict[str, str]:
    """Follows equal attributes of a model and of a node of the checkpoint."""
    matches: dict[str, str] = {}
    visited = {id(model.value)}
    queue = deque([(model.value, index)])
    while queue:
        value, position = queue.popleft()
        node = weights.nodes[position]
        for name, child in tf.train.TrackableView.children(value).items():
            if name not in node.children or id(child) in visited or is_optimizer(child):
                continue
            visited.add(id(child))
            target = weights.nodes[node.children[name]]
            variable = model.name_by_id.get(id(unwrap(child)))
            if variable is not None and target.key in weights.specs:
                matches.setdefault(variable, target.key)
            elif variable is None:
                queue.append((child, node.children[name]))
    return matches


def _by_variable_name(
    weights: ExternalWeights, model: _Model, keys: Collection[str]
) -> list[dict[str, str]]:
    """Returns the matches by names of variables, for each number of leading parts that are removed."""
    numbered = {re.sub(r"_\d+$", "", name) for name in layers_numbered_by_keras(model.value)}
    saved_paths = {
        key: "/".join(_mark_number(part, numbered) for part in weights.names[key].split("/"))
        for key in keys
        if key in weights.names
    }
    return _by_name(model.paths, saved_paths)


def _by_layer_name(weights: ExternalWeights, model: _Model) -> list[dict[str, str]]:
    """Returns the matches by name of the layer and number of the variable, for a weights file of Keras."""
    if any(not key.rpartition("/")[0].endswith("vars") for key in weights.names):
        return _by_variable_name(weights, model, weights.names.keys())  # of an older file
    numbered_layers = layers_numbered_by_keras(model.value)
    numbered = {re.sub(r"_\d+$", "", name) for name in numbered_layers}
    paths = {}
    for path, (variable, layer_name) in keras_weight_paths.weight_paths(model.value).items():
        name = model.name_by_id.get(id(unwrap(variable)))
        if name is not None:
            marked = _mark_number(layer_name, numbered) if layer_name in numbered_layers else layer_name
            paths[name] = f"{marked}/{path.rpartition('/')[2]}"
    saved_paths = {
        key: f"{_mark_number(name.partition('/')[0], numbered)}/{name.partition('/')[2]}"
        for key, name in weights.names.items()
    }
    return _by_name(paths, saved_paths)


def _by_file_path(weights: ExternalWeights, model: _Model) -> dict[str, str]:
    matches = {}
    for path, (variable, _) in keras_weight_paths.weight_paths(model.value).items():
        name = model.name_by_id.get(id(unwrap(variable)))
        if name is not None and path in weights.specs:
            matches[name] = path
    return matches


def _by_name(paths: Mapping[str, str], saved_paths: Mapping[str, str]) -> list[dict[str, str]]:
    """Returns the matches of equal paths without the first parts that are common to all paths."""
    alternatives: list[dict[str, str]] = []
    for model_side in _without_common_parts(paths):
        for saved_side in _without_common_parts(saved_paths):
            try:
                matches = name_matching.matching_names(model_side, saved_side)
            except name_matching.Ambiguous as e:
                if not any(alternatives):
                    alternatives.append(_AmbiguousMatches(e))
                continue
            alternatives.append(matches)
    return alternatives


class _AmbiguousMatches(dict[str, str]):
    """No matches, because of an error that is raised if no other way to match the variables succeeds."""

    def __init__(self, error: name_matching.Ambiguous):
        super().__init__()
        self.error = error


def _without_common_parts(paths: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    """Yields the paths, and again without each leading part that is common to all of them."""
    yield paths
    for _ in range(_MAX_PREFIX):
        first_parts = {path.partition("/")[0] for path in paths.values()}
        if len(first_parts) != 1 or any(path.count("/") < 2 for path in paths.values()):
            return
        paths = {name: path.partition("/")[2] for name, path in paths.items()}
        yield paths


def _mark_number(part: str, numbered: Collection[str]) -> str:
    """Returns a part of a saved name with "~" before a number that Keras may have assigned."""
    match = _NUMBER.fullmatch(part)
    return f"{match[1]}~{match[2]}" if match is not None and match[1] in numbered else part


def _chosen(
    weights: ExternalWeights, model: _Model, alternatives: Sequence[dict[str, str]]
) -> dict[str, str]:
    """Returns the matches with most variables of equal shape. Raises Ambiguous for contradictions."""
    fitting = [
        {name: key for name, key in m.items() if model.specs[name].fits(weights.specs[key])}
        for m in alternatives
    ]
    counts = [len(matches) for matches in fitting]
    if not any(counts):
        for matches in alternatives:
            if isinstance(matches, _AmbiguousMatches):
                raise matches.error
        return max(alternatives, key=len, default={})
    best = counts.index(max(counts))
    is_complete = counts[best] == len(model.specs)
    for other, count in zip(fitting, counts, strict=True):
        if is_complete and count < counts[best]:
            continue
        for name, key in other.items():
            if fitting[best].get(name, key) != key:
                raise name_matching.Ambiguous(
                    f"{name} may be {weights.labels[fitting[best][name]]} or {weights.labels[key]}"
                )
    return alternatives[best]


def _merged(weights: ExternalWeights, results: Sequence[tuple[_Model, dict[str, str]]]) -> dict[str, str]:
    """Returns the matches of all models. A saved variable belongs to one variable of the trainer."""
    merged: dict[str, str] = {}
    owner_by_key: dict[str, tuple[str, float]] = {}  # name in this model, part of its model that matches
    for model, matches in results:
        part = len(matches) / max(1, len(model.specs))
        for name, key in matches.items():
            if merged.get(name, key) != key:
                raise name_matching.Ambiguous(
                    f"{name} may be {weights.labels[merged[name]]} or {weights.labels[key]}"
                )
            other, other_part = owner_by_key.get(key, (name, part))
            if other != name and other_part == part:
                raise name_matching.Ambiguous(f"{weights.labels[key]} may be {other} or {name}")
            if other == name or part > other_part:
                merged.pop(other, None)
                merged[name], owner_by_key[key] = key, (name, part)
    return merged
