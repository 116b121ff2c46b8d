"""What a report says, as a tree of sections: the printers of report/printers.py show it in a terminal, as
Markdown and as a page."""

import re
from dataclasses import asdict, dataclass, field

from common.kernels import in_words
from common.record import AS_IT_IS, MY_FILE, Kernel, Row, Run, Study
from common.text import one_line
from report import (
    ablations,
    applied,
    bars,
    charts,
    doubts,
    findings,
    parity,
    proof,
    scaling,
    sentences,
    sweep,
    table,
    trainers,
)
from report.bars import Bar
from report.cells import milliseconds, number, time_or_status
from report.changes import code_diff
from report.derive import derive, derive_study
from report.figures import MARK, Figures, Line, learning_failure

# Where a section is shown: everywhere, in Markdown and on the page, there alone.
TERMINAL, TEXT, PAGE = range(3)
MOST_KERNELS = 12
TABLES = {  # of a study: rows by the title of their table. common/record.py lists the kinds, STUDIES.
    "scaling": scaling.tables,
    "sweep": sweep.tables,
    "ablations": ablations.tables,
    "parity": parity.tables,
}

Rows = list[dict[str, str]]


@dataclass
class Section:
    """A heading, and what stands below it, in this order. Whatever is empty is left out."""

    heading: str = ""
    text: str = ""
    lines: list[str] = field(default_factory=list)
    code: list[tuple[str, str]] = field(default_factory=list)  # a diff: (sign, line)
    bars: list[Bar] = field(default_factory=list)
    curves: str = ""  # an SVG
    rows: Rows = field(default_factory=list)
    short_rows: Rows = field(default_factory=list)  # of a terminal, where its table is narrower
    note: str = ""
    parts: list["Section"] = field(default_factory=list)
    shown: int = PAGE
    folded: bool = False  # on a page, until it is opened
    in_columns: bool = False  # its parts stand side by side, where there is room
    in_words: bool = False  # its table holds words

    @property
    def anchor(self) -> str:
        """Its place on a page: `peak-memory`."""
        return re.sub(r"\W+", "-", self.heading.lower())

    def __bool__(self) -> bool:
        own = (self.text, self.lines, self.code, self.bars, self.curves, self.rows)
        return any(own) or any(self.parts)


@dataclass
class Report:
    title: str
    about: str  # machine and workload
    remarks: list[str]
    sections: list[Section]
    command: str  # that makes it again


def of_run(figures: Figures) -> Report:
    """The report of one run."""
    rows, short_rows = (table.main_rows(figures, detailed) for detailed in (True, False))
    drawn = bars.ladder_bars(figures) if figures.timed_steps else []
    main = Section(bars=drawn, rows=rows, short_rows=short_rows, note=_conventions(figures), shown=TERMINAL)
    name, lines = findings.of(figures)
    # A card for every step but the first, and none for one that was left out.
    made = [line for line in figures.steps if line.base and line.row.status != "not run"]
    roofs = table.roof_rows(figures.run.roofs) if figures.run.roofs else []
    text = "Bare matrix products of this workload, back to back and in short bursts." if roofs else ""
    sections = [
        _lines(figures),
        main,
        Section(f"What holds {name} back", lines=lines, shown=TERMINAL),
        _time(figures),
        Section("Step by step", parts=[card(line) for line in made]),
        _block(figures),
        Section("Roofs", text, rows=roofs),
        _loss(figures),
        _work(figures),
        Section("Peak memory", bars=[bars.memory_bar(line) for line in figures.timed if line.gib]),
        _settings(figures),
    ]
    about = f"{sentences.describe_machine(figures.environment)}; "
    about += sentences.describe_workload(figures.run.workload)
    return Report(
        sentences.headline(figures),
        about,
        doubts.remarks(figures),
        [section for section in sections if section],
        figures.run.command,
    )


def _lines(figures: Figures) -> Section:
    """The change to a user's own code: what the recommended row has that the first one has not."""
    line = applied.recommended_line(figures)
    if line is None or not line.row.code:
        return Section()
    code = [pair for pair in code_diff(figures.first.row, line.row, around=99) if pair[0] != "@"]
    heading, first = f"What to change, with the names of {figures.run.workload.model}", figures.first
    if first.row.changes and first.name != AS_IT_IS:
        heading += f", beyond {first.name}"
    if f"{MY_FILE}." in line.row.code:
        heading += f", imported as {MY_FILE}"
    settings = trainers.settings_of(line.row.changes, line.row.settings.optimizer)
    parts = [Section("The same as settings of a trainer", lines=settings, shown=TEXT, folded=True)]
    note = " ".join(filter(None, [applied.patch_note(figures), applied.larger_batch(figures)]))
    return Section(heading, code=code, note=note, parts=parts, shown=TERMINAL)


def _conventions(figures: Figures) -> str:
    """What the columns of a run's table mean."""
    texts = [sentences.loss_rule(figures), sentences.convention(figures)]
    if table.has_another_base(figures):
        texts.append("Made from: the row that a row adds its change to")
    if figures.run.peers:
        texts += [
            "A peer is another implementation that trains the same workload",
            "Head: the format of the last matmul where the blocks multiply FP8",
            "Captured: the host launches the whole step at once, as a CUDA graph; launched: kernel by kernel",
        ]
    return ". ".join(filter(None, texts)) + "."


def _time(figures: Figures) -> Section:
    shares = [bars.share_bar(line) for line in figures.timed if line.category_ms]
    text = (
        "Shares of a training step by kind of kernel. Attention by hand has its matmuls among the products."
    )
    on_gpu = figures.environment.device_type != "cpu"
    limits = Section("What limits each step", rows=table.limit_rows(figures), shown=TEXT)
    if on_gpu:
        text += " Gaps: no kernel runs."
    if on_gpu and limits.rows and "most time in" in limits.rows[0]:
        limits.note = (
            "Compute: matrix products, and attention where it is fused. Other kernels: most of them pass "
            "over memory. The clock falls where a step draws the power limit."
        )
        if "of roof" in limits.rows[0]:
            limits.note += (
                " Of roof: model FLOP/s over what bare products of these shapes reach in short bursts."
            )
    in_figures = Section("In figures", rows=table.category_rows(figures), folded=True)
    if not on_gpu:
        limits.heading = "Operators and warm-up"
        in_figures.note = (
            "The profiler slows a CPU, so the parts add up to more or less than the timed step. What the "
            "compiler fused, the loss too, is in the compiled graph."
        )
    parts = [in_figures, limits]
    return Section("Where the time goes", text if shares else "", bars=shares, parts=parts, shown=TEXT)


def _block(figures: Figures) -> Section:
    drawn = [
        bars.block_bar(line)
        for line in figures.steps
        if line.profile and line.profile.forward and line.profile.backward
    ]
    kind = "operator" if figures.environment.device_type == "cpu" else "kernel"
    text = (
        f"Every {kind} of one block, from one attention to the next: forward, then backward. Hover for names."
    )
    return Section(
        "One transformer block", f"{text} Each step has a scale of its own." if drawn else "", bars=drawn
    )


def _loss(figures: Figures) -> Section:
    if not any(line.row.loss for line in figures.timed):
        return Section()
    text = (
        "The loss of every training step, on the same batches in every row. Below: its difference from the "
        "first row. So few steps do not show whether a row learns as well."
    )
    return Section("Loss", text, curves=charts.svg(charts.loss_figure(figures)))


def _work(figures: Figures) -> Section:
    rows = table.proof_rows(figures)
    if not rows:
        return Section()
    note = (
        "Each row went back to its initial weights, and one training step on the first batch left a sketch "
        "of the gradient of every matrix. The table has the lowest cosine between the sketches of two rows, "
        "which is 1 where the gradients point the same way. Limits are lower in FP8, and for a model that is "
        "not the ladder's"
    )
    if "two passes" in rows[0]:
        note += (
            ", and where random numbers or rounding alone turn a gradient; two passes: the first row with "
        )
        note += "itself"
    note += f". With less than {100 * proof.PAIRED:.0f} % of the matrices nothing is proven."
    return Section("The same work, by the gradients of one step", rows=rows, note=note, shown=TEXT)


def _settings(figures: Figures) -> Section:
    rows = [
        {"step": line.name}
        | {name: "-" if value is None else str(value) for name, value in asdict(line.row.settings).items()}
        for line in figures.lines
    ]
    machine = figures.environment
    facts = {**asdict(machine), "versions": None, "variables": None} | machine.versions | machine.variables
    words = [{"name": name, "value": str(value)} for name, value in facts.items() if value is not None]
    versions = Section("Machine and versions", rows=words, folded=True, in_words=True)
    return Section("What ran", rows=rows, parts=[versions], in_words=True)


# --- step by step ---------------------------------------------------------------------------------


def card(line: Line) -> Section:
    """A step and the one that it is made from: the code that differs, and what the machine did then."""
    before = line.before
    parts = [_code(line)]
    if line.ms and before:
        machine = Section(
            f"The machine, {before.name} to {line.name}", bars=[*map(bars.time_bar, (before, line))]
        )
        if before.category_ms and line.category_ms:
            machine.rows = _category_changes(before.category_ms, line.category_ms)
            kernels = _kernel_changes(before.profile.kernels, line.profile.kernels)
            machine.parts = [
                Section("The kernels that changed most", rows=kernels, folded=True, in_words=True)
            ]
        parts.append(machine)
    text = f"{_outcome(line)}. {change(line.row)}".strip()
    return Section(title(line.row), text, parts=parts, in_columns=True)


def _code(line: Line) -> Section:
    if line.row.changes and not line.ms:
        return Section()  # what a model of yours did not take is nothing to copy
    code = code_diff(line.base.row, line.row)
    if code or not line.ms:
        return Section("The code", code=code)
    has_sources = line.base.row.text and line.row.text
    return Section("The code", "Is the same." if has_sources else "The records hold no source to compare.")


def _outcome(line: Line) -> str:
    faster, machine = line.over_before, line.run.environment
    if line.ms and machine and machine.device_type == "cpu":
        return f"{time_or_status(line)} ms per step, on a CPU, whose times decide nothing"
    if faster is None:
        return f"{time_or_status(line)} ms per step" if line.ms else line.failure
    if not faster.clear:
        return f"As fast as {line.before.name}, within the spread of the times"
    if faster.value < 1:
        return f"{1 / faster.value:.2f}{faster.mark} times slower than {line.before.name}"
    return f"{faster.value:.2f}{faster.mark} times faster than {line.before.name}"


def change(row: Row) -> str:
    """What a script's docstring says after its first line."""
    after_title = re.match(r'(?s)""".*?\n\n(.*?)"""', row.text[:3000])
    return " ".join(after_title[1].split()) if after_title else ""


def title(row: Row) -> str:
    """The first line of a script where it names its step, otherwise the script's name."""
    first = re.match(r'"""(Step .+)', row.text)
    return one_line(first[1].rstrip('."'), 120) if first else row.step


def _category_changes(old: dict[str, float], new: dict[str, float]) -> Rows:
    """Milliseconds by kind of kernel, the largest change first."""
    rows = []
    for name in sorted(old, key=lambda name: -abs(new[name] - old[name])):
        if old[name] or new[name]:
            row = {"ms per step": name, "before": number(old[name]), "after": number(new[name])}
            rows.append(row | {"change": number(new[name] - old[name], "+,.1f")})
    return rows


def _kernel_changes(before: list[Kernel], after: list[Kernel]) -> Rows:
    """Kernels in plain words, the largest change first."""
    ms, launches = [{}, {}], [{}, {}]
    for side, kernels in enumerate((before, after)):
        for kernel in kernels:
            words = in_words(kernel.name)
            ms[side][words] = ms[side].get(words, 0.0) + kernel.ms
            launches[side][words] = launches[side].get(words, 0.0) + kernel.launches
    names = {**ms[0], **ms[1]}
    largest = sorted(names, key=lambda words: -abs(ms[1].get(words, 0.0) - ms[0].get(words, 0.0)))
    return [
        {
            "kernel": words,
            "ms": " → ".join(milliseconds(side.get(words, 0.0)) for side in ms),
            "launches": " → ".join(f"{side.get(words, 0.0):,.0f}" for side in launches),
        }
        for words in largest[:MOST_KERNELS]
    ]


# --- studies --------------------------------------------------------------------------------------


def of_study(study: Study) -> Report:
    """The report of a study, with the machine and the workload of its first run."""
    tables = TABLES[study.kind](study)
    sections = [Section(text=title, rows=rows, shown=TERMINAL) for title, rows in tables.items() if rows]
    first = derive(next(iter(study.runs.values())))
    columns = {name for rows in tables.values() if rows for name in rows[0]}
    notes = [sentences.convention(first)] if any("TFLOP/s" in name for name in columns) else []
    notes += [sentences.loss_rule(first)] if "loss" in columns else []
    notes += [sentences.CPU_SHOWS] if first.environment.device_type == "cpu" else []
    if sections:
        sections[-1].note = "".join(f"{note}. " for note in filter(None, notes)).strip()
    runs = "1 run" if len(study.runs) == 1 else f"{len(study.runs)} runs"
    machine = sentences.describe_machine(first.environment)
    about = f"The first run: {machine}; {sentences.describe_workload(first.run.workload)}"
    title = f"{study.kind.capitalize()}, {runs}"
    return Report(title, about, _study_remarks(study), sections, study.command)


def _study_remarks(study: Study) -> list[str]:
    """What is unusual in a study: a line for all rows that share it."""
    names: dict[str, list[str]] = {}
    for name, figures in derive_study(study).items():
        for line in figures.lines:
            where = f"{name}, {line.name}" if len(figures.lines) > 1 else name
            # A row's own note tells of what its script does, which a variant may change.
            note = learning_failure(line.row.loss) if study.kind == "ablations" else line.note
            for text in [line.failure, note, *(f"{MARK} {doubt}" for doubt in line.doubts)]:
                names.setdefault(text, []).append(where)
    names.pop("", None)
    remarks = [f"{text} ({'; '.join(rows)})" for text, rows in names.items()]
    return [*remarks, *dict.fromkeys(problem for run in study.runs.values() for problem in run.problems)]


def of(record: Run | Study) -> Report:
    return of_study(record) if isinstance(record, Study) else of_run(derive(record))
