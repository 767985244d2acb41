"""Reader of the files of W&B's offline mode, which are records of its own protobuf types."""

import json
import struct

from wandb.proto import wandb_internal_pb2

_HEADER_BYTES = 7  # of a file and of a chunk
_BLOCK_BYTES = 32768
_LAST_CHUNKS = (1, 4)  # of a record: a full one, or the last one


def read_run(path):
    """Returns the configuration, rows of metrics, summary, exit code, and artifacts of a run."""
    run = {"config": {}, "rows": [], "summary": {}, "exit_code": None, "artifacts": {}, "ids": set()}
    for content in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(content)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run["ids"].add((record.run.run_id, record.run.run_group, record.run.display_name))
            run["project"] = record.run.project
            run["config"] |= _values(record.run.config.update)
        elif kind == "config":
            run["config"] |= _values(record.config.update)
        elif kind == "history":
            run["rows"].append(_values(record.history.item))
        elif kind == "summary":
            run["summary"] |= _values(record.summary.update)
        elif kind == "exit":
            run["exit_code"] = record.exit.exit_code
        elif kind == "request" and record.request.WhichOneof("request_type") == "log_artifact":
            run["artifacts"] |= _artifact(record.request.log_artifact.artifact)
        elif kind == "artifact":
            run["artifacts"] |= _artifact(record.artifact)
    return run


def _artifact(artifact):
    return {artifact.name: sorted(entry.path for entry in artifact.manifest.contents)}


def _values(items):
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def _records(content):
    """Yields the records of a file in LevelDB's log format."""
    position, parts = _HEADER_BYTES, []
    while position + _HEADER_BYTES <= len(content):
        remaining = _BLOCK_BYTES - position % _BLOCK_BYTES
        if remaining < _HEADER_BYTES:
            position += remaining
            continue
        _, length, chunk_type = struct.unpack_from("<IHB", content, position)
        position += _HEADER_BYTES
        parts.append(content[position : position + length])
        position += length
        if chunk_type in _LAST_CHUNKS:
            yield b"".join(parts)
            parts = []
