"""What all experiments share: arguments, timing, and results that render as tables and sentences."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch
from tabulate import tabulate
from torch.utils.benchmark import Timer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


class Refused(ValueError):
    """The experiment cannot run as asked: one line that says why."""


@dataclass
class Table:
    """Rows of strings; `title` says what they are, with units in the headers."""

    title: str
    headers: list[str]
    rows: list[list[str]]

    def render(self, style: str = "simple") -> str:
        align = ["left", *["right"] * (len(self.headers) - 1)]
        return tabulate(self.rows, self.headers, tablefmt=style, disable_numparse=True, colalign=align)


@dataclass
class Result:
    """What an experiment found.

    `sentences` are computed from the result and claim no more than it shows; `figures` are the raw numbers behind
    tables and sentences, for JSON; `attachments` are files to write beside them: name -> text or bytes.
    """

    tables: list[Table]
    sentences: list[str]
    figures: dict
    attachments: dict[str, str | bytes] = field(default_factory=dict)

    def render(self, style: str = "simple") -> str:
        parts = [f"{table.title}\n\n{table.render(style)}" for table in self.tables]
        return "\n\n".join([*parts, "\n".join(f"- {sentence}" for sentence in self.sentences)])

    def record(self) -> dict:
        return {"tables": [asdict(t) for t in self.tables], "sentences": self.sentences, "figures": self.figures}


def positive(text: str) -> int:
    """A whole number from 1 on, for argparse."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def seconds(function: Callable[[], object], iters: int) -> float:
    """Median of five measurements of the seconds of one call, the GPU's work included; `iters` calls in all."""
    timer = Timer("function()", globals={"function": function}, num_threads=torch.get_num_threads())
    timer.timeit(1)  # warm-up: compilation, allocation
    return statistics.median(timer.timeit(max(1, iters // 5)).median for _ in range(5))
