"""What a recorded time depends on, as a hash: the code that a timed step runs through, and nothing else.

Each record holds this hash, and is stale when the present code has another. It covers the scripts and
MODULES, without comments, docstrings, blank lines, and statements that only raise an error or print a
message: a message may be improved without measuring anything again.
"""

import hashlib
import io
import tokenize
from collections.abc import Iterable
from pathlib import Path

# Of common/: what draws batches and weights, shares a model among GPUs, rehearses and times.
MODULES = ("data", "model", "parallel", "rehearsal", "timing")
TELL = ("progress", "say")  # functions that print a message
BEFORE_A_STATEMENT = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
NOTHING = (tokenize.NL, tokenize.COMMENT)


def code_sha256(root: Path) -> str:
    """16 hex digits over the scripts and MODULES of a checkout."""
    modules = [root / "common" / f"{name}.py" for name in MODULES]
    return sha256_of(sorted(path for path in [*root.glob("[0-9]*_*.py"), *modules] if path.is_file()))


def sha256_of(paths: Iterable[Path]) -> str:
    """16 hex digits over the names of Python files and the code in them."""
    digest = hashlib.sha256()
    for path in paths:
        code = "\n".join(code_of(path.read_text(), messages=False))
        digest.update(f"{path.name}\0{code}\0".encode())
    return digest.hexdigest()[:16]


def code_of(source: str, messages: bool = True) -> list[str]:
    """The lines of code of a Python source, without docstrings, comments and blank lines; without `messages`
    also without statements that hold one. Empty for what is no Python."""
    lines = source.splitlines()
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (tokenize.TokenError, SyntaxError):
        return []
    begins, message_from = True, None  # whether a statement begins with the next token; where a message did
    for token, following in zip(tokens, [*tokens[1:], tokens[-1]], strict=True):
        (row, column), (end, _) = token.start, token.end
        if token.type == tokenize.COMMENT:
            lines[row - 1] = lines[row - 1][:column]
        if token.type == tokenize.STRING and begins and following.type == tokenize.NEWLINE:  # a docstring
            lines[row - 1 : end] = [""] * (end - row + 1)
        if begins and not messages and is_message(token.string, following.string):
            message_from = row
        if token.type == tokenize.NEWLINE and message_from:
            lines[message_from - 1 : row] = [""] * (row - message_from + 1)
            message_from = None
        begins = token.type in BEFORE_A_STATEMENT or (begins and token.type in NOTHING)
    return [line.rstrip() for line in lines if line.strip()]


def is_message(word: str, following: str) -> bool:
    """Whether a statement that begins with these two words raises an error or tells something."""
    return word == "raise" or (word in TELL and following == "(")
