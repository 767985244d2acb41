"""Metric writer for MLflow."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ctl.errors import UsageError
from ctl.io import paths
from ctl.metrics.protocol import Ended, Joined, RunEnd, Started
from ctl.setting_values import check_type
from ctl.trackers.background_writer import TrackerWriter

_RUN_ID_TAG = "ctl.run_id"
_END_TAGS = ("ctl.status", "ctl.end", "ctl.error")
_MAX_VALUE_LENGTH = 500  # of a parameter, in the oldest supported servers
_MAX_NAME_LENGTH = 250
_MAX_PARAMS = 100  # of one request
_INVALID_CHARACTERS = re.compile(r"[^\w\-. :/]")
_SOURCE_TAGS = {"command": "mlflow.source.name", "git_commit": "mlflow.source.git.commit"}
_TRANSIENT_CODES = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "IO_ERROR")
_CLIENT_DEFAULTS = {  # the thread of the writer retries
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}


class MlflowWriter(TrackerWriter):
    """Metric writer for MLflow: parameters, metrics, exported models and the status of the run.

    The server and its credentials are those of MLflow: MLFLOW_TRACKING_URI and its other variables. A run
    that resumes in its model_dir continues the run of MLflow with the same tag `ctl.run_id`. MLflow does
    not change parameters, so values that differ after a resume become tags such as `resumed.seed`. MLflow
    keeps the metrics of steps that a resumed run repeats.

    >>> ctl.fit(model, x, y, model_dir="/tmp/run", extra_writers=[ctl.MlflowWriter()])

    Args:
      experiment: Name of the experiment. None: MLFLOW_EXPERIMENT_NAME or MLFLOW_EXPERIMENT_ID, else the
        class of the model.
      tracking_uri: Address of the server or of the local store. None: the one of MLflow.
      close_secs: See `TrackerWriter`.
      upload_secs: See `TrackerWriter`.

    Raises:
      UsageError: If the package mlflow-skinny or mlflow is missing, or the address is invalid.
    """

    def __init__(
        self,
        experiment: str | None = None,
        *,
        tracking_uri: str | None = None,
        close_secs: float = 10.0,
        upload_secs: float = 600.0,
    ) -> None:
        check_type("experiment", experiment, str | None)
        check_type("tracking_uri", tracking_uri, str | None)
        super().__init__("MLflow", close_secs=close_secs, upload_secs=upload_secs)
        for name, value in _CLIENT_DEFAULTS.items():
            os.environ.setdefault(name, value)
        try:
            import mlflow
        except ImportError as e:
            raise UsageError(
                f"MLflow cannot be imported ({e}); expected an installed package. Run "
                "pip install 'tf-ctl[mlflow]'."
            ) from None
        self._mlflow = mlflow
        uri = tracking_uri or mlflow.get_tracking_uri()
        try:
            self._client = mlflow.MlflowClient(tracking_uri=uri)
        except Exception as e:
            raise UsageError(
                f"MLflow cannot open the tracking URI {uri!r}: {' '.join(str(e).split())[:400]} Set "
                "MLFLOW_TRACKING_URI to a server, or install the package that the store needs."
            ) from None
        self._experiment = experiment
        self._run_id = ""
        self._owns_run = False

    def start_run(self, event: Started) -> None:
        """Creates a run with the parameters of the event, or resumes the one with the same `run_id`."""
        info = event.info
        run = self._find_run(info.run_id, info.model)
        if run is None:
            run = self._create_run(info.run_id, info.model, info.name)
        self._run_id, self._owns_run = run.info.run_id, True
        self._client.update_run(self._run_id, status="RUNNING")
        for name in _END_TAGS:
            if name in run.data.tags:
                self._client.delete_tag(self._run_id, name)
        values = {**info.config, **info.hparams}
        tags = {tag: str(values.pop(name)) for name, tag in _SOURCE_TAGS.items() if name in values}
        tags |= {"ctl.model_dir": info.model_dir} if info.model_dir else {}
        params = {_valid_name(name): str(value)[:_MAX_VALUE_LENGTH] for name, value in values.items()}
        for name, value in params.items():
            if run.data.params.get(name, value) != value:
                tags[f"resumed.{name}"] = value
        new_params = [(n, v) for n, v in params.items() if n not in run.data.params]
        for first in range(0, len(new_params), _MAX_PARAMS):
            batch = [self._mlflow.entities.Param(*item) for item in new_params[first : first + _MAX_PARAMS]]
            self._client.log_batch(self._run_id, params=batch)
        entities = [self._mlflow.entities.RunTag(name, value) for name, value in tags.items()]
        self._client.log_batch(self._run_id, tags=entities)

    def join_run(self, event: Joined) -> None:
        """Opens the run with this `run_id`, or creates it if the training process has not."""
        run = self._find_run(event.run_id, event.model)
        self._owns_run = run is None
        if run is None:
            run = self._create_run(event.run_id, event.model, "")
        self._run_id = run.info.run_id

    def log_metrics(self, step: int, values: Mapping[str, float], unix_secs: float) -> None:
        """Adds metrics to the run."""
        metric, time_ms = self._mlflow.entities.Metric, int(unix_secs * 1000)
        metrics = [metric(_valid_name(name), value, time_ms, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def log_exports(self, step: int, paths_to_log: Sequence[str]) -> None:
        """Uploads local files and directories below `export/`. URLs become tags."""
        for path in paths_to_log:
            name = os.path.basename(path.rstrip("/"))
            if paths.is_url(path):
                self._client.set_tag(self._run_id, f"ctl.export.{_valid_name(name)}", path)
            elif Path(path).is_dir():
                self._client.log_artifacts(self._run_id, path, artifact_path=f"export/{name}")
            else:
                self._client.log_artifact(self._run_id, path, artifact_path="export")
        self._client.set_tag(self._run_id, "ctl.export_step", str(step))

    def end_run(self, event: Ended) -> None:
        """Sets the status: FINISHED, FAILED, or KILLED after a signal or at the time limit."""
        if not self._owns_run:
            return
        for name, value in zip(_END_TAGS, (event.status, event.reason, event.error), strict=True):
            if value:
                self._client.set_tag(self._run_id, name, value)
        is_killed = event.end in (RunEnd.SIGNAL, RunEnd.TIME_LIMIT)
        status = "FAILED" if event.end is RunEnd.FAILED else "KILLED" if is_killed else "FINISHED"
        self._client.set_terminated(self._run_id, status)

    def is_transient(self, error: Exception) -> bool:
        """Returns True for errors of the connection and of an overloaded server."""
        code = getattr(error, "error_code", None)
        return super().is_transient(error) or code in _TRANSIENT_CODES

    def _find_run(self, run_id: str, model: str) -> Any:
        """Returns the run with a tag, or None."""
        experiment_id = self._experiment_id(model)
        runs = self._client.search_runs(
            [experiment_id],
            f"tags.`{_RUN_ID_TAG}` = '{run_id}'",
            max_results=1,
            order_by=["start_time ASC"],
        )
        return runs[0] if runs else None

    def _create_run(self, run_id: str, model: str, name: str) -> Any:
        tags = {_RUN_ID_TAG: run_id, "mlflow.user": os.environ.get("USER", "")}
        return self._client.create_run(
            self._experiment_id(model), tags=tags, run_name=(name or model)[:_MAX_NAME_LENGTH]
        )

    def _experiment_id(self, model: str) -> str:
        """Returns the identifier of the experiment, which is created if necessary."""
        if self._experiment is None and (experiment_id := os.environ.get("MLFLOW_EXPERIMENT_ID")):
            return experiment_id
        name = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or model
        experiment = self._client.get_experiment_by_name(name)
        return self._client.create_experiment(name) if experiment is None else experiment.experiment_id


def _valid_name(name: str) -> str:
    """Returns a name with the characters and the length that MLflow accepts."""
    return _INVALID_CHARACTERS.sub("_", name)[:_MAX_NAME_LENGTH]
