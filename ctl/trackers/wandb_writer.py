"""Metric writer for Weights & Biases."""

import netrc
import os
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ctl.errors import UsageError
from ctl.io import paths
from ctl.metrics.protocol import Ended, Joined, RunEnd, Started
from ctl.setting_values import check_type
from ctl.trackers.background_writer import TrackerWriter

_STEP = "step"
_CONNECTION_TIMEOUT_SECS = 5.0
_EXIT_FAILED, _EXIT_KILLED = 1, 143
_MAX_NAME_LENGTH = 128
_INVALID_CHARACTERS = re.compile(r"[^\w\-.]")


class WandbWriter(TrackerWriter):
    """Metric writer for Weights & Biases: configuration, metrics, exported models and status of the run.

    The server, the credentials and the mode are those of W&B: `wandb login`, WANDB_MODE=offline and its
    other variables. A run that resumes in its model_dir continues the run of W&B with the same identifier.
    The horizontal axis is the metric "step". An evaluator process has a separate run in the same group,
    because two processes cannot write one run. Files are in `model_dir/wandb`.

    >>> ctl.fit(model, x, y, model_dir="/tmp/run", extra_writers=[ctl.WandbWriter()])

    Args:
      project: Name of the project. None: WANDB_PROJECT, else the class of the model.
      close_secs: See `TrackerWriter`.
      upload_secs: See `TrackerWriter`.

    Raises:
      UsageError: If the package wandb is missing, or has no API key and is not offline.
    """

    def __init__(
        self, project: str | None = None, *, close_secs: float = 10.0, upload_secs: float = 600.0
    ) -> None:
        check_type("project", project, str | None)
        super().__init__("W&B", close_secs=close_secs, upload_secs=upload_secs)
        try:
            import wandb
        except ImportError as e:
            raise UsageError(
                f"W&B cannot be imported ({e}); expected an installed package. Run pip install "
                "'tf-ctl[wandb]'."
            ) from None
        self._wandb = wandb
        settings = wandb.setup().settings
        if settings.mode == "online" and not _has_credentials(settings):
            raise UsageError(
                "W&B has no API key; expected WANDB_API_KEY, or WANDB_MODE=offline. Run `wandb login`."
            )
        self._project = project
        self._wandb_run: Any = None
        self._is_joined = False

    def start_run(self, event: Started) -> None:
        """Starts a run with the configuration of the event, or resumes the one with the same `run_id`."""
        info = event.info
        if self._wandb_run is not None:  # the run has rolled back
            return
        config = {**info.config, **info.hparams}
        config |= {"model_dir": info.model_dir} if info.model_dir else {}
        self._init(
            id=info.run_id,
            project=self._project_of(info.model),
            name=info.name[:_MAX_NAME_LENGTH] or None,
            group=os.environ.get("WANDB_RUN_GROUP") or info.run_id,
            directory=info.model_dir,
            config=config,
        )
        self._is_joined = False

    def join_run(self, event: Joined) -> None:
        """Starts or resumes the run of the evaluations, in the group of the run."""
        self._init(
            id=f"{event.run_id}-eval",
            project=self._project_of(event.model),
            group=os.environ.get("WANDB_RUN_GROUP") or event.run_id,
            job_type="eval",
            directory=event.model_dir,
            config={"run_id": event.run_id, "model_dir": event.model_dir},
        )
        self._is_joined = True

    def log_metrics(self, step: int, values: Mapping[str, float], unix_secs: float) -> None:
        """Adds metrics to the run, with the step as a metric, as a resumed run may repeat steps."""
        self._wandb_run.log({**values, _STEP: step, "_timestamp": unix_secs})

    def log_exports(self, step: int, paths_to_log: Sequence[str]) -> None:
        """Uploads the exports as one artifact of type "model", with references to URLs."""
        name = _INVALID_CHARACTERS.sub("_", f"export-{self._wandb_run.id}")
        artifact = self._wandb.Artifact(name, type="model", metadata={_STEP: step})
        for path in paths_to_log:
            base = os.path.basename(path.rstrip("/"))
            if paths.is_url(path):
                artifact.add_reference(path, name=base, checksum=False)
            elif Path(path).is_dir():
                artifact.add_dir(path, name=base)
            else:
                artifact.add_file(path, name=base)
        self._wandb_run.log_artifact(artifact)

    def end_run(self, event: Ended) -> None:
        """Writes status, reason and error to the summary, and sets the exit code of the run."""
        run, self._wandb_run = self._wandb_run, None
        if self._is_joined:
            run.finish(exit_code=_EXIT_FAILED if event.end is RunEnd.FAILED else 0)
            return
        run.summary.update({"status": event.status, "end": event.reason, "error": event.error})
        exit_code = _EXIT_KILLED if event.end is RunEnd.SIGNAL else 0
        run.finish(exit_code=_EXIT_FAILED if event.end is RunEnd.FAILED else exit_code)

    def is_transient(self, error: Exception) -> bool:
        """Returns True for errors of the connection."""
        return super().is_transient(error) or isinstance(error, self._wandb.errors.CommError)

    def _init(self, *, directory: str | None, config: Mapping[str, Any], **arguments: Any) -> None:
        settings = self._wandb.setup().settings
        if settings.mode == "online":
            _check_connection(settings.base_url)
        is_local = bool(directory) and not paths.is_url(directory)
        self._wandb_run = self._wandb.init(
            **arguments,
            dir=os.environ.get("WANDB_DIR") or (directory if is_local else None),
            config=_displayable(config),
            resume="allow",
            settings=self._wandb.Settings(silent=True, console="off", reinit="create_new"),
        )
        self._wandb_run.define_metric(_STEP, hidden=True)
        self._wandb_run.define_metric("*", step_metric=_STEP)

    def _project_of(self, model: str) -> str:
        name = self._project or os.environ.get("WANDB_PROJECT") or model
        return _INVALID_CHARACTERS.sub("_", name)[:_MAX_NAME_LENGTH]


def _has_credentials(settings: Any) -> bool:
    """Returns True if W&B has an API key. `wandb.login` would connect to the server, and wait for it."""
    if settings.api_key or os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    try:
        entries = netrc.netrc(os.environ.get("NETRC"))
    except (OSError, netrc.NetrcParseError):
        return False
    return entries.authenticators(urllib.parse.urlsplit(settings.base_url).hostname or "") is not None


def _check_connection(url: str) -> None:
    """Raises OSError if the server does not answer, as `wandb.init` would block the exit of the process."""
    address = urllib.parse.urlsplit(url)
    if address.scheme in urllib.request.getproxies():
        return
    port = address.port or (80 if address.scheme == "http" else 443)
    socket.create_connection((address.hostname or "", port), _CONNECTION_TIMEOUT_SECS).close()


def _displayable(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values as types that W&B displays."""
    is_plain = (bool, int, float, str, list, dict, type(None))
    return {name: value if isinstance(value, is_plain) else str(value) for name, value in config.items()}
