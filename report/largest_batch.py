"""What the saved memory buys: the largest batch of each step, and its speed there, beside the equal batch of all."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from common.record import STATUSES, Environment, Workload, describe_shape
from common.text import aligned, one_line
from report.analysis import GIB
from report.load import RecordError, convert, read_json
from report.table import describe_machine, markdown

LARGEST = "largest-batch.json"
SLOWER = 0.95  # a gain below it is no matter of a few steps' spread
NEAR_THE_END = (
    "Why is not measured. At the end of the memory PyTorch's allocator gives unused memory back to the driver and asks "
    "for it again, within a step, and that is likely to cost time: try a batch between the two."
)
NONE = "No largest batches are recorded yet: `./run_all.sh --batch-size max` finds them."
HOW = (
    "The equal batch is the one that all steps of the ladder train. The largest batch is the first that trained of at "
    "most three attempts, which two measured batches predict. *gain* is tokens per second at the largest batch over "
    "those at the equal batch of the same step. Each figure is from few steps right after the warm-up. "
    "PyTorch's allocator works with `expandable_segments:True`, unless `PYTORCH_CUDA_ALLOC_CONF` or "
    "`PYTORCH_ALLOC_CONF` was set: otherwise memory is lost in pieces that no tensor fits."
)


@dataclass
class Largest:
    """What a step trains at the equal batch and at its largest; records of each batch hold the rest."""

    step: str
    status: str = "failed"
    reason: str | None = None
    equal_batch: int | None = None  # sequences
    equal_tokens_per_s: float | None = None
    equal_peak_bytes: int | None = None
    bytes_per_sequence: float | None = None  # of the line through two measured peaks
    batch: int | None = None
    tokens_per_s: float | None = None
    peak_bytes: int | None = None
    tried: list[int] = field(default_factory=list)  # attempts that ran, in order


@dataclass
class LargestBatches:
    """The content of largest-batch.json."""

    command: str
    started_at: str | None  # UTC, ISO 8601
    environment: Environment | None  # these two: of the first record
    workload: Workload | None
    steps: list[Largest]


def read_largest(path: Path) -> LargestBatches:
    """The largest batches of a machine. Raises RecordError."""
    found = convert(read_json(path), LargestBatches, path.name)
    if not found.steps:
        raise RecordError(f"{path.name} holds no steps")
    for row in found.steps:
        equal = (row.equal_tokens_per_s, row.equal_peak_bytes) if row.equal_batch else ()
        largest = (row.tokens_per_s, row.peak_bytes, row.equal_batch) if row.batch else ()
        if row.status not in STATUSES or not all((*equal, *largest)):
            raise RecordError(f"{path.name}: {row.step} lacks a figure, or has an unknown status")
    return found


def table(rows: list[Largest], style: str = "simple") -> str:
    """Tokens a second and peak at the equal batch, and beside them at each step's largest."""
    cells, text = [], markdown if style == "pipe" else str
    for row in rows:
        cell = {"step": text(row.step), "equal batch": "-", "tokens/s": "-", "peak GiB": "-", "largest batch": "-",
                "tokens/s there": row.status, "peak GiB there": "-", "gain": "-"}  # fmt: skip
        if row.equal_batch:
            cell |= {"equal batch": row.equal_batch, "tokens/s": f"{row.equal_tokens_per_s:,.0f}",
                     "peak GiB": f"{row.equal_peak_bytes / GIB:.1f}"}  # fmt: skip
        if row.batch:
            cell |= {"largest batch": row.batch, "tokens/s there": f"{row.tokens_per_s:,.0f}",
                     "peak GiB there": f"{row.peak_bytes / GIB:.1f}",
                     "gain": f"{row.tokens_per_s / row.equal_tokens_per_s:.2f}"}  # fmt: skip
        cells.append(cell)
    why = [text(f"{row.step}: {row.status}: {row.reason}") for row in rows if not row.batch]
    return "\n\n".join([aligned(cells, style), *why])


def gains(rows: list[Largest]) -> list[str]:
    """What the larger batch buys, in sentences; none where no step trained one."""
    gain = {row.step: row.tokens_per_s / row.equal_tokens_per_s for row in rows if row.batch}
    if not gain:
        return []
    least, most = min(gain.values()), max(gain.values())
    said = [f"At its largest batch a step trains {least:.2f} to {most:.2f} times the tokens a second of its equal one."]
    slower = [f"{step} ({ratio:.2f})" for step, ratio in gain.items() if ratio < SLOWER]
    return [*said, f"Slower there: {', '.join(slower)}. {NEAR_THE_END}"] if slower else said


def render_markdown(found: LargestBatches) -> str:
    """The machine, the shape, the table, and what it says."""
    about = describe_machine(found.environment) if found.environment else "the machine is unknown"
    if found.workload:
        about += f"; {found.workload.preset}: {describe_shape(found.workload)}"
    command, said = f"    {one_line(found.command, 1000)}", filter(None, [markdown(" ".join(gains(found.steps)))])
    return "\n\n".join([markdown(f"{about}."), HOW, table(found.steps, "pipe"), *said, command])


def recorded(results: Path) -> str:
    """Markdown of every search below docs/results, for docs/sweep.md."""
    paths = sorted(results.glob(f"*/{LARGEST}"))
    parts = [f"### {path.parent.name}\n\n{render_markdown(read_largest(path))}" for path in paths]
    return "\n\n".join(parts or [NONE])
