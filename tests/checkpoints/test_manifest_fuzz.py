"""Arbitrary manifests and flags: they are parsed or refused with a CheckpointError or UsageError."""

import json
from contextlib import suppress

import ctl
from ctl.checkpoints import checksums
from hypothesis import given, settings
from hypothesis import strategies as st

FUZZ_SETTINGS = settings(database=None)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
VALID_CONTENT = json.loads(
    ctl.Manifest(
        step=3, created=1.5, variables={"model/k": {"shape": [2, None], "dtype": "float32"}},
        keys={"model/k": "model/k/.ATTRIBUTES/VARIABLE_VALUE"},
        files={"state.index": {"size": 3, "checksum": "crc32c:364b3fb7"}},
        world={"workers": 1}, data={"mode": "indexed"}, metrics={"loss": 0.5},
        state={"interval": {"a": [1]}}, versions={"ctl": "0.1"},
    ).to_json()
)  # fmt: skip


def read(text):
    """Returns the manifest after the usual accesses, or None if it is refused with a CheckpointError."""
    with suppress(ctl.CheckpointError):
        manifest = ctl.Manifest.from_json(text, "here")
        ctl.Keep(newest=1, best="loss").surplus([manifest, manifest])
        assert all(spec["shape"] is not None and spec["dtype"] for spec in manifest.variables.values())
        assert all(f["size"] >= 0 and f["checksum"] for f in manifest.files.values())
        assert ctl.Manifest.from_json(manifest.to_json(), "again").step == manifest.step
        return manifest
    return None


def with_checksum(content):
    """Returns the content with a valid checksum, so that the reader validates the other fields."""
    content.pop("checksum", None)
    text = json.dumps(content, sort_keys=True)
    return json.dumps({**content, "checksum": checksums.compute_checksum([text.encode()])})


@FUZZ_SETTINGS
@given(st.text() | st.binary().map(lambda b: b.decode("latin-1")))
def test_any_text_is_read_or_refused(text):
    read(text)


@FUZZ_SETTINGS
@given(JSON)
def test_any_json_is_read_or_refused(content):
    read(json.dumps(content))


@FUZZ_SETTINGS
@given(st.dictionaries(st.sampled_from(sorted(VALID_CONTENT)), JSON, min_size=1, max_size=3))
def test_a_manifest_with_wrong_fields_is_read_or_refused(changes):
    read(with_checksum({**VALID_CONTENT, **changes}))


@FUZZ_SETTINGS
@given(st.data())
def test_a_manifest_with_a_wrong_nested_value_is_read_or_refused(data):
    content = json.loads(json.dumps(VALID_CONTENT))
    node = content
    while isinstance(node, (dict, list)) and node:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(node[key], (dict, list)) or data.draw(st.booleans()):
            if data.draw(st.booleans()) or isinstance(node, list):
                node[key] = data.draw(JSON)
            else:
                del node[key]
            break
        node = node[key]
    read(with_checksum(content))


@FUZZ_SETTINGS
@given(st.integers(0, 10**4), st.integers(0, 255), st.booleans())
def test_a_manifest_with_a_wrong_byte_is_refused(where, byte, cut):
    text = json.dumps(VALID_CONTENT)
    position = where % len(text)
    changed_text = text[:position] + ("" if cut else chr(byte) + text[position + 1 :])
    manifest = read(changed_text)
    if manifest is not None:
        assert json.loads(changed_text) == VALID_CONTENT  # a space, or the same letter


@FUZZ_SETTINGS
@given(
    st.text()
    | st.lists(
        st.sampled_from(["5", "0", "every", "best", "mode", "=", ",", "min", "loss", " ", "²", "-"])
    ).map("".join)
)
def test_any_string_for_keep_is_read_or_refused(text):
    with suppress(ctl.UsageError):
        keep = ctl.Keep.parse(text)
        assert keep.newest >= 0 and (keep.every is None or keep.every >= 1)
        keep.surplus([ctl.Manifest(step=s, created=0.0) for s in (1, 2)])


def test_names_of_files_outside_the_directory_are_refused():
    for name in ("../x", "/etc/passwd", "a/b", "..", "", "a\\b", "a\0b"):
        files = {name: {"size": 1, "checksum": "crc32c:00000000"}}
        assert read(with_checksum({**VALID_CONTENT, "files": files})) is None
    assert read(with_checksum(VALID_CONTENT)) is not None


def test_a_file_with_an_empty_checksum_is_refused():
    file = VALID_CONTENT["files"]["state.index"]
    assert read(with_checksum(dict(VALID_CONTENT))) is not None
    files = {"state.index": {**file, "checksum": ""}}
    assert read(with_checksum({**VALID_CONTENT, "files": files})) is None
