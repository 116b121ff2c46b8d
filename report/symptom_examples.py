"""A measured example of each symptom of docs/not-faster.md, from the records: the table of that page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from common.record import MERGED, Row, Run
from report import analysis, scaling, symptoms
from report.analysis import peak_gib
from report.causal_claims import MARKED
from report.doubts import MARK, compared
from report.records import CPU, GPU, GPUS, OF_SLICE, SLICE, Records
from report.story import ms_of
from report.table import markdown, pipe_table

SHOWN = ("gpt2-batch-8", SLICE)
BEFORE = {"1_cublas": "0_baseline", "3_compile": "2_sdpa", "4_transformer_engine": "3_compile"}
Found = tuple[str, str]  # figure, and record below the machine's folder
Example = Callable[[Records], Found]  # raises KeyError where a record lacks


def slower(step: str) -> Example:
    """Runs in which a step takes longer than the one before."""

    def describe(run: Run, before: Row, row: Row) -> str | None:
        faster = compared(row, before, run)
        if faster is None or faster.ratio >= 1 / symptoms.MORE:
            return None
        kinds = ("matrix products", "copies and casts")
        old, new = (analysis.category_ms(one) for one in (before, row))
        parts = [f"{kind} {old[kind]:.1f} ms, then {new[kind]:.1f}" for kind in kinds]
        return f"{before.step} {ms_of(run, before)} ms, {row.step} {ms_of(run, row)} ({'; '.join(parts)})"

    return _of_pairs(step, describe)


def larger(step: str) -> Example:
    """Runs in which a step needs more memory than the one before."""

    def describe(_: Run, before: Row, row: Row) -> str | None:
        a, b = peak_gib(before), peak_gib(row)
        return f"from {a:.1f} to {b:.1f} GiB" if b > symptoms.MORE * a else None

    return _of_pairs(step, describe)


def changed(step: str, category: str, *names: str) -> Example:
    """Time and launches of a category in some runs, in a step and in the one before."""

    def describe(_: Run, before: Row, row: Row) -> str:
        a, b = (one.profile.categories[category] for one in (before, row))
        return (f"{category} {a.ms:.1f} ms in {a.launches:.0f} launches in {before.step}, "
                f"{b.ms:.1f} in {b.launches:.0f} in {row.step}")  # fmt: skip

    return _of_pairs(step, describe, names)


def _of_pairs(step: str, describe: Callable[[Run, Row, Row], str | None], names: tuple[str, ...] = ()) -> Example:
    def measure(records: Records) -> Found:
        pairs = records.rows(BEFORE[step], step, of=names).items()
        said = [f"{name}: {text}" for name, pair in pairs if (text := describe(records.runs[name], *pair))]
        return _joined(said, f"*/{MERGED}")

    return measure


def _joined(said: list[str], record: str) -> Found:
    if not said:
        raise KeyError(record)
    return "; ".join(said), record


def unscaled(figures: dict) -> str:
    lost = [number for number, range_ in figures["ranges"].items() if range_["becomes"]["FP8 E4M3"] == "nan"]
    return f"without a scale {' and '.join(lost)} become NaN in E4M3, a format of FP8"


def untimed_step_4(records: Records) -> Found:
    for name, run in records.runs.items():
        for row in run.steps:
            if row.step == "4_transformer_engine" and row.status == "skipped":
                return f"not seen here; without a GPU: {analysis.reason_untimed(row)}", f"{name}/{MERGED}"
    raise KeyError("a step 4 that was skipped")


def anatomy(experiment: str, describe: Callable[[dict], str]) -> Example:
    """A figure of an experiment of anatomy/."""
    return lambda records: (describe(records.experiments[experiment]), f"anatomy/{experiment}.json")


def compiled_step(figures: dict) -> str:
    eager, default = figures["eager"]["step_s"], figures["modes"]["default"]["cold"]
    cold = default["first_steps_s"]
    return f"a small block: {1e3 * eager:.2f} ms eager, {1e3 * default['step_s']:.2f} compiled after {cold:.1f} s"


def compiled_memory(figures: dict) -> str:
    eager, default = figures["eager"]["reserved_bytes"], figures["modes"]["default"]["cold"]["reserved_bytes"]
    return f"a small block: {eager / 1e6:.0f} MB reserved eager, {default / 1e6:.0f} compiled"


def graphs(figures: dict) -> str:
    return "5 calls compile " + ", ".join(f"{found} ({name})" for name, (_, found) in figures["graphs"].items())


def kernels(figures: dict) -> str:
    length = max(figures["attention"]["SDPA math"], key=int)
    times = (
        f"{name} {1e3 * at[length]['seconds']:.1f} ms" for name, at in figures["attention"].items() if length in at
    )
    return f"T {length}: {', '.join(times)}"


def sync(figures: dict) -> str:
    loop = figures["loop"]
    without, with_item = (1e3 * loop[f"{which}_s"] for which in ("without", "with"))
    return f"{loop['iterations']} small kernels: {without:.1f} ms, with .item() after each {with_item:.1f}"


def tf32(records: Records) -> Found:
    fp32, tf32 = (records.roofs().ceilings[precision] / 1e12 for precision in ("fp32", "tf32"))
    return f"{fp32:.0f} TFLOP/s in FP32, {tf32:.0f} in TF32", OF_SLICE


def over_the_peak(records: Records) -> Found:
    """The FLOP/s of step 4 against the ceiling of another format, and against that of its own."""
    ((_, row),) = records.rows("3_compile", "4_transformer_engine", of=(SLICE,)).values()
    bf16, fp8 = (row.model_flops_per_s / records.roofs().ceilings[precision] for precision in ("bf16", "fp8"))
    text = f"{row.step} reaches {bf16:.0%} of the ceiling of BF16, and {fp8:.0%} of FP8's, in which it multiplies"
    return f"{'' if bf16 > 1 else 'not seen here; '}{text}", OF_SLICE


def parallel(kind: str) -> Example:
    """Efficiency of a way to share the model, FSDP's beside DDP's, in recorded runs with --scaling."""

    def measure(records: Records) -> Found:
        said, behind = [], kind == "ddp"
        for path in sorted(records.folder.glob(f"*/{scaling.ROWS}")):
            rows = {
                (row.step, row.gpus, row.parallel): row for row in scaling.scaled_rows(scaling.load_places(path.parent))
            }
            for (step, gpus, how), row in rows.items():
                if how != kind or not row.efficiency:
                    continue
                ddp = rows.get((step, gpus, "ddp"))
                beside = f", DDP {scaling.efficiency_cell(ddp)}" if ddp and ddp is not row else ""
                said.append(f"{path.parent.name}: {step} on {gpus} GPUs {scaling.efficiency_cell(row)}{beside}")
                behind |= bool(beside and ddp.efficiency) and row.efficiency < ddp.efficiency
        text, record = _joined(said, f"*/{scaling.ROWS}")
        return f"{'' if behind else 'not seen here; '}efficiency by {kind.upper()}: {text}", record

    return measure


EXAMPLES = {
    symptoms.SLOW_FP8: slower("4_transformer_engine"), symptoms.LARGE_FP8: larger("4_transformer_engine"),
    symptoms.NAN: anatomy("precision", unscaled), symptoms.INSTALL: untimed_step_4,
    symptoms.SLOW_COMPILE: anatomy("compile-modes", compiled_step),
    symptoms.RECOMPILED: anatomy("compile-modes", graphs),
    symptoms.LARGE_COMPILE: anatomy("compile-modes", compiled_memory),
    symptoms.ATTENTION: anatomy("attention", kernels),
    symptoms.SLOW_AMP: changed("1_cublas", "copies and casts", *SHOWN), symptoms.TF32: tf32,
    symptoms.DDP: parallel("ddp"), symptoms.FSDP: parallel("fsdp"),
    symptoms.HOST: changed("3_compile", "optimizer", *SHOWN), symptoms.MFU: over_the_peak,
    symptoms.SYNC: anatomy("sync-points", sync),
}  # fmt: skip


def examples_table(results: Path) -> str:
    """A row per symptom: a link to its entry, a figure, and the record that holds it."""
    machines = {name: Records.read(results / name) for name in (GPU, GPUS, CPU)}
    elsewhere = {symptoms.INSTALL: CPU, symptoms.DDP: GPUS, symptoms.FSDP: GPUS}
    cells = []
    for title in symptoms.TITLES:
        name = elsewhere.get(title, GPU)
        figure, record = machines[name].measured(EXAMPLES[title], ("nothing is recorded", None))
        link, place = f"[{title}](#{anchor(title)})", f"{name}/{record}" if record else "-"
        cells.append((link, markdown(figure), markdown(place)))
    marks = {MARK: MARKED, scaling.UNLIKE: scaling.UNLIKE_LEGEND}
    legend = [meaning for sign, meaning in marks.items() if any(sign in figure for _, figure, _ in cells)]
    return "\n\n".join([pipe_table(("symptom", "measured here", "record"), cells, n_left=3), *legend])


def anchor(title: str) -> str:
    """The name that GitHub gives to a heading."""
    return "".join(letter for letter in title.lower().replace(" ", "-") if letter.isalnum() or letter in "-_")
