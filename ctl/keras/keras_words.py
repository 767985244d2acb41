"""Translation of messages of `ctl.Trainer` into the terms of `Model.fit`.

The original messages name methods, attributes and flags of a trainer, which a Keras program does not have.
"""

import contextlib
import logging
import re
from collections.abc import Iterator

from ctl.errors import CtlError

# pattern -> replacement, in this order
_REPLACEMENTS = (
    (r"Write dataset\.batch\(batch_size\) with the batch_size that \w+ is given, or set "
     r"--global_batch_size=",
     "Write the same number in dataset.batch(batch_size) of x and of all datasets it is made of, such as "),
    (r"Write dataset\.batch\(batch_size\) with the batch_size that train_data is given",
     "Write dataset.batch(batch_size) with the size of its first batch"),
    (r"Try a smaller --global_batch_size, or self\.gradients = ctl\.Gradients\(accumulate_steps=2\), which "
     r"splits a replica's batch", "Try a smaller batch_size"),
    (r"or clip with self\.gradients = ctl\.Gradients\(clip_norm=1\.0\)\..*$",
     "or clip with the optimizer's argument global_clipnorm=1.0."),
    (r"from_arrays got arrays of shapes", "x, y and sample_weight have the shapes"),
    (r"from_arrays got arrays of 0 examples", "x has 0 examples"),
    (r"from_arrays got an array of Python objects", "x, y or sample_weight is an array of Python objects"),
    (r"Write self\.gradients = ctl\.Gradients\(accumulate_steps=\.\.\.\) in build\(\) instead\.",
     "Leave it out, or train on one device."),
    (r"or call ctl\.synchronize_batch_norm\(model\) in build\(\), or ctl\.fit", "or ctl.fit"),
    (r"If a layer was frozen, build the optimizer .*$",
     "If a layer was frozen, compile the model again afterwards. If a layer gets its variables only when "
     "it is called, begin its model with keras.Input(shape)."),
    (r"Make them in build\(\), as attributes of self, and use them in the step\.",
     "Make them in the constructor of the model, as attributes, and use them in the step."),
    (r"Is there a `return`\?", ""),
    (r"eval_data\(\.\.\.\)", "validation_data"),
    (r"--global_batch_size|global_batch_size", "batch_size"),
    (r"train_data_fn|train_data", "x"),
    (r"eval_data", "validation_data"),
    (r"train\(steps=\.\.\.\), or --train_steps", "steps_per_epoch=..."),
    (r"self\.model\b", "the model"),
    (r"self\.optimizer\b", "the optimizer"),
    (r"In build\(\), begin", "Begin"),
)  # fmt: skip


class _KerasWords(logging.Filter):
    """A filter that translates log records."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = translated(record.getMessage()), ()
        return True


@contextlib.contextmanager
def in_keras_words() -> Iterator[None]:
    """Translates errors and log records of ctl into the terms of `Model.fit` within the block."""
    log, translation = logging.getLogger("ctl"), _KerasWords()
    log.addFilter(translation)
    try:
        yield
    except CtlError as e:
        if e.args and isinstance(e.args[0], str):
            e.args = (translated(e.args[0]), *e.args[1:])
        raise
    finally:
        log.removeFilter(translation)


def translated(message: str) -> str:
    """Returns the message with arguments of `Model.fit` in place of methods and flags of a trainer."""
    for pattern, replacement in _REPLACEMENTS:
        message = re.sub(pattern, replacement, message, flags=re.DOTALL)
    return message
