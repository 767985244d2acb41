"""Registry of gradient reducers. The first factory that returns a reducer decides."""

from ctl.step.reducers import int8, local_sgd
from ctl.step.reducers.reducer import GradientReducer, ReducerInputs
from ctl.step.reducers.sum import SumReducer

_FACTORIES = (local_sgd.create_local_sgd, int8.create_int8)


def create_reducer(inputs: ReducerInputs) -> GradientReducer:
    """Creates the reducer for the settings, by default the sum in each step.

    Raises:
      UsageError: If the trainer does not support the settings.
    """
    for create in _FACTORIES:
        if (reducer := create(inputs)) is not None:
            return reducer
    return SumReducer()
