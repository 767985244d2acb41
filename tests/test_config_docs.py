"""Flags of a `ctl` program, and their reference in docs/flags.md."""

import importlib.util

from absl import flags
from conftest import ROOT
from ctl.config import GROUPS, NAMES
from ctl.config_flags import define_flags


def define_all_flags() -> flags.FlagValues:
    values = flags.FlagValues()
    define_flags(values)
    return values


def load_generator():
    spec = importlib.util.spec_from_file_location("generate_flags", ROOT / "docs/generate_flags.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_names_of_the_flags_are_frozen():
    expected_names = [
        "model_dir", "train_steps", "epochs", "global_batch_size", "strategy", "devices",
        "num_virtual_devices", "cross_device_ops", "communication", "collective_timeout_secs",
        "heartbeat_secs", "tpu", "variable_partitioner", "steps_per_loop", "log_every_steps",
        "eval_every_steps", "save_every_steps", "keep", "jit_compile", "check_collectives", "seed",
        "mode", "export", "full_traceback", "on_nonfinite", "step_timeout_secs", "startup_timeout_secs",
        "allow_config_change", "background_save", "init_from", "report_hypertune",
        "data_position", "evaluate_ema", "profile", "sync_every", "outer_learning_rate", "outer_momentum",
        "max_secs", "fast_dev_run", "overfit_batches", "max_eval_batches", "precision", "writers",
            "elastic",
    ]  # fmt: skip
    defined_names = {f.name for f in define_all_flags().flags_by_module_dict()["ctl.app"]}
    assert defined_names == set(expected_names), (
        "a flag is a promise; a new one needs a note in docs/decisions"
    )
    assert sorted(NAMES) == sorted(expected_names)


def test_every_flag_is_in_exactly_one_group_of_the_help():
    grouped = [name for group in GROUPS.values() for name in group]
    assert sorted(grouped) == sorted(NAMES)


def test_the_page_equals_the_output_of_the_generator():
    text = (ROOT / "docs/flags.md").read_text(encoding="utf-8")
    assert text == load_generator().page(), "write it again with: python docs/generate_flags.py"
