"""Text for a terminal: one line of an error, tables, progress, and a parser whose errors are one line."""

import argparse
import difflib
import importlib
import os
import shlex
import sys
import sysconfig
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("common", "ladder", "mine")  # which run a script: their lines say nothing of its error
PACKAGE_FOLDERS = ("site-packages", "dist-packages", "torchinductor_")  # the last is the compiler's
PACKAGES = ROOT / ".packages" / str(sysconfig.get_config_var("SOABI"))  # what run_all.sh installed

# What libraries say of too little memory, and the names of their errors.
OUT_OF_MEMORY = ("out of memory", "allocate memory", "alloc_failed", "memoryerror", "out_of_memory")
MISSING = {  # what libraries say of what is not installed or too old, and what to do
    "is not defined for option 'gpu-name'": (
        "Triton's ptxas does not know this GPU: set TRITON_PTXAS_PATH to that of a newer CUDA toolkit, "
        "such as /usr/local/cuda/bin/ptxas"
    ),
    "python.h": "torch.compile lacks the headers of Python: install them (Debian, Ubuntu: python3-dev)",
    "c++ compiler": "torch.compile lacks a C++ compiler: install one (Debian, Ubuntu: g++)",
    "cannot find -ltorch": "torch.compile fails where the path of Python or of its packages has a space",
    "same as output file": "torch.compile fails where TMPDIR or TORCHINDUCTOR_CACHE_DIR has a space",
    "c compiler": "torch.compile lacks a C compiler: install one (Debian, Ubuntu: gcc)",
}
UNWRITTEN: list[OSError] = []  # of output, as on a full disk: see `say`


class Skip(Exception):
    """Raised by a script that cannot run on this machine. The message is one line that tells what to do."""


def explain(error: Exception) -> tuple[str, str]:
    """The status of a row that ended with `error`, and a one-line reason that tells what to do."""
    if isinstance(error, Skip):
        return "skipped", one_line(error)
    text = f"{type(error).__name__} {error}".lower()
    if any(sign in text for sign in OUT_OF_MEMORY):
        return "oom", "out of memory: try a smaller batch size or sequence length"
    advice = next((advice for sign, advice in MISSING.items() if sign in text), None)
    fatal = next((line for line in str(error).splitlines() if "fatal" in line), error)  # ptxas says it later
    line = line_of(error)
    reason = f"{line}: {one_line(error)}" if line else one_line(error)
    return "failed", f"{advice} ({one_line(fatal, 150)})" if advice else reason


def line_of(error: BaseException) -> str:
    """The line that an error came through last of a script or of a user's files, as `net.py, line 31`; empty
    for one that came through packages, compiled code and the rooms of this project alone."""
    foreign = [str(Path(os.__file__).parent), *(f"{ROOT / room}/" for room in ROOMS), str(PACKAGES), "<"]
    foreign.append(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or "<")  # an empty one is every file
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        is_package = any(part.startswith(PACKAGE_FOLDERS) for part in path.parts)
        if not (is_package or frame.filename.startswith(tuple(foreign))):
            return f"{path.name}, line {frame.lineno}"
    return ""


def import_or_skip(module: str, package: str | None = None) -> ModuleType:
    """A module, or an empty one of which any use raises Skip with the reason and the line that installs
    `package`: one that does not fit this torch or CUDA can fail in any way on import."""
    try:
        return importlib.import_module(module)
    except Exception as error:
        advice = f': pip install --no-build-isolation "{package}"' if package else ""
        reason = f"{module.partition('.')[0]} does not import ({one_line(error, 150)}){advice}"

    def skip(name: str):
        raise Skip(reason)

    missing = ModuleType(module)
    missing.__getattr__ = skip
    return missing


def one_line(text: object, longest: int = 300) -> str:
    """The first line of a text or of an exception's message, and the next where it ends in a colon, without
    control characters, cut to `longest` characters.

    An exception without a message gives the name of its class.
    """
    try:
        lines = str(text).strip().splitlines()
    except Exception:  # of an error that cannot tell itself
        lines = []
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
    return shlex.join([*name.split(), *map(_portable_word, without(words, ["--output"]))])


def without(words: list[str], options: Collection[str]) -> list[str]:
    """The words of a command without these options and their values."""
    rest, skips = [], False
    for word in words:
        option, equals, _ = word.partition("=")
        if option not in options and not skips:
            rest.append(word)
        skips = option in options and not equals
    return rest


def _portable_word(word: str) -> str:
    option, equals, value = word.partition("=")
    if equals and option.startswith("--"):
        return f"{option}={_portable_word(value)}"
    path = Path(word)
    if path.is_relative_to(ROOT):
        return str(path.relative_to(ROOT))
    return path.name if path.is_absolute() else word


def say(text: str, stream=None, end: str = "\n") -> None:
    """Print to a reader who may have left (`| head`), to a terminal that lacks a letter, or to a full disk:
    nothing here ends the run. `run_command` says at the end what could not be written."""
    stream = stream or sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, end=end, flush=True)
    except (BrokenPipeError, ValueError):  # the reader left, or closed it
        pass
    except OSError as error:
        UNWRITTEN.append(error)


def progress(doing: str) -> None:
    """Renew the line of a terminal that tells what a run is doing; "" clears it."""
    if sys.stderr and sys.stderr.isatty():  # None where it was closed
        say(f"\r\033[K{doing}", sys.stderr, end="")


class OneLineParser(argparse.ArgumentParser):
    """argparse without abbreviations and without the usage block: bad input gets one line and exit code 2."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.register("type", Path, lambda text: Path(os.path.expanduser(text)))  # a shell leaves --output=~

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
    """End this process with what `main` returns. Ctrl-C, and a file or a package that cannot be read, are one
    line. Exit codes: 2 for bad arguments, 130 for Ctrl-C."""
    try:
        code = main() or 0
    except KeyboardInterrupt:
        say(f"{name}: interrupted", sys.stderr)
        code = 130
    except SystemExit as error:  # a number of a parser, which has told why; or a text
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            say(error.code, sys.stderr)
    except ImportError as error:
        say(f"{name}: error: {error}: ./run_all.sh --setup installs it, where PYTHON is not set", sys.stderr)
        code = 1
    except OSError as error:
        say(f"{name}: error: {one_line(error)}", sys.stderr)
        code = 1
    if UNWRITTEN and not code:
        say(f"{name}: error: cannot write its output: {UNWRITTEN[0].strerror}", sys.stderr)
        code = 1
    is_watched = sys.gettrace() or sys.getprofile() or "coverage" in sys.modules
    if is_watched or "CUDA_INJECTION64_PATH" in os.environ:  # a profiler writes its results at the end
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        say("", stream, end="")  # flushes it
    os._exit(code)  # the interpreter's teardown takes seconds once torch has compiled
