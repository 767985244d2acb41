"""Best step and metrics of a run of two workers, and after a resume."""

import pytest


@pytest.mark.smoke
def test_two_workers_report_the_best_step_of_one(run_program, tmp_path):
    program = "tests/programs/best_results.py"
    (alone,) = run_program(1, [program, str(tmp_path / "one")])
    workers = run_program(2, [program, str(tmp_path / "two")])
    assert [r.code for r in (alone, *workers)] == [0, 0, 0], workers[0].output[-3000:]
    assert workers[0].json == workers[1].json
    for (step, metrics), (expected_step, expected) in zip(
        workers[1].json["best"], alone.json["best"], strict=True
    ):
        assert step == expected_step == 2 and metrics == pytest.approx(expected, rel=1e-5)
        assert {"eval_loss"} <= metrics.keys() and (tmp_path / f"two/checkpoints/ckpt-{step}").is_dir()
