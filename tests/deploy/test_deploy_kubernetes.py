"""`ctl deploy kubernetes`: objects that Kubernetes' own schemas take, and that fit together."""

import json
import re

import kubernetes_validate
import pytest
import yaml
from conftest import some_of
from ctl import cli, errors
from golden_cases import CASES, IMAGE, SHARED
from regenerate import manifest

NAMES = [n for n in CASES if n.startswith(("kubernetes", "tfjob", "trainjob"))]
VERSIONS = ["1.31", "1.33", "1.37"]
TEMPLATE = ("spec", "template", "spec")


def documents(name):
    text = manifest(CASES[name])
    if name.endswith(".json"):
        return json.loads(text)["items"]
    return list(yaml.safe_load_all(text))


def make_documents(*options, program=SHARED):
    return list(yaml.safe_load_all(manifest(["kubernetes", IMAGE, *options, *program])))


def of_kind(documents_of_case, document_kind, ending=""):
    [document] = [
        d
        for d in documents_of_case
        if d["kind"] == document_kind and d["metadata"]["name"].endswith(ending)
    ]
    return document


def pod_templates(all_documents):
    """Yields every pod template in the documents, also those inside a TFJob or a TrainingRuntime."""
    for d in all_documents:
        if d["kind"] in ("Job", "Deployment"):
            yield d["spec"]["template"]
        elif d["kind"] == "TFJob":
            yield from (r["template"] for r in d["spec"]["tfReplicaSpecs"].values())
        elif d["kind"] == "TrainingRuntime":
            [job] = d["spec"]["template"]["spec"]["replicatedJobs"]
            yield job["template"]["spec"]["template"]


def labels_of_pods(all_documents):
    """Yields the labels of all future pods. Pods of an existing runtime have its JobSet's labels."""
    yield from (t["metadata"]["labels"] for t in pod_templates(all_documents))
    for d in all_documents:
        if d["kind"] == "TrainJob" and d["spec"]["runtimeRef"]["kind"] == "ClusterTrainingRuntime":
            yield {
                "jobset.sigs.k8s.io/jobset-name": d["metadata"]["name"],
                "jobset.sigs.k8s.io/replicatedjob-name": "node",
            }


def chooses(selector, labels):
    expressions = [(e["key"], e["values"]) for e in selector.get("matchExpressions", [])]
    return selector["matchLabels"].items() <= labels.items() and all(
        labels.get(key) in values for key, values in expressions
    )


@pytest.mark.parametrize("version", some_of(VERSIONS, *VERSIONS[-1:]))
@pytest.mark.parametrize("name", NAMES)
def test_kubernetes_schemas_take_every_object(name, version):
    for document in documents(name):
        if document["apiVersion"].startswith(("kubeflow", "trainer")):
            continue
        kubernetes_validate.validate(document, version, strict=True)
    for template in pod_templates(documents(name)):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": template["spec"]}
        kubernetes_validate.validate(pod, version, strict=True)


def test_the_schemas_detect_mistakes():
    for path, value in [
        (["spec", "completion"], 3), (["spec", "completions"], "3"),
        (["spec", "podFailurePolicy", "rules"], [{"onExitCodes": {"operator": "In", "values": [1]}}]),
        ([*TEMPLATE, "restartPolicies"], "Never"), ([*TEMPLATE, "securityContext", "runAsUser"], "1000"),
    ]:  # fmt: skip
        job = of_kind(documents("kubernetes_workers.yaml"), "Job")
        node = job
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = value
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(job, "1.33", strict=True)


@pytest.mark.parametrize("name", NAMES)
def test_every_container_is_confined_and_nothing_is_open_to_the_outside(name):
    manifests_of_case = documents(name)
    assert list(pod_templates(manifests_of_case))
    for template in pod_templates(manifests_of_case):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        for container in spec["containers"]:
            confined = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
            assert container["securityContext"] == confined
    for service in (d for d in manifests_of_case if d["kind"] == "Service"):
        assert service["spec"].get("type", "ClusterIP") == "ClusterIP"


@pytest.mark.parametrize("name", NAMES)
def test_every_pod_is_under_a_policy_and_every_selector_finds_pods(name):
    manifests_of_case = documents(name)
    pods = list(labels_of_pods(manifests_of_case))
    policies = [d["spec"] for d in manifests_of_case if d["kind"] == "NetworkPolicy"]
    assert pods and policies
    for labels in pods:
        assert sum(chooses(p["podSelector"], labels) for p in policies) == 1
    for policy in policies:
        assert any(chooses(policy["podSelector"], labels) for labels in pods)
        for rule in policy["ingress"]:
            assert rule["from"]
            for peer in rule["from"]:
                assert any(chooses(peer["podSelector"], labels) for labels in pods)
    for service in (d for d in manifests_of_case if d["kind"] == "Service"):
        assert any(service["spec"]["selector"].items() <= labels.items() for labels in pods)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_mounted_is_a_volume_and_names_are_labels(name):
    for template in pod_templates(documents(name)):
        volumes = {v["name"] for v in template["spec"]["volumes"]}
        for container in template["spec"]["containers"]:
            assert {m["name"] for m in container.get("volumeMounts", [])} <= volumes
    for document in documents(name):
        assert len(document["metadata"]["name"]) <= 63


def test_pods_receive_all_addresses_in_order_and_compute_their_index():
    objects = make_documents("--workers=3", "--storage=1Gi")
    job, service = of_kind(objects, "Job"), of_kind(objects, "Service")
    [container] = job["spec"]["template"]["spec"]["containers"]
    hosts = "flowers-0.flowers:2222,flowers-1.flowers:2222,flowers-2.flowers:2222"
    assert container["env"] == [{"name": "CTL_WORKERS", "value": hosts}]
    assert job["metadata"]["name"] == "flowers"  # so that pods are called flowers-0, flowers-1, ...
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"] == "flowers"
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]


def test_in_a_namespace_addresses_name_it():
    job = of_kind(make_documents("--workers=2", "--namespace=ml", "--storage=1Gi"), "Job")
    [container] = job["spec"]["template"]["spec"]["containers"]
    hosts = "flowers-0.flowers.ml.svc:2222,flowers-1.flowers.ml.svc:2222"
    assert container["env"] == [{"name": "CTL_WORKERS", "value": hosts}]


def test_an_evaluator_is_a_job_of_its_own_that_the_workers_know_of():
    objects = make_documents("--workers=2", "--evaluator", "--storage=1Gi", "--gpus=1")
    workers = of_kind(objects, "Job", "flowers")["spec"]["template"]["spec"]["containers"][0]
    assert {"name": "CTL_EVALUATOR", "value": "1"} in workers["env"]
    evaluator = of_kind(objects, "Job", "-evaluator")["spec"]["template"]["spec"]["containers"][0]
    [config] = [json.loads(e["value"]) for e in evaluator["env"] if e["name"] == "TF_CONFIG"]
    assert config == {
        "cluster": {"worker": ["flowers-0.flowers:2222", "flowers-1.flowers:2222"]},
        "task": {"type": "evaluator", "index": 0},
    }
    assert workers["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert "nvidia.com/gpu" not in evaluator["resources"]["limits"]


@pytest.mark.parametrize("flavor", ["job", "tfjob", "trainjob"])
def test_a_selector_of_nodes_with_gpus_never_comes_without_their_toleration(flavor):
    options = [f"--flavor={flavor}", "--workers=2", "--evaluator", "--tensorboard", "--storage=1Gi",
               *(["--ps=1"] if flavor == "tfjob" else [])]  # fmt: skip
    pool = "--node_selector=cloud.google.com/gke-accelerator=nvidia-tesla-t4"
    specs = [t["spec"] for t in pod_templates(make_documents(*options, "--gpus=1", pool))]
    placed = [("nodeSelector" in s, "tolerations" in s) for s in specs]
    assert set(placed) == {(True, True), (False, False)}
    without = [t["spec"] for t in pod_templates(make_documents(*options, "--node_selector=zone=a"))]
    assert all(s["nodeSelector"] == {"zone": "a"} and "tolerations" not in s for s in without)


def test_one_pod_needs_no_service_and_no_peers():
    objects = make_documents("--storage=1Gi")
    assert [d["kind"] for d in objects] == ["PersistentVolumeClaim", "NetworkPolicy", "Job"]
    spec = of_kind(objects, "Job")["spec"]
    assert "completionMode" not in spec and "env" not in spec["template"]["spec"]["containers"][0]
    assert of_kind(objects, "NetworkPolicy")["spec"]["ingress"] == []


@pytest.mark.parametrize(("workers", "restarts"), [(2, 3), (4, 5), (3, 0)])
def test_the_limits_allow_so_many_restarts_of_all_pods(workers, restarts):
    options = [f"--workers={workers}", f"--max_restarts={restarts}", "--storage=1Gi"]
    spec = of_kind(make_documents(*options), "Job")["spec"]
    assert spec["backoffLimit"] == workers * restarts and spec["backoffLimitPerIndex"] == restarts
    assert spec["maxFailedIndexes"] == 0 and spec["parallelism"] == spec["completions"] == workers
    assert spec["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}


def test_exit_codes_that_no_restart_helps_end_the_job_and_others_do_not():
    rules = of_kind(make_documents("--workers=2", "--storage=1Gi"), "Job")["spec"]["podFailurePolicy"][
        "rules"
    ]
    assert [r["action"] for r in rules] == ["Ignore", "Ignore", "FailJob"]
    saved, codes = (rule["onExitCodes"]["values"] for rule in rules[1:])
    assert saved == [
        errors.EXIT_PREEMPTED
    ]  # saved by all processes together with the pod on the drained node
    assert codes == [errors.EXIT_FAILED, errors.EXIT_USAGE]


def test_peers_may_use_two_ports_and_with_gpus_all():
    ports = [
        of_kind(make_documents("--workers=2", "--storage=1Gi", g), "NetworkPolicy")["spec"]["ingress"][
            0
        ].get("ports")
        for g in ("--gpus=0", "--gpus=1")
    ]
    assert ports == [[{"protocol": "TCP", "port": 2222, "endPort": 2223}], None]


def test_a_new_volume_is_for_one_node_only_where_one_pod_uses_it():
    assert of_kind(make_documents("--storage=1Gi"), "PersistentVolumeClaim")["spec"]["accessModes"] == [
        "ReadWriteOnce"
    ]
    for option in ("--workers=2", "--evaluator", "--tensorboard"):
        claim = of_kind(make_documents("--storage=1Gi", option), "PersistentVolumeClaim")
        assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("tfjob")])
def test_a_tfjob_is_as_its_operator_expects(name):
    job = of_kind(documents(name), "TFJob")
    assert set(job) == {"apiVersion", "kind", "metadata", "spec"}
    assert set(job["spec"]) == {"runPolicy", "tfReplicaSpecs"}
    assert job["spec"]["runPolicy"]["cleanPodPolicy"] == "Running"
    replicas = job["spec"]["tfReplicaSpecs"]
    assert set(replicas) <= {"Chief", "Worker", "PS", "Evaluator"} and replicas["Chief"]["replicas"] == 1
    for replica_type, replica in replicas.items():
        assert set(replica) == {"replicas", "restartPolicy", "template"}
        assert replica["restartPolicy"] == "ExitCode" and replica["replicas"] >= 1
        template = replica["template"]
        assert template["metadata"]["annotations"] == {"sidecar.istio.io/inject": "false"}
        [container] = template["spec"]["containers"]
        assert container["name"] == "tensorflow"
        assert container["ports"] == [{"name": "tfjob-port", "containerPort": 2222}]
        assert not any(e["name"] in ("TF_CONFIG", "CTL_WORKERS") for e in container.get("env", []))
        assert ("nvidia.com/gpu" in container["resources"]["limits"]) == (
            name == "tfjob_workers.yaml" and replica_type in ("Chief", "Worker")
        )


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("trainjob")])
def test_kubeflow_trainer_s_models_keep_every_field(name):
    from kubeflow_trainer_api import models  # late: it takes seconds

    kinds = {"TrainJob": models.TrainerV1alpha1TrainJob,
             "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime}  # fmt: skip
    checked = [d for d in documents(name) if d["kind"] in kinds]
    assert checked
    for document in checked:  # unknown fields are dropped
        back = kinds[document["kind"]].from_dict(document).to_dict()
        assert json.loads(json.dumps(back)) == document


def test_a_trainjob_s_pods_have_the_names_of_its_jobset():
    objects = make_documents("--flavor=trainjob", "--workers=2", "--storage=1Gi", "--gpus=1")
    job, runtime = of_kind(objects, "TrainJob"), of_kind(objects, "TrainingRuntime")
    hosts = "flowers-node-0-0.flowers:2222,flowers-node-0-1.flowers:2222"
    assert job["spec"]["trainer"]["env"] == [{"name": "CTL_WORKERS", "value": hosts}]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"] == "flowers"
    [replicated] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["name"] == "node"
    assert replicated["template"]["metadata"]["labels"] == {
        "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
    }
    spec = {**replicated["template"]["spec"], "completionMode": "Indexed", "completions": 2}
    batch = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j"}, "spec": spec}
    kubernetes_validate.validate(batch, "1.33", strict=True)


def test_the_next_commands_depend_on_the_flavor(capsys):
    for flavor, chief in [("job", "job-completion-index=0"), ("tfjob", "replica-type=chief")]:
        options = [f"--flavor={flavor}", "--workers=2", "--storage=1Gi", "--tensorboard"]
        assert cli.main(["deploy", "kubernetes", IMAGE, *options, "--namespace=ml", *SHARED]) == 0
        message = capsys.readouterr().err
        assert "  kubectl apply --namespace=ml --filename=job.yaml\n" in message and chief in message
        assert "kubectl port-forward --namespace=ml service/flowers-tensorboard 6006:6006" in message


def test_a_note_warns_that_deletion_by_file_deletes_the_volume(capsys):
    for options, is_said in [(["--storage=1Gi"], True), (["--claim=data"], False)]:
        assert cli.main(["deploy", "kubernetes", IMAGE, *options, *SHARED]) == 0
        assert ("would delete the volume" in capsys.readouterr().err) == is_said


@pytest.mark.parametrize("flavor", ["job", "tfjob", "trainjob"])
def test_the_command_that_ends_all_names_every_kind_but_the_volume(flavor, capsys):
    options = [f"--flavor={flavor}", "--workers=2", "--evaluator", "--tensorboard", "--namespace=ml"]
    assert cli.main(["deploy", "kubernetes", IMAGE, *options, "--storage=1Gi", *SHARED]) == 0
    captured = capsys.readouterr()
    [command] = re.findall("note: to delete all objects: `(.*)`", captured.err)
    kinds, *options_of_command = command.removeprefix("kubectl delete ").split()
    objects = list(yaml.safe_load_all(captured.out))
    assert set(kinds.split(",")) == {d["kind"].lower() for d in objects} - {"persistentvolumeclaim"}
    assert options_of_command == ["--namespace=ml", "--selector=app.kubernetes.io/instance=flowers"]
    assert all(d["metadata"]["labels"]["app.kubernetes.io/instance"] == "flowers" for d in objects)


def test_with_a_runtime_that_is_there_its_pods_are_found_by_their_jobset(capsys):
    options = ["--flavor=trainjob", "--runtime=plain", "--workers=2"]
    program = ["--", "python", "-m", "t", "--model_dir=gs://b/f"]
    assert cli.main(["deploy", "kubernetes", IMAGE, *options, *program]) == 0
    captured = capsys.readouterr()
    [pod] = labels_of_pods(list(yaml.safe_load_all(captured.out)))
    pod["batch.kubernetes.io/job-completion-index"] = "0"
    for selector in re.findall("kubectl (?:get|logs).* --selector=([^ ]+)", captured.err):
        assert dict(pair.split("=") for pair in selector.split(",")).items() <= pod.items()
