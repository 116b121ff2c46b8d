"""The story of a run, from which the page and docs/steps.md are made: pictures, and a card a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from common.record import Row, Run
from common.traced import Block
from report import analysis, drawn, sentences, table
from report.analysis import is_timed, median_ms, reason_untimed
from report.doubts import compared, mark
from report.load import environment_of

MOST_FACTS, MOST_KERNELS = 6, 12
ONE_BLOCK = (
    "Every kernel of one block, from one attention to the next. The left group is the forward pass, the right one the "
    "backward pass. The gray line below a group is as long as the group takes. A gap inside a group is a moment in "
    "which nothing ran."
)
OF_NO_BLOCK = {"loss", "optimizer"}  # kinds of kernels
PEERS = "Below the steps stand peers: other libraries that train the same model on the same batches."
FAR_APART = 4  # times: beyond it a block of the later steps gets a picture of its own


@dataclass
class Card:
    """A step beside the one before it."""

    name: str
    title: str
    before: str  # the script before
    compared: str  # the last row before that has a time; empty without one
    change: str
    expected: str
    outcome: str
    why: str
    further: list[str]
    code: list[tuple[str, str]] | None
    noun: str  # what the kernels are: of a CPU operators
    bars: str = ""  # SVG; empty where there is nothing to compare
    facts: list[dict] = field(default_factory=list)
    categories: list[dict] = field(default_factory=list)
    kernels: list[dict] = field(default_factory=list)  # `names` beside the cells
    kinds: Counter = field(default_factory=Counter)


def cards(run: Run) -> list[Card]:
    """A card for every step but the first, and none for a step that was not to run."""
    pairs = [*analysis.consecutive(run.steps)][1:]
    return [_card(run, script, *pair) for script, pair in zip(run.steps, pairs, strict=False)
            if pair[1].status != "not run"]  # fmt: skip


def _card(run: Run, script: Row, before: Row | None, after: Row) -> Card:
    card = Card(
        after.step, sentences.title(after), script.step, before.step if before else "",
        change=sentences.told(after, "Change"), expected=sentences.told(after, "Why"),
        outcome=sentences.outcome(run, before, after), why=sentences.why(run, before, after),
        further=sentences.further(run, before, after), code=analysis.code_diff(script, after), noun=_noun(run),
    )  # fmt: skip
    if before is not None and is_timed(after):
        card.bars = drawn.stacked([time_bar(run, row) for row in (before, after)], "ms", legend=False)
        card.facts = _facts(run, before, after)
        if before.profile and after.profile:
            changes, kernels = analysis.changed_categories(before, after), analysis.changed_kernels(before, after)
            card.categories = [_cells("kind of kernel", change, 1) for change in changes]
            card.kernels = [_cells("kernel", change, 2) | {"names": names} for change, names in kernels[:MOST_KERNELS]]
            card.kinds = Counter(change.kind for change, _ in kernels)
    return card


def _cells(header: str, change: analysis.Change, digits: int) -> dict:
    ms = arrow(change.before_ms, change.after_ms, digits)
    return {header: change.name, "ms": ms, "launches": arrow(change.before_launches, change.after_launches, 0)}


def _facts(run: Run, before: Row, after: Row) -> list[dict]:
    """What the machine did in both steps: the first figures that are known and differ."""
    old, new = (_figures(run, row) for row in (before, after))
    facts = [(name, old[name], new[name]) for name in old if old[name] != new[name]]
    return table.grid(("per training step", "before", "after"), facts[:MOST_FACTS])


def _figures(run: Run, row: Row) -> dict[str, str]:
    profile = row.profile
    return {
        "ms per step": ms_of(run, row),
        "peak GiB": table.gib(row),
        f"{_noun(run).lower()} run": table.figure(profile and profile.kernels_per_step, ",.0f"),
        "most time in": analysis.describe_bound(row),
        "tokens/J": table.tokens_per_joule(row),
        "clock, MHz": table.figure(row.clock_mhz, ",.0f"),
        "host waits for the GPU": table.figure(row.host_syncs, ",.0f"),
        "autograd nodes of attention": table.figure(profile and profile.autograd_nodes_attention, ",.0f"),
    }


def time_bar(run: Run, row: Row, reference: Row | None = None) -> drawn.Bar:
    """The time of a step in its kinds of kernels, or in one piece where it has no profile."""
    if not is_timed(row):
        return _untimed_bar(row)
    speedup = compared(row, reference, run)
    label = f"{ms_of(run, row)} ms"
    label += f", predicted {table.figure(row.predicted_ms)}" if row.predicted_ms else ""
    label += f" · {speedup.ratio:.1f}x{speedup.mark}" if speedup and row is not reference else ""
    label += _head(run, row)
    return drawn.Bar(row.step, analysis.category_ms(row) or {"step": median_ms(row)}, label, row.predicted_ms)


def _head(run: Run, row: Row) -> str:
    """The format of an FP8 row's LM head, as a label ends with it, where peers stand beside the steps."""
    return f" · {row.settings.head} head" if run.peers and row.settings.head else ""


def where(run: Run) -> dict[str, str]:
    """Where the time of every step and peer went, with its speedup over the first that has a time."""
    reference = analysis.reference_row(run.steps)
    whole, shares = whole_and_shares([time_bar(run, row, reference) for row in [*run.steps, *run.peers]])
    return {"where": whole, "shares": shares}


def whole_and_shares(bars: list[drawn.Bar]) -> tuple[str, str]:
    """A picture in ms, and one in shares of each profiled step; empty without any."""
    profiled = [bar for bar in bars if bar.parts and "step" not in bar.parts]
    return drawn.stacked(bars, "ms"), drawn.stacked(profiled, "ms", shares=True) if profiled else ""


def blocks(run: Run) -> dict[str, str]:
    """Pictures by caption: the kernels of one block, all steps at one scale; and those after the first again, where it
    dwarfs them."""
    rows = [(row.step, *one_block(row)) for row in run.steps]
    spans = [block.forward_ms + block.backward_ms for _, block, _ in rows if block]
    if not spans:
        return {}
    pictures, rest = {"All steps at one time scale.": drawn.timeline(rows)}, [row for row in rows if row[1]][1:]
    if rest and spans[0] > FAR_APART * max(spans[1:]):
        pictures["The same without the first step, enlarged, at one time scale."] = drawn.timeline(rest)
    return pictures


def one_block(row: Row) -> tuple[Block | None, str]:
    """The kernels of one block; or None, and why. On a CPU an attention may be missing from a profile: what then lies
    between the others is more than a block."""
    block = row.profile and row.profile.block
    if block and OF_NO_BLOCK & {launch.category for launch in block.forward + block.backward}:
        return None, "its profile lacks an attention, so no block can be cut out of it"
    return block, "" if block else _why_none(row)


def block_table(run: Run) -> list[dict]:
    """One block of every step in figures: ms forward and backward, and by kind of kernel."""
    found = [(row.step, block, _ms_by_kind(block)) for row in run.steps if (block := one_block(row)[0])]
    kinds = [kind for kind in drawn.CATEGORY_COLORS if any(kind in ms for _, _, ms in found)]
    cells = [(step, f"{block.forward_ms:.2f}", f"{block.backward_ms:.2f}",
              *(table.figure(ms.get(kind), ".2f") for kind in kinds)) for step, block, ms in found]  # fmt: skip
    return table.grid(("ms of one block", "forward", "backward", *kinds), cells)


def _ms_by_kind(block: Block) -> Counter:
    kinds = Counter()
    for launch in block.forward + block.backward:
        kinds[launch.category] += launch.ms
    return kinds


def memory(run: Run) -> str:
    """A picture of what steps hold, and what for; where no row says what for, of their peaks alone."""
    if any(row.memory for row in run.steps):
        return drawn.memory([(row.step, row.memory, _why_none(row)) for row in run.steps])
    return _plain_bars("peak", "GiB", [(row, analysis.peak_gib(row), f"{table.gib(row)} GiB") for row in run.steps])


def _plain_bars(name: str, unit: str, figures: list[tuple[Row, float | None, str]]) -> str:
    """A picture of one figure of every row that has it, with its label; empty where no row has it."""
    bars = [drawn.Bar(row.step, {name: value}, label) if is_timed(row) else _untimed_bar(row)
            for row, value, label in figures if value or not is_timed(row)]  # fmt: skip
    return drawn.stacked(bars, unit, legend=False) if any(bar.parts for bar in bars) else ""


def _untimed_bar(row: Row) -> drawn.Bar:
    return drawn.Bar(row.step, None, reason_untimed(row))


def memory_table(run: Run) -> list[dict]:
    """GiB of every step at the peak, by what they are for, and where that lies; empty where no row says."""
    cells = []
    for row in run.steps:
        if row.memory:
            held = drawn.at_peak(row.memory)
            gib = (f"{held.get(kind, 0) / analysis.GIB:.1f}" for kind in drawn.MEMORY_COLORS)
            where, _, _ = drawn.describe_peak(row.memory).partition(",")
            cells.append((row.step, f"{row.memory.peak_bytes / analysis.GIB:.1f}", where, *gib))
    return table.grid(("GiB", "peak", "where", *drawn.MEMORY_COLORS), cells)


def energy(run: Run) -> str:
    """A picture of the tokens that a joule trains."""
    figures = [(row, row.tokens_per_joule, f"{table.tokens_per_joule(row)} tokens/J{_head(run, row)}")
               for row in [*run.steps, *run.peers]]  # fmt: skip
    return _plain_bars("tokens per joule", "tokens/J", figures)


def _noun(run: Run) -> str:
    return "Operators" if environment_of(run).device_type == "cpu" else "Kernels"


def _why_none(row: Row) -> str:
    return "not recorded" if is_timed(row) else reason_untimed(row)


def ms_of(run: Run, row: Row) -> str:
    """Milliseconds of a row in a place that has no room for a range."""
    return table.figure(median_ms(row)) + mark(run, row)


def arrow(before: float | None, after: float | None, digits: int = 1) -> str:
    ends = (table.figure(end, f",.{digits}f") for end in (before, after))
    return "" if before is None and after is None else " → ".join(ends)
