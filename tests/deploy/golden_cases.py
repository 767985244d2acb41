"""Arguments of `ctl deploy` for the manifests in golden/, by file name."""

IMAGE = "--image=us-central1-docker.pkg.dev/my-project/flower-app/flowers:1"
DATA = "--data_dir=/gcs/my-bucket/flower_photos"
PROGRAM = ["--", "python", "-m", "trainer.task", DATA]
OUTPUT = "--base_output=gs://my-bucket/flowers"
SHARED = ["--", "python", "-m", "trainer.task", "--model_dir=/shared/flowers"]

CASES = {
    "vertex_one_machine.yaml": [
        "vertex", IMAGE, "--accelerator=NVIDIA_TESLA_V100:2", OUTPUT, *PROGRAM,
    ],
    "vertex_workers.yaml": [
        "vertex", "--image=us-central1-docker.pkg.dev/PROJECT/flower-app/flowers:1", "--workers=3",
        "--machine_type=n1-standard-8", "--accelerator=NVIDIA_TESLA_V100:2", "--env=NCCL_DEBUG=WARN",
        "--base_output=gs://BUCKET/flowers", "--", "python", "-m", "trainer.task",
        "--data_dir=/gcs/BUCKET/flower_photos", "--learning_rate=1e-3",
    ],
    "vertex_all.yaml": [
        "vertex", IMAGE, "--workers=4", "--machine_type=a2-highgpu-2g", "--accelerator=NVIDIA_TESLA_A100:2",
        "--reduction_server=4:n1-highcpu-16", "--evaluator", "--spot", "--timeout=36h",
        "--disk_gb=200", OUTPUT,
        "--service_account=trainer@my-project.iam.gserviceaccount.com",
        "--network=projects/123456/global/networks/training",
        "--tensorboard=projects/my-project/locations/us-central1/tensorboards/987",
        "--name=all of it", "--label=team=vision", *PROGRAM,
    ],
    "vertex_parameter_servers.yaml": [
        "vertex", IMAGE, "--workers=3", "--ps=2", "--evaluator", OUTPUT, *PROGRAM,
        "--strategy=parameter_server",
    ],
    "vertex_evaluator.json": [
        "vertex", IMAGE, "--workers=2", "--evaluator", "--format=json", OUTPUT, *PROGRAM,
    ],
    "vertex_tuning.yaml": [
        "vertex", IMAGE, "--workers=2", "--tune=learning_rate:1e-5..1e-1:log", "--tune=units:32..512",
        "--tune=optimizer:adam|sgd", "--metric=loss:minimize", "--trials=20", "--parallel_trials=4",
        "--label=team=vision", OUTPUT, *PROGRAM,
    ],
    "kubernetes_one_pod.yaml": ["kubernetes", IMAGE, "--storage=10Gi", *SHARED],
    "kubernetes_workers.yaml": [
        "kubernetes", "--image=us-central1-docker.pkg.dev/PROJECT/flower-app/flowers:1", "--workers=2",
        "--claim=team-data", "--env=TF_CPP_MIN_LOG_LEVEL=1", *SHARED,
    ],
    "kubernetes_all.yaml": [
        "kubernetes", IMAGE, "--workers=3", "--evaluator", "--tensorboard", "--gpus=2", "--cpu=500m",
        "--memory=16Gi", "--namespace=vision", "--name=flowers-1", "--storage=100Gi",
        "--storage_class=filestore", "--mount=/data", "--env_from_secret=HF_TOKEN=hugging-face:token",
        "--service_account=trainer", "--node_selector=cloud.google.com/gke-accelerator=nvidia-tesla-t4",
        "--max_restarts=5", "--grace_secs=60", "--timeout=2d", "--", "python", "-m", "trainer.task",
        "--model_dir=/data/flowers",
    ],
    "kubernetes_in_a_bucket.json": [
        "kubernetes", IMAGE, "--workers=2", "--evaluator", "--format=json", "--",
        "python", "-m", "trainer.task", "--model_dir=gs://my-bucket/flowers",
    ],
    "kubernetes_elastic.yaml": [
        "kubernetes", IMAGE, "--elastic=2:4", "--tensorboard", "--storage=10Gi", "--namespace=vision",
        "--env=TF_CPP_MIN_LOG_LEVEL=1", "--grace_secs=60", *SHARED,
    ],
    "tfjob_workers.yaml": [
        "kubernetes", IMAGE, "--flavor=tfjob", "--workers=3", "--evaluator", "--gpus=1",
        "--storage=10Gi", *SHARED,
    ],
    "tfjob_parameter_servers.yaml": [
        "kubernetes", IMAGE, "--flavor=tfjob", "--workers=3", "--ps=2", "--claim=team-data",
        "--namespace=vision", *SHARED, "--strategy=parameter_server",
    ],
    "trainjob_workers.yaml": [
        "kubernetes", IMAGE, "--flavor=trainjob", "--workers=2", "--evaluator", "--gpus=1",
        "--storage=10Gi", *SHARED,
    ],
    "trainjob_named_runtime.yaml": [
        "kubernetes", IMAGE, "--flavor=trainjob", "--runtime=plain", "--workers=2", "--evaluator",
        "--namespace=vision",
        "--", "python", "-m", "trainer.task", "--model_dir=gs://my-bucket/flowers",
    ],
    "slurm_machines.sbatch": [
        "slurm", "--nodes=2", "--gpus_per_node=4", "--cpus_per_task=16", "--time=04:00:00",
        "--venv=/shared/venv", "--name=flowers", *SHARED,
    ],
    "slurm_gpus.sbatch": [
        "slurm", "--nodes=2", "--task_per=gpu", "--gpus_per_node=4", "--memory=64G", "--time=1-00:00:00",
        "--partition=gpu", "--account=vision", "--module=cuda/12.4", "--image=/shared/flowers.sif",
        "--env=NCCL_DEBUG=WARN", "--signal_secs=300", "--max_restarts=5", *SHARED,
    ],
    "slurm_elastic.sbatch": [
        "slurm", "--nodes=4", "--elastic=2:6", "--cpus_per_task=8", "--time=04:00:00",
        "--venv=/shared/venv", "--name=flowers", "--env=TF_CPP_MIN_LOG_LEVEL=1", *SHARED,
    ],
}  # fmt: skip
