"""One script, any launcher: `ctl.Trainer` under ctlrun, Horovod's API under `ctl launch`; and a trace."""

import json
import sys

import processes
from conftest import ROOT, TIMEOUT_SECS, environment

RANKED = """
import json, os
import ctl.hvd as hvd, tensorflow as tf
hvd.init()
ranks = hvd.allgather_object([hvd.rank(), hvd.local_rank(), hvd.local_size(), hvd.cross_size()])
task = json.loads(os.environ["TF_CONFIG"])["task"]
total = tf.function(lambda: hvd.allreduce(tf.ones([300_000]), op=hvd.Sum, name="total"))()
hvd.allreduce(tf.constant(1.0), name="one")
print(json.dumps({"ranks": ranks, "task": task, "total": float(total[-1])}), flush=True)
"""


def run(*arguments, timeout=TIMEOUT_SECS):
    result = processes.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, env=environment(CUDA_VISIBLE_DEVICES=""),
        text=True, timeout=timeout,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return result.stdout


def test_a_trainer_runs_under_ctlrun(tmp_path):
    run("ctl.launch.horovodrun_cli", "-np", "2", sys.executable, "-m", "models.mnist",
        f"--model_dir={tmp_path}/run", "--train_steps=20", "--global_batch_size=64")  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert max(line.get("step", 0) for line in lines) == 20
    assert (tmp_path / "run" / "checkpoints" / "ckpt-20" / "manifest.json").exists()


def test_ranks_are_the_workers_of_ctl_launch(tmp_path):
    script = tmp_path / "ranked.py"
    script.write_text(RANKED)
    out = run(
        "ctl", "launch", "--workers=3", f"--log_dir={tmp_path}/logs", "--", sys.executable, str(script)
    )
    records = [json.loads(line[line.index("{") :]) for line in out.splitlines() if '"ranks"' in line]
    logs = "".join(path.read_text() for path in (tmp_path / "logs").rglob("*.log"))
    records += [json.loads(line[line.index("{") :]) for line in logs.splitlines() if '"ranks"' in line]
    assert records, out
    for record in records:
        assert record["ranks"] == [[0, 0, 3, 1], [1, 1, 3, 1], [2, 2, 3, 1]] and record["total"] == 3.0
    assert {record["task"]["index"] for record in records} == {0, 1, 2}


def test_a_timeline_shows_waiting_and_sending(tmp_path):
    script, trace = tmp_path / "ranked.py", tmp_path / "trace.json"
    script.write_text(RANKED)
    line = ("-np", "2", f"--timeline-filename={trace}", sys.executable, str(script))
    run("ctl.launch.horovodrun_cli", *line)
    events = [event for event in json.loads(trace.read_text()) if event]
    rows = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    for name in ("total", "one"):
        events_of_rank = [event for event in events if rows.get(event["pid"]) == name]
        assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE"} <= {event["name"] for event in events_of_rank}
        assert all(event["ts"] >= 0 for event in events_of_rank if event["ph"] != "M")
