"""The GAN and the cart pole model on two workers. Only the chief writes files."""

import pytest

pytestmark = pytest.mark.workers


@pytest.mark.parametrize(
    ("model", "options", "metric"),
    [
        pytest.param(
            "gan", ["--show_every_steps=5", "--steps_per_loop=5"], "generator_loss", marks=pytest.mark.slow
        ),  # docs/models.md trains it on two workers too
        ("cartpole", ["--game_steps=20"], "game_length"),
    ],
)
def test_a_model_trains_on_two_workers_and_resumes(run_program, tmp_path, model, options, metric):
    def run(steps):
        return run_program(2, [
            "-m", f"models.{model}", f"--model_dir={tmp_path}", f"--train_steps={steps}",
            "--global_batch_size=8", "--log_every_steps=5", "--export=keras", *options,
        ])  # fmt: skip

    for result in run(5):
        assert result.code == 0, result.output[-2000:]
    chief, other = run(10)
    assert chief.code == other.code == 0
    assert "resuming at step 5" in chief.output and f"{metric}" in chief.output
    assert other.output.count("step") == 0, "only the chief reports"
    names = {p.name for p in tmp_path.iterdir()}
    assert not [n for n in names if n.startswith("workertemp")]
    assert {p.name for p in (tmp_path / "export").iterdir()} == {"model.keras"}
