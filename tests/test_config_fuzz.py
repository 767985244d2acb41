"""Fuzzing of TF_CONFIG and of flags: any value is accepted or refused with one sentence."""

import json
import string

import pytest
from absl import flags
from ctl import app, config, setting_values
from ctl.checkpoints import export
from ctl.checkpoints.retention import Keep
from ctl.config_flags import define_flags
from ctl.distribute import parameter_servers
from ctl.distribute.platforms import detection
from ctl.errors import UsageError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

NO_HEALTH_CHECKS = settings(suppress_health_check=list(HealthCheck))
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
TASK_TYPE = st.one_of(
    st.sampled_from(["chief", "worker", "ps", "evaluator", "master", "workerpool0"]), TEXT
)
CONFIG = st.one_of(
    JSON,
    st.fixed_dictionaries(
        {},
        optional={
            "cluster": st.one_of(
                JSON, st.dictionaries(TASK_TYPE, st.one_of(JSON, st.lists(ADDRESS, max_size=3)), max_size=3)
            ),
            "task": st.one_of(
                JSON,
                st.fixed_dictionaries(
                    {}, optional={"type": TASK_TYPE, "index": st.one_of(JSON, st.integers(-2, 4))}
                ),
            ),
            "environment": JSON,
        },
    ),
)  # fmt: skip


def is_readable_error(error):
    text = str(error)
    return 10 < len(text) < 4000 and "Traceback" not in text


@NO_HEALTH_CHECKS
@given(text=st.one_of(TEXT, CONFIG.map(json.dumps)), servers=st.booleans())
def test_any_tf_config_is_a_cluster_or_a_sentence(text, servers):
    try:
        topology = detection.read_topology({"TF_CONFIG": text})
        topology = topology if servers else topology.without_servers()
    except UsageError as e:
        assert is_readable_error(e) and "TF_CONFIG" in str(e)
        return
    assert topology.num_workers >= 1 and topology.worker_index >= 0
    restored = detection.read_topology({"TF_CONFIG": topology.tf_config()})
    assert restored.tasks == topology.tasks and restored.is_chief == topology.is_chief


ARGUMENT = st.one_of(
    TEXT,
    st.builds("--{}={}".format, st.sampled_from(config.NAMES), st.one_of(TEXT, st.integers(), st.floats())),
    st.builds("--{}".format, st.sampled_from([*config.NAMES, "no", "nojit_compile", "x"])),
    st.text(alphabet=string.punctuation + "a1", max_size=12),
)


@NO_HEALTH_CHECKS
@given(arguments=st.lists(ARGUMENT, max_size=4))
def test_any_arguments_are_flags_or_an_error_line(arguments):
    if any(w.startswith(("--flagfile", "-flagfile")) for w in arguments):
        return  # reads files
    values = flags.FlagValues()
    define_flags(values)
    try:
        app.parse(["program", *arguments], values)
    except SystemExit as end:
        assert end.code in (0, 2)


@NO_HEALTH_CHECKS
@given(text=st.one_of(TEXT, st.text(alphabet="0123456789,=besttmodxinacy.", max_size=24)))
@pytest.mark.parametrize(
    "parse",
    [
        *(Keep.parse, export.parse_formats, setting_values.parse_steps_per_loop),
        parameter_servers.Partition.parse,
    ],
)
def test_any_text_is_parsed_or_refused(parse, text):
    try:
        parse(text)
    except UsageError as e:
        assert is_readable_error(e)
