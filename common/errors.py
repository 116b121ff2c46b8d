"""Errors that become one line: a step that cannot run here, too little memory, a missing package or compiler."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType

from common.text import one_line

OUT_OF_MEMORY = (  # what libraries say of it
    "out of memory", "can't allocate memory", "alloc_failed", "array is too big", "maximum allowed dimension",
    "storage size calculation overflowed",
)  # fmt: skip


class Skip(Exception):
    """Raised by a script that cannot run on this machine. The message is one line that says what to do."""


class Missing:
    """Stands for a module that cannot be imported: using it raises Skip."""

    def __init__(self, reason: str):
        self._reason = reason

    def __getattr__(self, name: str):
        raise Skip(self._reason)


def optional(module: str, package: str) -> ModuleType | Missing:
    """A module, or a stand-in whose use raises Skip with the reason and the line that installs `package`.

    A package that does not fit this torch or CUDA can fail in any way on import.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:
        why = f"{module.partition('.')[0]} does not import ({one_line(error, 150)})"
        return Missing(f'{why}: pip install --no-build-isolation "{package}"')


def needs(*packages: str) -> None:
    """Exit with code 2 and one line where a package is not installed: for the top of a `python -m` command."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(f"error: needs {', '.join(missing)}: run ./run_all.sh --setup and use the Python it prints\n")
        sys.exit(2)


def run_command(main: Callable[[], int | None], name: str) -> None:
    """Exit with what `main` returns. Ctrl-C and a file that cannot be read or written are one line in its place."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.stderr.write(f"{name}: interrupted\n")
        sys.exit(130)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        sys.stderr.write(f"{name}: error: {where}{error.strerror or error}\n")
        sys.exit(1)


def explain(error: Exception, batch_size: int) -> tuple[str, str]:
    """The status of a row that ended with `error`, and a one-line reason that says what to do."""
    if isinstance(error, Skip):
        return "skipped", one_line(error)
    if is_out_of_memory(error):
        return "oom", f"out of memory: {smaller_batch(batch_size)}"
    return "failed", missing_tool(error) or one_line(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host had too little memory, whichever library reports it."""
    kind = type(error).__name__
    return kind in ("OutOfMemoryError", "MemoryError") or any(sign in str(error).lower() for sign in OUT_OF_MEMORY)


def smaller_batch(batch_size: int) -> str:
    """What to try when a step ran out of memory: the next smaller power of two."""
    if batch_size > 1:
        return f"try --batch-size {2 ** (batch_size - 1).bit_length() // 2}"
    return "batch size 1 is already the smallest; try a smaller --seq-len, --n-layer or --n-embd"


def missing_tool(error: BaseException) -> str | None:
    """One line that says what to install where torch.compile lacks a tool; None for any other error."""
    text = f"{type(error).__name__} {error}".lower()
    if any(sign in text for sign in ("invalidcxxcompiler", "no working c++ compiler", "failed to find c comp")):
        return "torch.compile found no working C++ compiler: install one (Debian, Ubuntu: apt-get install g++)"
    if any(sign in text for sign in ("tritonmissing", "working triton installation", "no module named 'triton")):
        return "torch.compile found no working Triton: pip install triton, in the version that this torch names"
    if "python.h: no such file" in text:
        return "torch.compile needs Python's headers (Debian, Ubuntu: apt-get install python3-dev)"
    return None
