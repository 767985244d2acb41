"""Environment variable that turns off replacements of parts of TensorFlow and Keras.

    CTL_DISABLE_TENSORFLOW_PATCHES=random_in_xla,quiet_device_search python train.py

The names are those of the modules in this folder. The variable must be equal on all workers, which
compare it before they start (`ctl.distribute.job_fingerprint`).
"""

import functools
import logging
import os

from ctl.errors import UsageError

VARIABLE = "CTL_DISABLE_TENSORFLOW_PATCHES"
PATCHES = frozenset({
    "announced_collectives",
    "collective_launchers",
    "graph_call_errors",
    "keras2_spellings",
    "keras_compilation",
    "kernel_seeds",
    "loss_reduction",
    "metric_building",
    "metric_values",
    "mirrored_assignments",
    "optimizer_sum",
    "quiet_device_search",
    "random_in_xla",
    "seed_generators",
    "session_registry",
    "skipped_batches",
    "synchronized_moments",
    "thread_spinning",
    "unlocked_connection",
    "weighted_means",
})  # fmt: skip


def is_enabled(name: str) -> bool:
    """Returns False if the environment variable contains the name of a patch, which is then logged once.

    Raises:
      UsageError: The environment variable contains a name that is no patch.
    """
    is_disabled = name in disabled_patches()
    if is_disabled:
        _log_disabled(name)
    return not is_disabled


def disabled_patches() -> set[str]:
    """Returns the names in the environment variable. Raises UsageError as `is_enabled`."""
    text = os.environ.get(VARIABLE, "")
    disabled = {part.strip() for part in text.split(",")} - {""}
    unknown = sorted(disabled - PATCHES)
    if unknown:
        raise UsageError(
            f"{VARIABLE} contains {', '.join(unknown)}; expected names of "
            f"{', '.join(sorted(PATCHES))}, separated by commas. Correct the variable, or unset it."
        )
    return disabled


@functools.cache
def _log_disabled(name: str) -> None:
    logging.getLogger("ctl").warning("%s turns off the patch %r of TensorFlow.", VARIABLE, name)
