"""What all experiments share: arguments, timing, and results that print as tables and sentences.

An experiment is a file of this folder with three parts. Its docstring has the question as one sentence; what the
reader should predict ("Predict:"); the prediction by simple arithmetic; what to change next ("Change:"); the source and
the command. `add_arguments(parser)` adds its own sizes. `run(args)` returns a Result. In `args`, `device` is a
torch.device that works, `dtype` is a torch.dtype or None for the experiment's own choice, `iters` is how often a time
is taken, and `quick` asks for smaller sizes.
"""

import argparse
import contextlib
import ctypes
import io
import itertools
import json
import logging
import math
import statistics
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from common import profile
from common.text import aligned, one_line, positive_int

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
ITERS, QUICK_ITERS = 50, 20  # how often a time is taken
AGAIN = 5  # how often a time is taken that explains another
SAMPLE_S = 1e-3  # one sample repeats a shorter call for so long, so that waiting for the GPU at its end counts little
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h
NEAR = 1.25  # a prediction within 25 %: neither is more than this factor times the other


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


class Seconds(float):
    """The median of several times of one call, in seconds. `quartiles` are p25 and p75."""

    quartiles: tuple[float, float]

    @classmethod
    def of(cls, times: list[float]) -> "Seconds":
        median = cls(statistics.median(times))
        low, _, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
        median.quartiles = (low, high)
        return median

    def minus(self, other: "Seconds") -> "Seconds":
        """How much longer it is: at least from the p75 of the other to its own p25."""
        difference = Seconds(self - other)
        difference.quartiles = self.quartiles[0] - other.quartiles[1], self.quartiles[1] - other.quartiles[0]
        return difference


def differ(a: float, b: float) -> bool:
    """Whether two times differ by more than their spread: their ranges from p25 to p75 do not touch."""
    (low_a, high_a), (low_b, high_b) = (getattr(s, "quartiles", (s, s)) for s in (a, b))
    return high_a < low_b or high_b < low_a


def less(a: float, b: float) -> bool:
    """Whether a time is shorter than another one by more than their spread."""
    return a < b and differ(a, b)


Cause = str | Callable[[], str | None] | None  # of a miss: a sentence, or what makes it and needs the profiler
RECORDED = ("what", "predicted", "measured", "unit", "at_most", "cause", "hit")  # of a check


@dataclass
class Check:
    """One prediction beside its measurement: two figures of one unit, at best within 25 %.

    `at_most` makes the prediction an upper bound. `cause` is a sentence about a miss, computed from a measurement.
    `find_cause` makes it by further measurements, see misses.py.
    """

    what: str
    predicted: float
    measured: float
    unit: str
    at_most: bool = False
    cause: str | None = None
    find_cause: "Callable[[Check], Cause] | None" = None

    @property
    def hit(self) -> bool:
        if self.at_most:
            return self.measured <= self.predicted
        if not self.predicted or not self.measured or isinstance(self.measured, int):  # counts are exact
            return self.predicted == self.measured
        return near(self.measured, self.predicted)

    @property
    def noisy(self) -> bool:
        """Whether times between the quartiles would have been a hit, where the medians are none."""
        (low, high), (least, most) = (getattr(s, "quartiles", (s, s)) for s in (self.measured, self.predicted))
        if self.at_most:
            return low <= most
        return not isinstance(self.measured, int) and low <= NEAR * most and high * NEAR >= least

    def row(self) -> dict:
        predicted, measured = (shown(figure, self.unit) for figure in (self.predicted, self.measured))
        ratio = f"{self.measured / self.predicted:.2f}" if self.predicted else "-"
        noise = "missed, but not beyond the spread of the times" if self.noisy else None
        verdict = "hit" if self.hit else self.cause or noise or "missed, and nothing measured here says why"
        cells = {"prediction": self.what, "unit": self.unit, "predicted": f"{'<= ' * self.at_most}{predicted}"}
        return cells | {"measured (p25-p75)": measured, "measured / predicted": ratio, "verdict": verdict}


def shown(figure: float, unit: str) -> str:
    """A figure in its unit, times with their quartiles: seconds become microseconds or milliseconds."""
    return {"us": us, "ms": ms}[unit](figure) if unit in ("us", "ms") else f"{figure:.4g}"


@dataclass
class Result:
    """The outcome of an experiment.

    `sentences` are computed from the figures and claim no more than these show. `figures` are the raw numbers behind
    the tables, for JSON. `checks` are predictions beside measurements, and make a table and a score of their own.
    `attachments` are files to write: name -> text or bytes. `listings` are code: title -> text.
    """

    tables: list[Table]
    sentences: list[str]
    figures: dict
    checks: list[Check] = field(default_factory=list)
    attachments: dict[str, str | bytes] = field(default_factory=dict)
    listings: dict[str, str] = field(default_factory=dict)

    def render(self, style: str = "simple") -> str:
        tables = [*self.tables, *self.checked()]
        parts = [f"{table.title}\n\n{table.render(style)}" for table in tables]
        parts += [f"{title}\n\n{textwrap.indent(text, '    ')}" for title, text in self.listings.items()]
        sentences = [*self.sentences, *([f"Score: {self.score()}."] * bool(self.checks))]
        return "\n\n".join([*parts, "\n".join(f"- {sentence}" for sentence in sentences)])

    def explain(self) -> None:
        """Find the causes of misses. Call it after all times are taken: a profiler makes later launches slower."""
        missed = [check for check in self.checks if check.find_cause and not check.hit]
        with quiet():  # what a call prints or warns of was shown
            found = [_ask(check.find_cause, check) for check in missed]
            for check, cause in zip(missed, found, strict=True):
                check.cause = _ask(cause) if callable(cause) else cause

    def checked(self) -> list[Table]:
        return [table("Predictions", [check.row() for check in self.checks])] if self.checks else []

    def score(self) -> str:
        """How many predictions were near. An upper bound counts if it holds."""
        hits = sum(check.hit for check in self.checks)
        return f"{hits} of {len(self.checks)} predictions hold (within 25 %, or under their bound)"

    def with_plot(self, name: str, draw: Callable[..., None]) -> "Result":
        self.attachments |= plot(name, draw)
        self.sentences += [] if self.attachments else ["Without matplotlib there is no plot."]
        return self

    def record(self) -> dict:
        checks = [with_quartiles({name: getattr(check, name) for name in RECORDED}) for check in self.checks]
        fields = {"tables": list(map(asdict, self.tables)), "attachments": list(self.attachments), "checks": checks}
        return vars(self) | fields | {"figures": with_quartiles(self.figures)}


def _ask(find_cause: Callable[..., object], *of: Check) -> object:
    """What a search for a cause finds. If it fails, the experiment keeps its times."""
    try:
        return find_cause(*of)
    except Exception as error:  # those of CUDA and of the profiler have no common class
        return f"missed, and the search for its cause failed: {one_line(error)}"


def with_quartiles(figures: object) -> object:
    """The same figures for JSON: beside a key that holds a measured time, another key holds its p25 and p75."""
    if isinstance(figures, dict):
        spread = {f"{key}_p25_p75": list(s.quartiles) for key, s in figures.items() if isinstance(s, Seconds)}
        return {key: with_quartiles(value) for key, value in figures.items()} | spread
    return [with_quartiles(value) for value in figures] if isinstance(figures, (list, tuple)) else figures


def common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that every experiment has."""
    parser.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu, cuda, cuda:N (default: auto)")
    dtypes = f"{', '.join(DTYPES)} (default: the experiment's own choice)"
    parser.add_argument("--dtype", choices=DTYPES, metavar="NAME", help=dtypes)
    iters = f"how often each time is taken (default: {ITERS}; {QUICK_ITERS} with --quick)"
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


def keep_memory() -> None:
    """Let glibc keep what is freed, as PyTorch's allocator does on a GPU: of memory that the system gives anew, every
    page costs when it is first written, which was seen to take most of a call's time. Elsewhere it does nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(M_TRIM_THRESHOLD, -1)  # never give back
        mallopt(M_MMAP_MAX, 0)  # no large block apart, which would be given back when it is freed


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
    """Microseconds, and in parentheses the quartiles of a measured time."""
    return spread(seconds, lambda s: f"{s * 1e6:.{1 if s >= 1e-6 else 2}f}")


def ms(seconds: float) -> str:
    """Milliseconds, and in parentheses the quartiles of a measured time."""
    return spread(seconds, lambda s: f"{s * 1e3:.3g}" if s < 0.1 else f"{s * 1e3:.0f}")


def spread(seconds: float, text: Callable[[float], str]) -> str:
    low, high = getattr(seconds, "quartiles", (seconds, seconds))
    return text(seconds) if low == high else f"{text(seconds)} ({text(low)}-{text(high)})"


def seconds(function: Callable[[], object], samples: int) -> Seconds:
    """The time of one call with the GPU's work, of so many samples. Calls follow each other without a wait between."""

    def sample(calls: int) -> float:
        wait()
        began = time.perf_counter()
        for _ in range(calls):
            function()
        wait()
        return (time.perf_counter() - began) / calls

    sample(1)  # the first call compiles and allocates
    calls = min(1000, math.ceil(SAMPLE_S / sample(1))) if samples > 1 else 1
    return Seconds.of([sample(calls) for _ in range(samples)])


def host_seconds(call: Callable[[], object], samples: int, before: Callable[[], object] | None = None) -> Seconds:
    """The time until one call returns to the host, where the GPU has nothing queued but what `before` has queued."""
    times = []
    for _ in range(samples + 1):
        wait()
        if before:
            before()
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    wait()
    return Seconds.of(times[1:])  # the first call warms up


def wait() -> None:
    """Wait until the current GPU, if there is one, has done what is queued."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def expected(host_s: float, work_s: float, device: torch.device) -> float:
    """The time of a call whose host needs `host_s` and whose arithmetic and bytes need `work_s`.

    A GPU works while the host launches, so the longer one counts. A CPU does one after the other.
    """
    return max(host_s, work_s) if device.type == "cuda" else host_s + work_s


def busy_seconds(function: Callable[[], object], device: torch.device) -> float | None:
    """How long the kernels and copies of one call run on the GPU, by the profiler. None on a CPU."""
    return sum(event["dur"] for event in gpu_work(function, device)) / 1e6 if device.type == "cuda" else None


def gpu_work(function: Callable[[], object], device: torch.device) -> list[dict]:
    """The kernels, copies and fills of one call on a GPU, as events of a Chrome trace: `name`, and `dur` in us."""
    events = json.loads(profile.trace_step(function, device).chrome, strict=False)["traceEvents"]
    return [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]


def near(a: float, b: float) -> bool:
    """Whether two times are within 25 % of each other."""
    return 1 / NEAR <= a / b <= NEAR


def copy_seconds(n_bytes: float, device: torch.device) -> Seconds:
    """The time of a copy that reads and writes so many bytes together, again and again the same ones."""
    source, target = torch.ones(2, max(1, round(n_bytes / 8)), device=device)
    return seconds(lambda: torch.neg(source, out=target), AGAIN)  # copy_ would use a GPU's copy engines


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """A CPU's operators use one thread meanwhile."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def on_one_thread(call: Callable[[], object], samples: int) -> Seconds:
    with one_thread():
        return seconds(call, samples)


def launches(function: Callable[[], object], device: torch.device) -> int:
    """How many kernels one call launches on a GPU. On a CPU, how many operators it calls that no operator calls, views
    left out."""
    trace = profile.trace_step(function, device)
    if device.type == "cuda":
        return len(trace.kernels)
    operators = [event for event in trace.operators if event["name"].startswith("aten::")]
    count, end = 0, 0.0
    for event in sorted(operators, key=lambda event: (event["ts"], -event["dur"])):
        if event["ts"] >= end and not is_view(event["name"]):
            count, end = count + 1, event["ts"] + event["dur"]
    return count


def is_view(operator: str) -> bool:
    """Whether an operator, `aten::t`, by its schema returns the memory that it was given, and writes nothing to it.
    One that sometimes copies, as aten::reshape, then calls another that does."""
    overloads = getattr(torch.ops.aten, operator.removeprefix("aten::"), None)
    schemas = [getattr(overloads, name)._schema for name in overloads.overloads()] if overloads else []
    aliases = [one.alias_info for schema in schemas[:1] for one in schema.returns[:1]]
    return any(alias and not alias.is_write for alias in aliases)


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
