"""Batch normalization over the batches of all ranks, which differ in size."""

import numpy as np
import pytest
from ranks import PROGRAMS, results

pytestmark = pytest.mark.workers
PROGRAM = PROGRAMS / "normalizing.py"


@pytest.fixture(scope="module", params=["keras3", pytest.param("tf_keras", marks=pytest.mark.slow)])
def runs(request):
    """Returns (results of one process, results of each of two ranks)."""
    environ = {"TF_USE_LEGACY_KERAS": "1"} if request.param == "tf_keras" else {}
    (single_rank_result,) = results(PROGRAM, 1, environ=environ)
    return single_rank_result, results(PROGRAM, 2, environ=environ)


@pytest.mark.parametrize("case", ["eager", "in_a_function"])
def test_outputs_gradients_and_averages_are_those_of_one_large_batch(runs, case):
    single_rank_result, ranks = runs[0][case], [rank[case] for rank in runs[1]]
    for name in ("y", "of_x"):
        joined = np.concatenate([rank[name] for rank in ranks])
        np.testing.assert_allclose(joined, single_rank_result[name], atol=2e-5)
    for name in ("of_gamma", "of_beta"):
        np.testing.assert_allclose(
            sum(np.array(r[name]) for r in ranks), single_rank_result[name], atol=2e-5
        )
    for name in ("mean", "variance"):
        assert ranks[0][name] == ranks[1][name]
    np.testing.assert_allclose(ranks[0]["mean"], single_rank_result["mean"], atol=1e-6)
    np.testing.assert_allclose(ranks[0]["variance"], single_rank_result["variance"], rtol=1e-5)


def test_inference_needs_no_collective(runs):
    np.testing.assert_allclose(runs[1][0]["inference"], runs[0]["inference"])


def test_a_mask_counts_over_all_ranks(runs):
    for rank in runs[1]:
        np.testing.assert_allclose(rank["masked"]["layer"], rank["masked"]["all"], atol=1e-5)


def test_a_layer_is_made_of_its_config(runs):
    assert runs[0]["a_copy_by_its_config"] == ["SyncBatchNormalization", 0.7]


def test_the_fused_operation_is_refused(runs):
    assert "expected fused=False" in runs[0]["refusal"]
