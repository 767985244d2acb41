"""Whatever is in a manifest or a flag, it is a sentence and not a traceback."""

import json
from contextlib import suppress

import ctl
from ctl.checkpoints import checksums
from hypothesis import given, settings
from hypothesis import strategies as st

CASES = settings(database=None)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
GOOD = json.loads(
    ctl.Manifest(
        step=3, created=1.5, variables={"model/k": {"shape": [2, None], "dtype": "float32"}},
        keys={"model/k": "model/k/.ATTRIBUTES/VARIABLE_VALUE"},
        files={"state.index": {"size": 3, "checksum": "crc32c:364b3fb7"}},
        world={"workers": 1}, data={"mode": "indexed"}, metrics={"loss": 0.5},
        state={"interval": {"a": [1]}}, versions={"ctl": "0.1"},
    ).to_json()
)  # fmt: skip


def read(text):
    """The manifest, or None with the one error that there may be; used as its readers use it."""
    with suppress(ctl.CheckpointError):
        found = ctl.Manifest.from_json(text, "here")
        ctl.Keep(newest=1, best="loss").surplus([found, found])
        assert all(spec["shape"] is not None and spec["dtype"] for spec in found.variables.values())
        assert all(f["size"] >= 0 and f["checksum"] for f in found.files.values())
        assert ctl.Manifest.from_json(found.to_json(), "again").step == found.step
        return found
    return None


def signed(content):
    """With the right checksum, so that what is inside is looked at."""
    content.pop("checksum", None)
    text = json.dumps(content, sort_keys=True)
    return json.dumps({**content, "checksum": checksums.compute_checksum([text.encode()])})


@CASES
@given(st.text() | st.binary().map(lambda b: b.decode("latin-1")))
def test_any_text_is_read_or_refused(text):
    read(text)


@CASES
@given(JSON)
def test_any_json_is_read_or_refused(content):
    read(json.dumps(content))


@CASES
@given(st.dictionaries(st.sampled_from(sorted(GOOD)), JSON, min_size=1, max_size=3))
def test_a_manifest_with_wrong_parts_is_read_or_refused(changes):
    read(signed({**GOOD, **changes}))


@CASES
@given(st.data())
def test_a_manifest_with_a_wrong_place_deep_inside_is_read_or_refused(data):
    content = json.loads(json.dumps(GOOD))
    here = content
    while isinstance(here, (dict, list)) and here:
        keys = list(here) if isinstance(here, dict) else list(range(len(here)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(here[key], (dict, list)) or data.draw(st.booleans()):
            if data.draw(st.booleans()) or isinstance(here, list):
                here[key] = data.draw(JSON)
            else:
                del here[key]
            break
        here = here[key]
    read(signed(content))


@CASES
@given(st.integers(0, 10**4), st.integers(0, 255), st.booleans())
def test_a_manifest_with_a_wrong_byte_is_refused(where, byte, cut):
    text = json.dumps(GOOD)
    at = where % len(text)
    changed = text[:at] + ("" if cut else chr(byte) + text[at + 1 :])
    found = read(changed)
    if found is not None:
        assert json.loads(changed) == GOOD  # a space, or the same letter


@CASES
@given(
    st.text()
    | st.lists(
        st.sampled_from(["5", "0", "every", "best", "mode", "=", ",", "min", "loss", " ", "²", "-"])
    ).map("".join)
)
def test_any_words_for_keep_are_read_or_refused(text):
    with suppress(ctl.UsageError):
        keep = ctl.Keep.parse(text)
        assert keep.newest >= 0 and (keep.every is None or keep.every >= 1)
        keep.surplus([ctl.Manifest(step=s, created=0.0) for s in (1, 2)])


def test_names_of_files_that_lead_elsewhere_are_refused():
    for name in ("../x", "/etc/passwd", "a/b", "..", "", "a\\b", "a\0b"):
        files = {name: {"size": 1, "checksum": "crc32c:00000000"}}
        assert read(signed({**GOOD, "files": files})) is None
    assert read(signed(GOOD)) is not None
