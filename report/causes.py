"""What each choice inside a script gives, and what each gain comes from: the records of `python -m anatomy.ablations`.

A variant is a script with one choice changed. With --causes, variants stand between a script and the one before it: the
file of a workload then divides each gain among its causes, and brings peers to equal heads. A gain is the difference of
two medians, in ms per step. One function a figure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from common.record import Environment, Profile, Row, Settings, Timing, Workload
from report import analysis
from report.load import convert, read_json
from report.table import percent, pipe_table

FOLDER = "causes"  # below a machine's folder of docs/results
LAST_STEP = "4_transformer_engine"
HOW = (
    "Each table lies between two scripts, A and B. Its first row is A, its last row B. A row *only X* is A with one "
    "part of the change, and a row *without X* is B without one part. *Saved of A* is how many milliseconds the row "
    "takes less than A. *Saved by B* is how many B takes less than the row: what the missing part is worth beside the "
    "others. In *profiled change* a plus means that a kind of kernels takes longer than in A. A CUDA graph needs an "
    "AdamW that counts its steps on the GPU. Where AdamW is not compiled, that adds kernels. Their time "
    "belongs to the rows *only the CUDA graph* and *without the compiled AdamW*. Every row ran once, without waiting "
    "for a steady clock: compare rows with each other, and not with the tables above."
)
HEADS = (
    "The head of step 4 is in FP8. The peers have a BF16 head, as their documentation says, or one in FP8 where the "
    "name says so. *Time over step 4* above 1 means that the peer is slower. The second such column compares it with "
    "step 4 whose head has the same format, and the last column has that row's time. The head is not all that differs: "
    "peers are launched kernel by kernel while step 4 is captured, and the FP8 head of `te.TransformerLayer` is step "
    "4's, with a compiled loss. Every row ran once, as above."
)
CHOICES = (
    "*Unchanged* is the script as it is, *varied* the script with this one choice changed, quartiles in brackets. "
    "*Difference* is the varied time less the unchanged one, so a minus sign is a gain. *GiB* is the same of the peak "
    "memory, and *loss* of the mean loss, in per cent. *Predicted* was written before, by arithmetic for "
    "`gpt3-6.7b-slice` except where it names another workload: in the tables of others it shows what was thought of, "
    "and is no prediction for them."
)


@dataclass
class Measured:
    """A script or a variant as it ran once."""

    status: str
    timing: Timing
    reason: str | None = None
    settings: Settings = field(default_factory=Settings)
    loss: list[float] = field(default_factory=list)
    peak_allocated_bytes: int | None = None
    profile: Profile | None = None  # without its kernels; null without --profile
    started_at: str = ""
    commit: str | None = None

    @property
    def ms(self) -> float | None:
        return self.timing.median_ms

    @property
    def row(self) -> Row:
        """What the figures of report/analysis.py are made of."""
        return Row("", timing=self.timing, loss=self.loss, profile=self.profile)


@dataclass(kw_only=True)
class Variant(Measured):
    """A patched script, and the script itself beside it. The other fields are those of anatomy.ablations.Variant."""

    name: str
    script: str
    predicted: str
    baseline: Measured
    kind: str = ""
    rung: str | None = None
    cause: str | None = None


@dataclass
class Causes:
    """One file."""

    environment: Environment
    workload: Workload
    variants: list[Variant]


def read_causes(path: Path) -> Causes:
    """Read and check a file. Raises RecordError."""
    return convert(read_json(path), Causes, path.name)


# --- figures --------------------------------------------------------------------------------------


def scripts(causes: Causes) -> dict[str, Measured]:
    """The unchanged scripts that have a time: of each the one that ran last."""
    ran = sorted(causes.variants, key=lambda variant: variant.baseline.started_at)
    return {variant.script: variant.baseline for variant in ran if variant.baseline.ms is not None}


def rungs(causes: Causes) -> list[tuple[str | None, str]]:
    """The scripts that have variants which explain them, each after the script before it; None where that did not
    run."""
    explained = sorted({variant.rung for variant in causes.variants if variant.rung})
    known = {variant.script for variant in causes.variants} | set(explained)
    before = {int(name[0]): name for name in known if name[0].isdigit()}
    return [(before.get(int(rung[0]) - 1), rung) for rung in explained]


def variants_of(causes: Causes, rung: str) -> list[Variant]:
    """The variants that explain a script: first those with a single cause, then those with all but one."""
    return sorted((v for v in causes.variants if v.rung == rung), key=lambda v: (v.cause.split()[0], v.name))


def gain_ms(before: Measured | None, after: Measured | None) -> float | None:
    """Milliseconds that the second takes less than the first; None where one has no time."""
    known = before and after and before.ms is not None and after.ms is not None
    return before.ms - after.ms if known else None


def moved_ms(before: Measured | None, after: Measured | None) -> dict[str, float]:
    """The change of each kernel category, largest first, down to a tenth of all; empty without both profiles."""
    changes = analysis.changed_categories(before.row, after.row) if before and after else []
    least = 0.1 * sum(abs(change.ms) for change in changes)
    return {change.name: change.ms for change in changes if abs(change.ms) > least}


def by_head(causes: Causes) -> dict[str, Measured]:
    """Step 4 by the format of its head: as it is, and the variant that changes the head alone."""
    own = [v for v in causes.variants if v.script == LAST_STEP and v.settings.head and v.settings.fp8_recipe]
    changed = {v.settings.head: v for v in own if v.settings.head != v.baseline.settings.head}
    unchanged = scripts(causes).get(LAST_STEP)
    return changed | ({unchanged.settings.head: unchanged} if unchanged else {})


def peers(causes: Causes) -> dict[str, Measured]:
    """Peers and their variants by name, unchanged ones first."""
    whole = {name.removeprefix("peers/"): row for name, row in scripts(causes).items() if name.startswith("peers/")}
    return whole | {v.name: v for v in causes.variants if v.script.startswith("peers/")}


# --- for docs/steps.md ------------------------------------------------------------------------------


def of_run(folder: Path) -> dict[str, str]:
    """By step, what the parts of its change save one at a time, of a recorded run's workload."""
    path = folder.parent / FOLDER / f"{folder.name}.json"
    if not path.exists():
        return {}
    causes = read_causes(path)
    return {rung: parts_table(causes, before, rung) for before, rung in rungs(causes) if before}


def parts_table(causes: Causes, before: str, rung: str) -> str:
    """A part alone is held against the step before, a part left out against the whole step."""
    ends = scripts(causes)
    first, last = ends.get(before), ends.get(rung)
    cells = []
    for variant in variants_of(causes, rung):
        how, _, part = variant.cause.partition(" ")
        slow, fast = (first, variant) if how == "only" else (variant, last)
        gain, whole = gain_ms(slow, fast), gain_ms(first, last)
        if gain is not None and whole:
            beyond = analysis.tells_apart(fast.row, slow.row)
            saved = f"{gain:.1f} of {whole:.1f} ms" if beyond else "nothing beyond the spread"
            cells.append((part, "alone" if how == "only" else "left out", saved))
    return pipe_table(("part of the change", "measured", "it saves"), cells, n_left=3) if cells else ""


# --- for docs/performance.md ------------------------------------------------------------------------


def choices(machine: Path) -> list[str]:
    """What each choice gives: a heading and a table per workload of a machine, above the first what its columns are."""
    parts = []
    for path in sorted(machine.glob("*/ablations.json")):
        headers = ("variant", "script", "predicted", "unchanged, ms (p25-p75)", "varied, ms", "difference", "GiB",
                   "loss", "commit")  # fmt: skip
        legend = [] if parts else [CHOICES]
        table = pipe_table(headers, map(_choice, read_causes(path).variants), n_left=3)
        parts += [f"### What each choice gives: {path.parent.name}", *legend, table]
    return parts


def _choice(variant: Variant) -> tuple[str, ...]:
    both = (variant, variant.baseline)
    more_ms, peaks = gain_ms(*both), [one.peak_allocated_bytes for one in both]
    difference = loss = variant.reason or "-"
    if more_ms is not None:
        difference = f"{more_ms:+.1f} ms"
        loss = percent(analysis.loss_difference(*(one.row for one in both)))
    memory = f"{(peaks[0] - peaks[1]) / analysis.GIB:+.1f}" if all(peaks) else "-"
    script, commit = f"{variant.script}, {variant.kind}", (variant.commit or "-")[:7]
    times = (time_cell(variant.baseline), time_cell(variant))
    return variant.name, script, variant.predicted, *times, difference, memory, loss, commit


def sections(results: Path) -> list[str]:
    """Each gain by its causes, and peers beside step 4 with the same head, workload by workload; empty where nothing is
    recorded."""
    gains, equals = [], []
    for path in sorted(results.glob(f"*/{FOLDER}/*.json")):
        causes = read_causes(path)
        commits = ", ".join(dict.fromkeys(v.commit[:7] for v in causes.variants if v.commit))
        name = f"{path.parent.parent.name}/{path.stem}"
        work = f"batch {causes.workload.batch_size}, {causes.workload.steps} timed steps"
        at = f"{work}, {causes.environment.device}, commit {commits or 'unknown'}"
        gains.append(f"### Causes: {name}, {at}")
        for before, rung in rungs(causes):
            gains += [_rung_table(causes, before, rung), *_interaction(causes, before, rung)]
        if peers(causes):
            equals += [f"### LM heads: {name}", _peer_table(causes)]
    parts = ["## Each gain to its cause", HOW, *gains] if gains else []
    return parts + (["## Peers with the same LM head as step 4", HEADS, *equals] if equals else [])


def _rung_table(causes: Causes, before: str | None, rung: str) -> str:
    ends = scripts(causes)
    first, last = ends.get(before), ends.get(rung)
    explaining = [(v.cause, v) for v in variants_of(causes, rung)]
    if before is None:
        cells = [(name, time_cell(row), _ms(gain_ms(row, last))) for name, row in explaining]
        headers = ("ms per step", "median (p25-p75)", f"saved by {rung}")
        return pipe_table(headers, [*cells, (rung, time_cell(last), "")])
    named = [(before, first), *explaining, (rung, last)]
    whole, cells = gain_ms(first, last), []
    for name, row in named:
        gain = gain_ms(first, row)
        share = f" ({gain / whole:.0%})" if gain is not None and whole and row is not first else ""
        moved = ", ".join(f"{category} {ms:+.1f}" for category, ms in moved_ms(first, row).items())
        gained = "" if row is first else _ms(gain) + share
        cells.append((name, time_cell(row), gained, "" if row is last else _ms(gain_ms(row, last)), moved))
    headers = ("ms per step", "median (p25-p75)", f"saved of {before}", f"saved by {rung}", "profiled change, ms")
    return pipe_table(headers, cells)


def _interaction(causes: Causes, before: str | None, rung: str) -> list[str]:
    """A sentence: how far the single causes add up to the whole gain. Nothing of fewer than two, or where one
    has no time."""
    ends = scripts(causes)
    first, last = ends.get(before), ends.get(rung)
    single = [variant for variant in variants_of(causes, rung) if variant.cause.startswith("only")]
    whole, *gains = (gain_ms(first, row) for row in (last, *single))
    if len(single) < 2 or None in (whole, *gains):
        return []
    alone = sum(gains)
    said = f"Alone, these causes save {alone:.1f} ms in sum, and together {whole:.1f}"
    spread = sum(row.timing.p75_ms - row.timing.p25_ms for row in (first, *single, last))
    if abs(whole - alone) <= spread:
        return [f"{said}: no difference beyond the spread of these rows."]
    return [f"{said}: {'each helps the others' if whole > alone else 'each does a part of the work of the others'}."]


def _peer_table(causes: Causes) -> str:
    cells, unchanged = [], scripts(causes).get(LAST_STEP)
    for name, row in peers(causes).items():
        own = by_head(causes).get(row.settings.head)
        ratios = (f"{row.ms / one.ms:.2f}" if one and one.ms and row.ms else "-" for one in (unchanged, own))
        cells.append((name, row.settings.head or "-", time_cell(row), *ratios, time_cell(own)))
    headers = ("peer", "LM head", "ms per step", "time over step 4", "over step 4 with this head", "which takes, ms")
    return pipe_table(headers, cells, n_left=2)


def _ms(ms: float | None) -> str:
    return "not measured" if ms is None else f"{ms:+.1f}"


def time_cell(row: Measured | None) -> str:
    if row is None or row.ms is None:
        return f"{row.status}: {row.reason}" if row and row.reason else "not measured"
    return f"{row.ms:.1f} ({row.timing.p25_ms:.1f}-{row.timing.p75_ms:.1f})"
