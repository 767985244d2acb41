"""Loop of many steps as one XLA program, for one replica.

The program indexes data on the device and contains the optimizer. Within XLA no operation can raise an
error or print. Therefore the program returns reports of steps with values that are not finite, which are
raised or printed after it. A step that ends the run is the last one of the program.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from ctl.data.batches import Batches, device_of, is_on_cpu
from ctl.data.dataset_traits import RANDOM_OPS, nodes_of_graph
from ctl.data.row_windows import RowWindows, gather_batch
from ctl.distribute import devices
from ctl.errors import UsageError
from ctl.step import finiteness
from ctl.step.replica_step import RETRACE_MESSAGE, ReplicaStep
from ctl.tensorflow_patches import random_in_xla
from ctl.training.graph_loop import errors_of_a_trace
from ctl.training.pacing import SynchronousPacing

_log = logging.getLogger("ctl")
_BATCH_SIZE_ASSERT = "assert_non_negative"  # of tf.nn.compute_average_loss
_MAX_REPORTS = 64  # of skipped steps in one call of a program


class CompiledLoop:
    """Loop of a `ReplicaStep` over data in memory, with one program for each batch size.

    Args:
      strategy: Strategy with one replica.
      step: Step of the replica.
      counter: int64 variable with the number of completed steps.
      trained: Returns the identities of the trained variables, on which a trace depends.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        step: ReplicaStep,
        *,
        counter: tf.Variable,
        trained: Callable[[], tuple] = tuple,
    ):
        self._strategy, self._step, self._counter, self._trained = strategy, step, counter, trained
        self._programs: dict[int, Any] = {}  # by batch size
        self._traced_for: tuple = ((), ())  # functions of the data, trained variables
        self._batches: Batches | None = None  # for which the programs were created or checked
        self._number = functools.lru_cache(maxsize=1000)(lambda value: tf.constant(value, tf.int64))
        self.has_run = False
        self.totals, self.reducer = step.totals, step.reducer
        self._device = device_of(strategy) or devices.best_device()

    def pacing(self) -> SynchronousPacing:
        """Returns the lengths of graph calls."""
        return SynchronousPacing()

    def run(self, batches: Batches, steps: int, packed: tf.Tensor) -> tuple[tf.Tensor, int]:
        """Runs up to `steps` steps; fewer if the data ends.

        Returns:
          `packed` plus the totals of the steps, and the number of steps.

        Raises:
          tf.errors.InvalidArgumentError: With `finiteness.MESSAGE`, if a step ends the run.
        """
        if self._batches is not batches:
            self.trace(batches)
        windows, ran = batches.windows, 0
        assert windows is not None
        self.has_run = True
        packed = tf.broadcast_to(packed, [len(self.totals.names), 2])
        for part in windows.segments(steps):
            first, length = self._number(part.first), self._number(part.steps)
            program = self._programs[part.size]
            with tf.device(self._device):
                packed, reports = program(windows.arrays, part.window, first, length, packed)
            self._evaluate_reports(part.steps, reports)
            ran += part.steps
        return packed, ran

    @property
    def calls_minimize(self) -> bool:
        """True if the traced step calls `minimize`."""
        return self._step.calls_minimize

    def trace(self, batches: Batches) -> None:
        """Compiles the programs for these batches, unless they exist."""
        windows = batches.windows
        assert windows is not None
        windows.check_dtypes()
        trained = self._trained()
        if self._programs and trained != self._traced_for[1]:
            _log.info(RETRACE_MESSAGE)
        if trained != self._traced_for[1] or windows.functions is not self._traced_for[0]:
            self._programs = {}  # objects that functions of the data use may have changed
        self._traced_for = windows.functions, trained
        for size in windows.sizes:
            if size not in self._programs:
                self.has_run = False
                self._programs[size] = self._program(windows, size)
        self._batches = batches

    def _program(self, windows: RowWindows, size: int) -> Any:
        """Creates the program for batches of `size` examples, and compiles it with a call of no steps."""
        specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, windows.arrays)
        number, rows = tf.TensorSpec([], tf.int64), windows.iterator.element_spec
        replica, functions = self._step.function(in_program=True), windows.functions

        def steps_of(arrays: Any, window: Any, first: Any, steps: Any, packed: Any) -> Any:
            def step(ran: Any, packed: Any, reports: Any, _: Any) -> tuple:
                batch = gather_batch(arrays, _rows(window, first + ran * size, size), functions)
                result = self._strategy.run(replica, (batch,))
                return ran + 1, *self._summed(result, packed, reports, ran)

            start = tf.constant(0, tf.int64), packed, self._no_reports(), tf.constant(True)
            shapes = [t.shape for t in tf.nest.flatten(start)]
            shapes[1] = tf.TensorShape([None, 2])
            _, packed, reports, _ = tf.while_loop(
                lambda ran, _, __, continues: continues & (ran < steps),
                step,
                start,
                tf.nest.pack_sequence_as(start, shapes),
            )
            return packed, reports

        function = tf.function(steps_of, jit_compile=True, autograph=False)
        packed = tf.TensorSpec([None, 2], tf.float64)
        batch = tf.nest.map_structure(lambda s: tf.TensorSpec([size, *s.shape[1:]], s.dtype), specs)
        with tf.device(self._device):
            with errors_of_a_trace(batch), random_in_xla.same_numbers():
                program = function.get_concrete_function(specs, rows, number, number, packed)
            _check_operations(program.graph, is_on_cpu(self._strategy))
            none, totals = self._number(0), tf.zeros([len(self.totals.names), 2], tf.float64)
            program(windows.arrays, tf.zeros(rows.shape, rows.dtype), none, none, totals)
        return program

    @staticmethod
    def _no_reports() -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the number of reports, and rows (number of the step in this call, report)."""
        return tf.constant(0), tf.zeros([_MAX_REPORTS, 4])

    def _summed(self, result: Any, packed: Any, reports: Any, ran: Any) -> tuple[Any, Any, Any]:
        """Adds a step; returns the totals, the reports, and True if another step follows."""
        (local,) = self._strategy.experimental_local_results(result)
        values, report = local
        count, rows = reports
        continues = report[0] < finiteness.STOPPED
        self._counter.assign_add(tf.cast(continues, tf.int64), read_value=False)
        row = tf.concat([tf.cast(ran, tf.float32)[None], report], axis=0)
        index = tf.minimum(count, _MAX_REPORTS - 1)  # the next row overwrites that of a valid step
        rows = tf.tensor_scatter_nd_update(rows, index[None, None], row[None])
        return packed + values, (count + tf.cast(report[0] > 0.0, tf.int32), rows), continues

    def _evaluate_reports(self, steps: int, reports: Any) -> None:
        """Prints the skipped ones of the newest `steps` steps. Raises an error if one ends the run."""
        count = int(reports[0])
        if not count:
            return
        rows = [row for row in reports[1].numpy()[:count] if row[1] > 0.0]
        is_stopped = rows[-1][1] == finiteness.STOPPED
        before = int(self._counter.numpy()) - int(rows[-1][0] if is_stopped else steps)
        for number, outcome, *flags in rows:
            if outcome == finiteness.LEFT_OUT:
                finiteness.warn_of_reported(before + int(number) + 1, flags)
        if is_stopped:
            raise finiteness.reported_error(rows[-1][2:])
        if count > len(rows):
            _log.warning("%d more of these %d steps were skipped.", count - len(rows), steps)

    def refresh(self) -> None:
        """Called after user code, which may have changed the set of trained variables."""
        if self._programs and self._trained() != self._traced_for[1]:
            self.has_run = False
        self._batches = None

    def release(self) -> None:
        """Releases the batches of the newest call, so that their pipeline can end."""
        self._batches = None

    def graph_def(self) -> Any:
        """Returns the graph of the step as a GraphDef, after the first call."""
        return next(iter(self._programs.values())).graph.as_graph_def()


def _rows(window: tf.Tensor, first: tf.Tensor, size: int) -> tf.Tensor:
    """Returns `window[first : first + size]`. tf.slice would compile once for each `first`."""
    return tf.gather(window, first + tf.range(size, dtype=tf.int64))


def _check_operations(graph: tf.Graph, is_on_cpu: bool) -> None:
    """Raises UsageError for operations that XLA seeds by the clock. Warns of ignored or slow operations."""
    nodes, functions = nodes_of_graph(graph.as_graph_def())
    everywhere = {
        node.op
        for body in (nodes, *functions.values())
        for node in body
        if _BATCH_SIZE_ASSERT not in node.name
    }
    if drawn := sorted(everywhere & RANDOM_OPS):
        raise UsageError(
            f"jit_compile='loop' with {', '.join(drawn)}, whose numbers XLA does not repeat for a "
            "seed. Write tf.random.stateless_uniform(shape, seed) or layers of Keras 3; or write "
            "--jit_compile=step."
        )
    if "Assert" in everywhere:
        _log.warning("jit_compile='loop': XLA removes assertions (tf.debugging.assert_*).")
    if is_on_cpu and any(op.startswith(("Conv2D", "Conv3D")) for op in everywhere):
        _log.warning(
            "jit_compile='loop' with convolutions on a CPU, where XLA's take several times as long as "
            "TensorFlow's. Leave it out if steps are slower with it."
        )
