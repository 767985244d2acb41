"""Callbacks and values of `ctl.hvd.keras`, on one and on two ranks."""

import pytest
from ranks import PROGRAMS, results

pytestmark = pytest.mark.workers


@pytest.fixture(scope="module")
def ranks():
    """Returns the results of each of two ranks."""
    return results(PROGRAMS / "calling_back.py", 2)


def test_weights_and_optimizer_are_broadcast_once_after_the_first_batch(ranks):
    first, second = (rank["broadcast_after_the_first_batch"] for rank in ranks)
    assert first["before"] != second["before"]
    assert first["after"]["bits"] == second["after"]["bits"]
    assert first["broadcasts"] == second["broadcasts"] == 1


def test_ranks_keep_their_own_seeds_of_dropout(ranks):
    first, second = (rank["broadcast_after_the_first_batch"]["seed"] for rank in ranks)
    assert first and first != second


def test_local_variables_are_not_broadcast(ranks):
    first, second = (rank["local_variables_stay"] for rank in ranks)
    assert first["kernel"] != second["kernel"]
    assert first["bias"] == second["bias"] == 0.0


def test_metrics_are_averaged_in_place_for_the_callbacks_after(ranks):
    first, second = (rank["averaged_metrics"] for rank in ranks)
    assert first == second
    assert len(first["epochs"]) == 2  # both stopped early, at the same epoch
    assert first["history"] == [logs["val_loss"] for logs in first["epochs"]]


def test_ranks_with_different_metrics_all_raise_and_name_it(ranks):
    for rank in ranks:
        message = rank["different_metrics_are_an_error_everywhere"]
        assert "rank 0 has no metric 'val_loss'" in message


def test_the_rate_rises_over_the_first_epochs_and_falls_by_epoch_later(ranks):
    rising = [round(0.2 + 0.2 * (batch + 1) / 8, 6) for batch in range(8)]
    values = ranks[0]["warm_up_and_schedule"]
    assert values["rates"] == [*rising, *[0.4] * 8, *[0.04] * 4][:12] + [0.4] * 4 + [0.04] * 4
    assert values["logs"] == [0.3, 0.4, 0.4, 0.4, 0.04]
    assert ranks[1]["warm_up_and_schedule"] == values
    assert ranks[0]["warm_up_of_a_scaled_loss"] == values["rates"]


def test_momentum_is_scaled_with_the_rate(ranks):
    # -0.1, then 0.5 * -0.1 * (0.01 / 0.1) - 0.01, or without the correction 0.5 * -0.1 - 0.01
    values = ranks[0]["momentum_is_scaled_with_the_rate"]
    assert values == {"True": -0.115, "False": -0.16}


def test_a_rate_that_cannot_be_set_is_refused_with_an_alternative(ranks):
    message = ranks[0]["a_schedule_object_is_refused"]
    assert "CosineDecay" in message
    assert "keras.optimizers.SGD(0.1)" in message


def test_the_best_model_is_written_to_the_given_path(ranks):
    result = ranks[0]["best_model"]
    assert 'BestModelCheckpoint(filepath="best.keras")' in result["without"]
    assert result["loads"] == 2


def test_values_are_reduced_gathered_and_broadcast(ranks):
    assert [rank["values"] for rank in ranks] == [[0.5, 3.0, 4.0, [0, 1], 1, [2.0]]] * 2
