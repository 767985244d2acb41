"""Numerical correctness of masks, loss scaling, empty replicas, Keras metrics and losses."""

import correctness
import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import some_of
from correctness import BATCH, LENGTH, Linear, Short, Tokens, outcome
from small_models import every_step

NO_FILES = dict(writers=[], model_dir=None)
NO_REPORTS = dict(global_batch_size=BATCH, writers=[], intervals=every_step(log=ctl.Every()))


class Outcomes(dict):
    """Results of the cases under one strategy, by name. A case is trained at its first access."""

    def __init__(self, strategy):
        self.strategy = strategy

    def __missing__(self, name):
        self[name] = outcome(name, self.strategy)
        return self[name]


@pytest.fixture(scope="module")
def single():
    return Outcomes("default")


@pytest.fixture(scope="module")
def mirrored():
    return Outcomes(ctl.make_strategy("mirrored", devices=["cpu:0", "cpu:1"]))


@pytest.fixture(scope="module")
def workers(run_program):
    program = ["tests/programs/correctness.py", "multi_worker"]
    return [result.json for result in run_program(2, program)]


def test_a_mask_gives_the_mean_over_the_tokens_of_the_global_batch(single, mirrored):
    arrays = Tokens.train_data(None, 40).rows.tensors()
    token_ids, tags = (a.numpy() for a in map(tf.convert_to_tensor, arrays))
    assert (token_ids[: BATCH // 2] > 0).sum() != (token_ids[BATCH // 2 : BATCH] > 0).sum(), "equal halves"
    assert single["tokens"]["losses"][0] == pytest.approx(np.log(4), abs=0.05)
    np.testing.assert_allclose(single["tokens"]["losses"], mirrored["tokens"]["losses"], atol=1e-6)
    for a, b in zip(single["tokens"]["weights"], mirrored["tokens"]["weights"], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert single["tokens"]["eval"] == pytest.approx(mirrored["tokens"]["eval"], abs=1e-6)


def test_epochs_of_data_of_unknown_length_are_those_of_numpy(single, mirrored):
    x, y = (a.astype(np.float64) for a in Linear.arrays(None))
    w, b, errors = np.full([3], 0.3), 0.0, []
    for first in [0, 8, 16] * 3:
        rows = slice(first, min(first + BATCH, 20))
        error = x[rows] @ w + b - y[rows]
        errors.append(np.mean(error**2))
        w, b = w - 0.1 * x[rows].T @ error / BATCH, b - 0.1 * error.sum() / BATCH
    for result in (single["passes"], mirrored["passes"]):
        assert result["step"] == 9
        np.testing.assert_allclose(result["losses"], errors, rtol=1e-4)
        np.testing.assert_allclose(np.ravel(result["weights"][0]), w, atol=1e-5)
        np.testing.assert_allclose(result["matrix"], x[:20].T @ x[:20], rtol=1e-4)
        true, guess = y[:20] > 0, x[:20] @ w + b > 0.5
        f1 = [2 * (t & g).sum() / (t.sum() + g.sum()) for t, g in ((~true, ~guess), (true, guess))]
        np.testing.assert_allclose(result["f1"], f1, rtol=1e-5)
        assert result["eval"] == pytest.approx(np.mean((x[:20] @ w + b - y[:20]) ** 2), rel=1e-4)


def test_the_gradient_of_a_masked_mean_is_that_of_numpy():
    class Means(ctl.Trainer):
        def build(self):
            self.model = tf.Module()
            self.model.w = tf.Variable([0.0])
            self.optimizer = keras.optimizers.SGD(1.0)

        def train_data(self, batch_size):
            values = np.array([[1.0, 2.0, 3.0], [10.0, 0.0, 0.0]], np.float32)
            return ctl.from_arrays((values, values > 0), batch_size, shuffle=False)

        def train_step(self, batch):
            values, mask = batch
            with tf.GradientTape() as tape:
                loss = self.average(values * self.model.w, mask=mask, sample_weight=[1.0, 0.5][:len(values)]
                                    if self.weighted else None)  # fmt: skip
            self.minimize(loss, tape, self.model.trainable_variables)
            return {"loss": loss}

    for weighted, expected in ((False, 16 / 4), (True, (6 + 5) / 4)):
        trainer = Means(**{**NO_REPORTS, "global_batch_size": 2}, strategy="default")
        trainer.weighted = weighted
        trainer.train(1)
        assert -float(trainer.model.w.numpy()[0]) == pytest.approx(expected)


@pytest.mark.parametrize("case", some_of(["scaled", "scaled_tf_keras"], "scaled"))
def test_one_bad_replica_skips_the_step_everywhere_and_halves_the_scale(single, mirrored, case):
    for result in (single[case], mirrored[case]):
        assert result["step"] == 9
        # steps 2, 5 and 8 are skipped, and the scale halves; after two good steps it doubles again
        assert result["scale"] == 1024.0 / 2 * 2 / 2 * 2 / 2
        assert [not np.isnan(n) for n in result["norms"]] == [i % 3 != 1 for i in range(9)]
        assert np.isfinite(np.concatenate([np.ravel(w) for w in result["weights"]])).all()
    if case == "scaled":
        assert single[case]["iterations"] == mirrored[case]["iterations"] == 6
    for a, b in zip(single[case]["weights"], mirrored[case]["weights"], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_loss_scaling_does_not_change_the_update(single):
    class Clean(correctness.Scaled):
        arrays = Linear.arrays

    unscaled, scaled, clipped_scaled, clipped_unscaled = (
        cls(**NO_REPORTS, strategy="default") for cls in (Linear, Clean, Clean, Linear)
    )
    for trainer in (clipped_scaled, clipped_unscaled):
        trainer.gradients = ctl.Gradients(clip_norm=0.5)
    for trainer in (unscaled, scaled, clipped_scaled, clipped_unscaled):
        trainer.train(5)
    for a, b in zip(unscaled.model.get_weights(), scaled.model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    for a, b in zip(clipped_scaled.model.get_weights(), clipped_unscaled.model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_a_fixed_scale_factor_of_keras_is_respected():
    class Fixed(Linear):
        optimizer_of = staticmethod(lambda: keras.optimizers.SGD(0.05, loss_scale_factor=64.0))

    unscaled, fixed = (cls(**NO_REPORTS, strategy="default") for cls in (Linear, Fixed))
    for trainer in (unscaled, fixed):
        trainer.train(4)
    np.testing.assert_allclose(*(t.model.get_weights()[0] for t in (unscaled, fixed)), atol=1e-6)


def test_numbers_that_overflow_at_any_scale_stop_the_run():
    class Broken(correctness.Scaled):
        def arrays(self):
            x, y = Linear.arrays(self)
            return x * np.inf, y

    trainer = Broken(**NO_REPORTS, strategy="default")
    with pytest.raises(ctl.NonFiniteError, match="Step 26:"):  # 2^10 to 2^-15
        trainer.train(60)
    assert trainer.step == 25


def test_a_norm_that_overflows_does_not_clip_to_zero():
    class Large(correctness.Scaled):
        def arrays(self):
            x, y = Linear.arrays(self)
            x[BATCH + 6] = 1e16  # gradients of 1e33 are finite, their squares are not
            return x, y

    trainer = Large(**NO_REPORTS, strategy="default")
    trainer.gradients = ctl.Gradients(clip_norm=1.0)
    trainer.train(2)
    assert trainer.scale() == 512.0 and int(trainer.optimizer.iterations.numpy()) == 1


def test_a_replica_without_examples_does_not_change_the_result(single, mirrored):
    assert single["short"]["step"] == mirrored["short"]["step"] == 3
    np.testing.assert_allclose(single["short"]["losses"], mirrored["short"]["losses"], atol=1e-6)
    np.testing.assert_allclose(single["short"]["mse"], mirrored["short"]["mse"], atol=1e-6)
    np.testing.assert_allclose(single["short"]["mse"], single["short"]["losses"], atol=1e-6)
    np.testing.assert_allclose(single["short"]["total"], mirrored["short"]["total"], rtol=1e-6)
    assert np.isfinite(mirrored["short"]["naive"]).all()
    np.testing.assert_allclose(single["short"]["logged"], mirrored["short"]["logged"], rtol=1e-5)
    trained = [w for w in range(len(single["short"]["weights"])) if w not in (2, 3)]  # not statistics
    for i in trained:
        weights = single["short"]["weights"][i], mirrored["short"]["weights"][i]
        np.testing.assert_allclose(*weights, atol=1e-6)


@pytest.mark.parametrize("case", some_of(["short_by_hand", "short_tokens"], "short_tokens"))
def test_a_padding_row_counts_in_no_sum_and_under_no_mask(single, mirrored, case):
    assert single[case]["step"] == 3
    np.testing.assert_allclose(single[case]["losses"], mirrored[case]["losses"], atol=1e-6)
    np.testing.assert_allclose(single[case]["weights"][-2], mirrored[case]["weights"][-2], atol=1e-6)


def test_a_metric_is_reset_with_the_log_and_set_aside_for_an_evaluation():
    class Both(Short):
        def eval_data(self, batch_size):
            x, y = self.arrays()
            return x, y + 100.0

        def eval_step(self, batch):
            self.largest.update_state(batch[1], self.model(batch[0])[:, 0])
            return {"mse": self.largest}

    def train_mse(**extra_intervals):
        writer = ctl.MemoryWriter()
        intervals = every_step(log=ctl.Every(steps=3), **extra_intervals)
        Both(strategy="default", global_batch_size=BATCH, writers=[writer], intervals=intervals).train()
        rows = {run: values for run, _, values in writer.rows}
        return rows["train"]["mse"], rows.get("eval", {}).get("mse")

    without, _ = train_mse()
    with_evaluation, evaluated = train_mse(evaluate=ctl.Every(steps=1))
    assert evaluated > 5000
    assert with_evaluation == without


def test_a_keras_loss_object_that_divides_by_replicas_is_refused(two_replicas):
    class Divides(Linear):
        loss_of = staticmethod(keras.losses.MeanSquaredError)

        def train_step(self, batch):
            with tf.GradientTape() as tape:
                values = self.loss_of()(batch[1][:, None], self.model(batch[0]))
                loss = self.average(values) if len(values.shape) else values
            self.minimize(loss, tape)
            return {"loss": values}

    class PerExample(Divides):
        loss_of = staticmethod(lambda: keras.losses.MeanSquaredError(reduction=None))

    with pytest.raises(ctl.UsageError, match="reduction=None"):
        Divides(strategy=two_replicas, **NO_REPORTS).train(1)
    PerExample(strategy=two_replicas, **NO_REPORTS).train(1)
    Divides(strategy="default", **NO_REPORTS).train(1)  # one replica: no division
    assert float(keras.losses.MeanSquaredError()([[1.0]], [[3.0]])) == 4.0


def test_a_loss_per_token_without_a_mask_is_refused():
    class NoMask(Tokens):
        def train_step(self, batch):
            with tf.GradientTape() as tape:
                loss = self.average(self.score(batch)[0])
            self.minimize(loss, tape)
            return {"loss": loss}

    with pytest.raises(ctl.UsageError, match="mask="):
        NoMask(strategy="default", **NO_REPORTS).train(1)


@pytest.mark.parametrize(("masked", "op_type"), [
    (lambda self, ids, loss: loss > 1.0, "ReadVariableOp"),
    (lambda self, ids, loss: tf.random.uniform([LENGTH]) > 0.5, "RandomUniform"),
    (lambda self, ids, loss: tf.cond(ids[0, 0] > 0, lambda: (ids > 1) & (self.step_variable > 0),
                                     lambda: ids > 0), "If"),
], ids=["the model", "chance", "a condition"])  # fmt: skip
def test_a_mask_that_is_not_of_the_batch_alone_is_refused_with_parts(masked, op_type):
    class Masked(Tokens):
        def train_step(self, batch):
            with tf.GradientTape() as tape:
                loss, _, scores = self.score(batch)
                loss = self.average(loss, mask=tf.broadcast_to(masked(self, batch[0], loss), loss.shape))
            self.minimize(loss, tape)
            return scores

    trainer = correctness.with_gradients(Masked, accumulate_steps=2)(strategy="default", **NO_REPORTS)
    with pytest.raises(ctl.UsageError, match=f"{op_type}.*from the batch alone"):
        trainer.train(1)


def test_a_mask_averaged_within_a_condition_is_refused_with_parts():
    class Masked(Tokens):
        def train_step(self, batch):
            with tf.GradientTape() as tape:
                loss, mask, scores = self.score(batch)
                loss = tf.cond(mask[0, 0], lambda: self.average(loss, mask=mask & True), lambda: 0.0)
            self.minimize(loss, tape)
            return scores

    trainer = correctness.with_gradients(Masked, accumulate_steps=2)(strategy="default", **NO_REPORTS)
    with pytest.raises(ctl.UsageError, match="within a condition"):
        trainer.train(1)


@pytest.mark.parametrize("replicas", some_of([1, 2], 2))
def test_a_compiled_step_gives_the_same_numbers(replicas, two_replicas):
    strategy = two_replicas if replicas == 2 else "default"
    uncompiled, compiled = (Linear(strategy=strategy, **NO_REPORTS) for _ in range(2))
    compiled.jit_compile = True
    for trainer in (uncompiled, compiled):
        trainer.train(5)
    for a, b in zip(uncompiled.model.get_weights(), compiled.model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_a_step_that_cannot_be_compiled_is_refused_before_training(two_replicas):
    central = ctl.make_strategy("central_storage", devices=["cpu:0", "cpu:1"])
    for cls, strategy, error_pattern in ((Short, two_replicas, "sums over replicas within the step"),
                                         (Linear, central, "variables on another device")):  # fmt: skip
        trainer = cls(strategy=strategy, **NO_REPORTS)
        trainer.jit_compile = True
        with pytest.raises(ctl.UsageError, match=error_pattern):
            trainer.train(1)


def test_a_step_that_xla_cannot_compile_is_refused():
    class Strings(Linear):
        def train_step(self, batch):
            tf.strings.as_string(batch[1])
            return super().train_step((tf.strings.to_number(tf.strings.as_string(batch[0])), batch[1]))

    trainer = Strings(strategy="default", **NO_REPORTS)
    trainer.jit_compile = True
    with pytest.raises(ctl.UsageError, match="jit_compile"):
        trainer.train(1)


@pytest.mark.slow  # the next test compares one of them with a loop by hand
@pytest.mark.parametrize("name", correctness.MASKED)
def test_masks_of_parts_give_the_mean_over_the_whole_batch(monkeypatch, single, mirrored, name):
    model, gradient_options = correctness.MASKED[name]
    monkeypatch.setitem(correctness.CASES, "whole", correctness.with_gradients(model, **gradient_options))
    expected = outcome("whole", "default")
    assert np.ptp(expected["losses"]) > 0.01
    for result in (single[name], mirrored[name]):
        np.testing.assert_allclose(result["losses"], expected["losses"], atol=1e-5)
        for a, b in zip(result["weights"], expected["weights"], strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_masks_of_parts_train_as_a_loop_by_hand_does(single, mirrored):
    trainer = Tokens(strategy="default", **NO_REPORTS)
    trainer.build()
    token_ids, tags = trainer.train_data(BATCH).rows.tensors()
    variables, expected = trainer.model.trainable_variables, []
    for step in range(9):
        rows = slice(step * BATCH % 40, step * BATCH % 40 + BATCH)
        with tf.GradientTape() as tape:
            logits = trainer.model(token_ids[rows])
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(tags[rows], logits)
            mask = tf.cast(token_ids[rows] > 0, tf.float32)
            mean = tf.reduce_sum(loss * mask) / tf.reduce_sum(mask)
        trainer.optimizer.apply(tape.gradient(mean, variables), variables)
        expected.append(float(mean))
    for result in (single["masks"], mirrored["masks"]):
        np.testing.assert_allclose(result["losses"], expected, atol=1e-5)


@pytest.mark.parametrize("name", some_of(correctness.ROWS, "rows_lazy_clipped"))
def test_sparse_gradients_of_any_number_of_rows_train_as_a_loop_by_hand_does(single, mirrored, name):
    trainer = correctness.ROWS[name](strategy="default", global_batch_size=BATCH, **NO_FILES)
    trainer.build()
    tables = trainer.model.trainable_variables
    start, expected = [t.numpy() for t in tables], []
    for ids in trainer.train_data(BATCH).take(9):
        with tf.GradientTape() as tape:
            loss = trainer.loss_of(ids)
            mean = tf.reduce_sum(loss) / BATCH
        gradients = [tf.convert_to_tensor(g) for g in tape.gradient(mean, tables)]
        norm = tf.linalg.global_norm(gradients)
        scale = min(1.0, (trainer.gradients.clip_norm or float("inf")) / norm)
        indices = [np.unique(ids[ids > 0]), np.unique(ids[ids > 0]) - 1]
        rows = [tf.IndexedSlices(tf.gather(g, w) * scale, w, g.shape)
                for g, w in zip(gradients, indices, strict=True)]  # fmt: skip
        trainer.optimizer.apply(rows, tables)
        expected.append(tf.reduce_mean(loss))
    assert np.abs(tables[0].numpy() - start[0]).max() > 0.05
    for result in (single[name], mirrored[name]):
        np.testing.assert_allclose(result["losses"], expected, atol=1e-5)
        for weights, table in zip(result["weights"], tables, strict=True):
            np.testing.assert_allclose(weights, table.numpy(), atol=1e-5)


@pytest.mark.parametrize("case", correctness.WITH_WORKERS)
def test_two_workers_train_as_one_device_does(single, workers, case):
    expected, first, second = single[case], workers[0][case], workers[1][case]
    assert first["digest"] == second["digest"]
    assert first["step"] == expected["step"]
    for key in ("losses", "mse", "total", "logged", "matrix", "f1", "norms", "eval", "scale", "iterations"):
        if key in expected:
            np.testing.assert_allclose(first[key], expected[key], atol=1e-5, err_msg=key)
    for a, b in zip(first["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_bad_worker_skips_the_step_on_both_without_a_deadlock(single, workers):
    for results in (single, *workers):
        scaled = results["scaled"]
        assert (scaled["step"], scaled["iterations"], scaled["scale"]) == (9, 6, 512.0)


def test_a_run_resumed_on_workers_with_unequal_shares_equals_one_device(run_program, tmp_path):
    program = "tests/programs/unequal_shares.py"
    [expected] = run_program(1, [program, "default", "6", str(tmp_path / "one")])
    run_program(1, [program, "default", "3", str(tmp_path / "two")])
    results = run_program(2, [program, "multi_worker", "6", str(tmp_path / "two")])
    np.testing.assert_allclose(results[0].json["losses"], expected.json["losses"][3:], atol=1e-4)
    for worker in results:
        np.testing.assert_allclose(worker.json["weights"], expected.json["weights"], atol=1e-5)
