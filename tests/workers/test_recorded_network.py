"""The costs of the network, from which workers select algorithms, in checkpoints and after a resume."""

import json

import pytest
from conftest import PROGRAMS

LINE = "Collectives use the algorithms of the checkpoint"
TWO_MACHINES = "127.0.0.1", "127.0.0.2"
FLAGS = ["--steps_per_loop=2", "--global_batch_size=12", "--communication=tcp", "--export=none"]


@pytest.mark.workers
def test_a_resumed_run_keeps_the_algorithms_of_its_checkpoint(run_program, tmp_path):
    def network_after(steps, hosts, *flags, workers=2):
        """Returns the costs in the checkpoint of `steps`, and whether the log names the change."""
        program = [str(PROGRAMS / "faulty.py"), *FLAGS, f"--model_dir={tmp_path}", *flags]
        results = run_program(workers, [*program, f"--train_steps={steps}"], hosts=hosts)
        assert [result.code for result in results] == [0] * workers, results[0].output
        manifest = json.loads((tmp_path / f"checkpoints/ckpt-{steps}/manifest.json").read_text())
        return manifest["world"]["network"], LINE in results[0].output

    one_machine = {"latency_secs": 0.0, "byte_secs": 0.0}
    assert network_after(2, ["127.0.0.1"]) == (one_machine, False)
    assert network_after(4, TWO_MACHINES) == (one_machine, True)
    measured, is_named = network_after(6, TWO_MACHINES, "--allow_config_change")
    assert sum(measured.values()) > 0 and not is_named
    assert network_after(8, ["127.0.0.1"]) == (measured, True)
    assert network_after(10, ["127.0.0.1"], workers=3) == (one_machine, False)
