"""Name matching of layers between a model and a checkpoint. Automatic numbers of Keras may differ."""

import logging

import ctl
import keras
import numpy as np
import pytest
from ctl.checkpoints.name_matching import Ambiguous, matching_names
from small_models import Small, every_step

OPTIONS = dict(strategy="default", writers=[], intervals=every_step(save=ctl.Every(steps=2)))


def matched(model_names, saved_names):
    return matching_names({p: p for p in model_names.split()}, {p: p for p in saved_names.split()})


@pytest.mark.parametrize(
    ("model_names", "saved_names", "expected"),
    [
        ("m/a/k m/b/k", "m/b/k m/a/k", "m/a/k=m/a/k m/b/k=m/b/k"),
        ("m/block_2/k m/block_3/k", "m/block_1/k m/block_2/k m/block_3/k",
         "m/block_2/k=m/block_2/k m/block_3/k=m/block_3/k"),
        ("m/block_2/dense/k", "m/block_1/dense/k m/block_2/dense~1/k",
         "m/block_2/dense/k=m/block_2/dense~1/k"),
        ("m/dense~3/k m/dense~4/k", "m/dense/k m/dense~1/k",
         "m/dense~3/k=m/dense/k m/dense~4/k=m/dense~1/k"),
        ("m/dense/k m/dense~1/k", "m/dense/k m/dense~1/k m/dense~2/k",
         "m/dense/k=m/dense/k m/dense~1/k=m/dense~1/k"),
        ("m/dense/k m/dense~1/k m/dense~2/k", "m/dense/k m/dense~1/k",
         "m/dense/k=m/dense/k m/dense~1/k=m/dense~1/k"),
        ("m/seq~1/dense~10/k m/seq~1/dense~9/k", "m/seq/dense/k m/seq/dense~1/k",
         "m/seq~1/dense~9/k=m/seq/dense/k m/seq~1/dense~10/k=m/seq/dense~1/k"),
        ("m/new/k", "m/old/k", ""),
    ],
)  # fmt: skip
def test_names_are_paired(model_names, saved_names, expected):
    assert matched(model_names, saved_names) == dict(pair.split("=") for pair in expected.split())


@pytest.mark.parametrize(
    ("model_names", "saved_names"),
    [
        ("m/block~1/k m/block~2/k", "m/block~2/k m/block~3/k"),  # the numbers may be automatic or chosen
        ("m/dense~1/k m/dense~2/k", "m/dense/k m/dense~1/k m/dense~2/k"),
        ("m/dense~4/k", "m/dense/k m/dense~1/k"),
    ],
)
def test_ambiguous_names_are_refused_with_the_names_of_both_sides(model_names, saved_names):
    with pytest.raises(Ambiguous) as raised:
        matched(model_names, saved_names)
    for name in (model_names + " " + saved_names).split():
        assert name.replace("~", "_") in str(raised.value)


def test_variables_with_one_name_are_paired_by_order_if_their_numbers_are_equal():
    def names(count):
        return {f"w#{i}": "m/w" for i in range(count)}

    assert matching_names(names(2), names(2)) == {"w#0": "w#0", "w#1": "w#1"}
    with pytest.raises(Ambiguous):
        matching_names(names(2), names(3))


class Blocks(Small):
    """A model with layers of equal shapes and explicit names."""

    numbers = (1, 2, 3)

    def build(self):
        blocks = [keras.layers.Dense(8, name=f"block_{i}") for i in self.numbers]
        self.model = keras.Sequential([keras.Input((8,)), *blocks, keras.layers.Dense(4, name="head")])
        self.optimizer = keras.optimizers.SGD(1e-2)


class Fewer(Blocks):
    numbers = (2, 3)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    trainer = Blocks(model_dir=str(tmp_path_factory.mktemp("source") / "run"), **OPTIONS)
    trainer.train(2)
    return trainer


def test_weights_are_assigned_to_the_layers_of_the_same_name(source, caplog):
    caplog.set_level(logging.INFO, "ctl")
    trainer = Fewer(**OPTIONS)
    trainer.init_from = source.model_dir
    trainer.prepare()
    for name in ("block_2", "block_3", "head"):
        for weights, saved in zip(trainer.model.get_layer(name).get_weights(),
                                  source.model.get_layer(name).get_weights(), strict=True):  # fmt: skip
            np.testing.assert_array_equal(weights, saved, err_msg=name)
    assert "block_1/kernel: only in the checkpoint" in caplog.text


def test_a_checkpoint_without_paths_is_refused_for_layers_with_chosen_numbers(source, monkeypatch):
    from ctl.checkpoints import warm_start

    find_source = warm_start.find_source

    def find_source_without_paths(checkpoint_path):
        path, manifest = find_source(checkpoint_path)
        return path, type(manifest)(**{**vars(manifest), "paths": {}})

    monkeypatch.setattr(warm_start, "find_source", find_source_without_paths)
    trainer = Fewer(**OPTIONS)
    trainer.init_from = source.model_dir
    with pytest.raises(ctl.CheckpointError, match="omits the numbers in names.*block_2"):
        trainer.prepare()
