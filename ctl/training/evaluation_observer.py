"""Observers of the batches of an evaluation."""

from collections.abc import Mapping


class EvaluationObserver:
    """An object that is called around each graph call of `batches_per_call` batches, on all workers."""

    def __init__(self, batches_per_call: int = 1):
        self.batches_per_call = batches_per_call

    def batch_begins(self, batch: int) -> None:
        """Called before a graph call, with the index of its first batch."""

    def batch_ends(self, batch: int, means: Mapping[str, float]) -> bool:
        """Called after a graph call with its last index. The chief returns True to end the evaluation."""
        return False
