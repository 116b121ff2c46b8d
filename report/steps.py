"""docs/steps.md: the story of one recorded run in Markdown, with its pictures as files beside it."""

from __future__ import annotations

from common.record import Run
from report import drawn, page, story, table, traffic
from report.doubts import NOTICE, SERIOUS
from report.load import environment_of
from report.sentences import headline
from report.story import Card
from report.table import bullets, levels, markdown, pipe_table

COUNTED = (
    "*Most time in* above only says which kind of kernel takes most of a step, and the roofline takes the least bytes "
    "by arithmetic. Neither says what limits a kernel. Here the GPU counted the bytes that go through DRAM. The lines "
    "name the kernels among each "
    "step's ten longest that pass over memory: neither matrix products nor fused attention. The percentage behind a "
    "name is the kernel's bandwidth as a share of a large copy's, and some kernels exceed it a little. From "
    f"{traffic.LIMITED_BY_MEMORY:.0%} on, a kernel counts as limited by memory. A kernel that is not among the ten "
    "longest is not named, so a step may have more kernels of a kind. [How it was "
    "counted](performance.md#dram-bytes-of-the-longest-kernels)."
)
PARTS = (
    "Another run measured the parts of each change one at a time: [how](performance.md#each-gain-to-its-cause). A part "
    "*alone* is added to the step before. A part *left out* is missing from the whole step: what it saves is how much "
    "faster the whole step is than the step without it."
)
FOLDER = "steps"  # of the pictures, below docs/
SOURCES = (
    "The diffs, and what each step says of itself, are those of the scripts as they ran: the record holds their text. "
    "Today's scripts may differ."
)


def steps_page(run: Run, at: str, counted: list[str], parts_of: dict[str, str]) -> tuple[str, dict[str, bytes]]:
    """Markdown between the markers of docs/steps.md, and the pictures by file name; `at` is where the run is,
    `counted` what the GPU's counters say of its steps, `parts_of` a table of what the parts of a step save."""
    evidence = page.evidence(run)
    pictures, blocks = story.where(run), []
    took = (f"{row['ms of one block']} {row['forward']} and {row['backward']}" for row in story.block_table(run))
    alternative = f"Kernels of one transformer block, in ms forward and backward: {', '.join(took)}"
    for k, (caption, svg) in enumerate(story.blocks(run).items(), 1):
        pictures[f"block-{k}"] = svg
        blocks += [caption, f"![{alternative}](steps/block-{k}.svg)"]
    pictures |= {name: part.svg for name, part in evidence.items()}
    doubts = levels(run, [headline(run)])
    parts = [
        f"**{markdown(headline(run))}**",
        f"{markdown(table.describe_machine(environment_of(run)))}. {markdown(table.describe_workload(run))}. "
        f"[Record]({at}/results.json), [report as one page]({at}/report.html).",
        *bullets(doubts.get(SERIOUS, [])),
        "## Where the time went",
        "A bar is as long as a training step takes. Its colors are kinds of kernel.",
        story.PEERS if run.peers else "",
        "![Milliseconds of a training step by kind of kernel](steps/where.svg)",
        "The same as shares of each step:\n\n![Shares of each step](steps/shares.svg)" if pictures["shares"] else "",
        SOURCES if any(row.source for row in run.steps) else "",
        PARTS if parts_of else "",
        *(part for card in story.cards(run) for part in _card(card, parts_of.get(card.name, ""))),
        *(["## One transformer block", story.ONE_BLOCK, *blocks] if blocks else []),
    ]
    for name, part in evidence.items():
        picture = [f"![{part.name}](steps/{name}.svg)"] if part.svg else []
        figures = [table.pipe(part.rows, n_left=1)] if name == "memory" and part.rows else []
        parts += [f"## {part.name}", *picture, markdown(part.caption), *figures]
    parts += ["## What goes through DRAM", COUNTED, "\n".join(bullets(counted)).strip()] if counted else []
    parts += ["## How far to trust it", "\n".join(bullets(doubts.get(NOTICE, ["No rule was broken."]))).strip()]
    return "\n\n".join(filter(None, parts)), {
        f"{name}.svg": drawn.standalone(svg).encode() for name, svg in pictures.items() if svg
    }


def _card(card: Card, parts: str) -> list[str]:
    lines = [f"## {markdown(card.title)}", markdown(card.change)]
    lines += [f"Why it should help, as the script says: {markdown(card.expected)}"] if card.expected else []
    lines.append(markdown(f"{card.outcome} {card.why}"))
    lines.append(markdown(" ".join(card.further)))
    lines += ["One part of the change at a time:", parts] if parts else []
    if card.facts:
        cells = [tuple(map(markdown, row.values())) for row in card.facts]
        lines.append(pipe_table(("per training step", card.compared, card.name), cells))
    if card.code:
        code = "\n".join(f"{'@@ … ' if sign == '@' else sign}{line}".rstrip() for sign, line in card.code)
        lines.append(f"```diff\n{code}\n```")
    return lines
