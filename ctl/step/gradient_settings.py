"""Settings of the path from gradients to an update."""

from dataclasses import dataclass

import tensorflow as tf
from ctl.errors import UsageError
from ctl.setting_values import check_choice, check_fields, check_integer
from ctl.step import finiteness

WIRE_DTYPES = ("bfloat16", "float16", "int8")


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Accumulation, reduction and clipping of gradients. Set `self.gradients` in `build`.

    Attributes:
      clip_norm: Largest global norm of the summed gradients. Larger gradients are scaled down. None
        disables clipping.
      accumulate_steps: Number of parts into which the batch of a replica is split. The gradients of the
        parts are added up before one update, so that a large batch fits into memory.
      wire_dtype: Data type in which gradients travel between replicas. "bfloat16" and "float16" halve the
        number of bytes, except between workers that share memory. "int8" sends a quarter, between workers
        with one replica each; rounding errors are added to the gradients of the next step. None sends the
        gradients in their own dtype.
      on_nonfinite: Policy for a loss or gradient that is NaN or infinite on any replica: "stop" ends the
        run, "skip" leaves the step out, "rollback" restores the newest checkpoint and continues with other
        data.
      merge_rows: True adds up equal rows of a sparse gradient before the update, as if the gradient were
        dense. False passes each row to the optimizer; Adam of Keras 3 squares each of them separately.

    Raises:
      UsageError: If a value is invalid.
    """

    clip_norm: float | None = None
    accumulate_steps: int = 1
    wire_dtype: str | None = None
    merge_rows: bool = True
    on_nonfinite: str = "stop"

    def __post_init__(self) -> None:
        dtype_name = getattr(self.wire_dtype, "name", self.wire_dtype)  # of tf.bfloat16
        object.__setattr__(self, "wire_dtype", dtype_name)
        check_fields(self)
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UsageError(f"clip_norm is {self.clip_norm!r}; expected a number > 0, or None.")
        check_integer("accumulate_steps", self.accumulate_steps, 1)
        if self.wire_dtype not in (None, *WIRE_DTYPES):
            raise UsageError(
                f"wire_dtype is {self.wire_dtype!r}; expected 'bfloat16', 'float16', 'int8' or None."
            )
        check_choice("on_nonfinite", self.on_nonfinite, finiteness.NONFINITE_POLICIES)

    @property
    def cast_dtype(self) -> str | None:
        """Floating-point type to which dense gradients are cast for their sum. None: no cast."""
        is_float = self.wire_dtype is not None and tf.as_dtype(self.wire_dtype).is_floating
        return self.wire_dtype if is_float else None
