"""What changed from one step to the next: lines of code, kinds of kernels, kernels in plain words."""

import re
from collections import defaultdict
from dataclasses import dataclass, field

from common.kernels import in_words
from common.record import Kernel, Row
from common.text import one_line
from report.cells import milliseconds, number, time_or_status
from report.changes import code_diff
from report.figures import Figures, Line

MOST_KERNELS = 12


@dataclass
class Card:
    """A step and the one before it. Cells are text."""

    name: str
    title: str  # what the script says of itself in its first line
    change: str  # and of its change
    outcome: str  # how fast it is, or why it has no time
    pair: list[Line] = field(default_factory=list)  # the nearest row before that has a time, and this one
    code: list[tuple[str, str]] = field(default_factory=list)  # (sign, line)
    without_code: str = ""  # why a row that has a time shows no code
    categories: list[dict[str, str]] = field(default_factory=list)
    kernels: list[dict[str, str]] = field(default_factory=list)


def cards(figures: Figures) -> list[Card]:
    """A card for every step but the first, and none for one that was left out."""
    cards, before, script = [], None, None
    for line in figures.steps:
        if script and line.row.status != "not run":
            base = line.base
            cards.append(_card(line, base or before, base.row if base else script))
        before, script = line if line.ms else before, line.row
    return cards


def _card(line: Line, before: Line | None, script: Row) -> Card:
    """The card of a step, `before` being the nearest row before it that has a time, and `script` the row
    before."""
    card = Card(line.name, title(line.row), change(line.row), line.why_untimed)
    if line.ms or not line.row.changes:  # what a model of yours did not take is nothing to copy
        card.code = code_diff(script, line.row)
    if not line.ms:
        return card
    if not card.code:
        has_sources = script.source and line.row.source
        card.without_code = (
            "The code is the same." if has_sources else "The records hold no source to compare."
        )
    card.outcome = _outcome(before, line)
    if before:
        card.pair = [before, line]
        if before.category_ms and line.category_ms:
            card.categories = _category_changes(before.category_ms, line.category_ms)
            card.kernels = _kernel_changes(before.row.profile.kernels, line.row.profile.kernels)
    return card


def _outcome(before: Line | None, line: Line) -> str:
    faster = line.over_before
    if faster is None:
        return f"{time_or_status(line)} ms per step"
    if not faster.clear:
        return f"As fast as {before.name}, within the spread of the times"
    if faster.value < 1:
        return f"{1 / faster.value:.2f}{faster.mark} times slower than {before.name}"
    return f"{faster.value:.2f}{faster.mark} times faster than {before.name}"


def change(row: Row) -> str:
    """What a script's docstring says after its first line."""
    after_title = re.match(r'(?s)""".*?\n\n(.*?)"""', (row.source or "")[:3000])
    return " ".join(after_title[1].split()) if after_title else ""


def title(row: Row) -> str:
    """The first line of a script where it names its step, otherwise the script's name."""
    first = re.match(r'"""(Step .+)', row.source or "")
    return one_line(first[1].rstrip('."'), 120) if first else row.step


def _category_changes(old: dict[str, float], new: dict[str, float]) -> list[dict[str, str]]:
    """Milliseconds by kind of kernel, the largest change first."""
    names = [name for name in {**old, **new} if old.get(name) or new.get(name)]
    rows = []
    for name in sorted(names, key=lambda name: -abs(new.get(name, 0.0) - old.get(name, 0.0))):
        before, after = old.get(name, 0.0), new.get(name, 0.0)
        row = {"ms per step": name, "before": number(before), "after": number(after)}
        rows.append(row | {"change": number(after - before, "+,.1f")})
    return rows


@dataclass
class Change:
    """What kernels of the same words took before, and after."""

    before_ms: float = 0.0
    after_ms: float = 0.0
    before_launches: float = 0.0
    after_launches: float = 0.0


def _kernel_changes(before: list[Kernel], after: list[Kernel]) -> list[dict[str, str]]:
    """Kernels in plain words, the largest change first."""
    changes: dict[str, Change] = defaultdict(Change)
    for kernel in before:
        of_kernel = changes[in_words(kernel.name)]
        of_kernel.before_ms += kernel.ms
        of_kernel.before_launches += kernel.launches
    for kernel in after:
        of_kernel = changes[in_words(kernel.name)]
        of_kernel.after_ms += kernel.ms
        of_kernel.after_launches += kernel.launches
    largest = sorted(changes, key=lambda words: -abs(changes[words].after_ms - changes[words].before_ms))
    rows = []
    for words in largest[:MOST_KERNELS]:
        of_kernel = changes[words]
        ms = f"{milliseconds(of_kernel.before_ms)} → {milliseconds(of_kernel.after_ms)}"
        launches = f"{of_kernel.before_launches:,.0f} → {of_kernel.after_launches:,.0f}"
        rows.append({"kernel": words, "ms": ms, "launches": launches})
    return rows
