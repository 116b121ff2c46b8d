"""What the cells of a sweep show: for each rung where it pays, where it does not, and why."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from report.load import RecordError, convert, read_json

SWEEP = "sweep.json"
SHAPE = ("n_layer", "n_head", "n_embd", "seq_len", "vocab_size", "batch_size")
FEWEST_LINES, FEWEST_SIZES = 3, 3  # of shapes, that show a trend
EXPLAINED = 0.9  # of what became longer: kinds of kernels are named until they reach it
PART, CLOSE = 2, 1.5  # a profiled difference within such a factor of a timed one explains a part of it, or all
LEAST = 0.02  # difference of two times: the same cell in another process may differ by as much


@dataclass
class Cell:
    """One script at one shape. What was predicted is from the machine's roofs."""

    step: str
    n_layer: int
    n_head: int
    n_embd: int
    seq_len: int
    vocab_size: int
    batch_size: int
    status: str  # of common.record.STATUSES
    reason: str | None = None
    median_ms: float | None = None
    predicted_ms: float | None = None
    note: str | None = None
    step_ms: list[float] = field(default_factory=list)  # every timed step
    warmup_s: float | None = None  # compilation and capture included
    peak_bytes: int | None = None  # of CUDA's allocator; null on a CPU
    host_bound: bool | None = None  # whether the GPU had no work left when the last step had been launched
    captured: bool | None = None
    predicted_category_ms: dict[str, float] = field(default_factory=dict)
    predicted_host_ms: float | None = None  # to launch the kernels of a step that is launched
    predicted_commit: str | None = None  # at which the roofs were measured; null in older records: that of the cell
    launches: int | None = None  # of a step, as counted for the prediction
    category_ms: dict[str, float] = field(default_factory=dict)  # profiled, gaps included; where a step was slower
    again_ms: float | None = None  # the median of that training, timed before the profiler began
    started_at: str | None = None
    device: str | None = None  # these five: of the machine that ran it
    torch: str | None = None
    transformer_engine: str | None = None
    commit: str | None = None
    dirty: bool | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(getattr(self, name) for name in SHAPE)

    @property
    def column(self) -> tuple[int, int]:
        """Tokens a step, and sequence length."""
        return self.batch_size * self.seq_len, self.seq_len

    @property
    def is_timed(self) -> bool:
        return self.status == "ok" and bool(self.median_ms)


Shapes = dict[tuple[int, ...], dict[str, Cell]]  # cells by shape, by step


def read_cells(path: Path) -> list[Cell]:
    """The cells of a sweep.json. Raises RecordError."""
    cells = convert(read_json(path), list[Cell], path.name)
    if not cells or not all(cell.step for cell in cells):
        raise RecordError(f"{path.name} holds no cells, or one without a step")
    return cells


def by_shape(cells: list[Cell]) -> Shapes:
    shapes: Shapes = {}
    for cell in sorted(cells, key=lambda cell: (cell.column, cell.n_embd, cell.step)):
        shapes.setdefault(cell.shape, {})[cell.step] = cell
    return shapes


def rungs(cells: list[Cell]) -> list[tuple[str, str]]:
    """Each step and the one before it."""
    return [*itertools.pairwise(sorted({cell.step for cell in cells}))]


def ratio(shape: dict[str, Cell], before: str, step: str) -> float | None:
    """How many times faster a step is than the one before; None where one has no time."""
    pair = [shape[name] for name in (before, step) if name in shape and shape[name].is_timed]
    return pair[0].median_ms / pair[1].median_ms if len(pair) == 2 else None


def describe_shape(cell: Cell) -> str:
    return f"{cell.n_embd} channels, {cell.column[0]:,} tokens, T {cell.seq_len}"


# --- where a rung pays, and why not -----------------------------------------------------------------


def apart(cell: Cell, before: Cell) -> bool:
    """Whether the middle half of one step's times lies on one side of the other's, and their medians differ by more
    than LEAST: else no difference is shown."""
    (least, most), (least_before, most_before) = map(_quartiles, (cell, before))
    far = abs(math.log(cell.median_ms / before.median_ms)) > LEAST
    return far and (most < least_before or least > most_before)


def fastest(shape: dict[str, Cell]) -> list[Cell]:
    """The step with the shortest time, and those of which no difference to it is shown, in the order of the steps."""
    timed = [cell for cell in shape.values() if cell.is_timed]
    best = min(timed, key=lambda cell: cell.median_ms, default=None)
    return [cell for cell in timed if cell is best or not apart(cell, best)]


def pays(shape: dict[str, Cell], before: str, step: str) -> bool:
    """Whether a step is shown to be faster than the one before."""
    return (ratio(shape, before, step) or 0) > 1 and apart(shape[step], shape[before])


def why_slower(cell: Cell, before: Cell) -> str:
    """Why a step is slower than the one before: from its host, the profiled parts of both, or the predicted ones."""
    if cell.category_ms and before.category_ms:
        profiled = sum(cell.category_ms.values()) - sum(before.category_ms.values())
        times = {"timed": cell.median_ms - before.median_ms}
        if cell.again_ms and before.again_ms:
            times["again"] = cell.again_ms - before.again_ms
            if cell.again_ms < before.again_ms * (1 + LEAST):
                return f"trained again, it is {before.again_ms / cell.again_ms:.2f} times: the step is not the cause"
        said = ", ".join(f"{name} {ms:+.3g} ms" for name, ms in (times | {"profiled": profiled}).items())
        if not any(ms / PART < profiled < PART * ms for ms in times.values()):
            return _host_bound(cell, before) or f"not explained: {said}"
        lost = times["timed"]
        share = "explained in part: " if profiled < lost / CLOSE else "in the second training: "
        share = "" if lost / CLOSE <= profiled <= lost * CLOSE else share
        return f"{share}{said}: {_largest(cell.category_ms, before.category_ms)}"
    if host := _host_bound(cell, before):
        return host
    if not (cell.predicted_ms and before.predicted_ms):
        return "nothing is predicted for it"
    times = before.predicted_ms / cell.predicted_ms
    if times < 1:
        return f"the roofs predict {times:.2f} times as well: {_changes(cell, before)}"
    return f"not explained: the roofs predict {times:.2f} times ({_changes(cell, before)})"


def _host_bound(cell: Cell, before: Cell) -> str:
    """How many kernels the host launches, where the GPU had none left when the last was launched; else nothing."""
    if not cell.host_bound or cell.captured:
        return ""
    counted = f" {cell.launches} kernels, and not {before.launches}," if cell.launches and before.launches else ""
    return f"the host launches{counted} longer than the GPU works: none was queued when the last was launched"


def _changes(cell: Cell, before: Cell) -> str:
    """The two largest differences of the predicted parts: `copies and casts +0.31 ms, matrix products -0.12 ms`."""
    if cell.predicted_host_ms and cell.predicted_ms == cell.predicted_host_ms:
        return f"the host launches {cell.launches} kernels in {cell.predicted_host_ms:.3g} ms"
    return _largest(cell.predicted_category_ms, before.predicted_category_ms)


def _largest(parts: dict[str, float], parts_before: dict[str, float]) -> str:
    """The kinds of kernels that make up the difference of two times, the largest first, and the largest one that goes
    the other way: `copies and casts +0.46 ms, normalization and pointwise +0.2 ms, matrix products -0.21 ms`."""
    change = {name: parts.get(name, 0.0) - parts_before.get(name, 0.0) for name in parts | parts_before}
    sign = 1 if sum(change.values()) > 0 else -1
    ordered, shown = sorted(change, key=lambda name: -sign * change[name]), []
    all_of_it = sum(max(0.0, sign * ms) for ms in change.values())
    for name in ordered:
        if sign * sum(change[one] for one in shown) < EXPLAINED * all_of_it:
            shown.append(name)
    if ordered and -sign * change[ordered[-1]] > (1 - EXPLAINED) * all_of_it:
        shown.append(ordered[-1])
    return ", ".join(f"{name} {change[name]:+.3g} ms" for name in shown)


def _quartiles(cell: Cell) -> tuple[float, float]:
    times = cell.step_ms if len(cell.step_ms) > 1 else [cell.median_ms] * 2
    p25, _, p75 = statistics.quantiles(times, method="inclusive")
    return p25, p75


def describe_rung(shapes: Shapes, before: str, step: str) -> str:
    """At how many shapes a step pays, and how much."""
    timed = [shape for shape in shapes.values() if ratio(shape, before, step)]
    if not timed:
        cells = [shape[step] for shape in shapes.values() if step in shape]
        tried = [cell for cell in cells if cell.status != "not run"] or cells
        reasons = Counter(cell.reason or cell.status for cell in tried)
        return f"{step} has no time beside {before} at any shape: {reasons.most_common(1)[0][0]}."
    ends = (end(timed, key=lambda shape: ratio(shape, before, step)) for end in (min, max))
    extent = [f"{ratio(shape, before, step):.2f} times ({describe_shape(shape[step])})" for shape in ends]
    faster = sum(pays(shape, before, step) for shape in timed)
    alike = sum(not apart(shape[step], shape[before]) for shape in timed)
    slow = len(timed) - faster - alike
    unknown = f", slower at {slow}" * bool(slow) + f", with no difference shown at {alike}" * bool(alike)
    if len(timed) == 1:
        difference = ", with no difference shown" * bool(alike)
        return f"{step} and {before} have times at one shape alone: the ratio is {extent[0]}{difference}."
    return f"{step} is faster than {before} at {faster} of {len(timed)} shapes{unknown}: from {' to '.join(extent)}."


def ratios(shapes: Shapes, before: str, step: str, along: str) -> list[dict[int, list[float]]]:
    """How many times faster a step is than the one before, in lines of shapes. Along `n_embd` a line has one number of
    tokens and one length, along `seq_len` one width; it has the ratios of each size, the smallest first."""
    lines: dict[tuple[int, ...], dict[int, list[float]]] = {}
    for shape in shapes.values():
        if value := ratio(shape, before, step):
            cell = shape[step]
            line = lines.setdefault(cell.column if along == "n_embd" else (cell.n_embd,), {})
            line.setdefault(getattr(cell, along), []).append(value)
    return [dict(sorted(line.items())) for line in lines.values()]


def trend(lines: list[dict[int, list[float]]]) -> int:
    """1 where the ratios rise along every line, -1 where they fall along every one, otherwise 0."""
    if len(lines) < FEWEST_LINES or min(map(len, lines)) < FEWEST_SIZES:
        return 0
    pairs = [pair for line in lines for pair in itertools.pairwise(line.values())]
    rises, falls = all(max(a) < min(b) for a, b in pairs), all(min(a) > max(b) for a, b in pairs)
    return 1 if rises else -1 if falls else 0


def describe_trends(shapes: Shapes, before: str, step: str) -> list[str]:
    """Sentences: with what the gain of a step rises at every shape."""
    width, length = (trend(ratios(shapes, before, step, along)) for along in ("n_embd", "seq_len"))
    said = []
    if width:
        models = "wider" if width > 0 else "narrower"
        said.append(f"At each number of tokens and length it gains more, the {models} the model is.")
    if length > 0:
        said.append("At each width it gains more, the longer the sequences are.")
    return said


def boundaries(shapes: Shapes, before: str, step: str) -> list[str]:
    """For each length and number of tokens, the width from which a step pays at every wider shape."""
    columns: dict[tuple[int, int], list[tuple[int, float, bool]]] = {}
    for shape in shapes.values():
        if value := ratio(shape, before, step):
            columns.setdefault(shape[step].column, []).append((shape[step].n_embd, value, pays(shape, before, step)))
    lines = []
    for (tokens, T), found in sorted(columns.items()):
        found, paying = sorted(found), []
        for width, value, faster in reversed(found):
            if not faster:
                break
            paying.append(f"{width} channels ({value:.2f})")
        narrower = [f"{width} channels ({value:.2f})" for width, value, _ in found[: len(found) - len(paying)]]
        if not paying:
            says = f"{step} pays not even at {narrower[-1]}"
        elif narrower:
            says = f"{step} pays from {paying[-1]} on, and not yet at {narrower[-1]}"
        else:
            says = f"{step} pays at every width, from {paying[-1]} on"
        lines.append(f"{tokens:,} tokens a step, T {T}: {says}")
    return lines


def slower(shapes: Shapes, pairs: list[tuple[str, str]]) -> list[tuple[Cell, Cell]]:
    """The cells whose step is shown to be slower than the one before, each behind the cell of that one."""
    return [
        (shape[before], shape[step])
        for before, step in pairs
        for shape in shapes.values()
        if (ratio(shape, before, step) or 1) < 1 and apart(shape[step], shape[before])
    ]


def explanations(shapes: Shapes, pairs: list[tuple[str, str]]) -> list[str]:
    """A line for every cell whose step is shown to be slower than the one before."""
    return [
        f"{cell.step}, {describe_shape(cell)}: {before.median_ms / cell.median_ms:.2f} times {before.step}; "
        f"{why_slower(cell, before)}"
        for before, cell in slower(shapes, pairs)
    ]
