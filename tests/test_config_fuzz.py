"""Whatever TF_CONFIG and the flags say: they are used, or refused in one sentence; never a traceback."""

import json
import string

import pytest
from absl import flags
from ctl import app, config
from ctl.checkpoints import export
from ctl.checkpoints.retention import Keep
from ctl.config_flags import define_flags
from ctl.distribute import parameter_servers
from ctl.distribute.platforms import detection
from ctl.errors import UsageError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

MANY = settings(suppress_health_check=list(HealthCheck))
TEXT = st.text(max_size=40)
ADDRESS = st.one_of(
    TEXT,
    st.builds("{}:{}".format, st.sampled_from(["a", "10.0.0.1", "[::1]", "", "h-1.x"]),
              st.one_of(st.integers(-5, 70000), TEXT)),
)  # fmt: skip
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXT, ADDRESS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXT, inner, max_size=4)),
    max_leaves=12,
)
KIND = st.one_of(st.sampled_from(["chief", "worker", "ps", "evaluator", "master", "workerpool0"]), TEXT)
CONFIG = st.one_of(
    JSON,
    st.fixed_dictionaries(
        {},
        optional={
            "cluster": st.one_of(
                JSON, st.dictionaries(KIND, st.one_of(JSON, st.lists(ADDRESS, max_size=3)), max_size=3)
            ),
            "task": st.one_of(
                JSON,
                st.fixed_dictionaries(
                    {}, optional={"type": KIND, "index": st.one_of(JSON, st.integers(-2, 4))}
                ),
            ),
            "environment": JSON,
        },
    ),
)  # fmt: skip


def refused_in_words(error):
    text = str(error)
    return 10 < len(text) < 4000 and "Traceback" not in text


@MANY
@given(text=st.one_of(TEXT, CONFIG.map(json.dumps)), servers=st.booleans())
def test_any_tf_config_is_a_cluster_or_a_sentence(text, servers):
    try:
        found = detection.read_topology({"TF_CONFIG": text})
        found = found if servers else found.without_servers()
    except UsageError as e:
        assert refused_in_words(e) and "TF_CONFIG" in str(e)
        return
    assert found.num_workers >= 1 and found.worker_index >= 0
    again = detection.read_topology({"TF_CONFIG": found.tf_config()})
    assert again.tasks == found.tasks and again.is_chief == found.is_chief


WORD = st.one_of(
    TEXT,
    st.builds("--{}={}".format, st.sampled_from(config.NAMES), st.one_of(TEXT, st.integers(), st.floats())),
    st.builds("--{}".format, st.sampled_from([*config.NAMES, "no", "nojit_compile", "x"])),
    st.text(alphabet=string.punctuation + "a1", max_size=12),
)


@MANY
@given(words=st.lists(WORD, max_size=4))
def test_any_words_are_flags_or_a_sentence(words):
    if any(w.startswith(("--flagfile", "-flagfile")) for w in words):
        return  # reads files
    values = flags.FlagValues()
    define_flags(values)
    try:
        app.parse(["program", *words], values)
    except SystemExit as end:
        assert end.code in (0, 2)


@MANY
@given(text=st.one_of(TEXT, st.text(alphabet="0123456789,=besttmodxinacy.", max_size=24)))
@pytest.mark.parametrize(
    "parse",
    [Keep.parse, export.parse_formats, config.parse_steps_per_loop, parameter_servers.Partition.parse],
)
def test_any_text_is_understood_or_refused(parse, text):
    try:
        parse(text)
    except UsageError as e:
        assert refused_in_words(e)
