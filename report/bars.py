"""Bars, drawn as SVG: on the page of a run, and in its picture (README, steps.svg).

All bars of one drawing are to one scale, and the longest takes the whole width. Horizontal places are per
cents, so a drawing is as wide as what it stands in. Names come from records: all text is escaped.
"""

from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from common.kernels import in_words
from common.record import CATEGORIES
from common.text import one_line
from report.cells import gain, time_or_status
from report.changes import lines_added
from report.figures import GAPS, Figures, Line

WIDE, NARROW = 830, 390  # pixels of a picture
MOST_LINES = 6  # of code below a bar
# Okabe and Ito's colors, which stay apart for color-blind readers, and grays.
PALETTE = ("#0072b2", "#56b4e9", "#009e73", "#e69f00", "#cc79a7", "#d55e00", "#f0e442", "#8a6d3b", "#b8bec6")
COLORS = dict(zip((*CATEGORIES, GAPS), PALETTE, strict=True))
PLAIN = "#6e7b88"  # what has no kind of kernel, and soft text
# Pixels: of letters, their lines and a bar; the most that a letter of code and one of a name take.
TEXT, LINE, BAR, GAP = 13, 15, 14, 10
CODE_LETTER, LETTER = 6.7, 7.2
NO_BREAK = chr(160)  # a space that an SVG keeps at the beginning of a line
LONGEST_LABEL = 34  # letters
PAGE_LETTERS = 110  # of a line of code; a narrow page shows its beginning


@dataclass
class Bar:
    """A row of a drawing: its name and a label above the bar, code below it."""

    name: str
    label: str
    parts: list[tuple[str, float, str]] = field(default_factory=list)  # what, how long, the color
    code: list[str] = field(default_factory=list)

    @property
    def length(self) -> float:
        return sum(length for _, length, _ in self.parts)


def draw(bars: list[Bar], code_letters: int) -> tuple[str, int]:
    """The elements of an SVG, and their height in pixels."""
    longest = max((bar.length for bar in bars), default=0.0) or 1.0
    elements, top = [], 0
    for bar in bars:
        name, label = (escape(one_line(text, LONGEST_LABEL)) for text in (bar.name, bar.label))
        elements.append(
            f'<text y="{top + TEXT}" font-size="{TEXT}"><tspan font-weight="600">{name}</tspan>'
            f'<tspan dx="10">{label}</tspan></text>'
        )
        top += LINE + 3
        x = 0.0
        for what, length, color in bar.parts:
            width = 100 * length / longest
            elements.append(
                f'<rect x="{x:.3f}%" y="{top}" width="{width:.3f}%" height="{BAR}" fill="{color}">'
                f"<title>{escape(what)}</title></rect>"
            )
            x += width
        top += BAR if bar.parts else 0
        for line in bar.code:
            top += LINE
            elements.append(
                f'<text x="6" y="{top}" font-size="11" font-family="ui-monospace, monospace">'
                f"{escape(one_line(line, code_letters)).replace(' ', NO_BREAK)}</text>"
            )
        top += GAP
    return "\n".join(elements), top


def svg(bars: list[Bar], about: str) -> str:
    """A drawing for a page: text has the page's color."""
    elements, height = draw(bars, PAGE_LETTERS)
    label = escape(about, {'"': "&quot;"})
    return (
        f'<svg class="bars" role="img" aria-label="{label}" width="100%" height="{height}" '
        f'fill="currentColor">{elements}</svg>'
    )


def picture(figures: Figures, width: int = WIDE, ink: str = "#18212b", paper: str = "white") -> str:
    """A file: what each step adds, and where the milliseconds of its training step go."""
    bars = ladder_bars(figures)
    elements, height = draw(bars, int((width - 12) / CODE_LETTER))
    legend, below = _legend(bars, width - 16, height)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{below + 16}" fill="{ink}" '
        f'font-family="system-ui, sans-serif"><rect width="100%" height="100%" fill="{paper}"/>'
        f'<svg x="8" y="8" width="{width - 16}" height="{below}">{elements}{legend}</svg></svg>\n'
    )


def _legend(bars: list[Bar], width: int, top: int) -> tuple[str, int]:
    """What the colors mean, in as many lines as it takes, and where it ends."""
    elements, x = [], 0.0
    for name, color in colors_of(bars).items():
        needs = 24 + LETTER * len(name)
        if x and x + needs > width:
            x, top = 0.0, top + LINE + 2
        elements.append(
            f'<rect x="{x:.0f}" y="{top + 2}" width="11" height="11" fill="{color}"/>'
            f'<text x="{x + 16:.0f}" y="{top + TEXT - 1}" font-size="12">{escape(name)}</text>'
        )
        x += needs
    return "".join(elements), top + LINE + 4


def colors_of(bars: list[Bar]) -> dict[str, str]:
    """The colors of the kinds of kernels that take at least half a per cent of a bar."""
    used = {color for bar in bars for _, length, color in bar.parts if length >= 0.005 * bar.length}
    return {name: color for name, color in COLORS.items() if color in used}


# --- what bars show -------------------------------------------------------------------------------


def ladder_bars(figures: Figures) -> list[Bar]:
    """The time of every step, and the code that it adds."""
    bars = [time_bar(line) for line in figures.steps]
    for bar, line in zip(bars, figures.steps, strict=True):
        is_tried = line.row.changes and not line.ms  # what a model did not take is nothing to copy
        if line.base and not is_tried:
            added = [*lines_added(line.base.row.text, line.row.text)]
            if len(added) > MOST_LINES:  # the first ones, how many more, and the last one
                added[MOST_LINES - 1 : -1] = [f"... {len(added) - MOST_LINES} more lines, and"]
            bar.code = [f"+ {code}" for code in added]
    return bars


def time_bar(line: Line) -> Bar:
    """The time of a step by kind of kernel, whose parts add up to it."""
    if not line.ms:
        return Bar(line.name, line.row.status)
    label = f"{time_or_status(line)} ms"
    if line.over_first and line.over_first.value != 1.0:
        label += f", {gain(line.over_first)} x"
    if not line.category_ms:
        return Bar(line.name, label, [(f"a step: {line.ms:,.2f} ms", line.ms, PLAIN)])
    scale = line.ms / sum(line.category_ms.values())
    return Bar(line.name, label, parts_by_kind(line.category_ms, scale))


def share_bar(line: Line) -> Bar:
    """The time of a step by kind of kernel, as shares of itself."""
    largest = f"{line.share[0]} {line.share[1]:.0%}" if line.share else ""
    return Bar(line.name, largest, parts_by_kind(line.category_ms, 1 / sum(line.category_ms.values())))


def parts_by_kind(category_ms: dict[str, float], scale: float) -> list[tuple[str, float, str]]:
    return [(f"{name}: {ms:,.2f} ms", ms * scale, COLORS[name]) for name, ms in category_ms.items() if ms]


def block_bar(line: Line) -> Bar:
    """The kernels of one transformer block, forward and then backward, as shares of their time."""
    profile, parts, halves_ms = line.profile, [], []
    for half in (profile.forward, profile.backward):
        at = 0.0
        for launch in half:
            # Operators of a CPU lie inside of each other: each has its own time alone, and none waits.
            if profile.idle_ms is not None and (gap := launch.start_ms - at) > 0:
                parts.append((f"{GAPS}: {gap:.3f} ms", gap, "none"))
            parts.append((f"{in_words(launch.name)}: {launch.ms:.3f} ms", launch.ms, COLORS[launch.category]))
            at = max(at, launch.start_ms + launch.ms)
        halves_ms.append(sum(launch.ms for launch in half) if profile.idle_ms is None else at)
    whole = sum(halves_ms) or 1.0
    label = "forward {:.2f} ms, backward {:.2f} ms".format(*halves_ms)
    return Bar(line.name, label, [(what, ms / whole, color) for what, ms, color in parts])


def memory_bar(line: Line) -> Bar:
    label = f"{line.gib:.1f} GiB"
    return Bar(line.name, label, [(label, line.gib, PLAIN)])
