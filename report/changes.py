"""What one script changes of another: lines of code, from the sources that records hold."""

import difflib
import functools
import io
import re
import textwrap
import tokenize

from common.record import Row

IMPORT = re.compile(r"import |from |\w+ = import_or_skip\(")
IMPORTED_NAMES = re.compile(r"(?m)^(\s*from [\w.]+ import) \([^)]*\)")  # one a line, between parentheses
BEFORE_A_STATEMENT = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
NOTHING = (tokenize.NL, tokenize.COMMENT)
LONG_SOURCE = 2000  # lines, from which frequent lines are not compared, since that takes too long


@functools.cache
def lines_added(before: str, after: str) -> tuple[str, ...]:
    """The lines of code in a source that are not in the one before, each group of them with its depth inside
    the group: without docstring, imports and comments, and without lines that only moved to another depth."""
    old, new = code_lines(before), code_lines(after)
    if not old or not new:
        return ()
    is_long = max(len(old), len(new)) > LONG_SOURCE
    stripped = ([line.strip() for line in lines] for lines in (old, new))
    changes = difflib.SequenceMatcher(None, *stripped, autojunk=is_long).get_opcodes()
    groups = [new[start:end] for kind, _, _, start, end in changes if kind in ("insert", "replace")]
    return tuple(line for group in groups for line in textwrap.dedent("\n".join(group)).split("\n"))


def code_lines(source: str) -> list[str]:
    """The code of a script, line by line, without docstring, imports and comments."""
    text = IMPORTED_NAMES.sub(r"\1", "\n".join(code_of(source)))
    return [line for line in text.splitlines() if not IMPORT.match(line.strip())]


def code_of(source: str) -> list[str]:
    """The lines of code of a Python source, without docstrings, comments and blank lines. Empty for what is
    no Python."""
    lines = source.splitlines()
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (tokenize.TokenError, SyntaxError):
        return []
    begins = True  # whether a statement begins with the next token
    for token, following in zip(tokens, [*tokens[1:], tokens[-1]], strict=True):
        (row, column), (end, _) = token.start, token.end
        if token.type == tokenize.COMMENT:
            lines[row - 1] = lines[row - 1][:column]
        if token.type == tokenize.STRING and begins and following.type == tokenize.NEWLINE:  # a docstring
            lines[row - 1 : end] = [""] * (end - row + 1)
        begins = token.type in BEFORE_A_STATEMENT or (begins and token.type in NOTHING)
    return [line.rstrip() for line in lines if line.strip()]


def code_diff(before: Row, after: Row, around: int = 1) -> list[tuple[str, str]]:
    """The code of two scripts as (sign, line), with unchanged lines `around` each change, without docstring.

    A sign is `+`, `-`, a space, or `@` for lines left out. Empty without sources.
    """
    old, new = (re.sub(r'(?s)^"""(.*?)"""\s*', "", row.text).splitlines() for row in (before, after))
    if not old or not new:
        return []
    lines = [*difflib.unified_diff(old, new, n=around, lineterm="")][2:]
    return [(line[0], "" if line[0] == "@" else line[1:]) for line in lines if line[1:].strip()]
