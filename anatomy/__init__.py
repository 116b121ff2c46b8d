"""Small experiments that show why each step of the ladder is faster: python -m anatomy."""

import os
import signal
import sys

from common.errors import needs


def exit_at_once(*_) -> None:
    """End after Ctrl-C. While torch is imported, a KeyboardInterrupt can be lost or abort the process instead."""
    os.write(2, b"python -m anatomy: interrupted\n")
    os._exit(130)


if sys.argv[0] == "-m" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, exit_at_once)  # argv[0] is "-m" only while Python looks up this package as a command
needs("torch", "tabulate")  # one line instead of a traceback
