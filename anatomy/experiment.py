"""What all experiments share: arguments, timing, and results that render as tables and sentences.

An experiment is a file of this folder with three parts: a docstring (the question as one sentence, the prediction by
napkin math, the source, the run line), `add_arguments(parser)` for its own sizes, and `run(args) -> Result`.
`args` holds what `common_arguments` and the experiment added; `device` is a torch.device that works, `dtype` a
torch.dtype or None for the experiment's own choice, `iters` a number, and `quick` asks for smaller sizes.
"""

from __future__ import annotations

import argparse
import io
import itertools
import statistics
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.utils.benchmark import Timer

from common import profile
from common.text import aligned
from common.text import positive_int as positive

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
ITERS, QUICK_ITERS = 50, 10


class Refused(ValueError):
    """The experiment cannot run as asked: one line that says why."""


@dataclass
class Table:
    """Rows of strings; `title` says what they are, with units in the headers."""

    title: str
    headers: list[str]
    rows: list[list[str]]

    def render(self, style: str = "simple") -> str:
        return aligned([dict(zip(self.headers, row, strict=True)) for row in self.rows], style)


@dataclass
class Result:
    """What an experiment found.

    `sentences` are computed from the result and claim no more than it shows; `figures` are the raw numbers behind
    tables and sentences, for JSON; `attachments` are files to write beside them: name -> text or bytes; `listings`
    are code to show: title -> text.
    """

    tables: list[Table]
    sentences: list[str]
    figures: dict
    attachments: dict[str, str | bytes] = field(default_factory=dict)
    listings: dict[str, str] = field(default_factory=dict)

    def render(self, style: str = "simple") -> str:
        parts = [f"{table.title}\n\n{table.render(style)}" for table in self.tables]
        parts += [f"{title}\n\n{textwrap.indent(text, '    ')}" for title, text in self.listings.items()]
        return "\n\n".join([*parts, "\n".join(f"- {sentence}" for sentence in self.sentences)])

    def record(self) -> dict:
        return {
            "tables": [asdict(table) for table in self.tables],
            "sentences": self.sentences,
            "figures": self.figures,
            "attachments": list(self.attachments),
            "listings": self.listings,
        }


def common_arguments(parser: argparse.ArgumentParser) -> None:
    """What every experiment takes; `positive` above is the type of a size."""
    parser.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu, cuda, cuda:N (default: auto)")
    parser.add_argument(
        "--dtype", choices=DTYPES, metavar="NAME", help=f"{', '.join(DTYPES)} (default: the experiment's own choice)"
    )
    parser.add_argument(
        "--iters", type=positive, metavar="N", help=f"timed calls (default: {ITERS}; {QUICK_ITERS} with --quick)"
    )
    parser.add_argument("--quick", action="store_true", help="smaller sizes: seconds, even on a small CPU")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the figures as JSON, and attachments beside it"
    )


def default_size(args: argparse.Namespace, quick: int, cpu: int, gpu: int) -> int:
    """A size for this device; a GPU takes its own even in quick form, because less would time only launches."""
    return gpu if args.device.type == "cuda" else quick if args.quick else cpu


def us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"


def seconds(function: Callable[[], object], iters: int) -> float:
    """Median of five measurements of the seconds of one call, the GPU's work included; `iters` calls in all."""
    timer = Timer("function()", globals={"function": function}, num_threads=torch.get_num_threads())
    timer.timeit(1)  # warm-up: compilation, allocation
    return statistics.median(timer.timeit(max(1, iters // 5)).median for _ in range(5))


def launches(function: Callable[[], object], device: torch.device) -> int:
    """Kernels that one call launches on a GPU, as the profiler saw them; on a CPU, operators not inside another."""
    trace = profile.trace_step(function, device)
    if device.type == "cuda":
        return len(trace.kernels)
    operators = [event for event in trace.operators if event["name"].startswith("aten::")]
    count, end = 0, 0.0
    for event in sorted(operators, key=lambda event: (event["ts"], -event["dur"])):
        if event["ts"] >= end:
            count, end = count + 1, event["ts"] + event["dur"]
    return count


def extra_peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """The most bytes of tensors that one `step` holds at a time, beyond those that were there before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [
        event for kind in profile.chrome_trace(profiler)[1].values() for event in kind if event["name"] == "[memory]"
    ]
    changes = [event["args"]["Bytes"] for event in sorted(events, key=lambda event: event["ts"])]
    return max(itertools.accumulate(changes), default=0)


def plot(name: str, draw: Callable[[Axes], None]) -> dict[str, str]:
    """The attachment `name`, an SVG that `draw` filled; none where matplotlib is not installed."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        return {}
    figure = Figure(figsize=(8, 5), layout="constrained")
    draw(figure.add_subplot())
    text = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):  # text as text; the same file each time
        figure.savefig(text, format="svg", metadata={"Date": None})
    return {name: text.getvalue()}
