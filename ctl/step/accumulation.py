"""Loop state of gradient accumulation: gradients of several parts of a batch, added up.

A dense gradient is a tensor. A sparse one is a list [indices, values]; the rows of parts are concatenated.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from ctl.step.update_request import UpdateRequest


def initial_sums(requests: Sequence[UpdateRequest]) -> list:
    """Returns the gradients and loss flags of requests as loop state."""
    return [[*map(_parts, r.gradients), r.loss_flag] for r in requests]


def _parts(gradient: Any) -> Any:
    return [gradient.indices, gradient.values] if isinstance(gradient, tf.IndexedSlices) else gradient


def shape_invariants(sums: Sequence[Sequence[Any]]) -> list:
    """Returns the shapes of the loop state. The number of rows of sparse gradients is unknown."""
    return [
        [
            [tf.TensorShape([None, *t.shape[1:]]) for t in gradient]
            if isinstance(gradient, list)
            else gradient.shape
            for gradient in gradients
        ]
        for gradients in sums
    ]


def add(sums: Sequence[Sequence[Any]], requests: Sequence[UpdateRequest]) -> list:
    """Returns the loop state after another part of the batch."""

    def sum_of(a: Any, b: Any) -> Any:
        if isinstance(a, list):
            return [tf.concat(pair, axis=0) for pair in zip(a, b, strict=True)]
        return a + b

    return [
        [sum_of(a, b) for a, b in zip(before, part, strict=True)]
        for before, part in zip(sums, initial_sums(requests), strict=True)
    ]


def accumulated(requests: Sequence[UpdateRequest], sums: Sequence[Sequence[Any]]) -> list[UpdateRequest]:
    """Returns the requests of the first part with the gradients of all parts."""
    return [
        dataclasses.replace(
            request,
            gradients=[_gradient(s, g) for s, g in zip(gradients, request.gradients, strict=True)],
            loss_flag=loss_flag,
            may_lack_rows=True,
        )
        for request, (*gradients, loss_flag) in zip(requests, sums, strict=True)
    ]


def _gradient(parts: Any, like: Any) -> Any:
    return tf.IndexedSlices(parts[1], parts[0], like.dense_shape) if isinstance(parts, list) else parts
