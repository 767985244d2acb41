"""Creation of the variables of Keras metrics before their first update.

Purpose: Metrics such as F1Score create variables in their first `update_state`. TensorFlow cannot create
  variables of several replicas while it traces a loop.
Replaces: `update_state` of single metrics; calls their methods `_build` and reads `_built`.
Versions: Keras 3.0 and later, tf_keras 2.16 and later. Metrics without these attributes are unchanged.
Upstream issue: none known.
Switch: `metric_building`. Without the patch such metrics raise an error on several replicas.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from ctl.tensorflow_patches import switches


def build_before_update(metric: Any, create: Callable[[Callable[[], Any]], None]) -> None:
    """Makes `update_state` build the metric with `create(build)` first. A no-op for a built metric."""
    is_unbuilt = not getattr(metric, "_built", True) and callable(getattr(metric, "_build", None))
    if is_unbuilt and switches.is_enabled("metric_building"):
        object.__setattr__(metric, "update_state", _built_first(metric, create))


def _built_first(metric: Any, create: Callable[[Callable[[], Any]], None]) -> Callable[..., Any]:
    """Returns `update_state` of a metric, preceded by a build with the shapes of its arguments."""
    update_state = metric.update_state
    names = list(inspect.signature(type(metric).update_state).parameters)[1:]
    num_shapes = len(inspect.signature(metric._build).parameters)

    @tf.autograph.experimental.do_not_convert
    def built_first(*args: Any, **named: Any) -> Any:
        if not metric._built:
            arguments = dict(zip(names, args, strict=False)) | named
            values = [arguments[n] for n in ("y_true", "y_pred") if n in arguments]
            values = values or list(arguments.values())[:1]
            shapes = [tf.convert_to_tensor(value).shape for value in values]
            create(functools.partial(metric._build, *shapes[-num_shapes:]))
        return update_state(*args, **named)

    return built_first
