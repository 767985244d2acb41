"""Picture of the objects of a run, for docs/architecture.md.

    python docs/generate_architecture.py     # writes docs/images/architecture.svg

Each box names a class, its file in ctl/, and its content. Numbered circles are the stations of a batch, a
gradient, a checkpoint and a signal.
"""

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "images" / "architecture.svg"
WIDTH, HEIGHT = 1000, 640
LINE = 17
WALKS = {"batch": "#1a73e8", "gradient": "#d93025", "checkpoint": "#188038", "signal": "#a142f4"}


@dataclass(frozen=True)
class Box:
    """A class.

    Attributes:
      x, y, width: Position and width in pixels.
      title: Name of the class.
      file: Its file, relative to ctl/.
      lines: Content.
      stations: Walk -> number of the station.
    """

    x: int
    y: int
    width: int
    title: str
    file: str
    lines: tuple[str, ...] = ()
    stations: dict[str, int] = field(default_factory=dict)

    @property
    def height(self) -> int:
        return 44 + LINE * len(self.lines)


BOXES = (
    Box(20, 20, 300, "Trainer", "trainer.py", ("your subclass: build, train_data, train_step",)),
    Box(20, 120, 300, "PreparedTrainer", "training/prepared.py", ("frozen; has the objects to the right",)),
    Box(360, 20, 300, "Task", "training/task.py", ("your methods, models and optimizers",)),
    Box(360, 95, 300, "World", "distribute/world.py", ("strategy, topology, kind, sums on the host",)),
    Box(360, 170, 300, "Config", "config.py", ("settings, final after build",)),
    Box(
        680, 20, 300, "Checkpointing", "training/checkpointing.py",
        ("Progress: consumed examples, metrics", "TrackedState: variables by name",
         "CheckpointManager: writes and restores"),
        {"checkpoint": 2},
    ),
    Box(
        680, 140, 300, "CallbackRunner", "training/callback_runner.py",
        ("hooks and callbacks, alike on all workers",),
    ),
    Box(
        20, 245, 300, "Run", "training/run.py", ("one call of train: log, evaluate, save",),
        {"checkpoint": 1, "signal": 3},
    ),
    Box(
        20, 345, 300, "TrainLoop", "training/loop.py", ("length of graph calls, due actions, votes",),
        {"signal": 2},
    ),
    Box(
        360, 345, 300, "LoopObserver", "profiling/loop_observer.py",
        ("lease, progress, heartbeat, profile",),
    ),
    Box(680, 245, 300, "ProgramCache", "training/programs.py", ("loops that are traced once",)),
    Box(
        680, 345, 300, "StepLoop", "training/graph_loop.py", ("many steps in one graph call",),
        {"batch": 2},
    ),
    Box(
        20, 445, 300, "Batches", "data/batches.py", ("your data, at the position of the run",),
        {"batch": 1},
    ),
    Box(
        20, 545, 300, "Interruption", "supervision/signals.py", ("Ctrl-C, SIGTERM, SIGHUP",),
        {"signal": 1},
    ),
    Box(
        680, 445, 300, "ReplicaStep", "step/replica_step.py", ("your train_step on one replica",),
        {"batch": 3, "gradient": 1},
    ),
    Box(
        360, 445, 300, "StepContext, StepRecord", "step/context.py", ("inputs and outputs of one trace",)
    ),
    Box(
        360, 545, 300, "GradientReducer", "step/reducers/reducer.py",
        ("sum, 16 bits, sparse rows, local SGD, int8",), {"gradient": 3},
    ),
    Box(
        680, 545, 300, "apply_update", "step/update.py", ("checks, clips and applies gradients",),
        {"gradient": 2},
    ),
)  # fmt: skip
ARROWS = (  # from, to, label
    ("Trainer", "PreparedTrainer", "prepares"),
    ("PreparedTrainer", "Task", ""),
    ("PreparedTrainer", "World", ""),
    ("PreparedTrainer", "Config", ""),
    ("PreparedTrainer", "Run", "trains"),
    ("Run", "TrainLoop", ""),
    ("TrainLoop", "LoopObserver", ""),
    ("TrainLoop", "Batches", ""),
    ("ProgramCache", "StepLoop", ""),
    ("StepLoop", "ReplicaStep", ""),
    ("ReplicaStep", "StepContext, StepRecord", ""),
    ("ReplicaStep", "apply_update", ""),
    ("apply_update", "GradientReducer", ""),
)


def arrow(start: Box, end: Box, label: str) -> str:
    """Returns a line from the nearer side of one box to that of another."""
    if start.x + start.width <= end.x or end.x + end.width <= start.x:
        is_right = start.x < end.x
        x1, x2 = (start.x + start.width, end.x) if is_right else (start.x, end.x + end.width)
        y1, y2 = start.y + start.height // 2, end.y + end.height // 2
    else:
        is_below = start.y < end.y
        y1, y2 = (start.y + start.height, end.y) if is_below else (start.y, end.y + end.height)
        x1 = x2 = max(start.x, end.x) + min(start.width, end.width) // 2
    x, y = (x1 + x2) // 2 + 6, (y1 + y2) // 2 + 5
    text = f'<text class="label" x="{x}" y="{y}">{label}</text>' if label else ""
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" marker-end="url(#head)"/>{text}'


def drawn(box: Box) -> str:
    """Returns a box with its text and stations."""
    parts = [f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="6"/>']
    parts.append(f'<text class="title" x="{box.x + 12}" y="{box.y + 20}">{escape(box.title)}</text>')
    parts.append(f'<text class="file" x="{box.x + 12}" y="{box.y + 36}">{box.file}</text>')
    for number, line in enumerate(box.lines):
        parts.append(f'<text x="{box.x + 12}" y="{box.y + 53 + LINE * number}">{escape(line)}</text>')
    for position, (walk, number) in enumerate(box.stations.items()):
        x, y = box.x + box.width - 16 - 24 * position, box.y + 16
        parts.append(f'<circle cx="{x}" cy="{y}" r="10" fill="{WALKS[walk]}"/>')
        parts.append(f'<text class="number" x="{x}" y="{y + 4}">{number}</text>')
    return "\n".join(parts)


def picture() -> str:
    """Returns the picture as SVG."""
    by_title = {box.title: box for box in BOXES}
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT + 20}" width="{WIDTH}">',
        "<style>text{font:13px sans-serif;fill:#202124}.title{font-weight:bold}.file{font:11px monospace;"
        "fill:#5f6368}.label{font-size:11px;fill:#5f6368}.number{fill:#fff;text-anchor:middle;font-size:12px}"
        "rect{fill:#f8f9fa;stroke:#9aa0a6}line{stroke:#5f6368}</style>",
        '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#5f6368"/></marker></defs>',
        f'<rect x="0" y="0" width="{WIDTH}" height="{HEIGHT + 20}" style="fill:#fff;stroke:none"/>',
        *(arrow(by_title[start], by_title[end], label) for start, end, label in ARROWS),
        *map(drawn, BOXES),
    ]
    for position, (walk, color) in enumerate(WALKS.items()):
        x, y = 20 + 150 * position, HEIGHT + 2
        lines.append(f'<circle cx="{x + 8}" cy="{y}" r="8" fill="{color}"/>')
        lines.append(f'<text x="{x + 22}" y="{y + 4}">{walk}</text>')
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    FILE.write_text(picture())


if __name__ == "__main__":
    main()
