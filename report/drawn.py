"""Pictures drawn as SVG by hand, with the exact figure of every part on hover: bars, a block's kernels, memory.

Text takes the color of the page around it. Names come from records: they are shortened and escaped.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections import Counter
from dataclasses import dataclass, field
from html import escape

from common.record import CATEGORIES
from common.text import one_line
from common.traced import MEMORY_KINDS, Block, MemoryUse
from report.analysis import GAPS, GIB
from report.kernels import readable

# Okabe and Ito's colors, which stay apart for color-blind readers, and grays.
COLORS = ("#0072b2", "#56b4e9", "#009e73", "#e69f00", "#cc79a7", "#d55e00", "#f0e442", "#8a6d3b", "#b8bec6")
CATEGORY_COLORS = dict(zip((*CATEGORIES, GAPS), COLORS, strict=True))
MEMORY_COLORS = dict(zip(MEMORY_KINDS, ("#0072b2", "#e69f00", "#b8bec6", "#cc79a7", "#009e73", "#56b4e9"), strict=True))
DARK = ("#0072b2", "#009e73", "#d55e00", "#8a6d3b")  # on which text is white
PLAIN = "#2f7ebc"
WIDTH = 460  # small, so that text stays legible on a phone
LINE, BAR = 46, 20  # heights of a step's line and of its bar
LONGEST_NAME, LONGEST_LABEL, LONGEST_REASON = 24, 48, 68
PHASES = {"forward": 0.0, "backward": 0.36, "optimizer": 0.82}  # of a step's memory: where each begins, of the width
LEAST_LABELED = 34  # width of a part that holds its share as text


@dataclass
class Bar:
    """A step: parts by name, or None and in `label` why it has none; `mark` is a figure on the same scale."""

    name: str
    parts: dict[str, float] | None
    label: str
    mark: float | None = None


@dataclass
class Drawing:
    """An SVG that grows downward."""

    parts: list[str] = field(default_factory=list)
    height: float = 0.0

    def text(self, x: float, y: float, text: object, end: bool = False, bold: bool = False, ink: str = "") -> None:
        look = ' text-anchor="end"' * end + ' font-weight="600"' * bold + (f' style="fill:{ink}"' if ink else "")
        self.parts.append(f'<text x="{x:.1f}" y="{self.height + y:.1f}"{look}>{escape(str(text))}</text>')

    def box(self, x: float, y: float, width: float, height: float, color: str, title: str = "") -> None:
        hover = f"<title>{escape(title)}</title>" if title else ""
        place = f'x="{x:.2f}" y="{self.height + y:.1f}" width="{width:.2f}" height="{height:g}"'
        self.parts.append(f'<rect {place} fill="{color}">{hover}</rect>')

    def line(self, x: float, y: float, x2: float, y2: float, dashed: bool = False) -> None:
        ends = f'x1="{x:.1f}" y1="{self.height + y:.1f}" x2="{x2:.1f}" y2="{self.height + y2:.1f}"'
        dash = ' stroke-dasharray="3 3"' if dashed else ""
        self.parts.append(f'<line {ends} stroke="currentColor" stroke-width="1"{dash}/>')

    def heading(self, name: str, label: str) -> None:
        """The line above a step's bar."""
        self.text(0, 13, one_line(name, LONGEST_NAME), bold=True)
        self.text(WIDTH, 13, one_line(label, LONGEST_LABEL), end=True)

    def reason(self, name: str, why: str) -> None:
        """A step that has nothing to draw."""
        self.text(0, 13, one_line(name, LONGEST_NAME), bold=True)
        for line in textwrap.wrap(one_line(why), LONGEST_REASON):
            self.height += 17
            self.text(0, 13, line)
        self.height += 26

    def legend(self, colors: dict[str, str]) -> None:
        """The names of these colors, in as many lines as they need."""
        x, self.height = 0.0, self.height + 8
        for name, color in colors.items():
            width = 7.0 * len(name) + 28
            if x and x + width > WIDTH:
                x, self.height = 0.0, self.height + 19
            self.box(x, 2, 11, 11, color)
            self.text(x + 16, 12, name)
            x += width
        self.height += 22

    def svg(self) -> str:
        opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height:.0f}"'
        style = "font-family:system-ui,sans-serif;font-size:12.5px;fill:currentColor"
        return f'{opening} style="{style}">{"".join(self.parts)}</svg>'


def stacked(bars: list[Bar], unit: str, shares: bool = False, legend: bool = True) -> str:
    """Bars under each other, each in its parts, at one scale or each as shares of itself."""
    drawing = Drawing()
    top = max([*(sum(bar.parts.values()) for bar in bars if bar.parts), *(bar.mark or 0 for bar in bars)], default=0)
    for bar in bars:
        if bar.parts is None:
            drawing.reason(bar.name, bar.label)
            continue
        drawing.heading(bar.name, bar.label)
        total = sum(bar.parts.values()) or 1.0
        scale, x = WIDTH / (total if shares else top or 1.0), 0.0
        for name, value in bar.parts.items():
            if not value:
                continue
            width, said = value * scale, f"{value / total:.0%}"
            color = CATEGORY_COLORS.get(name, PLAIN)
            title = f"{name}: {value:,.1f} {unit}" + (f", {said}" if len(bar.parts) > 1 else "")
            drawing.box(x, 19, width, BAR, color, title)
            if shares and width >= LEAST_LABELED:
                drawing.text(x + 6, 33, said, ink="#fff" if color in DARK else "#14191f")
            x += width
        if bar.mark and not shares:
            drawing.line(bar.mark * scale, 16, bar.mark * scale, 22 + BAR, dashed=True)
        drawing.height += LINE
    if legend:
        shown = {name for bar in bars for name, value in (bar.parts or {}).items() if value}
        drawing.legend({name: color for name, color in CATEGORY_COLORS.items() if name in shown})
    return drawing.svg()


def timeline(blocks: list[tuple[str, Block | None, str]]) -> str:
    """The kernels of one transformer block, forward and then backward, at one scale; (name, block, why none) a step."""
    drawing = Drawing()
    longest = max(block.forward_ms + block.backward_ms for _, block, _ in blocks if block)
    gap = 8.0  # between forward and backward
    scale = (WIDTH - gap) / (longest or 1.0)
    for name, block, why in blocks:
        if block is None:
            drawing.reason(name, why)
            continue
        launches = len(block.forward) + len(block.backward)
        took = f"{block.forward_ms:.2f} ms + {block.backward_ms:.2f} ms, {launches} kernels"
        drawing.heading(name, took)
        for left, part, ms in (
            (0.0, block.forward, block.forward_ms),
            (block.forward_ms * scale + gap, block.backward, block.backward_ms),
        ):
            drawing.box(left, 19 + BAR + 2, ms * scale, 2, CATEGORY_COLORS[GAPS])
            for launch in part:
                width = launch.ms * scale
                title = f"{readable(launch.name)}: {launch.ms:.3f} ms ({launch.category})"
                color = CATEGORY_COLORS.get(launch.category, PLAIN)
                shown = max(width - 0.4, 0.25)  # neighbours of one color stay apart
                drawing.box(left + launch.start_ms * scale, 19, shown, BAR, color, title)
        drawing.height += LINE + 2
    rule_ms = 10 ** math.floor(math.log10(longest / 4)) if longest else 1.0
    drawing.line(0, 6, rule_ms * scale, 6)
    drawing.text(rule_ms * scale + 8, 10, f"{rule_ms:g} ms; in each row forward, then backward")
    drawing.height += 14
    shown = {launch.category for _, block, _ in blocks if block for launch in block.forward + block.backward}
    drawing.legend({name: color for name, color in CATEGORY_COLORS.items() if name in shown})
    return drawing.svg()


def memory(rows: list[tuple[str, MemoryUse | None, str]]) -> str:
    """What a step holds, stacked by kind, in the order of its allocations; (name, use, why none) a step.

    Not over time: the host allocates long before the GPU computes, and may wait for it in any place.
    """
    drawing, height = Drawing(), 84
    top = max(use.peak_bytes for _, use, _ in rows if use) or 1
    last = next((use for _, use, _ in reversed(rows) if use and use.ms and _is_marked(use)), None)
    for name, use, why in rows:
        if use is None or not use.ms:
            drawing.reason(name, why or "no allocation was seen")
            continue
        drawing.heading(name, f"{use.peak_bytes / GIB:.1f} GiB {describe_peak(use)}")
        xs = [*_places(use), WIDTH]
        floor = [0.0] * len(xs)
        for kind, color in MEMORY_COLORS.items():
            held = use.bytes.get(kind) or [0] * len(use.ms)
            held = [*held, *held[-1:] * (len(xs) - len(held))]  # the last level holds until the step ends
            roof = [low + size / top * height for low, size in zip(floor, held, strict=False)]
            base = drawing.height + 19 + height
            points = " ".join(f"{x:.1f},{base - y:.1f}" for x, y in [*_stairs(xs, roof), *reversed(_stairs(xs, floor))])
            title = f"{kind}: at most {max(held, default=0) / GIB:.1f} GiB"
            drawing.parts.append(f'<polygon points="{points}" fill="{color}"><title>{title}</title></polygon>')
            floor = roof
        for share in [*PHASES.values()][1:] if _is_marked(use) else ():
            drawing.line(share * WIDTH, 19, share * WIDTH, 19 + height, dashed=True)
        if use is last:
            for phase, share in PHASES.items():
                drawing.text(share * WIDTH, 33 + height, phase)
            drawing.height += 8
        drawing.height += height + 32
    drawing.legend(MEMORY_COLORS)
    return drawing.svg()


def _stairs(xs: list[float], ys: list[float]) -> list[tuple[float, float]]:
    """A level holds until the next one: edges are upright."""
    return [point for k, x in enumerate(xs) for point in ((x, ys[max(k - 1, 0)]), (x, ys[k]))]


def _is_marked(use: MemoryUse) -> bool:
    """Whether it is known where backward and the optimizer begin."""
    return None not in (use.backward_ms, use.optimizer_ms)


def _places(use: MemoryUse) -> list[float]:
    """Where each point of a step's memory is drawn: evenly in the part of its phase, or over the whole width."""
    if not _is_marked(use):
        return [k / max(1, len(use.ms) - 1) * WIDTH for k in range(len(use.ms))]
    begins = (0.0, use.backward_ms, use.optimizer_ms)
    phases = [max(k for k, begin in enumerate(begins) if ms >= begin) for ms in use.ms]
    counts, edges, xs = Counter(phases), [*PHASES.values(), 1.0], []
    for k, phase in enumerate(phases):
        done = (k - phases.index(phase)) / max(1, counts[phase] - (phase == phases[-1]))
        xs.append((edges[phase] + done * (edges[phase + 1] - edges[phase])) * WIDTH)
    return xs


def describe_peak(use: MemoryUse) -> str:
    """In which part of the step the peak lies, and what holds the most of it: `in backward, 60% activations`."""
    begins = {"backward": use.backward_ms, "the optimizer": use.optimizer_ms}
    part = [name for name, ms in begins.items() if ms is not None and use.peak_ms >= ms][-1:] or ["forward"]
    held = at_peak(use)
    if not any(held.values()):
        return f"in {part[0]}"
    most = max(held, key=held.get)
    return f"in {part[0]}, {held[most] / sum(held.values()):.0%} {most}"


def at_peak(use: MemoryUse) -> dict[str, int]:
    """Bytes by kind at the point nearest to the peak."""
    at = min(range(len(use.ms)), key=lambda k: abs(use.ms[k] - use.peak_ms), default=0)
    return {kind: sizes[at] for kind, sizes in use.bytes.items() if at < len(sizes)}


def standalone(svg: str) -> str:
    """An SVG of this project as a file of its own, legible on light and on dark pages."""
    opening, rest = svg.split(">", 1)
    width, height = map(float, re.search(r'viewBox="0 0 (\S+) (\S+)"', opening).groups())
    opening = re.sub(r'viewBox="[^"]*"', f'viewBox="-12 -8 {width + 24:g} {height + 16:g}"', opening)
    style = (
        "<style>svg{color:#1c2530}.paper{fill:#fff}"
        "@media(prefers-color-scheme:dark){svg{color:#e4e9ee}.paper{fill:#14191f}}</style>"
    )
    paper = f'<rect class="paper" x="-12" y="-8" width="{width + 24:g}" height="{height + 16:g}"/>'
    return f"{opening}>{style}{paper}{rest}\n"
