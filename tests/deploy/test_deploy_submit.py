"""`--submit`, and gcloud with the file, against a stand-in for the service on this machine."""

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading

import pytest
from conftest import TIMEOUT_SECS
from ctl import cli
from golden_cases import IMAGE, OUTPUT, PROGRAM
from google.auth.credentials import AnonymousCredentials
from google.protobuf import json_format

STUDY = ["--tune=rate:1e-4..1e-1:log", "--metric=accuracy"]
ALL = ["--workers=3", "--evaluator", "--spot", "--timeout=2h", "--label=team=vision", "--name=all"]


class Service:
    """A server that answers every POST with the received job and a name, and records the requests."""

    REFUSAL = "quota of V100 exceeded.\nSee https://example.com/quota"

    def __init__(self):
        self.came, self.status = [], 200
        service = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                service.came.append((self.path.partition("?")[0], body))
                collection = self.path.partition("?")[0].rpartition("/")[2]
                name = f"projects/1/locations/us-central1/{collection}/42"
                answer = {**body, "name": name, "state": "JOB_STATE_PENDING"}
                if service.status != 200:
                    answer = {"error": {"code": service.status, "message": service.REFUSAL}}
                text = json.dumps(answer).encode()
                self.send_response(service.status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def service():
    running = Service()
    yield running
    running.server.shutdown()
    running.server.server_close()


@pytest.fixture
def client(service, monkeypatch):
    """Returns Google's client, connected to the simulated service. `submit` uses it by default."""
    from google.cloud.aiplatform_v1 import JobServiceClient  # late: it takes seconds
    from google.cloud.aiplatform_v1.services.job_service.transports.rest import JobServiceRestTransport

    transport = JobServiceRestTransport(
        host=service.address, credentials=AnonymousCredentials(), url_scheme="http"
    )
    new_client = JobServiceClient(transport=transport)
    monkeypatch.setattr("google.cloud.aiplatform_v1.JobServiceClient", lambda **_: new_client)
    return new_client


def custom_job(content):
    from google.cloud.aiplatform_v1.types import CustomJob

    return json_format.ParseDict(content, CustomJob.pb(CustomJob()))


def deploy(capsys, *options, flags=()):
    code = cli.main(["deploy", "vertex", IMAGE, OUTPUT, *options, *PROGRAM, *flags])
    return code, capsys.readouterr()


@pytest.mark.slow  # the import of the client takes seconds
def test_the_sent_job_equals_the_written_file(service, client, capsys):
    _, written = deploy(capsys, *ALL, "--format=json")
    code, captured = deploy(capsys, *ALL, "--submit")
    [(path, body)] = service.came
    assert code == 0 and path == "/v1/projects/my-project/locations/us-central1/customJobs"
    job = custom_job(body)
    expected = {"displayName": "all", "labels": {"team": "vision"}, "jobSpec": json.loads(written.out)}
    assert job == custom_job(expected)
    assert captured.out.splitlines()[0] == "submitted projects/1/locations/us-central1/customJobs/42"
    assert "training/42?project=my-project" in captured.out


@pytest.mark.slow  # the import of the client takes seconds
def test_a_study_is_sent_as_a_study(service, client, capsys):
    code, captured = deploy(capsys, *ALL, *STUDY, "--submit")
    [(path, body)] = service.came
    assert code == 0 and path.endswith("/hyperparameterTuningJobs")
    assert body["displayName"] == "all" and body["maxTrialCount"] == 10
    assert [p.get("replicaCount") for p in body["trialJobSpec"]["workerPoolSpecs"]] == ["1", "2", None, "1"]
    assert "hyperparameter-tuning/42" in captured.out


@pytest.mark.slow  # the import of the client takes seconds
def test_a_refusal_of_the_service_is_quoted_unchanged_and_exit_code_1(service, client, capsys):
    service.status = 400
    code, captured = deploy(capsys, "--submit")
    assert code == 1 and captured.out == ""
    assert "Vertex AI rejected the job: 400" in captured.err
    assert service.REFUSAL in captured.err


@pytest.mark.slow  # the import of the client takes seconds
def test_fields_unknown_to_google_s_client_are_quoted_and_not_sent(service, client, capsys):
    code, captured = deploy(capsys, "--accelerator=NVIDIA_V1000:1", "--submit")
    assert code == 2 and service.came == []
    assert "Google's client library rejected the job: " in captured.err
    assert "Invalid enum value NVIDIA_V1000" in captured.err


@pytest.mark.slow  # the import of the client takes seconds
def test_before_a_job_is_sent_warnings_are_printed_and_the_file_is_written(
    service, client, capsys, tmp_path
):
    path, alone = tmp_path / "job.yaml", ["--workers=2"]
    _, written = deploy(capsys, *alone, flags=["--strategy=mirrored"])
    code, captured = deploy(capsys, *alone, "--submit", f"--output={path}", flags=["--strategy=mirrored"])
    assert code == 0 and len(service.came) == 1 and path.read_text() == written.out
    assert (
        "warning: the program has --strategy=mirrored" in captured.err and f"wrote {path}" in captured.err
    )
    assert "next:" not in captured.err and captured.out.startswith("submitted ")
    path.write_text("mine")
    code, captured = deploy(capsys, *alone, "--submit", f"--output={path}")
    assert code == 2 and len(service.came) == 1 and path.read_text() == "mine"


@pytest.mark.slow  # the import of the client takes seconds
def test_nothing_is_sent_with_blanks_in_it(service, client, capsys):
    code, captured = deploy(capsys, "--project=PROJECT", "--submit")
    assert code == 2 and "PROJECT must be filled in" in captured.err and service.came == []


@pytest.mark.slow  # the import of the client takes seconds
def test_without_credentials_it_says_how_to_log_in(capsys, monkeypatch):
    from google.auth.exceptions import DefaultCredentialsError

    def no_credentials(**_):
        raise DefaultCredentialsError("none found.")

    monkeypatch.setattr("google.cloud.aiplatform_v1.JobServiceClient", no_credentials)
    code, captured = deploy(capsys, "--submit")
    assert code == 2 and "gcloud auth application-default login" in captured.err


def test_without_google_s_client_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "google.cloud", None)
    code, captured = deploy(capsys, "--submit")
    assert code == 2 and "pip install google-cloud-aiplatform" in captured.err


def test_writing_a_job_never_imports_google_s_client():
    code = (
        "import sys; from ctl import cli; "
        f"cli.main(['deploy', 'vertex', {IMAGE!r}, '--', 'python', '-m', 't']); "
        "sys.exit(any(m.startswith(('google.cloud.', 'tensorflow')) for m in sys.modules))"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, timeout=TIMEOUT_SECS, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow  # the import takes seconds
def test_the_codelab_s_class_takes_the_same_pools(capsys):
    """Tests `aiplatform.CustomJob(worker_pool_specs=...)` of the notebook with the content of the file."""
    from google.cloud import aiplatform
    from google.cloud.aiplatform_v1.types import CustomJob

    _, captured = deploy(capsys, "--workers=2", "--format=json")
    spec = CustomJob.to_dict(CustomJob(custom_job({"jobSpec": json.loads(captured.out)})))
    aiplatform.init(project="my-project", location="us-central1", credentials=AnonymousCredentials())
    job = aiplatform.CustomJob(
        display_name="flowers", worker_pool_specs=spec["job_spec"]["worker_pool_specs"],
        staging_bucket="gs://my-bucket",
    )  # fmt: skip
    pools = job.job_spec.worker_pool_specs
    assert [p.replica_count for p in pools] == [1, 1]
    assert pools[0].container_spec.image_uri == IMAGE.partition("=")[2]


@pytest.mark.skipif(not shutil.which("gcloud"), reason="gcloud is no Python package")
@pytest.mark.parametrize(("options", "collection"), [
    (["--workers=3"], "custom-jobs"),
    (["--workers=3", "--ps=1", "--evaluator", "--spot"], "custom-jobs"),
    (["--workers=3", "--evaluator"], "refused"),
    ([*STUDY, "--workers=2", "--evaluator"], "hp-tuning-jobs"),
])  # fmt: skip
def test_gcloud_reads_the_file(options, collection, service, capsys, tmp_path):
    path = tmp_path / "job.yaml"
    assert deploy(capsys, *options, f"--output={path}")[0] == 0
    environ = {
        **os.environ, "CLOUDSDK_CONFIG": str(tmp_path), "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "1",
        "CLOUDSDK_CORE_DISABLE_PROMPTS": "1", "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "1",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_AIPLATFORM": f"http://{service.address}/",
    }  # fmt: skip
    command = [
        "ai",
        "custom-jobs" if collection == "refused" else collection,
        "create",
        "--project=my-project",
    ]
    result = subprocess.run(
        ["gcloud", *command, "--region=us-central1", "--display-name=f", f"--config={path}"],
        env=environ, capture_output=True, text=True, timeout=TIMEOUT_SECS, check=False,
    )  # fmt: skip
    assert (result.returncode == 0) == (collection != "refused"), result.stderr
    assert len(service.came) == (collection != "refused")
