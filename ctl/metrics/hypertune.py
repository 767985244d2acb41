"""Metric of each evaluation for a hyperparameter tuning job on Vertex AI.

The service reads the file CLOUD_ML_HP_METRIC_FILE. It has one JSON object per line, for the newest 100
evaluations; all values except the time are strings (the protocol of the package cloudml-hypertune).
"""

import collections
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ctl.metrics.protocol import MetricWriter

FILE = "CLOUD_ML_HP_METRIC_FILE"
TRIAL = "CLOUD_ML_TRIAL_ID"
_DEFAULT = "/tmp/hypertune/output.metrics"
_MAX_LINES = 100


class HypertuneWriter(MetricWriter):
    """Metric writer for one metric of each evaluation. The tag is the name of the metric.

    Args:
      metric: Name of the metric.
      environ: Environment variables.
      clock: Function that returns the Unix time (seconds).

    Attributes:
      metric: Name of the metric, which the evaluation of the trainer must return.
    """

    def __init__(
        self, metric: str, environ: Mapping[str, str] = os.environ, clock: Callable[[], float] = time.time
    ):
        self.metric = self._metric = metric
        self._path = Path(environ.get(FILE) or _DEFAULT)
        self._trial = environ.get(TRIAL) or "0"
        self._clock = clock
        self._lines: collections.deque[str] = collections.deque(maxlen=_MAX_LINES)

    def write(self, step: int, values: Mapping[str, float], run: str = "train") -> None:
        """Writes the newest lines of evaluations. Metrics of the training are ignored."""
        if run != "eval":
            return
        self._lines.append(
            json.dumps(
                {
                    "timestamp": self._clock(),
                    "trial": self._trial,
                    self._metric: str(float(values[self._metric])),
                    "global_step": str(int(step)),
                    "checkpoint_path": "",
                }
            )
        )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text("".join(f"{line}\n" for line in self._lines), encoding="utf-8")
