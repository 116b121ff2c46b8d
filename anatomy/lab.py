"""What the experiments share: options, a clock, what this machine reaches, and the table of predicted and
measured.

An experiment is a file. Its docstring has the question and the arithmetic of its prediction. Its `run(lab,
...)` adds a row for each prediction and returns one sentence. The parameters after `lab` are options of its
command: sizes, dtype.
"""

import argparse
import ctypes
import functools
import importlib
import inspect
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch.utils.benchmark import Timer

from common import clock, fingerprint, hardware
from common.options import check_output
from common.record import Environment, write_json
from common.text import OneLineParser, aligned, one_line, positive_int, progress, say

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TIMED_S, QUICK_S = 0.2, 0.05  # of calls that one time is the median of
# Bytes of a copy, and the edge of square matrices.
LARGE_COPY, LARGE_EDGE = ({"cuda": 2**31, "cpu": 2**28}, {"cuda": 8192, "cpu": 1024})
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m"), (1e-6, "u"), (1e-9, "n"))


class Lab:
    """One run of one experiment on one device, and its rows."""

    def __init__(self, name: str, options: argparse.Namespace):
        """Raises ValueError, one line, for a device that cannot be used, or a --json file that cannot be
        written."""
        if options.json:
            check_output(options.json)
        self.name, self.device = name, hardware.resolve_device(options.device)
        self.gpu, self.quick = self.device.type == "cuda", options.quick
        # Without BF16 matrix products, experiments take FP32.
        self.amp = self.gpu and hardware.has_bf16_matrix_instructions(self.device)
        self.title, self.rows = "", []  # the title of the next row's table
        torch.set_float32_matmul_precision("highest")  # some containers set TF32
        if self.gpu:
            torch.cuda.set_device(self.device)  # Triton and torch's timer use the current one
        elif mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
            # glibc keeps what is freed, as PyTorch does on a GPU: first writes to new pages take most of the
            # time.
            mallopt(-1, -1)  # M_TRIM_THRESHOLD
            mallopt(-4, 0)  # M_MMAP_MAX

    def pick(self, quick, cpu, gpu):
        """A size, or several. A GPU keeps its own with --quick: smaller ones would time only launches."""
        if self.gpu:
            return gpu
        return quick if self.quick else cpu

    def seconds(self, call: Callable[[], object]) -> float:
        """Time of one call with the GPU's work: a median. Calls follow each other without a wait."""
        call()  # the first one compiles and allocates
        timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
        return timer.blocked_autorange(min_run_time=QUICK_S if self.quick else TIMED_S).median

    def device_seconds(self, call: Callable[[], object], calls: int = 50, launches: int = 1) -> float:
        """A GPU's own time of a call that launches about so many kernels: it sleeps until the host has
        launched all `calls`, whose kernels are at most about 1000. A CPU launches nothing."""
        call()  # the first one compiles
        return clock.mean_seconds(call, calls, self.device, launches) if self.gpu else self.seconds(call)

    def copy_seconds(self, n_bytes: float) -> float:
        """Time of a pass that reads and writes so many bytes in all, the same ones again and again."""
        source, target = torch.ones(2, max(1, round(n_bytes / 8)), device=self.device)
        # `copy_` would use a GPU's copy engines.
        return self.device_seconds(lambda: torch.neg(source, out=target))

    def expected(self, host_s: float, work_s: float) -> float:
        """The time of a call. A GPU works while the host launches, and a CPU does both in turn."""
        return max(host_s, work_s) if self.gpu else host_s + work_s

    def row(self, what: str, measured, predicted=None, unit="s", at_most=False, **columns: str) -> None:
        """Add a row, in `unit` s, B, B/s or none. A text as `measured` says why there is no number, as `needs
        a GPU`; `at_most` makes the prediction an upper bound; `columns` are further cells."""
        missing = measured if isinstance(measured, str) else None
        figures = [
            x if isinstance(x, (int, float)) and math.isfinite(x) else None for x in (predicted, measured)
        ]
        row = {
            "table": self.title,
            "what": what,
            "predicted": figures[0],
            "measured": figures[1],
            "unit": unit,
        }
        self.rows.append(row | {"at_most": at_most, "missing": missing, "columns": columns})
        progress(f"{self.name}: {what}")

    def tables(self, style: str = "simple") -> str:
        by_title = {row["table"]: [] for row in self.rows}
        for row in self.rows:
            predicted, measured, unit = row["predicted"], row["measured"], row["unit"]
            cells = {"": row["what"], **row["columns"], "predicted": shown(predicted, unit)}
            if row["at_most"]:
                cells["predicted"] = f"<= {cells['predicted']}"
            cells["measured"] = row["missing"] or shown(measured, unit)
            cells["ratio"] = f"{measured / predicted:.2f}" if predicted and measured is not None else "-"
            by_title[row["table"]].append(cells)
        return "\n\n".join(f"{title}\n\n{aligned(rows, style)}" for title, rows in by_title.items())

    def record(self, question: str, sentence: str) -> dict:
        return {"experiment": self.name, "question": question, "rows": self.rows, "sentence": sentence}


def shown(figure: float | None, unit: str) -> str:
    """`12.3 us`, `4.2 TB/s`; without a unit four digits."""
    if not figure or not unit:
        return "-" if figure is None else f"{figure:.4g} {unit}".rstrip()
    scale, prefix = next((pair for pair in PREFIXES if abs(figure) >= pair[0]), PREFIXES[-1])
    digits = 3 if abs(figure) < 999.5 * scale else 4
    return f"{figure / scale:.{digits}g} {prefix}{unit}"


@functools.cache
def rate(of: str, device: torch.device) -> float:
    """What this machine reaches, measured once in a process: bytes/s of a large `copy`, or FLOP/s of a large
    product in `fp32`, `tf32` or `bf16`."""
    if of == "copy":
        source, target = torch.ones(2, LARGE_COPY[device.type] // 8, device=device)
        seconds = clock.steady_seconds(lambda: torch.neg(source, out=target), device, TIMED_S)
        return 2 * source.nbytes / seconds
    edge = LARGE_EDGE[device.type]
    a, b = torch.randn(2, edge, edge, device=device, dtype=torch.bfloat16 if of == "bf16" else torch.float32)
    torch.set_float32_matmul_precision("high" if of == "tf32" else "highest")
    seconds = clock.steady_seconds(lambda: a @ b, device, TIMED_S)
    torch.set_float32_matmul_precision("highest")
    return 2 * edge**3 / seconds


def file_of(environment: Environment) -> dict:
    """What a file of records says of all of them: the machine, and the code that times them."""
    code = fingerprint.row_sha256("", hardware.ROOT, fingerprint.CLOCKS)
    return {"environment": asdict(environment), "code_sha256": code}


def add_options(parser: argparse.ArgumentParser) -> None:
    text = "default: auto, a GPU if any"
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help=text)
    parser.add_argument("--quick", action="store_true", help="smaller sizes on a CPU, and fewer timed calls")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows")


def run_experiment(name: str, words: list[str]) -> None:
    """The command of an experiment: `python -m anatomy NAME`."""
    module = importlib.import_module(f"anatomy.{name}")
    names = list(inspect.signature(module.run).parameters)[1:]
    parser = OneLineParser(prog=f"python -m anatomy {name}", description=module.__doc__)
    for size in names:
        kind = {"choices": DTYPES} if size == "dtype" else {"type": positive_int, "metavar": "N"}
        parser.add_argument(f"--{size}", **kind, help="default: the experiment's own")
    add_options(parser)
    options = parser.parse_args(words)
    chosen = {size: getattr(options, size) for size in names}
    if "dtype" in names:
        chosen["dtype"] = DTYPES.get(options.dtype)
    try:
        lab = Lab(name, options)
        sentence = module.run(lab, **chosen)
    except (ValueError, RuntimeError, MemoryError) as error:  # no such device, too little memory, a size
        parser.error(one_line(error).replace("--output", "--json"))
    progress("")
    record = lab.record((module.__doc__ or name).partition("\n")[0], sentence)
    say(f"{record['question']}\n\n{lab.tables()}\n\n{sentence}")
    if options.json:
        write_json(options.json, record | file_of(hardware.describe(lab.device)))
