"""The tables of README and docs/*.md, from the records under docs/results/: cog calls these functions
(docs/renew.sh).

A table that would mix states of the code raises ValueError.

python docs/tables.py                     make the reports of all recorded runs again
python docs/tables.py --stale [PLACE]     which recordings are of other code: docs/record.sh makes them again
python docs/tables.py --device MACHINE    fails where MACHINE has records, and none of this card or CPU
python docs/tables.py --lost OLD NEW      fails where a row has a time in folder OLD, and none in NEW
"""

import bisect
import difflib
import itertools
import math
import re
import statistics
import sys
import tempfile
from functools import cache, partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common.fingerprint import CLOCKS, row_sha256  # noqa: E402
from common.record import Row, Run, Study, read_object  # noqa: E402
from common.text import OneLineParser, aligned, run_command, say  # noqa: E402
from ladder import loop, patches, running  # noqa: E402
from ladder.rows import MODEL_SCRIPT, Planned  # noqa: E402
from report import ablations as variants  # noqa: E402
from report import (  # noqa: E402
    bars,
    cells,
    findings,
    parity,
    printers,
    scaling,
    sections,
    sentences,
    sweep,
    table,
    trainers,
)
from report.__main__ import render  # noqa: E402
from report.derive import derive, derive_study  # noqa: E402
from report.figures import MARK, Figures, Line, ratio  # noqa: E402
from report.load import DIFFER, RecordError, load, runs_of, statuses  # noqa: E402

RESULTS = ROOT / "docs" / "results"
TRAINED = {  # recipes of the experiment `gradients`, and the rows that train with them
    "BF16": "bf16-instead-of-fp8",
    "delayed scaling": "4_transformer_engine",
    "delayed, BF16 head": "bf16-head",
    "current, BF16 head": "current-scaling-bf16-head",
}
CONFIRMATION = "-confirmation"  # ends the name of the record of a second run
SITE = "h200/gpt3-6.7b-slice"  # whose report is docs/index.html, and whose picture stands in README
THEMES = {"light": ("#1f2328", "#ffffff"), "dark": ("#e6edf3", "#0d1117")}  # a code host's text and page


@cache
def record(place: str) -> Run | Study:
    return load(RESULTS / place)


@cache
def figures(place: str) -> Figures:
    return derive(record(place))


def runs(place: str) -> list[Run]:
    return [*runs_of(record(place)).values()]


def shown(
    rows: list[dict], *of: str, n_left: int = 1, other_card: str | None = None, by_recording: bool = False
) -> str:
    """A table of Markdown; `other_card` is the one of figures that are of no run. Where its recordings hold
    one row of two states of the code, it says so if each of its lines is of one recording, and otherwise
    raises ValueError, as it does where rows differ."""
    states: dict[str, set[str | None]] = {}
    differing = set()
    for name, run in ((name, run) for place in of for name, run in runs_of(record(place)).items()):
        for row in [*run.rows, *run.peers]:
            if row.status == "ok":
                states.setdefault(f"{variant_of(name)} {row.step}".strip(), set()).add(row.code_sha256)
        differing |= {problem.partition(":")[0] for problem in run.problems if problem.startswith(DIFFER)}
    mixed = {f"{name} is of several states of the code" for name in states if len(states[name]) > 1}
    if differing or (mixed and not by_recording):
        raise ValueError(f"{', '.join(of)}: {'; '.join(sorted(differing | mixed))}")
    names = {name for row in rows for pair in row.items() for name in pair}
    text = explained(printers.pipe(rows, n_left), names, *of) + several_cards(*of, other_card=other_card)
    return f"{text}\n\nThe rows are of several versions of the code." if mixed else text


def several_cards(*of: str, other_card: str | None = None) -> str:
    """How many cards the recordings of a table are of, where it is more than one; otherwise nothing."""
    cards = {run.environment.gpu_uuid for place in of for run in runs(place) if run.environment}
    cards = (cards | {other_card}) - {None}
    return f"\n\nRecorded on {len(cards)} cards." if len(cards) > 1 else ""


def explained(text: str, names: set[str], *of: str) -> str:
    """A table, and below it why figures bear a mark of the places, variants and rows with these names."""
    reasons: dict[str, list[str]] = {}
    for place in of if MARK in text else ():
        for name, line in lines_of(place):
            if {place, variant_of(name) or line.name} & names:
                where = [place if len(of) > 1 else "", name or line.name]
                for doubt in line.doubts:
                    reasons.setdefault(doubt, []).append(", ".join(filter(None, where)))
    lines = [f"{MARK} {doubt} ({'; '.join(where)})." for doubt, where in reasons.items()]
    return "\n\n".join([text, *lines])


def lines_of(place: str) -> list[tuple[str, Line]]:
    """Its timed rows; of a study, each with the name of its run."""
    recorded = record(place)
    runs = derive_study(recorded) if isinstance(recorded, Study) else {"": figures(place)}
    return [(name, line) for name, run in runs.items() for line in run.timed]


# --- one recording: each is called with its place -------------------------------------------------


# Tables of one kind of rows: how they are made from a place and what else is given, and columns on the left.
TABLES = {
    "categories": (lambda place: table.category_rows(figures(place)), 1),
    "limits": (lambda place: table.limit_rows(figures(place)), 1),
    "roofs": (lambda place: table.roof_rows(figures(place).run.roofs), 1),
    "front": (lambda place, *adds: table.front_rows(figures(place), [*adds]), 2),
    "by_shape": (lambda place: [sweep.gain_cells(shape) for shape in sweep.shapes(record(place))], 1),
    "ablations": (lambda place, *names: variants.variant_rows(record(place), *names), 2),
    "losses": (lambda place, *names: variants.loss_rows(record(place), *names), 1),
    "equals": (lambda place, *names: variants.equal_rows(record(place), *names), 2),
}


def __getattr__(name: str):
    """A table of TABLES as a function of its place."""
    if name not in TABLES:
        raise AttributeError(f"docs/tables.py has no table {name}")
    rows, n_left = TABLES[name]
    return lambda place, *words: shown(rows(place, *words), place, n_left=n_left)


def ms_by_span(line: Line) -> dict[str, float]:
    """The median training step of the first second after the rehearsal, of what a row is timed for by default
    (at least three seconds and `--steps` training steps), and of the last three seconds of a longer run."""
    settling, timed = line.row.settling_ms, line.row.step_ms
    by_default = max(line.run.workload.steps, first_seconds(timed, 3))
    every = [*settling, *timed]
    spans = {
        "first second": every[: first_seconds(every, 1)],
        "timed": timed[:by_default],
        "after a minute": every[-first_seconds(every[::-1], 3) :],
    }
    return {span: statistics.median(spans[span]) for span in spans}


def first_seconds(step_ms: list[float], seconds: float) -> int:
    """How many steps begin within these seconds."""
    return bisect.bisect_left([*itertools.accumulate(step_ms[:-1])], 1e3 * seconds) + 1


def lasting(place: str) -> str:
    """What of the time of each row of a longer run lasts."""
    rows = []
    for each in figures(place).timed:
        ms = ms_by_span(each)
        cells_of = {span: f"{ms[span]:,.1f}" for span in ms}
        later = ms["after a minute"] / ms["timed"] - 1
        rows.append({"ms a step": each.name, **cells_of, "later": f"{later:+.1%}"})
    return shown(rows, place)


def still(place: str, step: str, other: str) -> str:
    """How many times as fast as another a step is, when timed and after a minute: `16.7 and 16.6`."""
    ms, others_ms = (ms_by_span(line(place, name)) for name in (step, other))
    return " and ".join(f"{others_ms[span] / ms[span]:.3g}" for span in ("timed", "after a minute"))


def ladder(place: str) -> str:
    """Every step and peer, and what the losses are."""
    rows = table.main_rows(figures(place), detailed=True)
    return f"{shown(rows, place)}\n\n{sentences.loss_rule(figures(place))}."


def file(name: str) -> str:
    """The code of a file, without its docstring."""
    return re.sub(r'(?s)^""".*?"""\s*', "", (ROOT / name).read_text())


def of_model(place: str, *more: str) -> str:
    """The rows of a model that is not ours, with `more` columns."""
    rows, over_first = [], f"x {figures(place).first.name}"
    for row in table.main_rows(figures(place)):
        columns = ("step", "ms", "x above", "x made from", over_first, "GiB", *more)
        rows.append({name: row[name] for name in columns if name in row})
    return shown(rows, place)


def held_back(place: str) -> str:
    """What takes most of the fastest row of a run, in words that begin small."""
    text = findings.of(figures(place))[1][0]
    return text[0].lower() + text[1:]


def decision(place: str) -> str:
    """Which changes a model that is not ours should take."""
    return sentences.headline(figures(place))


def line(place: str, step: str) -> Line:
    """The figures of a row, or of a study's run of that name, for a sentence."""
    recorded = record(place)
    if isinstance(recorded, Study):
        return derive_study(recorded)[step].lines[0]
    return next(line for line in figures(place).lines if line.name == step)


def faster(place: str, step: str, than: str) -> str:
    """How many times faster a row is than another of the same recording."""
    return cells.gain(ratio(line(place, step), line(place, than)))


def warmups(place: str, step: str) -> str:
    """The warm-up of a row in each of its passes: `19.2 and 9.7 s`."""
    row = line(place, step).row
    seconds = [cells.number(each.warmup_s) for each in row.passes or [row]]
    return f"{' and '.join(seconds)} s"


def ms(place: str, step: str) -> str:
    return f"{line(place, step).ms:,.0f}{line(place, step).mark}"


def apart(place: str) -> str:
    """By how much the losses of the steps differ, at most, as a share that is rounded up."""
    losses = [line.loss for line in figures(place).steps if line.loss]
    return cells.percent(math.ceil(1000 * (max(losses) / min(losses) - 1)) / 1000)


def measured(place: str) -> str:
    """Device, date and commit of a recording, and of the short run of the same code that confirmed it."""
    run = record(place)
    text = f"{run.environment.device}, measured {run.started_at[:10]} at commit {run.environment.commit[:7]}"
    if (RESULTS / f"{place}{CONFIRMATION}").exists():
        again = record(f"{place}{CONFIRMATION}")
        hashes = {row.step: row.code_sha256 for row in run.rows}
        if all(row.code_sha256 == hashes.get(row.step) for row in again.rows if row.status == "ok"):
            cards = {run.environment.gpu_uuid, again.environment.gpu_uuid}
            card = " on another card" if len(cards) == 2 and None not in cards else ""
            text += f", confirmed{card} {again.started_at[:10]} at commit {again.environment.commit[:7]}"
    return text


def cards(*of: str) -> str:
    """One row a card. Its date and commit stand in the row, so states of the code may differ."""
    return explained(printers.pipe([table.card_row(figures(place)) for place in of]), {*of}, *of)


def learning(place: str, verdict: bool = True) -> str:
    """What each row of a parity study needs to the same loss; a study whose controls failed has no
    verdicts."""
    rows = parity.difference_rows(record(place))
    return shown([{name: row[name] for name in row if verdict or name != "verdict"} for row in rows], place)


def recipes(place: str, *studies: str) -> str:
    """How far each recipe of FP8 turns the gradient, by the experiment `gradients`, and what those that were
    trained need to the same loss, by studies of parity."""
    rows, gradients = [], read_object(RESULTS / place / "gradients.json")
    for each in gradients["rows"]:
        row = {"recipe": each["what"], "gradient off by": f"{each['measured']:.1%}"}
        row["forward and backward"] = each["columns"]["forward and backward"]
        label = TRAINED.get(each["what"])
        for study in map(record, studies):
            width = next(iter(study.runs.values())).workload.n_embd
            trained = next((row for row in parity.difference_rows(study) if row["row"] == label), {})
            for column in ("more steps", "more seconds"):
                row[f"{column}, {width:,} channels"] = trained.get(column, "-")
        rows.append(row)
    return shown(rows, *studies, other_card=gradients["environment"]["gpu_uuid"])


def same_loss(place: str, label: str = "4_transformer_engine", other: str = "3_compile") -> str:
    """What a row of a parity study needs to the loss of another: `1.2% ± 0.4% more training steps and ...`"""
    words = []
    for unit, apart in (("training steps", parity.more_steps), ("seconds", parity.more_seconds)):
        more = parity.more(record(place), label, other, apart)
        words.append(f"{more[1:]} {'more' if more[0] == '+' else 'fewer'} {unit}")
    return " and ".join(words)


def span(place: str, label: str, other: str = "3_compile") -> str:
    """The least and the most that a seed of a row of a parity study needs more: `0.8% and 3.2%`."""
    study = record(place)
    own, others = (parity.labels(study)[name] for name in (label, other))
    more = [parity.more_steps(row, others[seed]) for seed, row in own.items()]
    return f"{min(more):.1%} and {max(more):.1%}"


def lag(place: str, first: int, last: int, label: str = "4_transformer_engine") -> str:
    """How many more training steps a row of a parity study needs than step 3 between two training steps.
    Raises ValueError where some seeds have none: their rows are ahead, so the others would bias it."""
    study = record(place)
    found = parity.pair_by_seed(study, label, "3_compile", partial(parity.lag, first=first, last=last))
    if 0 < found.seeds < len(parity.labels(study)[label]):
        raise ValueError(f"{place}: {label} has a lag at {last} for {found.seeds} seeds alone")
    return parity.with_interval(found, "+.1%")


def lags(studies: dict[str, str]) -> str:
    """The lag of step 4 in parity studies by their names, read off the curves."""
    spans = {"steps 1,000 to 2,000": (1000, 2000), "at 2,000": (2000, 2000), "at 2,800": (2800, 2800)}
    rows = []
    for name, place in studies.items():
        seeds = len(parity.labels(record(place))["4_transformer_engine"])
        row = {"study": name, "seeds": str(seeds)}
        rows.append(row | {span: lag(place, *spans[span]) for span in spans})
    return aligned(rows, "pipe")


def growth(
    place: str, early: tuple[int, int], late: tuple[int, int], label: str = "4_transformer_engine"
) -> str:
    """By how much that lag is larger late than early, seed by seed. Raises ValueError as `lag` does."""
    for span in (early, late):
        lag(place, *span, label)

    def apart(row: Row, other: Row) -> float | None:
        lags = [parity.lag(row, other, *span) for span in (early, late)]
        return None if None in lags else lags[1] - lags[0]

    return parity.more(record(place), label, "3_compile", apart)


def heldout(place: str, step: int, label: str) -> str:
    """By which the held-out loss of a row of a parity study lies above that of step 3 at a training step."""

    def apart(row: Row, other: Row) -> float:
        return dict(row.heldout)[step] - dict(other.heldout)[step]

    return parity.with_interval(parity.pair_by_seed(record(place), label, "3_compile", apart), "+.2f")


def trainer_settings() -> str:
    """Each change as a setting of each trainer, as reports name them."""
    changes = dict.fromkeys(change for settings in trainers.SETTINGS.values() for change in settings)
    rows = [
        {"change": change}
        | {name: f"`{own[change]}`" if change in own else "-" for name, own in trainers.SETTINGS.items()}
        for change in changes
    ]
    return aligned(rows, "pipe")


def experiment(place: str, name: str) -> str:
    """The first table of an experiment of anatomy. Raises ValueError where none has this name."""
    section = (RESULTS / place / "report.md").read_text().partition(f"\n## {name}: ")[2]
    if not section:
        raise ValueError(f"{place} has no experiment {name}")
    from_table = itertools.dropwhile(lambda line: not line.startswith("|"), section.splitlines())
    text = "\n".join(itertools.takewhile(lambda line: line.startswith("|"), from_table))
    return text.replace("[[[", "[ [ [").replace("]]]", "] ] ]")  # cog reads again what it prints


# --- the guide's loop -----------------------------------------------------------------------------


@cache
def loop_states() -> dict[str, str]:
    """The text of the loop as it is and after each of its patches."""
    with tempfile.TemporaryDirectory() as folder:
        return {name: path.read_text() for name, path in loop.make_states(Path(folder)).items()}


def loop_change(last: str) -> str:
    """What all patches up to this one change of the loop, without what stays."""
    states = loop_states()
    before, after = states[loop.FIRST].splitlines(), states[last].splitlines()
    return as_diff(list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:])


def loop_patch(name: str) -> str:
    """One patch, with the lines around it."""
    text = (loop.LOOP / f"{name}.patch").read_text()
    return as_diff(text[text.index("@@") :].splitlines())


def as_diff(lines: list[str]) -> str:
    """A diff in Markdown, with an empty line where lines are left out."""
    text = "\n".join("" if line.startswith("@@") else line for line in lines[1:])
    return f"```diff\n{text}\n```"


# --- several recordings ---------------------------------------------------------------------------


def scales(*of: str) -> str:
    """Every step on one GPU and on several."""
    return shown(scaling.main_rows(scaled(*of)), *of, n_left=2)


def lost(*of: str) -> str:
    """Where the missing per cents of each step go."""
    return shown(scaling.lost_rows(scaled(*of)), *of, n_left=2)


def scaled(*of: str) -> list[scaling.Scaled]:
    return [row for place in of for row in scaling.scaled(record(place))]


def drift(*of: str) -> str:
    """The most by which the second half of a row's training steps took more or less time than its first."""
    return cells.percent(max(abs(row.line.drift) for row in scaled(*of)))


def gains(*of: str) -> str:
    """Times faster than the step before, by workload."""
    rows = [{"workload": place} | sweep.gain_cells(figures(place)) for place in of]
    return shown(rows, *of, by_recording=True)


def milliseconds(steps: list[str], *of: str) -> str:
    """Milliseconds of these steps, by workload."""
    rows = []
    for place in of:
        times = {step: cells.time_or_status(line(place, step)) for step in steps}
        rows.append({"workload": place} | times)
    return shown(rows, *of)


def kernels(step: str, word: str, *of: str) -> str:
    """The kernels of a step whose names hold a word, by workload."""
    rows = []
    for place in of:
        for kernel in line(place, step).row.profile.kernels:
            if whole := re.search(rf"\w*{word}\w*", kernel.name):
                rows.append({"workload": place, "kernel": whole[0], "ms": cells.milliseconds(kernel.ms)})
    return shown(rows, *of, n_left=2)


def present() -> str:
    """The recordings that are of the present code."""
    places = {str(path.parent.relative_to(RESULTS)) for path in RESULTS.glob("*/*/*.json")}
    return ", ".join(f"`{place}`" for place in sorted(places - {*stale()}))


def predictions(*of: str) -> str:
    """How far predictions from the roofs of a machine lie from what was measured there, by workload or sweep,
    and how far the gains of the nearest shape among the other ones do."""
    from predict import __main__ as predictor  # imports torch
    from predict import errors

    rows = []
    for place in of:
        machine = place.partition("/")[0]
        roofs, _ = predictor.read_roofs(machine)
        others = [
            run for other in of if other != place and other.startswith(f"{machine}/") for run in runs(other)
        ]
        rows.append({"predicted": place} | errors.error_cells(runs(place), roofs, others))
    return shown(table.only_filled(rows), *of, by_recording=True)


def stale(*of: str) -> list[str]:
    """Of these recordings, or of all, those that are absent, or hold a row or a figure of other code than the
    present one."""
    places = of or sorted({str(path.parent.relative_to(RESULTS)) for path in RESULTS.glob("*/*/*.json")})
    return [place for place in places if not is_recorded(place) or is_stale(place)]


def is_stale(place: str) -> bool:
    """Whether a recording holds a row of other code than the present one. Of bare rates and experiments only
    the code that times them counts."""
    if not (RESULTS / place / "results.json").exists():
        clock = row_sha256("", ROOT, CLOCKS)
        return any(read_object(path).get("code_sha256") != clock for path in (RESULTS / place).glob("*.json"))
    for name, run in runs_of(record(place)).items():
        for row in [*run.rows, *run.peers]:
            if row.status == "ok" and row.code_sha256 != present_sha256(variant_of(name), row, run):
                return True
    return False


def variant_of(name: str) -> str:
    """The variant that a run of a study trains, by its name: `VARIANT`, `VARIANT, seed 3`; empty if none."""
    label = name.partition(", seed ")[0]
    return label if label in patches.variants() else ""


def present_sha256(variant: str, row: Row, run: Run) -> str:
    """What a row's hash would be today; empty where its script is gone, or its patch does not fit any
    more."""
    if run.workload and run.workload.model == loop.NAME:
        state = loop_states().get(row.step)
        return row_sha256(state, ROOT, ()) if state else ""
    if not run.is_of_ladder:
        return present_code(MODEL_SCRIPT)
    script = f"{row.step}.py" if (ROOT / f"{row.step}.py").exists() else f"peers/{row.step}.py"
    return present_code(script, variant)


@cache
def present_code(script: str, variant: str = "") -> str:
    planned = Planned(script, [], "", patch=variant or None)
    return ((ROOT / script).exists() and running.code_of(planned)) or ""


def renew() -> None:
    """Make all that is drawn and written from records: a report.md of each, pictures of studies, the site,
    and README's picture for two widths in two themes."""
    for folder in sorted(path.parent for path in RESULTS.glob("*/*/results.json")):
        place = str(folder.relative_to(RESULTS))
        files = render(folder, record(place))[1]
        for name in files.keys() - {"report.html", "steps.svg"}:
            (folder / name).write_bytes(files[name])
    (ROOT / "docs" / "index.html").write_text(printers.html(sections.of_run(figures(SITE))))
    for theme, colors in THEMES.items():
        for name, width in (("wide", bars.WIDE), ("narrow", bars.NARROW)):
            (RESULTS / SITE / f"steps-{name}-{theme}.svg").write_text(
                bars.picture(figures(SITE), width, *colors)
            )


def main() -> int:
    parser = OneLineParser(prog="docs/tables.py", description=__doc__)
    parser.add_argument("--stale", nargs="*", metavar="PLACE")
    parser.add_argument("--device", metavar="MACHINE")
    parser.add_argument("--lost", nargs=2, type=Path, metavar=("OLD", "NEW"))
    args = parser.parse_args()
    if args.device:
        from common import hardware  # here, since it imports torch: the other commands need none

        return of_another_device(args.device, hardware.device_name(hardware.resolve_device("auto")))
    if args.lost:
        try:
            records = [load(each) for each in args.lost if (each / "results.json").exists()]
        except RecordError as error:
            say(str(error))
            return 1
        before, now = map(statuses, records) if len(records) == 2 else ({}, {})
        names = [name for name, status in before.items() if status == "ok" and now.get(name) != "ok"]
        if names:
            say(f"rows of {args.lost[0]} have no time now: {', '.join(names)}")
        return int(bool(names))
    if args.stale is None:
        renew()
        return 0
    places = stale(*args.stale)
    lines = [f"{place}: {'of other code' if is_recorded(place) else 'not recorded'}" for place in places]
    say("\n".join(lines) or "every record is of the present code")
    return int(bool(places))


def of_another_device(machine: str, here: str) -> int:
    """1 and one line where a machine has records, and none is of the device `here`; otherwise 0."""
    places = [path.parent for path in sorted((RESULTS / machine).glob("*/results.json"))]
    environments = [run.environment for place in places for run in runs(str(place.relative_to(RESULTS)))]
    recorded = {environment.device for environment in environments if environment}
    if not recorded or here in recorded:
        return 0
    say(
        f"{machine} has records of {' and '.join(sorted(recorded))}, and this is {here}: give another MACHINE"
    )
    return 1


def is_recorded(place: str) -> bool:
    """Whether a recording lies at a place, of whatever code."""
    return any((RESULTS / place).glob("*.json"))


if __name__ == "__main__":
    run_command(main, "docs/tables.py")
