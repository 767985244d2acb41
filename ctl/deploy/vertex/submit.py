"""Submission of a job to Vertex AI with Google's client, unchanged from the file.

The low-level API client accepts the contents of the file. The classes `aiplatform.CustomJob` and
`CustomContainerTrainingJob` would parse them and build a different job.
"""

from typing import Any

from ctl.errors import EXIT_FAILED, CtlError, UsageError

_INSTALL = (
    "--submit requires Google's client library; run `pip install google-cloud-aiplatform`, or omit "
    "--submit "
    "and use the printed gcloud command"
)


class SubmissionError(CtlError):
    """Rejection of a job by the service, or a failed connection to it."""

    exit_code = EXIT_FAILED


def submit(job: dict[str, Any], project: str, region: str, client: Any = None) -> str:
    """Creates a CustomJob, or a HyperparameterTuningJob if it has a study. Returns its resource name.

    Args:
      job: Request body of the API, in camelCase.
      project: ID of the project.
      region: Region, such as "us-central1".
      client: A JobServiceClient. None: a new one with the default credentials.

    Raises UsageError if the client's package or the credentials are missing or the client does not accept a
    field, and SubmissionError for an error of the service. The original messages are quoted unchanged.
    """
    try:
        from google.api_core.exceptions import GoogleAPIError
        from google.auth.exceptions import GoogleAuthError
        from google.cloud import aiplatform_v1
        from google.protobuf import json_format
    except ImportError:
        raise UsageError(_INSTALL) from None
    is_tuning = "studySpec" in job
    message_type = aiplatform_v1.HyperparameterTuningJob if is_tuning else aiplatform_v1.CustomJob
    try:
        message = message_type(json_format.ParseDict(job, message_type.pb(message_type())))
    except json_format.ParseError as e:
        raise UsageError(f"Google's client library rejected the job: {e}") from None
    parent = f"projects/{project}/locations/{region}"
    try:
        if client is None:
            options = {"api_endpoint": f"{region}-aiplatform.googleapis.com"}
            client = aiplatform_v1.JobServiceClient(client_options=options)
        if is_tuning:
            created_job = client.create_hyperparameter_tuning_job(
                parent=parent, hyperparameter_tuning_job=message
            )
        else:
            created_job = client.create_custom_job(parent=parent, custom_job=message)
    except GoogleAuthError as e:
        fix = "log in with `gcloud auth application-default login`"
        raise UsageError(f"there are no credentials for Google Cloud ({e}); {fix}") from None
    except GoogleAPIError as e:
        raise SubmissionError(f"Vertex AI rejected the job: {e}") from None
    return str(created_job.name)
