"""Text for a terminal: one line of an error, tables, progress, and a parser whose errors are one line."""

import argparse
import contextlib
import difflib
import shlex
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ROOT / ".packages" / str(sysconfig.get_config_var("SOABI"))  # what run_all.sh installed


class Skip(Exception):
    """Raised by a script that cannot run on this machine. The message is one line that tells what to do."""


def one_line(text: object, longest: int = 300) -> str:
    """The first line of a text or of an exception's message, and the next where it ends in a colon, without
    control characters, cut to `longest` characters.

    An exception without a message gives the name of its class.
    """
    lines = str(text).strip().splitlines()
    if not lines and isinstance(text, BaseException):
        lines = [type(text).__name__]
    first = " ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])
    line = "".join(c if c.isprintable() else " " for c in first)
    return line if len(line) <= longest else line[: longest - 1] + "…"


def aligned(rows: list[dict], style: str = "simple", n_left: int = 1) -> str:
    """Rows that share their keys, as a table: the first `n_left` columns to the left, the others to the
    right.

    `style` is a format of tabulate: simple, github, pipe. Raises ImportError where tabulate is not installed.
    """
    try:
        from tabulate import tabulate
    except ImportError:
        sys.path.append(str(PACKAGES / "report"))  # last: a process with torch keeps its own packages
        from tabulate import tabulate

    align = ["left" if k < n_left else "right" for k in range(len(rows[0]))] if rows else None
    return tabulate(rows, headers="keys", tablefmt=style, disable_numparse=True, colalign=align)


def portable_command(name: str, words: list[str]) -> str:
    """A command line to repeat anywhere: without --output, absolute paths as from the project's folder, or
    cut to their last part."""
    portable, words = name.split(), iter(words)
    for word in words:
        if word == "--output":
            next(words, None)
        elif not word.startswith("--output="):
            portable.append(_portable_word(word))
    return shlex.join(portable)


def _portable_word(word: str) -> str:
    option, equals, value = word.partition("=")
    if equals and option.startswith("--"):
        return f"{option}={_portable_word(value)}"
    path = Path(word)
    if path.is_relative_to(ROOT):
        return str(path.relative_to(ROOT))
    return path.name if path.is_absolute() else word


def say(text: str, stream=None, end: str = "\n") -> None:
    """Print to a reader who may have left (`| head`), or whose terminal lacks a letter: nothing here ends the
    run."""
    with contextlib.suppress(OSError, UnicodeError):
        print(text, file=stream or sys.stdout, end=end, flush=True)


def progress(doing: str) -> None:
    """Renew the line of a terminal that tells what a run is doing; "" clears it."""
    if sys.stderr and sys.stderr.isatty():  # None where it was closed
        say(f"\r\033[K{doing}", sys.stderr, end="")


class OneLineParser(argparse.ArgumentParser):
    """argparse without abbreviations and without the usage block: bad input gets one line and exit code 2."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {one_line(message + self._meant(message), 1000)}\n")

    def _meant(self, message: str) -> str:
        """The option that a misspelt one is nearest to, as a question; empty where none is near."""
        unknown = [word for word in message.split() if word.startswith("--")]
        if not message.startswith("unrecognized arguments") or not unknown:
            return ""
        name = unknown[0].partition("=")[0]
        nearest = difflib.get_close_matches(name, self._option_string_actions, n=1, cutoff=0.8)
        return f": did you mean {nearest[0]}?" if nearest else ""


def positive_int(text: str) -> int:
    """A whole number from 1 to 2^31 - 1, as argparse's `type`."""
    if not text.isdecimal() or len(text) > 10 or not 1 <= int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{one_line(text, 40)!r} is not a whole number from 1 to 2^31 - 1")
    return int(text)


def run_command(main: Callable[[], int | None], name: str) -> None:
    """Exit with what `main` returns. Ctrl-C and a file that cannot be read or written are one line in its
    place."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.stderr.write(f"{name}: interrupted\n")
        sys.exit(130)
    except ImportError as error:
        sys.exit(f"{name}: error: {error}: ./run_all.sh --setup installs it, where PYTHON is not set")
    except OSError as error:
        sys.exit(f"{name}: error: {error}")
