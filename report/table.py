"""Figures as text: the table of a terminal, report.md, the headline, and two runs side by side."""

import re
from pathlib import Path

import tabulate

from common.record import PRECISIONS, Environment, Roofs, Run, Study, Workload
from common.text import aligned, one_line
from report.changes import added_groups
from report.figures import LEGEND, MARK, NOT_FUSED, Figures, Line, Ratio, figures, loss_rule, ratio, unlearned
from report.load import RecordError, load

tabulate.MIN_PADDING = 0  # a column is no wider than its header
LINES_BELOW = 3  # at most, of what is unusual; one more tells where the report is
LONGEST_NAME = 24  # of a row in the table of a terminal, which has 100 columns
CPU_SHOWS = "A CPU shows how each step works, and not what it gains on a GPU: compiling gains nothing here"
CONVENTION = "TFLOP/s count the model's FLOPs, and of attention half of the (T, T) square"
# Fields of workloads whose times may still be compared.
HARMLESS = {"warmup", "steps", "text", "text_sha256"}
VERSIONS = ("torch", "transformer-engine", "cuda")  # that are told beside a result
LAUNCH = {True: "captured", False: "launched", None: "-"}


# --- cells ----------------------------------------------------------------------------------------


def number(value: float | None, form: str = ",.1f") -> str:
    if value is None:
        return "-"
    text = f"{value:{form}}"
    return text if text.strip("-0.,") else text.removeprefix("-")  # never -0.0


def ms_number(ms: float | None) -> str:
    return number(ms, ",.1f" if ms is None or ms >= 10 else ".2f")


def three_digits(value: float | None) -> str:
    """`145`, `92`, `7.66`: three significant digits, and whole numbers from 100 on."""
    return number(value, ".3g" if value is None or value < 100 else ",.0f")


def percent(share: float | None, digits: int = 1) -> str:
    return "-" if share is None else f"{round(100 * share, digits) or 0.0:.{digits}f} %"  # never -0.0


def tflops(flops_per_s: float | None) -> str:
    """In TFLOP/s: whole numbers from 10 on, below with three significant digits."""
    rate = (flops_per_s or 0.0) / 1e12
    return "-" if not rate else f"{rate:,.0f}" if rate >= 10 else f"{rate:.3g}"


def status_or_ms(line: Line, extent: bool = False) -> str:
    """`281.4?`, and with `extent` the range of the passes: `281.4 (281.0-281.8)`; or the status of an untimed
    row."""
    if not line.ms:
        return line.row.status
    ends = f" ({ms_number(line.low_ms)}-{ms_number(line.high_ms)})" if extent and line.passes > 1 else ""
    return f"{ms_number(line.ms)}{line.mark}{ends}"


def times(faster: Ratio | None) -> str:
    """`1.57`, `20.0`."""
    return "-" if faster is None else f"{faster.value:{'.1f' if faster.value >= 10 else '.2f'}}{faster.mark}"


def only_filled(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Rows without the columns that none of them fills."""
    shown = [name for name in (rows[0] if rows else ()) if any(row[name] != "-" for row in rows)]
    return [{name: row[name] for name in shown} for row in rows]


def table_rows(made: Figures, extent: bool = False) -> list[dict[str, str]]:
    """One row of cells by column a line. `extent` adds the ranges of the passes, and how peers differ."""
    first, plain = (f"x {line.name}" if line else "-" for line in (made.first, made.plain))
    rows = []
    for line in made.lines:
        row = {
            "step": f"{line.name} (peer)" if line.is_peer and extent else line.name,
            "ms": status_or_ms(line, extent),
            "tokens/s": number(line.tokens_per_s, ",.0f"),
            "TFLOP/s": tflops(line.flops_per_s),
            "x above": times(line.over_before),
            first: times(line.over_first),
            plain: times(line.over_plain),
            "GiB": number(line.gib),
            "loss": number(line.loss, ".3f"),
        }
        ran = line.row.settings
        how = {"head": ran.head or "-", "launch": LAUNCH[ran.captured]} if extent and made.run.peers else {}
        rows.append(row | how)
    return only_filled(rows)


def front_rows(made: Figures, adds: list[str]) -> list[dict[str, str]]:
    """The ladder in seven columns; `adds` are the words for what each step adds."""
    rows, before = [], None
    for line, words in zip(made.steps, adds, strict=True):
        lines = sum(map(len, added_groups(before.row, line.row))) if before else None
        row = {"script": f"{line.name}.py", "what it adds": words, "code lines added": number(lines, "d")}
        row |= {
            "ms": status_or_ms(line),
            "x the row above": times(line.over_before),
            "x FP32": times(line.over_first),
        }
        rows.append(row | {"GiB": number(line.gib)})
        before = line
    return rows


def card_row(made: Figures) -> dict[str, str]:
    """One card, or CPU, as a row of docs/cards.md: the first and the last step in ms, and the gains
    between."""
    timed, work = [line for line in made.steps if line.ms], made.run.workload
    gains = " x ".join(times(line.over_before) for line in timed[1:])
    shape = f"{work.n_layer} x {work.n_embd}, {work.batch_size} x {work.seq_len} tokens" if work else "-"
    environment = made.environment
    return {
        "device": environment.device,
        "workload": f"{work.preset}: {shape}" if work else "-",
        "first step, ms": status_or_ms(timed[0]) if timed else "-",
        "last step, ms": status_or_ms(timed[-1]) if timed else "-",
        "gains, step by step": f"{gains} = {times(timed[-1].over_first)}" if len(timed) > 1 else "-",
        "versions": ", ".join(
            f"{name} {environment.versions[name]}" for name in VERSIONS if name in environment.versions
        ),
        "date": (made.run.started_at or "-")[:10],
        "commit": (environment.commit or "-")[:7],
    }


def is_a_card(made: Figures) -> bool:
    """Whether a run is a row of docs/cards.md: the whole ladder on one GPU, of which at least two steps have
    a time."""
    chosen = "--only" in made.run.command or any(
        line.row.status in ("not run", "interrupted") for line in made.steps
    )
    alone = made.run.workload is not None and made.run.workload.gpus == 1
    return (
        made.environment.device_type == "cuda"
        and alone
        and not chosen
        and len([line for line in made.steps if line.ms]) > 1
    )


def category_rows(made: Figures) -> list[dict[str, str]]:
    """Milliseconds of a step by kind of kernel, and the timed step."""
    profiled = [line for line in made.timed if line.category_ms]
    names = dict.fromkeys(name for line in profiled for name, ms in line.category_ms.items() if ms)
    rows = [(line, {name: number(line.category_ms.get(name)) for name in names}) for line in profiled]
    return [
        {"ms per step": line.name} | row | {"timed": status_or_ms(line, extent=True)} for line, row in rows
    ]


def limit_rows(made: Figures) -> list[dict[str, str]]:
    """What limits each step."""
    rows = [
        {
            "step": line.name,
            "kernels run": number(line.row.profile and line.row.profile.launches, ",.0f"),
            "most time in": f"{line.share[0]} {line.share[1]:.0%}" if line.share else "-",
            "of roof": f"{line.of_roof:.0%} of {line.precision.upper()}" if line.of_roof else "-",
            "clock, MHz": number(line.row.clock_mhz, ",.0f"),
            "tokens/J": three_digits(line.tokens_per_joule),
            "predicted ms": ms_number(line.row.predicted_ms),
            "warm-up s": number(line.row.warmup_s),
        }
        for line in made.timed
    ]
    found = only_filled(rows)
    return found if found and len(found[0]) > 1 else []


def roof_rows(roofs: Roofs) -> list[dict[str, str]]:
    """What bare matrix products of the workload reach, by precision."""
    rates = {name.upper(): (roofs.rate(name), roofs.rate(name, burst=True)) for name in PRECISIONS}
    shown = {name: map(tflops, both) for name, both in rates.items() if all(both)}
    return [
        {"TFLOP/s": name, "back to back": steady, "in bursts": burst}
        for name, (steady, burst) in shown.items()
    ]


# --- sentences ------------------------------------------------------------------------------------


def headline(made: Figures) -> str:
    """What a run shows: the fastest step against AMP + SDPA and against the first, and whether FP8 pays; or
    why it shows nothing."""
    timed = [line for line in made.steps if line.ms]
    if not timed:
        return "No step has a time"
    best = min(timed, key=lambda line: line.ms)
    against = {line.name: line for line in (made.plain, made.first) if line and line is not best}
    if not against:
        return f"One training step of {best.name}: {ms_number(best.ms)} ms"
    gains = ", ".join(f"{_times_faster(best, line)} than {_usual(line)}" for line in against.values())
    return f"{best.name}: {gains}{_whether_fp8_pays(timed)}"


def _whether_fp8_pays(timed: list[Line]) -> str:
    """A clause on the fastest step in FP8, against the fastest one without; empty where one of the two is
    missing."""
    in_fp8 = [line for line in timed if line.row.settings.fp8_recipe]
    others = [line for line in timed if not line.row.settings.fp8_recipe]
    if not in_fp8 or not others:
        return ""
    gain = ratio(min(in_fp8, key=lambda line: line.ms), min(others, key=lambda line: line.ms))
    if not gain.clear:
        return ". FP8 gains nothing clear here"
    return f". FP8 {'pays' if gain.value > 1 else 'does not pay'} here: {times(gain)} x"


def _times_faster(line: Line, other: Line) -> str:
    faster = ratio(line, other)
    digits = 0 if faster.value >= 10 else 1 if faster.value >= 1.25 else 2
    return f"{faster.value:.{digits}f}{faster.mark} times faster" if faster.clear else "not clearly faster"


def _usual(line: Line) -> str:
    """What a reader calls a row: AMP + SDPA, FP32; or its name."""
    ran = line.row.settings
    if (
        ran.amp_dtype in ("bfloat16", "float16")
        and ran.attention_kernel not in NOT_FUSED
        and not ran.compiled
    ):
        return "AMP + SDPA"
    return "FP32" if ran.amp_dtype == "float32" and ran.float32_matmul_precision == "highest" else line.name


def describe_machine(environment: Environment) -> str:
    """The device, the versions of what ran on it, and the commit."""
    versions = [f"{name} {environment.versions[name]}" for name in VERSIONS if name in environment.versions]
    commit = environment.commit or "unknown"
    shown = commit[:7] + " with uncommitted changes" * commit.endswith("-dirty")
    return ", ".join([environment.device, *versions, f"commit {shown}"])


def describe_workload(work: Workload | None) -> str:
    if work is None:
        return "workload unknown"
    names = ("n_layer", "n_head", "n_embd", "seq_len", "vocab_size", "batch_size")
    shape = ", ".join([*(f"{name} {getattr(work, name)}" for name in names), f"learning rate {work.lr:.2g}"])
    gpus = f", {work.gpus} processes by {work.parallel}" if work.gpus > 1 else ""
    trained = f"{work.steps} trained steps"
    size = f"{work.parameters / 1e6:,.1f} M parameters"
    return f"{work.preset}: {shape}, {size}, {trained}, text: {work.text}{gpus}"


# --- a run ----------------------------------------------------------------------------------------


def render_text(made: Figures, report: str) -> str:
    """The report for a terminal: a table of at most 100 columns, and a few lines under it."""
    rows = [row | {"step": one_line(row["step"], LONGEST_NAME)} for row in table_rows(made)]
    below = [*made.remarks]
    if len(below) > LINES_BELOW:
        below[LINES_BELOW - 1 :] = [f"{len(below) - LINES_BELOW + 1} more lines in the report"]
    below += filter(None, [loss_rule(made.timed)])
    if made.environment.device_type == "cpu":
        below.append(CPU_SHOWS)
    below.append(f"{CONVENTION}. Report: {report}")
    if is_a_card(made):
        below.append(f"This GPU as a row of docs/cards.md:\n{pipe([card_row(made)]).splitlines()[-1]}")
    return "\n".join([headline(made), "", aligned(rows), "", *below])


def render_markdown(made: Figures) -> str:
    """report.md: short enough for a comment on a pull request."""
    tables = {"": table_rows(made, extent=True), "What limits each step:": limit_rows(made)}
    return _markdown_page(headline(made), made, tables, made.remarks, made.run.command)


def study_remarks(study: Study, tables: dict[str, list[dict]]) -> list[str]:
    """What is unusual: a line for all rows that share it."""
    names: dict[str, list[str]] = {}
    for name, run in study.runs.items():
        lines = figures(run, study.runs.values() if study.kind == "scaling" else ()).lines
        for line in lines:
            # The note of a variant is of a script that it may have changed.
            note = unlearned(line.row.loss) if study.kind == "ablations" else line.note
            for text in filter(None, [line.why_untimed, note, *line.doubt.split("; ")]):
                names.setdefault(text, []).append(f"{name}, {line.name}" if len(lines) > 1 else name)
    said = [f"{text} ({'; '.join(of)})" for text, of in names.items()]
    said += dict.fromkeys(problem for run in study.runs.values() for problem in run.problems)
    return [LEGEND] * (MARK in str(tables)) + said


def render_study(study: Study, tables: dict[str, list[dict]]) -> str:
    """report.md of a study, with the machine and the workload of its first run."""
    first = figures(next(iter(study.runs.values())))
    title = f"{study.kind.capitalize()}, {len(study.runs)} run{'s' * (len(study.runs) != 1)}"
    return _markdown_page(
        title, first, tables, study_remarks(study, tables), study.command, "The first run: "
    )


def variant_rows(study: Study, *names: str) -> list[dict[str, str]]:
    """Of a study of ablations: these variants, or all, each against the script that it changes."""
    lines, rows = {name: figures(run).lines[0] for name, run in study.runs.items()}, []
    for name in names or [name for name, line in lines.items() if line.name in lines and line.name != name]:
        line, script = lines[name], lines[lines[name].name]
        row = {"variant": name, "of": script.name, "script, ms": status_or_ms(script)}
        difference = number(line.ms and script.ms and line.ms - script.ms, "+,.1f")
        rows.append(row | {"variant, ms": status_or_ms(line), "difference, ms": difference})
    return rows


def _markdown_page(
    title: str, made: Figures, tables: dict, said: list[str], command: str, which: str = ""
) -> str:
    about = f"{which}{describe_machine(made.environment)}; {describe_workload(made.run.workload)}"
    parts = [f"# {markdown(title)}", markdown(about)]
    parts += [f"{markdown(title)}\n\n{pipe(rows)}".strip() for title, rows in tables.items() if rows]
    if "TFLOP/s" in str(tables):
        said = [*said, CONVENTION]
    if made.environment.device_type == "cpu":
        said = [*said, CPU_SHOWS]
    if any("loss" in rows[0] for rows in tables.values() if rows):
        said = [*said, loss_rule(made.timed)]
    parts += ["\n".join(f"- {markdown(text)}" for text in said), "Run it again:"]
    parts += ["    " + command.replace(" && ", "\n    ")]
    return "\n\n".join(filter(None, parts)) + "\n"


def pipe(rows: list[dict], n_left: int = 1) -> str:
    """A table of Markdown whose cells and headers may be a record's words."""
    return aligned(
        [{markdown(name): markdown(cell) for name, cell in row.items()} for row in rows], "pipe", n_left
    )


def markdown(text: object) -> str:
    """A line of Markdown in which nothing that a record says is markup, a link, or the end of a cell."""
    line = one_line(text, 1000).replace("&", "&amp;").replace("<", "&lt;").replace("`", "'")
    line = re.sub(r"([\\\[\]!|])", r"\\\1", line)
    line = line.replace("://", ":\\//").replace("www.", "www\\.")  # GitHub makes links of bare addresses
    return re.sub(r"^(\d*)(>|#|[+.)-](?=[\s-]))", r"\1\\\2", line)  # nor a heading, a quotation, a list


def compare(a: Path, b: Path) -> str:
    """Two runs, row by row, for a terminal: times of the same work, otherwise speedups. Raises
    RecordError."""
    runs = [load(folder) for folder in (a, b)]
    if not all(isinstance(run, Run) and run.workload for run in runs):
        raise RecordError("give two runs of steps: a sweep or another study cannot be compared")
    made = [figures(run) for run in runs]
    lines, others = ({line.name: line for line in one.timed} for one in made)
    both = [name for name in lines if name in others]
    if not both:
        raise RecordError("they have no row in common that has a time in both")
    works = [vars(run.workload) for run in runs]
    differing = [name for name in works[0] if works[0][name] != works[1][name]]
    rows = []
    for x, y in ((lines[name], others[name]) for name in both):
        row = {"step": x.name, "A, ms": status_or_ms(x, True), "B, ms": status_or_ms(y, True)}
        row |= {"A / B": times(ratio(y, x)) if set(differing) <= HARMLESS else "-"}
        row |= {
            f"A x {both[0]}": times(ratio(x, lines[both[0]])),
            f"B x {both[0]}": times(ratio(y, others[both[0]])),
        }
        rows.append(row)
    sides = [f"{side}: {describe_machine(one.environment)}" for side, one in zip("AB", made, strict=True)]
    note = f"The work differs in {', '.join(differing)}." if differing else "The work is the same."
    note += " Where A / B is above 1, B is faster." * (set(differing) <= HARMLESS)
    said = [f"{side}: {text}" for side, one in zip("AB", made, strict=True) for text in one.remarks]
    return "\n".join([*sides, note, "", aligned(only_filled(rows)), "", *said])
