"""What all experiments share: arguments, timing, and results that print as tables and sentences.

An experiment is a file of this folder with three parts. Its docstring has the question as one sentence, the prediction
by simple arithmetic, the source, and the command. `add_arguments(parser)` adds its own sizes. `run(args)` returns a
Result. In `args`, `device` is a torch.device that works, `dtype` is a torch.dtype or None for the experiment's own
choice, `iters` is a number, and `quick` asks for smaller sizes.
"""

import argparse
import contextlib
import io
import itertools
import logging
import statistics
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch.utils.benchmark import Timer

from common import profile
from common.text import aligned, positive_int

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
ITERS, QUICK_ITERS = 50, 10


class Refused(ValueError):
    """The experiment cannot run as asked; the message is one line."""


@dataclass
class Table:
    """Rows of strings. `title` describes them, and the headers have the units. No two headers are equal."""

    title: str
    headers: list[str]
    rows: list[list[str]]

    def render(self, style: str = "simple") -> str:
        return aligned([dict(zip(self.headers, row, strict=True)) for row in self.rows], style)


def table(title: str, rows: list[dict]) -> Table:
    """Rows of header -> cell. The longest row has all headers; a cell that a row lacks, or that is None, is "-"."""
    headers = list(max(rows, key=len))
    return Table(title, headers, [["-" if row.get(h) is None else str(row[h]) for h in headers] for row in rows])


def predictions(title: str, what: str, pairs: dict[str, tuple]) -> Table:
    """A table of name -> (predicted, measured)."""
    return table(title, [{what: name, "predicted": p, "measured": m} for name, (p, m) in pairs.items()])


@dataclass
class Result:
    """The outcome of an experiment.

    `sentences` are computed from the figures and claim no more than these show. `figures` are the raw numbers behind
    the tables, for JSON. `attachments` are files to write: name -> text or bytes. `listings` are code: title -> text.
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

    def with_plot(self, name: str, draw: Callable[..., None]) -> "Result":
        self.attachments |= plot(name, draw)
        self.sentences += [] if self.attachments else ["Without matplotlib there is no plot."]
        return self

    def record(self) -> dict:
        return vars(self) | {"tables": list(map(asdict, self.tables)), "attachments": list(self.attachments)}


def common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that every experiment has."""
    parser.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu, cuda, cuda:N (default: auto)")
    dtypes = f"{', '.join(DTYPES)} (default: the experiment's own choice)"
    parser.add_argument("--dtype", choices=DTYPES, metavar="NAME", help=dtypes)
    iters = f"timed calls (default: {ITERS}; {QUICK_ITERS} with --quick)"
    parser.add_argument("--iters", type=positive_int, metavar="N", help=iters)
    parser.add_argument("--quick", action="store_true", help="smaller sizes, which take seconds even on a small CPU")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the figures as JSON")


def size_argument(parser: argparse.ArgumentParser, name: str, text: str, **options) -> None:
    """Add an option that takes a number from 1. `name` is the option and what stands for the number: `--numbers N`."""
    option, _, metavar = name.partition(" ")
    parser.add_argument(option, type=positive_int, metavar=metavar or None, help=text, **options)


def default_size(args: argparse.Namespace, quick: int, cpu: int, gpu: int) -> int:
    """A size for this device. A GPU keeps its size in quick form, because smaller ones would time only launches."""
    return gpu if args.device.type == "cuda" else quick if args.quick else cpu


@contextlib.contextmanager
def quiet() -> Iterator[list[warnings.WarningMessage]]:
    """Keep back what is printed and logged, and yield the warnings."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        stack.callback(logging.disable, logging.NOTSET)
        logging.disable(logging.WARNING)
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        yield caught


def us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"


def seconds(function: Callable[[], object], iters: int) -> float:
    """The seconds of one call with the GPU's work: the median of five measurements, `iters` calls together."""
    timer = Timer("function()", globals={"function": function}, num_threads=torch.get_num_threads())
    timer.timeit(1)  # the first call compiles and allocates
    return statistics.median(timer.timeit(max(1, iters // 5)).median for _ in range(5))


def launches(function: Callable[[], object], device: torch.device) -> int:
    """How many kernels one call launches on a GPU. On a CPU, how many operators it calls that no operator calls."""
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
    """The most bytes that the tensors of one `step` take at any moment. Tensors from before it do not count."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    by_kind = profile.chrome_trace(profiler)[1].values()
    events = [event for events in by_kind for event in events if event["name"] == "[memory]"]
    changes = [event["args"]["Bytes"] for event in sorted(events, key=lambda event: event["ts"])]
    return max(itertools.accumulate(changes), default=0)


def plot(name: str, draw: Callable[..., None]) -> dict[str, str]:
    """An SVG whose axes `draw` fills, as the attachment `name`; no attachment where matplotlib is not installed."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        return {}
    figure = Figure(figsize=(8, 5), layout="constrained")
    draw(figure.add_subplot())
    text = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):  # searchable text, same bytes each time
        figure.savefig(text, format="svg", metadata={"Date": None})
    return {name: text.getvalue()}
