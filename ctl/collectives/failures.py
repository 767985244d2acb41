"""What a collective raises, of the types that scripts written for Horovod catch."""

import tensorflow as tf
from ctl.collectives import contents
from ctl.collectives.errors import HorovodInternalError

FAILURE_MARK = "ctl.hvd: "  # begins every message, so that it is found again in what TensorFlow makes of it


class LostRankError(HorovodInternalError, tf.errors.UnknownError):
    """A rank is gone, or the group was left; both types that Horovod's scripts look for."""

    def __init__(self, message: str):
        tf.errors.UnknownError.__init__(self, None, None, message)

    def __str__(self) -> str:
        return self.message


_TYPES = {
    "FAILED_PRECONDITION": tf.errors.FailedPreconditionError,
    "INVALID_ARGUMENT": tf.errors.InvalidArgumentError,
}


def failure(code: str, text: str) -> Exception:
    """The exception for a code of `requests`, or "LOST"."""
    made = _TYPES.get(code)
    text += contents.said(text)
    return LostRankError(FAILURE_MARK + text) if made is None else made(None, None, FAILURE_MARK + text)
