"""Methods and objects of a user's trainer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ctl.checkpoints import export
from ctl.checkpoints.export import Target
from ctl.checkpoints.tracked_state import collect_owners, is_model, is_optimizer
from ctl.config import Config
from ctl.step import keras_metrics
from ctl.step.gradient_settings import Gradients
from ctl.step.moving_averages import MovingAverages
from ctl.training.user_methods import is_defined_by_user

USER_METHODS = (
    *("build", "train_data", "train_data_fn", "train_step", "eval_data", "eval_step"),
    *("before_training", "after_loop", "after_epoch", "after_evaluation", "signatures", "moving_averages"),
)
_SETTINGS = (  # attributes of a trainer that `build` may change
    *("global_batch_size", "seed", "model_dir", "init_from", "jit_compile", "check_collectives"),
    *("evaluate_ema", "step_timeout_secs", "allow_config_change", "data_position"),
)
SETTINGS = (*_SETTINGS, "gradients")


@dataclass(frozen=True)
class Task:
    """The methods that a subclass of `ctl.Trainer` defines, and the objects that its `build` created.

    Attributes:
      class_name: Name of the subclass.
      methods: The methods that the user defines, by name, bound to the trainer; see `USER_METHODS`.
      attributes: All attributes of the trainer.
      model, optimizer: The default model and its optimizer, or None.
      gradients: Settings of gradients.
      moving_averages: Moving averages with which the trainer evaluates.
      export_targets: Returns the models and formats to export; see `export.targets`.
      rows_may_vary: True if the number of rows of a batch divides no loss.
    """

    class_name: str
    methods: Mapping[str, Callable[..., Any]]
    attributes: Mapping[str, Any]
    model: Any
    optimizer: Any
    gradients: Gradients
    moving_averages: MovingAverages
    export_targets: Callable[[Sequence[str]], list[Target]]
    rows_may_vary: bool

    @classmethod
    def of(cls, trainer: Any) -> Task:
        """Returns the task of a `ctl.Trainer`. Before `build` it has methods only."""
        names = [name for name in USER_METHODS if is_defined_by_user(trainer, name)]
        methods = {name: getattr(trainer, name) for name in names}
        attributes = vars(trainer)
        return cls(
            class_name=type(trainer).__name__,
            methods=methods,
            attributes=attributes,
            model=trainer.model,
            optimizer=trainer.optimizer,
            gradients=trainer.gradients,
            moving_averages=MovingAverages(attributes, trainer.moving_averages, trainer.evaluate_ema),
            export_targets=functools.partial(export.targets, trainer),
            rows_may_vary=trainer._rows_may_vary,
        )

    @property
    def can_evaluate(self) -> bool:
        """True if the user defines the methods of an evaluation."""
        return {"eval_data", "eval_step"} <= self.methods.keys()

    @property
    def owners(self) -> dict[str, Any]:
        """Attributes that own variables, by name."""
        return collect_owners(self.attributes)

    @property
    def models(self) -> dict[str, Any]:
        """Attributes that are models, by name."""
        return {name: owner for name, owner in self.owners.items() if is_model(owner)}

    @property
    def optimizers(self) -> dict[str, Any]:
        """Attributes that are optimizers, by name."""
        return {name: value for name, value in self.attributes.items() if is_optimizer(value)}

    @property
    def metrics(self) -> list[Any]:
        """Keras metrics among the attributes."""
        return keras_metrics.metrics_in(self.attributes)

    def signatures(self) -> dict[str, Any]:
        """Returns the functions that an exported SavedModel serves, by name."""
        method = self.methods.get("signatures")
        return export.checked_signatures({} if method is None else method())


def settled_config(trainer: Any) -> Config:
    """Returns the configuration of a trainer with the settings that its attributes have changed.

    Raises:
      UsageError: For an invalid value of an attribute.
    """
    config: Config = trainer.config
    values = {name: getattr(trainer, name) for name in _SETTINGS}
    values = {name: "" if value is None else value for name, value in values.items()}
    changed = {name: value for name, value in values.items() if value != getattr(config, name)}
    return config.with_settings(**changed) if changed else config
