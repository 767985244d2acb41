"""Training on one GPU has the numbers of the CPU, also in 16 bits and with XLA.

`CTL_TEST_DEVICE=cpu:1` runs the same tests on a logical CPU. This shows that the tests themselves work.
"""

import os

import ctl
import numpy as np
import pytest
import tensorflow as tf
from ctl.distribute.keras_objects import unwrap
from small_models import Small, every_step, losses, weights

STEPS = 10
DEVICE = os.environ.get("CTL_TEST_DEVICE", "gpu:0")
pytestmark = pytest.mark.skipif(
    DEVICE == "gpu:0" and not tf.config.list_physical_devices("GPU"), reason="needs a GPU; make test-gpu"
)


def train(strategy, **options):
    """Trains with Adam. Returns the trainer and the losses."""
    writer = ctl.MemoryWriter()
    options = dict(optimizer="adam", writers=[writer], intervals=every_step(), **options)
    trainer = Small(strategy=strategy, **options)
    trainer.train(STEPS)
    return trainer, losses(writer)


@pytest.fixture(scope="module")
def gpu():
    return ctl.make_strategy("one_device", devices=[DEVICE])


@pytest.fixture(scope="module")
def on_cpu():
    return train(ctl.make_strategy("one_device", devices=["cpu:0"]))


def test_numbers_are_those_of_the_cpu(gpu, on_cpu):
    trainer, actual = train(gpu)
    assert actual == pytest.approx(on_cpu[1], rel=1e-4)
    for weight, expected in zip(weights(trainer), weights(on_cpu[0]), strict=True):
        np.testing.assert_allclose(weight, expected, atol=1e-4)
    assert trainer.evaluate()["loss"] == pytest.approx(on_cpu[0].evaluate()["loss"], rel=1e-4)
    for variable in trainer.model.trainable_variables:
        assert f"/DEVICE:{DEVICE.upper()}" in unwrap(variable).device.upper()


@pytest.mark.parametrize("precision", ["mixed_float16", "mixed_bfloat16"])
def test_16_bits_have_nearly_the_losses_of_32_bits(gpu, on_cpu, precision):
    trainer, actual = train(gpu, precision=precision)
    assert trainer.model.layers[0].compute_dtype == precision.removeprefix("mixed_")
    assert all(weight.dtype == np.float32 for weight in weights(trainer))
    assert actual == pytest.approx(on_cpu[1], rel=0.05)


@pytest.mark.parametrize("jit_compile", ["step", "loop"])
def test_compiled_steps_have_the_losses_of_uncompiled_ones(gpu, on_cpu, jit_compile):
    _, actual = train(gpu, jit_compile=jit_compile)
    assert actual == pytest.approx(on_cpu[1], rel=1e-3)


def test_a_checkpoint_of_the_gpu_resumes_on_the_cpu(gpu, on_cpu):
    manager = ctl.MemoryCheckpoints()
    options = dict(optimizer="adam", writers=[], checkpoints=manager)
    Small(strategy=gpu, **options).train(STEPS // 2)
    resumed = Small(strategy=ctl.make_strategy("one_device", devices=["cpu:0"]), **options)
    resumed.train(STEPS)
    assert resumed.step == STEPS
    for weight, expected in zip(weights(resumed), weights(on_cpu[0]), strict=True):
        np.testing.assert_allclose(weight, expected, atol=1e-4)


def test_memory_grows_as_it_is_needed(run_program):
    """With memory growth, a small model takes a small part of the GPU."""
    (result,) = run_program(1, ["tests/gpu/programs.py", "memory", DEVICE], fresh=True)
    assert result.code == 0, result.output
    total = result.json["peak_bytes"]
    assert result.json["step"] == 5 and (total is None or total < 2**30)


@pytest.mark.workers
def test_hvd_sums_tensors_of_the_device(run_program):
    results = run_program(2, ["tests/gpu/programs.py", "allreduce", DEVICE])
    for result in results:
        assert result.code == 0, result.output
        assert result.json["sum"] == [3.0, 6.0] and result.json["gathered"] == [1.0, 2.0, 2.0, 4.0]
        assert result.json["on_device"]
