"""Content of the event files, read with TensorBoard's plugins."""

import json

import pytest
import tensorboard_runs
from ctl.metrics.protocol import Ended, RunEnd, RunInfo, SharesLogged, Started, Traced
from ctl.metrics.tensorboard import TensorBoardWriter
from ctl.metrics.tensorboard_log import TensorBoardLog
from tensorboard.backend.event_processing import plugin_event_multiplexer
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.context import RequestContext
from tensorboard.plugins import base_plugin
from tensorboard.plugins.custom_scalar.custom_scalars_plugin import CustomScalarsPlugin
from tensorboard.plugins.hparams import api_pb2
from tensorboard_runs import LAYOUT, accumulated, files, graph, raw_events, scalar_steps, trials

HPARAMS = {"learning_rate": 0.5, "width": 8, "augment": True, "optimizer": "adam"}


def info(**changes):
    facts = {
        "model": "Mnist",
        "strategy": "mirrored",
        "num_workers": 1,
        "num_replicas": 2,
        "global_batch_size": 64,
        "data": "1,000 examples",
        "precision": "float32",
        "seed": 7,
        "model_dir": None,
        "parameters": (("dense/kernel", (784, 10), "float32", True),),
        "config": {"steps": 20, "note": "a|b <i>*c*</i>"},
        "hparams": HPARAMS,
    }
    return RunInfo(**{**facts, **changes})


def attempt(logs, start, steps, *, facts=None, **options):
    tensorboard_runs.attempt(logs, start, steps, facts=facts or info(), **options)


def trial_names(logdir):
    return sorted(group.name for group in trials(logdir))


def test_trials_are_named_by_their_settings_and_equal_settings_stay_two_trials(tmp_path):
    for directory, run_id in [("a", "11111122"), ("b", "33333344")]:
        facts = info(name="learning_rate=0.5,width=8", run_id=run_id)
        attempt(tmp_path / directory / "logs", 0, [1, 2], evals=(2,), facts=facts)
    attempt(tmp_path / "a" / "logs", 2, [3], evals=(3,), facts=info(name="width=8", run_id="11111122"))
    assert trial_names(tmp_path) == ["learning_rate=0.5,width=8 (333333)", "width=8 (111111)"]
    assert all(metrics(group)[("", "loss")] for group in trials(tmp_path))


def metrics(group):
    return {(m.name.group, m.name.tag): m.value for m in group.metric_values}


@pytest.fixture
def logs(tmp_path):
    return tmp_path / "run" / "logs"


def test_both_runs_have_the_same_tags_so_that_their_curves_share_a_chart(logs):
    attempt(logs, 0, range(1, 9), evals=(4, 8))
    train, evaluation = accumulated(logs / "train"), accumulated(logs / "eval")
    scalar_tags = [
        {
            tag
            for tag in events.Tags()["tensors"]
            if events.SummaryMetadata(tag).plugin_data.plugin_name == "scalars"
        }
        for events in (train, evaluation)
    ]
    assert scalar_tags == [{"loss", "accuracy"}] * 2


def test_scalars_have_the_format_of_tensorflow(logs, tmp_path):
    import tensorflow as tf

    with tf.summary.create_file_writer(str(tmp_path / "tf")).as_default():
        tf.summary.scalar("loss", 0.1, step=3)
    writer = TensorBoardWriter(logs)
    writer.write(3, {"loss": 0.1})
    writer.note(Ended(3, RunEnd.DONE))
    expected, actual = (
        next(value for event in raw_events(folder) for value in event.summary.value)
        for folder in (tmp_path / "tf", logs / "train")
    )
    assert actual.metadata == expected.metadata
    assert tf.make_ndarray(actual.tensor) == tf.make_ndarray(expected.tensor)
    assert tf.make_ndarray(actual.tensor).shape == ()


def test_wall_time_is_the_time_of_writing(logs):
    times = iter([100.0, 200.0])
    writer = TensorBoardWriter(logs, clock=lambda: next(times, 300.0))
    writer.write(1, {"loss": 1.0})
    writer.write(2, {"loss": 1.0})
    writer.note(Ended(2, RunEnd.DONE))
    assert [e.wall_time for e in raw_events(logs / "train") if e.summary.value] == [100.0, 200.0]


def test_all_numbers_of_a_step_are_one_event(logs):
    attempt(logs, 0, range(1, 4))
    scalar_events = [e for e in raw_events(logs / "train") if e.summary.value and e.step]
    assert [len(event.summary.value) for event in scalar_events[:3]] == [2, 2, 2]


def test_one_session_shows_hyperparameters_and_the_metrics_of_the_evaluation(logs):
    attempt(logs, 0, range(1, 9), evals=(4, 8))
    (group,) = trials(logs)
    assert {name: value.WhichOneof("kind") for name, value in group.hparams.items()} == {
        "learning_rate": "number_value",
        "width": "number_value",
        "augment": "bool_value",
        "optimizer": "string_value",
    }
    assert metrics(group) == {("", "loss"): 8.5, ("", "accuracy"): 0.75}
    assert group.sessions[0].status == api_pb2.STATUS_SUCCESS


def test_each_run_under_one_folder_is_a_session(logs):
    attempt(logs / "a", 0, [1], evals=(1,))
    attempt(logs / "b", 0, [2], evals=(2,), facts=info(hparams={"depth": 3}))
    first, second = sorted(trials(logs), key=lambda group: group.name)
    assert (metrics(first)["", "loss"], metrics(second)["", "loss"]) == (1.5, 2.5)
    assert "depth" in second.hparams


def test_without_an_evaluation_the_session_shows_the_training(logs):
    attempt(logs, 0, range(1, 9))
    (group,) = trials(logs)
    assert metrics(group)["", "loss"] == 8.0


def test_an_evaluation_by_another_program_is_shown_in_the_session(logs):
    evaluator = TensorBoardLog(logs)
    trainer = TensorBoardLog(logs)
    trainer.start(Started(0, None, info()), 1000.0)
    trainer.scalars(1000.0, 1, {"loss": 1.0}, "train")
    evaluator.scalars(1000.0, 1, {"loss": 7.0}, "eval")
    evaluator.close()
    trainer.end(Ended(1, RunEnd.DONE), 1000.0)
    (group,) = trials(logs)
    assert metrics(group) == {("", "loss"): 7.0}


def test_a_failed_run_is_a_failed_session_and_a_resumed_one_is_new(logs):
    attempt(logs, 0, [1, 2], evals=(2,), end=RunEnd.FAILED)
    (group,) = trials(logs)
    assert group.sessions[0].status == api_pb2.STATUS_FAILURE
    attempt(logs, 2, [3], facts=info(hparams={"learning_rate": 0.25}))
    (group,) = trials(logs)
    assert group.sessions[0].status == api_pb2.STATUS_SUCCESS
    assert group.hparams["learning_rate"].number_value == 0.25
    assert list(group.hparams) == ["learning_rate"]


def test_hyperparameters_of_other_types_are_shown_as_text(logs):
    odd = {"sizes": [1, 2], "none": None, "rate": float("inf")}
    attempt(logs, 0, [1], facts=info(hparams=odd))
    (group,) = trials(logs)
    shown = {name: value.string_value for name, value in group.hparams.items()}
    assert shown == {"sizes": "[1, 2]", "none": "None", "rate": "inf"}


def test_cards_show_the_configuration_literally_and_the_weights(logs):
    attempt(logs, 0, [1])
    events = accumulated(logs / "train")
    card, model = (
        events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in ("configuration", "model")
    )
    assert "| steps | 20 |" in card
    for mark in "|<>*":
        assert mark not in card.splitlines()[-1].strip("| ").replace("note | ", "")
    assert "| dense/kernel | 784 x 10 | 7,840 |" in model
    assert "| total |  | 7,840 |" in model
    assert events.SummaryMetadata("configuration").plugin_data.plugin_name == "text"


def test_only_the_first_graph_of_a_run_is_kept(logs):
    writer = TensorBoardWriter(logs)
    writer.note(Started(0, None, info()))
    writer.note(Traced(graph("first")))
    writer.note(Traced(graph("second")))
    writer.note(Ended(0, RunEnd.DONE))
    assert accumulated(logs / "train").Graph().node[0].name == "first"


def layout(logdir):
    """Returns the layout of all runs: title of a group -> title of a chart -> its tags."""
    multiplexer = plugin_event_multiplexer.EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(logdir)).Reload()
    provider = MultiplexerDataProvider(multiplexer, str(logdir))
    plugin = CustomScalarsPlugin(base_plugin.TBContext(data_provider=provider))
    shown = plugin.layout_impl(RequestContext(), "")
    shown = json.loads(shown) if isinstance(shown, str) else shown
    return {
        group["title"]: {chart["title"]: chart["multiline"]["tag"] for chart in group["chart"]}
        for group in shown["category"]
    }


def test_a_chart_has_the_same_metric_of_training_and_evaluation(logs):
    writer = TensorBoardWriter(logs)
    for _ in range(2):
        writer.note(Started(0, None, info()))
        speed = {"steps_per_sec": 2.0, "learning_rate": 0.1, "gradient_norm/other": 1.0}
        writer.write(1, {"loss": 1.0, "a.b": 2.0, **speed}, "train")
        writer.write(1, {"loss": 2.0, "hits": 1.0}, "eval")
        writer.write(2, {"loss": 1.0, "later": 1.0}, "train")
        writer.note(SharesLogged(2, "time shares", {"host": 0.25}))
        writer.note(Ended(2, RunEnd.DONE))
    assert layout(logs) == {
        "metrics": {
            "a.b": [r"^a\.b$"], "hits": ["^hits$"], "later": ["^later$"], "loss": ["^loss$"],
        },
        "speed": {"steps_per_sec": ["^steps_per_sec$"]},
        "time shares": {"time shares/host": [r"^time\ shares/host$"]},
        "optimizer": {
            "gradient_norm/other": ["^gradient_norm/other$"], "learning_rate": ["^learning_rate$"],
        },
    }  # fmt: skip
    assert scalar_steps(logs / "train", "time shares/host") == [2]
    layouts = [
        event for path in files(logs / "train") for event in LegacyEventFileLoader(str(path)).Load()
        if any(value.tag == LAYOUT for value in event.summary.value)
    ]  # fmt: skip
    assert len(layouts) == 2 * 3  # of each attempt: at the first metrics and after new names
