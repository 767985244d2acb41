"""Position of a run: everything that a manifest stores besides tensors."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf
from ctl.checkpoints.protocol import Manifest
from ctl.data.passes import COUNT_AGAIN
from ctl.version import __version__


@dataclass(frozen=True)
class Progress:
    """Position of a run.

    Attributes:
      step: Number of completed steps to which the other values belong.
      examples: Number of examples consumed since the start of the data.
      pass_batches: Number of batches of a pass over data of unknown length. None until a pass has ended.
      data_position_mode: Method that finds the position in the data again: "indexed", "iterator" or "skip".
      data_description: Description of the data, or None.
      iterator_state: Value of `Batches.iterator_state` at this step, or None.
      order_seed: Seed of the order of examples that are read by index, or None.
      metrics: Metrics evaluated at this step.
      loop_state: State of the loop and of callbacks.
    """

    step: int = 0
    examples: int = 0
    pass_batches: int | None = None
    data_position_mode: str = "indexed"
    data_description: str | None = None
    iterator_state: Mapping[str, Any] | None = None
    order_seed: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    loop_state: Mapping[str, Any] = field(default_factory=dict)

    def advanced(self, step: int, global_batch_size: int, max_examples: int | None = None) -> "Progress":
        """Returns the progress after `step`. `max_examples` is given if the last batch was short."""
        examples = self.examples + (step - self.step) * global_batch_size
        if max_examples is not None:
            examples = min(examples, max_examples)
        return replace(self, step=step, examples=examples)

    def rolled_back(self, step: int) -> "Progress":
        """Returns the progress after a return to `step`. Consumed examples stay consumed."""
        return replace(self, step=step)

    @classmethod
    def from_manifest(cls, manifest: Manifest, global_batch_size: int) -> "Progress":
        """Returns the progress at a checkpoint."""
        data, pass_batches = manifest.data, manifest.data.get("pass_batches")
        if pass_batches and manifest.world.get("global_batch_size") != global_batch_size:
            pass_batches = COUNT_AGAIN
        return cls(
            manifest.step,
            int(data.get("examples", manifest.step * global_batch_size)),
            pass_batches,
            data.get("mode", "indexed"),
            data.get("source"),
            data.get("iterator"),
            data.get("order_seed"),
            manifest.metrics,
            manifest.state,
        )

    def to_manifest(
        self, step: int, *, variables: Mapping[str, Any], world: Mapping, seed: int, config: Mapping
    ) -> Manifest:
        """Returns the manifest of a checkpoint.

        Args:
          step: Step of the checkpoint.
          variables: Shapes and dtypes of the saved variables by name.
          world: Strategy, numbers of workers and replicas, and global batch size.
          seed: Seed of the data.
          config: Settings of the trainer.
        """
        return Manifest(
            step=step,
            created=time.time(),
            variables=variables,
            world=world,
            data={
                "mode": self.data_position_mode,
                "examples": self.examples,
                "seed": seed,
                "source": self.data_description,
                "one_pass": True,  # `source` describes the data before they are repeated for epochs
                **({"pass_batches": self.pass_batches} if self.pass_batches else {}),
                **({"iterator": self.iterator_state} if self.iterator_state else {}),
                **({} if self.order_seed is None else {"order_seed": self.order_seed}),
            },
            metrics=self.metrics,
            state=self.loop_state,
            config=config,
            versions={"ctl": __version__, "tensorflow": tf.__version__},
        )
