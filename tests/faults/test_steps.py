"""Steps that are not finite, hang, or fail in Python, on one process and on two workers."""

import signal

import ctl
import numpy as np
import pytest
import tensorflow as tf
from small_models import Small, every_step
from training import STEPS, assert_bit_identical, output_of, pids, run, saved, tensors, trace

pytestmark = pytest.mark.workers
POISON = {"POISON": "140"}


def log(model_dir, index):
    return (model_dir / "workers" / f"job_{index}.log").read_text()


def finite(model_dir):
    for step in saved(model_dir):
        for name, value in tensors(model_dir, step).items():
            if np.issubdtype(value.dtype, np.floating):
                assert np.isfinite(value).all(), (step, name)


def test_a_loss_that_is_not_finite_stops_both_workers_and_reaches_no_checkpoint(tmp_path):
    result = run(tmp_path / "run", workers=2, **POISON)
    assert result.code == 1, "what the same data would do again is not retried"
    last = max(trace(tmp_path / "run"))
    for index in (0, 1):
        text = log(tmp_path / "run", index)
        assert f"Step {last + 1}: the loss on replica " in text and "(worker " in text
        assert f"the newest checkpoint is of step {max(saved(tmp_path / 'run'))}" in text
    finite(tmp_path / "run")


def test_sigterm_while_a_failed_run_closes_its_writers_does_not_hide_the_error(tmp_path):
    """A launcher sends SIGTERM to all workers as soon as the first one has failed."""
    result = run(tmp_path / "run", faults="term@ended", **POISON)
    assert "fault: term at ended" in result.output
    assert result.code == 1 and "the loss is NaN or infinite" in result.output, result.output[-2000:]


def test_a_bad_step_is_left_out_on_both_workers(tmp_path):
    result = run(tmp_path / "run", "--on_nonfinite=skip", workers=2, **POISON)
    assert result.code == 0, result.output[-2000:]
    finite(tmp_path / "run")
    uses_by_example = next(v for n, v in tensors(tmp_path / "run").items() if n.startswith("seen/"))
    assert uses_by_example.sum() == (STEPS - 1) * 12 and set(uses_by_example) == {0.0, 1.0}
    assert uses_by_example[int(POISON["POISON"])] == 0.0


def test_going_back_on_both_workers_ends_at_the_same_step_with_other_data(tmp_path):
    result = run(tmp_path / "run", "--on_nonfinite=rollback", "--train_steps=30", workers=2, **POISON)
    assert result.code == 0, result.output[-2000:]
    assert "rolling back to the checkpoint of step" in result.output
    finite(tmp_path / "run")
    uses_by_example = next(v for n, v in tensors(tmp_path / "run", 30).items() if n.startswith("seen/"))
    assert uses_by_example.sum() == 30 * 12 and uses_by_example[int(POISON["POISON"])] == 0.0


def test_a_hook_that_hangs_is_shown_and_ends_retryable(tmp_path):
    result = run(tmp_path / "run", "--step_timeout_secs=5", faults="hang@8")
    assert result.code == 134
    assert "no progress for 5 s" in result.output and "in after_loop" in result.output
    assert saved(tmp_path / "run")[-1] == 5


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_an_exception_in_the_hook_names_hook_and_step_and_its_step_is_saved(workers, tmp_path, unbroken):
    fault = "raise@8:1" if workers else "raise@8"
    result = run(tmp_path / "run", workers=workers, faults=fault)
    assert result.code == 1
    text = log(tmp_path / "run", 1) if workers else result.output
    assert "after_loop failed at step 8" in text
    assert "RuntimeError: a fault that was asked for" in result.output
    assert saved(tmp_path / "run")[-1] == 8 and not pids(tmp_path / "run")
    assert run(tmp_path / "run", workers=workers).code == 0
    assert_bit_identical(tmp_path / "run", unbroken(workers))


@pytest.mark.parametrize("worker", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_exception_in_the_hook_of_one_worker_ends_all_between_two_logs(worker, tmp_path):
    fault = f"raise@8:{worker}"
    result = run(tmp_path / "run", "--log_every_steps=100", workers=2, faults=fault)
    assert result.code == 1, result.output
    assert "RuntimeError: a fault that was asked for" in log(tmp_path / "run", worker)
    assert "after_loop failed on another worker" in log(tmp_path / "run", 1 - worker)
    assert saved(tmp_path / "run")[-1] == 8 and not pids(tmp_path / "run")


def test_a_worker_that_leaves_early_is_named(tmp_path):
    result = run(tmp_path / "run", workers=2, faults="exit@8:1")
    assert result.code == 7 and "worker 1 (job 1) failed first: exit code 7" in result.output


def test_the_same_seed_twice_gives_the_same_bits(tmp_path, unbroken):
    assert run(tmp_path / "run", workers=2).code == 0
    assert_bit_identical(tmp_path / "run", unbroken(2))


class MemoryExhausting(Small):
    def train_step(self, batch):
        scores = super().train_step(batch)
        size = tf.where(self.step_variable < 2, tf.constant(1, tf.int64), tf.constant(2**46, tf.int64))
        return {**scores, "waste": tf.reduce_sum(tf.random.uniform([size]))}


def test_out_of_memory_is_reported_with_advice():
    trainer = MemoryExhausting(strategy="default", intervals=every_step(), writers=[], global_batch_size=24)
    with pytest.raises(ctl.OutOfMemory, match="Step 3: out of memory.*global_batch_size is 24") as e:
        trainer.train(5)
    assert e.value.exit_code == 1, "no platform retries it"
    assert "accumulate_steps" in str(e.value)


class Failing:
    def write(self, step, values, run="train"):
        raise OSError(28, "No space left on device")

    def note(self, event):
        raise ValueError("of its own")


def test_reports_that_fail_never_stop_training(caplog):
    trainer = Small(strategy="default", intervals=every_step(), writers=[Failing()])
    assert trainer.train(3)["loss"] > 0
    assert [m for m in caplog.messages if "Failing failed and is not called again" in m]


def test_a_killed_process_prints_no_message_and_loses_few_steps(tmp_path, unbroken):
    assert run(tmp_path / "run", faults="kill@8").code == -signal.SIGKILL
    assert saved(tmp_path / "run")[-1] == 5, output_of(tmp_path / "run").read_text()[-1000:]
    assert run(tmp_path / "run").code == 0
    assert_bit_identical(tmp_path / "run", unbroken(0))
