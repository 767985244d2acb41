"""Valid and invalid uses of the helpers in `ctl.hvd.advice`."""

import warnings

import pytest
import tensorflow as tf
from ctl.collectives.ranks import build_ranks
from ctl.errors import UsageError
from ctl.hvd import advice, process


class FourRanks:
    """A substitute for the engine in tests without communication."""

    def __init__(self, rank):
        self.ranks = build_ranks([f"host:{port}" for port in range(1, 5)], rank)


@pytest.fixture
def rank(monkeypatch):
    def be(number):
        monkeypatch.setattr(process, "_engine", FourRanks(number))

    be(1)
    return be


def numbers():
    return tf.data.Dataset.range(20)


def test_ranks_share_out_all_examples(rank):
    examples = []
    for number in range(4):
        rank(number)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            examples += [int(x) for x in advice.shard(numbers()).shuffle(5).repeat(1)]
    assert sorted(examples) == list(range(20))


@pytest.mark.parametrize("before", ["shuffle", "repeat"])
def test_sharding_too_late_is_warned_of(rank, before):
    shuffled_or_repeated = numbers().shuffle(5) if before == "shuffle" else numbers().repeat(2)
    with pytest.warns(UserWarning, match=rf"after {before}\(\); shard it first"):
        advice.shard(shuffled_or_repeated.map(lambda x: x))
    finished = shuffled_or_repeated.shard(4, 1).batch(2).prefetch(1)
    with pytest.warns(UserWarning, match=before):
        assert len(advice.check_sharding(finished)) == 1


def test_sharding_of_batches_is_warned_of(rank):
    with pytest.warns(UserWarning, match="whole batches in turn"):
        assert len(advice.check_sharding(numbers().batch(2).shard(4, 1).prefetch(1))) == 1


def test_shards_of_another_rank_or_size_are_warned_of(rank, monkeypatch):
    rank(3)
    with pytest.warns(UserWarning, match="into 2 parts, but there are 4 ranks"):
        advice.check_sharding(numbers().shard(2, 1))
    monkeypatch.setattr(process, "local_rank", lambda: 1)  # two hosts of two ranks
    with pytest.warns(UserWarning, match=r"rank 3 reads part 1 \(its local rank\)"):
        advice.check_sharding(numbers().shard(4, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert advice.check_sharding(numbers().shard(4, 3).batch(2)) == []


def test_missing_shards_are_warned_of_and_early_shards_are_accepted(rank):
    with pytest.warns(UserWarning, match="was not sharded"):
        advice.check_sharding(numbers().shuffle(5).batch(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert advice.check_sharding(numbers().shard(4, 1).shuffle(5).repeat().batch(2)) == []


def test_rates_steps_and_directories(rank, tmp_path):
    assert advice.scale_learning_rate(0.1) == pytest.approx(0.4)
    assert [advice.scale_steps(n) for n in (1000, 7, 1)] == [250, 1, 1]
    with pytest.raises(UsageError, match="steps is 0"):
        advice.scale_steps(0)
    assert advice.checkpoint_dir(tmp_path) is None
    rank(0)
    assert advice.checkpoint_dir(tmp_path) == str(tmp_path)


def test_before_init_an_error_names_the_missing_call(monkeypatch):
    monkeypatch.setattr(process, "_engine", None)
    with pytest.raises(ValueError, match=r"hvd\.init\(\)"):
        advice.scale_learning_rate(0.1)
