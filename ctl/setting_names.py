"""Suggestions for unknown names of settings, such as names in other frameworks."""

import difflib
from collections.abc import Collection

_OTHER_NAMES = {  # in other frameworks, by setting
    "train_steps": "max_steps num_steps num_train_steps steps total_steps",
    "max_secs": "max_time",
    "fast_dev_run": "dry_run",
    "epochs": "max_epochs num_epochs num_train_epochs",
    "model_dir": "checkpoint_dir default_root_dir job_dir log_dir logdir output_dir save_dir workdir",
    "global_batch_size": "batch_size per_device_train_batch_size train_batch_size",
    "init_from": "init_checkpoint warm_start_from",
    "strategy": "accelerator distribute distribution_strategy",
    "devices": "gpus num_devices num_gpus",
    "max_eval_batches": "eval_steps limit_val_batches validation_steps",
    "steps_per_loop": "iterations_per_loop steps_per_execution",
    "log_every_steps": "log_every_n_steps log_freq log_interval logging_steps summary_interval update_freq",
    "eval_every_steps": "eval_interval eval_steps evaluation_interval val_check_interval validation_freq",
    "save_every_steps": "checkpoint_every_steps checkpoint_freq checkpoint_interval save_checkpoints_steps "
    "save_freq save_interval save_steps",
    "precision": "amp bf16 dtype fp16 mixed_precision",
    "jit_compile": "jit use_xla xla",
    "profile": "profile_batch profile_steps",
    "writers": "logger loggers report_to",
    "keep": "keep_checkpoint_max max_to_keep save_total_limit",
}
_INSTEAD = {  # of options of other frameworks that are no settings of ctl
    "learning_rate lr": "Pass it to the optimizer.",
    "momentum": "Pass it to the optimizer.",
    "weight_decay": "Pass it to the optimizer.",
    "accumulate_grad_batches gradient_accumulation_steps": (
        "Pass gradient_accumulation_steps=... to the optimizer."
    ),
    "clipnorm gradient_clip_val max_grad_norm": "Pass global_clipnorm=... to the optimizer.",
    "early_stopping patience": "Pass callbacks=[ctl.EarlyStopping(...)].",
    "ckpt_path resume resume_from_checkpoint": (
        "A run resumes from the checkpoints in its model_dir; init_from is for those of another run."
    ),
    "steps_per_epoch": "An epoch is one pass over train_data.",
    "num_nodes num_workers workers": "Start the program with ctl launch --workers=...",
}
_CALLS = {  # of a trainer, by setting of ctl.run
    "mode": "train(), evaluate(), predict(data) or export()",
    "train_steps": "train(steps=...)",
    "epochs": "train(epochs=...)",
    "export": "train(export=...) or export(...)",
    "fast_dev_run": "train(2)",
}


def similar_names(name: str, expected: Collection[str]) -> list[str]:
    """Returns those of the expected names that mean the same as `name`, or else those that resemble it."""
    same = [setting for setting, aliases in _OTHER_NAMES.items() if name in aliases.split()]
    same += [alias for aliases in _INSTEAD if name in aliases.split() for alias in aliases.split()]
    near = [alias for alias in same if alias in expected]
    return near or ([] if same else difflib.get_close_matches(name, expected, cutoff=0.7))


def instruction_for(name: str) -> str:
    """Returns the instruction for an option that other frameworks have and ctl does not, or ""."""
    return next((sentence for aliases, sentence in _INSTEAD.items() if name in aliases.split()), "")


def suggest(name: str, expected: Collection[str]) -> str:
    """Returns an instruction to replace an unexpected name."""
    near = similar_names(name, list(dict.fromkeys([*expected, *_CALLS])))
    if near:
        return "Write " + " or ".join(f"{n}=..." if n in expected else _CALLS[n] for n in near)
    return instruction_for(name) or f"Expected one of {', '.join(expected)}."
