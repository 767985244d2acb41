"""TensorBoard logs of training processes, and functions that read them as TensorBoard does."""

from ctl.io import paths
from ctl.metrics.protocol import Ended, RunEnd, RunInfo, Started, Traced
from ctl.metrics.tensorboard import TensorBoardWriter
from tensorboard.backend.event_processing import plugin_event_multiplexer
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.compat.proto import graph_pb2
from tensorboard.context import RequestContext
from tensorboard.plugins import base_plugin
from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups

LAYOUT = "custom_scalars__config__"  # TensorBoard's tag
INFO = RunInfo(
    "Mnist",
    "mirrored",
    1,
    2,
    64,
    "1,000 examples",
    "float32",
    7,
    None,
    config={"steps": 20},
    hparams={"width": 8},
)


def graph(name):
    return graph_pb2.GraphDef(node=[{"name": name, "op": "NoOp"}])


def attempt(logs, start, steps, *, evals=(), end=RunEnd.DONE, facts=None, name="node"):
    """Writes the events of one attempt of a training process."""
    writer = TensorBoardWriter(logs)
    writer.note(Started(start, None, facts or INFO))
    writer.note(Traced(graph(name)))
    for step in steps:
        writer.write(step, {"loss": float(step), "accuracy": 0.5})
        if step in evals:
            writer.write(step, {"loss": step + 0.5, "accuracy": 0.75}, run="eval")
    writer.note(Ended(max([start, *steps]), end))


def files(folder):
    return sorted(folder.glob("events.out.tfevents.*"))


def raw_events(folder):
    """Returns all events except the layout, read by TensorBoard's loader in its order."""
    events = [event for path in files(folder) for event in LegacyEventFileLoader(str(path)).Load()]
    return [event for event in events if not any(v.tag == LAYOUT for v in event.summary.value)]


def scalar_steps(folder, tag="loss"):
    """Returns the steps of the points that TensorBoard shows."""
    if not paths.path(folder).exists():
        return []
    events = accumulated(folder)
    return [event.step for event in events.Tensors(tag)] if tag in events.Tags()["tensors"] else []


def accumulated(folder):
    """Returns the events that TensorBoard shows: a session log hides points before it."""
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})  # 0: no sampling
    events.Reload()
    return events


def trials(logdir):
    """Returns the session groups of TensorBoard's HPARAMS tab."""
    multiplexer = plugin_event_multiplexer.EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(logdir))
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, str(logdir))
    context = backend_context.Context(base_plugin.TBContext(data_provider=provider))
    request = api_pb2.ListSessionGroupsRequest(
        start_index=0,
        slice_size=100,
        allowed_statuses=[
            api_pb2.STATUS_UNKNOWN,
            api_pb2.STATUS_SUCCESS,
            api_pb2.STATUS_FAILURE,
            api_pb2.STATUS_RUNNING,
        ],
    )
    answer = list_session_groups.Handler(RequestContext(), context, "", request).run()
    return list(answer.session_groups)
