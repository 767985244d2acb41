"""Registry of gradient reducers. One line registers a reducer."""

import pkgutil

from ctl.step.reducers.reducer import GradientReducer, ReducerInputs
from ctl.step.reducers.sum import SumReducer

# functions that return a reducer, or None if the settings do not request it; the first reducer is used
FACTORIES = (
    "ctl.step.reducers.local_sgd:create_local_sgd",
    "ctl.step.reducers.int8:create_int8",
)  # fmt: skip


def create_reducer(inputs: ReducerInputs) -> GradientReducer:
    """Creates the reducer for the settings, by default the sum in each step.

    Raises:
      UsageError: If the trainer does not support the settings.
    """
    for name in FACTORIES:
        if (reducer := pkgutil.resolve_name(name)(inputs)) is not None:
            return reducer
    return SumReducer()
