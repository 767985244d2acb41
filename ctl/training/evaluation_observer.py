"""Observers of the batches of an evaluation."""

from collections.abc import Mapping


class EvaluationObserver:
    """An object that is called around each graph call of `batches_per_call` batches, on all workers."""

    def __init__(self, batches_per_call: int = 1):
        self.batches_per_call = batches_per_call

    def batch_begins(self, batch: int) -> None:
        """Called before a graph call, with the index of its first batch."""

    def batch_ends(self, batch: int, means: Mapping[str, float]) -> bool:
        """Called with the index of the last batch of a full graph call, and metrics of all batches.

        Returns True to end the evaluation. The value of the chief applies.
        """
        return False
