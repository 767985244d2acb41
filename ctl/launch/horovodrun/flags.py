"""The options of `ctlrun`: those of horovodrun, under the same names, and two of ours.

Each is a line of `FLAGS`; `options` reads a command line with them. Options that mean nothing
here are accepted, so that a command line of horovodrun runs unchanged, and named once on stderr.
"""

from dataclasses import dataclass

from ctl.launch.horovodrun.values import Convert, number, one_of, whole, words

LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")


@dataclass(frozen=True)
class Flag:
    """One option.

    Attributes:
      names: as it is written, "-np --num-proc"; key: what it is called in `options.Asked`.
      takes: converts each word that follows; None for a switch, which sets `sets`.
      metavar: of what follows; its number of words is how many do.
      adds: given again it adds to what came before.
    """

    names: str
    key: str
    about: str = ""
    takes: Convert | None = None
    metavar: str = ""
    sets: bool = True
    adds: bool = False

    @property
    def count(self) -> int:
        """How many words follow."""
        return len(self.metavar.split())


def _nothing(names: str, key: str, takes: Convert | None = None, sets: bool = True) -> Flag:
    metavar = "" if takes is None else "X"
    return Flag(names, key, "", takes, metavar, sets=sets)


GROUPS: dict[str, tuple[Flag, ...]] = {
    "the job": (
        Flag("-np --num-proc", "num_proc", "how many processes; elastic: how many before it begins",
             whole(1, 1024), "N"),
        Flag("-H --hosts", "hosts", "machines and how many processes each takes (default: this one)",
             words, "HOST:N,..."),
        Flag("-hostfile --hostfile", "hostfile", "the same in a file, a line `HOST slots=N` for each",
             words, "FILE"),
        Flag("--bind_gpus", "bind_gpus", "each process sees one GPU, that of its local rank"),
        Flag("--config-file", "config_file", "YAML with further options; those given here win",
             words, "FILE"),
        Flag("--heartbeat-timeout", "heartbeat_timeout_secs", "seconds without a sign of life until a "
             "rank of this machine is killed; 0 is never (default: 60)", whole(0), "SECS"),
        Flag("--start-timeout", "start_timeout", "seconds for all processes to find each other "
             "(default: HOROVOD_START_TIMEOUT, or 300)", whole(1), "SECS"),
    ),
    "several machines": (
        Flag("-p --ssh-port", "ssh_port", "the port of ssh", whole(1, 65535), "PORT"),
        Flag("-i --ssh-identity-file", "ssh_identity_file", "the private key of ssh", words, "FILE"),
        Flag("--network-interfaces --network-interface", "nics", "names, with commas, of the network "
             "interfaces to use; the first one's address is this machine's", words, "NAMES",
             adds=True),
    ),
    "output": (
        Flag("--output-filename", "output_filename",
             "also write to DIR/rank.0/stdout, DIR/rank.0/stderr, ...", words, "DIR"),
        Flag("-prefix-timestamp --prefix-output-with-timestamp", "prefix_timestamp",
             "begin each line with the time"),
        Flag("--verbose", "verbose", "say what is started, and where"),
    ),
    "elastic": (
        Flag("--min-np --min-num-proc", "min_num_proc", "go on with so many (default: that of -np)",
             whole(1, 1024), "N"),
        Flag("--max-np --max-num-proc", "max_num_proc", "never more (default: all slots there are)",
             whole(1, 1024), "N"),
        Flag("--host-discovery-script", "host_discovery_script",
             "a program that prints a line HOST:N, or HOST, for each machine there is", words, "FILE"),
        Flag("--slots-per-host", "slots", "of a machine named without a number (default: 1)",
             whole(1, 1024), "N"),
        Flag("--elastic-timeout", "elastic_timeout", "seconds to wait for enough processes (default: "
             "HOROVOD_ELASTIC_TIMEOUT, or 600)", whole(1), "SECS"),
        Flag("--reset-limit", "reset_limit", "how often the set of processes may change (default: any)",
             whole(0), "N"),
        Flag("--blacklist-cooldown-range", "cooldown", "seconds, least and most, before a machine on "
             "which a process failed is used again", whole(1), "SECS SECS"),
    ),
    "collectives": (
        Flag("--fusion-threshold-mb", "fusion_threshold_mb", "tensors up to so many MiB travel together",
             whole(0), "MIB"),
        Flag("--timeline-filename", "timeline_filename", "write what happened when, for "
             "chrome://tracing", words, "FILE"),
        Flag("--timeline-mark-cycles", "timeline_mark_cycles", "with a mark for each cycle"),
        Flag("--no-timeline-mark-cycles", "timeline_mark_cycles", "without", sets=False),
        Flag("--no-stall-check", "no_stall_check", "no warning when a rank does not come"),
        Flag("--stall-check", "no_stall_check", "with it, the default", sets=False),
        Flag("--stall-check-warning-time-seconds", "stall_warning_secs",
             "seconds before the warning (default: 60)", whole(0), "SECS"),
        Flag("--stall-check-shutdown-time-seconds", "stall_shutdown_secs",
             "seconds before an error; 0 is never (default: 0)", whole(0), "SECS"),
    ),
    "about": (
        Flag("-v --version", "version", "show the version"),
        Flag("-cb --check-build", "check_build", "show what collectives work with here"),
        Flag("-h --help", "help", "show this text"),
    ),
    "accepted": (
        Flag("--gloo", "use_gloo", "TCP without MPI, which is what there is"),
        Flag("--disable-cache", "disable_cache", "nothing is checked in advance, so nothing is cached"),
        Flag("--mpi", "use_mpi", "refused: there is no MPI"),
        Flag("--jsrun", "use_jsrun", "refused: there is no MPI"),
    ),
    "meaningless": (
        _nothing("--cycle-time-ms", "cycle_time_ms", number),
        _nothing("--cache-capacity", "cache_capacity", whole(0)),
        _nothing("--log-level", "log_level", one_of(*LEVELS)),
        _nothing("--log-with-timestamp --no-log-hide-timestamp", "log_with_timestamp"),
        _nothing("--log-without-timestamp --log-hide-timestamp", "log_with_timestamp", sets=False),
        _nothing("--hierarchical-allreduce", "hierarchical_allreduce"),
        _nothing("--no-hierarchical-allreduce", "hierarchical_allreduce", sets=False),
        _nothing("--hierarchical-allgather", "hierarchical_allgather"),
        _nothing("--no-hierarchical-allgather", "hierarchical_allgather", sets=False),
        _nothing("--torus-allreduce", "torus_allreduce"),
        _nothing("--no-torus-allreduce", "torus_allreduce", sets=False),
        _nothing("--autotune", "autotune"),
        _nothing("--no-autotune", "autotune", sets=False),
        _nothing("--autotune-log-file", "autotune_log_file", words),
        _nothing("--autotune-warmup-samples", "autotune_warmup_samples", whole(0)),
        _nothing("--autotune-steps-per-sample", "autotune_steps_per_sample", whole(0)),
        _nothing("--autotune-bayes-opt-max-samples", "autotune_bayes_opt_max_samples", whole(0)),
        _nothing("--autotune-gaussian-process-noise", "autotune_gaussian_process_noise", number),
        _nothing("--mpi-threads-disable", "mpi_threads_disable"),
        _nothing("--no-mpi-threads-disable", "mpi_threads_disable", sets=False),
        _nothing("--mpi-args", "mpi_args", words),
        _nothing("--tcp", "tcp_flag"),
        _nothing("--binding-args", "binding_args", words),
        _nothing("--num-nccl-streams", "num_nccl_streams", whole(0)),
        _nothing("--thread-affinity", "thread_affinity", whole(0)),
        _nothing("--gloo-timeout-seconds", "gloo_timeout_seconds", whole(0)),
    ),
}  # fmt: skip
FLAGS = {name: flag for group in GROUPS.values() for flag in group for name in flag.names.split()}
