"""Keras 3 and tf_keras optimizers on one, two and three ranks, compared with one process."""

import numpy as np
import pytest
from ranks import PROGRAMS, results

pytestmark = pytest.mark.workers
AS_ONE_PROCESS = [
    "fit_with_momentum", "fit_with_adam_and_clipping", "fit_with_a_schedule",
    "fit_in_loops_of_steps", "fit_eagerly", "fit_predivided_in_groups", "custom_loop",
    "several_passes", "a_sum_of_passes_in_fit",
    "sparse_gradients", "sparse_gradients_as_dense",
]  # fmt: skip
ON_THREE = ["custom_loop", "several_passes", "sparse_gradients",
            "mixed_precision_with_an_overflow_on_one_rank"]  # fmt: skip


@pytest.fixture(scope="module")
def runs():
    """Returns number of ranks -> results of each rank with Keras 3. Three ranks run some of the cases."""
    program = PROGRAMS / "training_keras3.py"
    return {1: results(program, 1), 2: results(program, 2), 3: results(program, 3, *ON_THREE)}


@pytest.fixture(scope="module")
def tf_keras_runs():
    return {count: results(PROGRAMS / "training_tf_keras.py", count) for count in (1, 2)}


def equal(runs, case, count, tolerance=1e-6):
    """Checks that all ranks have the same bits, and approximately the values of one process."""
    results = [rank[case] for rank in runs[count]]
    assert len({f["bits"] for f in results}) == 1
    np.testing.assert_allclose(
        results[0]["numbers"], runs[1][0][case]["numbers"], rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("case", AS_ONE_PROCESS)
def test_two_ranks_train_as_one_process_does_with_the_global_batch(runs, case):
    equal(runs, case, 2, 1e-5 if "adam" in case else 1e-6)


@pytest.mark.parametrize("case", [c for c in ON_THREE if c in AS_ONE_PROCESS])
def test_three_ranks_train_as_one_process_does_with_the_global_batch(runs, case):
    equal(runs, case, 3)


@pytest.mark.parametrize("count", [2, 3])
def test_gradients_travel_only_in_the_last_of_several_passes(runs, count):
    for rank in runs[count]:
        assert rank["custom_loop"]["exchanges"] == 4
        result = rank["several_passes"]
        assert (result["exchanges"], result["iterations"]) == (2, 4)
        np.testing.assert_allclose(result["numbers"], result["large"], atol=1e-6)


def test_one_process_exchanges_nothing(runs):
    (single_rank_result,) = runs[1]
    assert (
        single_rank_result["custom_loop"]["exchanges"]
        == single_rank_result["several_passes"]["exchanges"]
        == 0
    )
    assert set(single_rank_result["exchanges_per_step"].values()) == {0}


def test_gradients_are_fused_as_far_as_groups_and_the_threshold_allow(runs):
    for rank in runs[2]:
        assert rank["exchanges_per_step"] == {
            "fused": 1, "two groups": 2, "listed": 4, "130 bytes": 3, "0 bytes": 4,
        }  # fmt: skip


def test_a_variable_without_gradient_stays_and_the_others_are_averaged(runs):
    assert [rank["a_variable_without_gradient"] for rank in runs[2]] == [[0.75, 1.5, 3.0]] * 2


def test_the_gradient_of_a_local_variable_stays_and_is_divided_by_the_ranks(runs):
    # 6 on the first rank and 12 on the second: once divided by two, and once not; 9 on average
    assert [rank["a_local_variable"] for rank in runs[2]] == [[9.0, 18.0], [18.0, 18.0]]


def test_compressed_gradients_travel_as_they_say(runs):
    assert [rank["compressed"] for rank in runs[2]] == [[False, True, False]] * 2


@pytest.mark.parametrize("count", [2, 3])
def test_an_overflow_on_one_rank_is_skipped_by_all(runs, count):
    results = [rank["mixed_precision_with_an_overflow_on_one_rank"] for rank in runs[count]]
    assert len({f["bits"] for f in results}) == 1
    for f in results:
        assert (f["same"], f["finite"], f["scale"], f["iterations"]) == (True, True, 2.0**14, 3)


def test_the_state_of_the_wrapped_optimizer_continues(runs):
    result = runs[2][0]["state_of_the_wrapped_optimizer_goes_on"]
    assert result == {"weight": 2.5, "iterations": 2}  # 1 and then 1 + 1 / 2


@pytest.mark.parametrize("ending", [".keras", ".h5"])
def test_a_saved_model_loads_without_ctl_and_continues_with_ctl(runs, ending):
    assert runs[2][0]["saved_and_loaded"][ending] == {
        "plain": True, "rate": 0.25, "iterations": 1, "momentum kept": True, "exchanges": 1,
    }  # fmt: skip


def test_an_optimizer_made_of_its_config_or_copied_or_pickled_is_distributed_too(runs):
    result = runs[2][1]["copies_are_distributed_too"]
    assert result == {"config": True, "names": ["ours.gradients.0"] * 3, "is adam": True}
    assert runs[2][1]["custom_loop"]["called"]


def test_models_that_differ_are_an_error_on_all_ranks_that_names_the_variables(runs):
    for rank in runs[2]:
        assert "DistributedSGD.gradients.0: the shape" in rank["models_that_differ"]
        assert "top/kernel, " in rank["models_that_differ"]


@pytest.mark.parametrize(
    ("attempt", "sentence"),
    [
        ("twice", "exchanged twice; expected the optimizer"),
        ("adasum", "Use op=hvd.Average"),
        ("min", "expected hvd.Average or hvd.Sum"),
        ("name", "keras.optimizers.get(name)"),
        ("passes", "backward_passes_per_step is 0; expected a whole number >= 1"),
        ("predivided sum", "expected op=hvd.Average"),
        ("no groups", "expected a number of groups above 0"),
        ("inside out", "hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))"),
        ("sparse passes", "Set sparse_as_dense=True"),
    ],
)
def test_invalid_options_are_refused_with_an_alternative(runs, attempt, sentence):
    assert sentence in runs[1][0]["refusals"][attempt]


@pytest.mark.parametrize(
    "case", ["new_fit", "legacy_fit", "new_loop", "legacy_passes", "legacy_loss_scale"]
)
def test_tf_keras_trains_as_one_process_does(tf_keras_runs, case):
    equal(tf_keras_runs, case, 2)


def test_tf_keras_exchanges_once_per_step_and_in_the_last_pass(tf_keras_runs):
    for rank in tf_keras_runs[2]:
        assert rank["new_fit"]["exchanges"] == rank["legacy_fit"]["exchanges"] == 8
        assert rank["new_loop"]["exchanges"] == 4
        assert rank["legacy_passes"]["exchanges"] == 2
        assert rank["legacy_passes"]["iterations"] == 4


def test_a_saved_model_of_tf_keras_continues(tf_keras_runs):
    for rank in tf_keras_runs[2]:
        assert rank["saved_and_loaded"] == {"rate": 0.25, "iterations": 1, "exchanges": 1}
