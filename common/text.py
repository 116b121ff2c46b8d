"""Text for a terminal: a line, an aligned table, a command, progress, and a parser whose errors are one line."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

PROGRESS_FD = "LADDER_PROGRESS_FD"  # names the file descriptor that takes a row's progress as JSON lines


def one_line(text: object, longest: int = 300) -> str:
    """The first line of a text or of an exception's message, without control characters, cut to `longest` characters.

    An exception without a message gives the name of its class.
    """
    lines = str(text).strip().splitlines()
    first = lines[0] if lines else type(text).__name__ if isinstance(text, BaseException) else ""
    line = "".join(c if c.isprintable() else " " for c in first)
    return line if len(line) <= longest else line[: longest - 1] + "…"


def aligned(rows: list[dict], style: str = "simple", n_left: int = 1) -> str:
    """Rows that share their keys, as a table: the first `n_left` columns to the left, the others to the right.

    `style` is a format of tabulate: simple, github, pipe. Raises ImportError where tabulate is not installed.
    """
    from tabulate import tabulate  # NVIDIA's container may lack it, and a script runs without it

    if not rows:
        return ""
    align = ["left"] * n_left + ["right"] * (len(rows[0]) - n_left)
    return tabulate(rows, headers="keys", tablefmt=style, disable_numparse=True, colalign=align[: len(rows[0])])


def portable_command(words: Iterable[str]) -> str:
    """A command line to repeat anywhere: without --output, absolute paths cut to their last part."""
    kept, rest = [], iter(words)
    for word in rest:
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if word == "--output":
            next(rest, None)
        elif option != "--output":
            kept.append(one_line(option + equals + (Path(value).name if Path(value).is_absolute() else value)))
    return shlex.join(kept)


def say(text: str, stream: TextIO | None = None, end: str = "\n") -> None:
    """Print to a reader who may have left (`| head`), or whose terminal lacks a letter: nothing here ends the run."""
    stream = stream or sys.stdout
    if stream is None:  # closed before the program began
        return
    encoding = stream.encoding or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + end)
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Progress:
    """Phase, step and expected rest: a rewritten line on a terminal, or JSON lines for the ladder. It never waits.

    Of several processes the first one says it. torchrun passes on no file descriptor: its own is opened again.
    """

    def __init__(self, step: str, rank: int = 0, processes: int = 1):
        self.step, self.pipe = step, int(os.environ.get(PROGRESS_FD, -1))
        self.terminal = rank == 0 and sys.stderr.isatty()
        if processes > 1 and self.pipe >= 0:
            descriptor, self.pipe = self.pipe, -1
            if rank == 0:
                with contextlib.suppress(OSError):
                    self.pipe = os.open(f"/proc/{os.getppid()}/fd/{descriptor}", os.O_WRONLY)

    def show(self, phase: str, k: int, n: int) -> None:
        """Step `k` of `n` of a phase begins."""
        if k == 0:
            self.began = time.monotonic()
        rest_s = (time.monotonic() - self.began) / k * (n - k) if k else None
        if self.pipe >= 0:
            message = json.dumps({"phase": phase, "k": k + 1, "n": n, "rest_s": rest_s}) + "\n"
            with contextlib.suppress(OSError):  # nobody listens
                os.write(self.pipe, message.encode())
        elif self.terminal:
            rest = f", about {rest_s:.0f} s left" if k else ""
            sys.stderr.write(f"\r\033[K{self.step}: {phase} {k + 1}/{n}{rest}")
            sys.stderr.flush()

    def clear(self) -> None:
        if self.terminal:
            sys.stderr.write("\r\033[K")


class OneLineParser(argparse.ArgumentParser):
    """argparse without abbreviations and without the usage block: bad input gets one line and exit code 2."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {one_line(message, 1000)}\n")


def positive_int(text: str) -> int:
    """A whole number from 1 to 2^31 - 1, as argparse's `type`."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value < 2**31:
        raise argparse.ArgumentTypeError(f"{one_line(text, 40)!r} is not a whole number from 1 to 2^31 - 1")
    return value
