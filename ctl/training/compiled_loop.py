"""Many steps as one XLA program: data indexed on the device, optimizer included; for one replica.

Within XLA nothing can be raised or printed. Reports of steps whose numbers are not finite are carried out
of the program, and raised or printed after it; a step that stops the run is the last one of the program.
"""

import logging
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from ctl.data.batches import Batches, device_of, is_on_cpu
from ctl.data.dataset_traits import RANDOM_OPS, nodes_of_graph
from ctl.data.row_windows import RowWindows, gather_batch
from ctl.errors import UsageError
from ctl.step import finiteness, random_in_xla
from ctl.step.replica_step import ReplicaStep
from ctl.training.graph_loop import TRACED_AGAIN, errors_of_a_trace

_log = logging.getLogger("ctl")
_AVERAGES_OWN = "assert_non_negative"  # what tf.nn.compute_average_loss asserts of the batch size
_REPORTS = 64  # of steps that were left out, kept in one call of a program


class CompiledLoop:
    """Runs a `ReplicaStep` over rows of data in memory; a program for each size of batch.

    Args:
      counter: a variable of int64 that counts completed steps.
      trained: () -> what a trace depends on: which variables are trained, as a tuple.
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
        self._programs: dict[int, Any] = {}  # by size of batch
        self._known: tuple = ((), ())  # what they depend on: functions of the data, variables trained
        self._batches: Batches | None = None  # that they were made or checked for
        self._numbers: dict[int, tf.Tensor] = {}
        self.has_run = False
        self.totals, self.reducer = step.totals, step.reducer

    def run(self, batches: Batches, steps: int, packed: tf.Tensor) -> tuple[tf.Tensor, int]:
        """Runs up to `steps` steps; returns (packed + their totals, steps that were run).

        Fewer steps than asked means that the data ended. Raises InvalidArgumentError with
        finiteness.MESSAGE where a step stops the run; the completed ones are counted.
        """
        if self._batches is not batches:
            self.trace(batches)
        windows, ran = batches.windows, 0
        assert windows is not None
        self.has_run = True
        packed = tf.broadcast_to(packed, [len(self.totals.names), 2])
        for part in windows.segments(steps):
            first, length = self._number(part.first), self._number(part.steps)
            packed, told = self._programs[part.size](windows.arrays, part.window, first, length, packed)
            self._heed(part.steps, told)
            ran += part.steps
        return packed, ran

    @property
    def calls_minimize(self) -> bool:
        """True if the traced step calls `minimize`."""
        return self._step.calls_minimize

    def trace(self, batches: Batches) -> None:
        """Compiles what `run` calls for these batches, if need be; runs no step."""
        windows = batches.windows
        assert windows is not None
        windows.check_dtypes()
        trained = self._trained()
        if self._programs and trained != self._known[1]:
            _log.info(TRACED_AGAIN)
        if trained != self._known[1] or windows.functions is not self._known[0]:
            self._programs = {}  # what functions of the data use may have changed since they were traced
        self._known = windows.functions, trained
        for size in windows.sizes:
            if size not in self._programs:
                self.has_run = False
                self._programs[size] = self._program(windows, size)
        self._batches = batches

    def _program(self, windows: RowWindows, size: int) -> Any:
        """The program for batches of `size` examples; it has been called for no step, which compiles it."""
        specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, windows.arrays)
        number, rows = tf.TensorSpec([], tf.int64), windows.iterator.element_spec
        replica, functions = self._step.function(in_program=True), windows.functions

        def steps_of(arrays: Any, window: Any, first: Any, steps: Any, packed: Any) -> Any:
            def step(done: Any, packed: Any, told: Any, _: Any) -> tuple:
                batch = gather_batch(arrays, _rows(window, first + done * size, size), functions)
                result = self._strategy.run(replica, (batch,))
                return done + 1, *self._summed(result, packed, told, done)

            start = tf.constant(0, tf.int64), packed, self._nothing_told(), tf.constant(True)
            shapes = [t.shape for t in tf.nest.flatten(start)]
            shapes[1] = tf.TensorShape([None, 2])
            _, packed, told, _ = tf.while_loop(
                lambda done, _, __, goes_on: goes_on & (done < steps),
                step,
                start,
                tf.nest.pack_sequence_as(start, shapes),
            )
            return packed, told

        function = tf.function(steps_of, jit_compile=True, autograph=False)
        packed = tf.TensorSpec([None, 2], tf.float64)
        batch = tf.nest.map_structure(lambda s: tf.TensorSpec([size, *s.shape[1:]], s.dtype), specs)
        with tf.device(device_of(self._strategy)):
            with errors_of_a_trace(batch), random_in_xla.same_numbers():
                program = function.get_concrete_function(specs, rows, number, number, packed)
            _check_operations(program.graph, is_on_cpu(self._strategy))
            none, totals = self._number(0), tf.zeros([len(self.totals.names), 2], tf.float64)
            program(windows.arrays, tf.zeros(rows.shape, rows.dtype), none, none, totals)
        return program

    @staticmethod
    def _nothing_told() -> tuple[tf.Tensor, tf.Tensor]:
        """How many steps were not fine; of the first ones the number within the call, and the report."""
        return tf.constant(0), tf.zeros([_REPORTS, 4])

    def _summed(self, result: Any, packed: Any, told: Any, done: Any) -> tuple[Any, Any, Any]:
        """(The totals with this step's, what is told with its report, whether another step follows)."""
        (here,) = self._strategy.experimental_local_results(result)
        numbers, report = here
        count, reports = told
        goes_on = report[0] < finiteness.STOPPED
        self._counter.assign_add(tf.cast(goes_on, tf.int64), read_value=False)
        line = tf.concat([tf.cast(done, tf.float32)[None], report], axis=0)
        place = tf.minimum(count, _REPORTS - 1)  # the next line overwrites that of a step that was fine
        reports = tf.tensor_scatter_nd_update(reports, place[None, None], line[None])
        return packed + numbers, (count + tf.cast(report[0] > 0.0, tf.int32), reports), goes_on

    def _heed(self, steps: int, told: Any) -> None:
        """Prints which of the newest `steps` steps were left out; raises where one stops the run."""
        count = int(told[0])
        if not count:
            return
        reports = [line for line in told[1].numpy()[:count] if line[1] > 0.0]
        stops = reports[-1][1] == finiteness.STOPPED
        before = int(self._counter.numpy()) - int(reports[-1][0] if stops else steps)
        for done, outcome, *flags in reports:
            if outcome == finiteness.LEFT_OUT:
                finiteness.warn_of_reported(before + int(done) + 1, flags)
        if stops:
            raise finiteness.reported_error(reports[-1][2:])
        if count > len(reports):
            _log.warning("%d more of these %d steps were left out.", count - len(reports), steps)

    def refresh(self) -> None:
        """The user's code has run, and may have changed which variables are trained."""
        if self._programs and self._trained() != self._known[1]:
            self.has_run = False
        self._batches = None

    def release(self) -> None:
        """Forgets the batches of the last call, so that their pipeline can end."""
        self._batches = None

    def graph_def(self) -> Any:
        """The graph of the step as a GraphDef, once something ran; None before."""
        for program in self._programs.values():
            return program.graph.as_graph_def()
        return None

    def _number(self, value: int) -> tf.Tensor:
        if value not in self._numbers:
            if len(self._numbers) > 1000:
                self._numbers.clear()
            self._numbers[value] = tf.constant(value, tf.int64)
        return self._numbers[value]


def _rows(window: tf.Tensor, first: tf.Tensor, size: int) -> tf.Tensor:
    """`window[first : first + size]`; tf.slice would compile once for each `first`."""
    return tf.gather(window, first + tf.range(size, dtype=tf.int64))


def _check_operations(graph: tf.Graph, is_on_cpu: bool) -> None:
    """Raises UsageError for operations that XLA seeds with the time of day; warns of others."""
    nodes, functions = nodes_of_graph(graph.as_graph_def())
    everywhere = {
        node.op for body in (nodes, *functions.values()) for node in body if _AVERAGES_OWN not in node.name
    }
    if drawn := sorted(everywhere & RANDOM_OPS):
        raise UsageError(
            f"jit_compile='loop' with {', '.join(drawn)}, which no seed repeats within XLA. Write "
            "tf.random.stateless_uniform(shape, seed) and its like, or layers of Keras 3; or write "
            "--jit_compile=step."
        )
    if "Assert" in everywhere:
        _log.warning("jit_compile='loop': XLA leaves out tf.debugging.assert_* and its like.")
    if is_on_cpu and any(op.startswith(("Conv2D", "Conv3D")) for op in everywhere):
        _log.warning(
            "jit_compile='loop' with convolutions on a CPU, where XLA's take several times as long as "
            "TensorFlow's. Leave it out if steps are slower with it."
        )
