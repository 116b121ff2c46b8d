"""One run of every kind, and what its report says: tests/data holds it, reviewed by eye.

python tests/goldens.py     writes these texts anew; read `git diff tests/data` before you keep them
"""

import sys
from dataclasses import replace
from pathlib import Path

import runs

from common.record import Proof, Run, Settings, Study
from report import printers, sections
from report.__main__ import render

DATA = Path(__file__).parent / "data"


def ok() -> Run:
    """The ladder with roofs, proofs, a prediction and a power."""
    rows = [
        runs.row(step, ms, profile=runs.profile(ms), rehearsed=10, power_w=400.0, clock_mhz=1500.0)
        for step, ms in zip(runs.STEPS, (2000.0, 400.0, 200.0, 150.0, 100.0), strict=True)
    ]
    for row in rows[1:]:
        row.proof = Proof(rows[0].step, row is rows[4], 1.0, 0.9999, "mlp.weight", limit=0.999)
    measured = replace(runs.roofs(), allows_ms={"bf16": 90.0})
    return runs.run(*rows, measured=measured, device="NVIDIA H200")


def ended() -> Run:
    """Rows that ended in every way, one whose gradients differ, and a late one that copies an early one."""
    rows = [
        runs.row("0_baseline", status="oom", reason="out of memory: try a smaller batch size"),
        runs.row("1_cublas", 100.0, source="x = 1\ny = 2\nz = 3\n"),
        runs.row("2_sdpa", 50.0, source="x = 1\ny = 2\nw = 4\nv = 5\n", note="odd"),
        runs.row("3_compile", status="failed", reason="torch.compile lacks a C++ compiler"),
        runs.row("4_transformer_engine", status="skipped", reason="no FP8"),
        runs.row("5_mine", 80.0, source="x = 1\ny = 2\nz = 3\nmine = 5\n"),
        runs.row("6_late", status="not run", reason="the run ended before this row"),
    ]
    rows[5].proof = Proof("1_cublas", False, 1.0, 0.5, "mlp.weight", limit=0.999)
    return runs.run(*rows, problems=["rows differ in torch: 1 in 1_cublas; 2 in 5_mine"])


def passes() -> Run:
    """Two passes of two steps, three processes, and a peer."""
    rows = []
    for step, ms in (("2_sdpa", 100.0), ("3_compile", 50.0)):
        each = [runs.row(step, ms), runs.row(step, 1.1 * ms)]
        rows.append(replace(each[0], passes=each))
    work = runs.workload(gpus=3, parallel="ddp")
    peer = runs.row("nanogpt", 60.0, settings=replace(runs.SETTINGS["3_compile"], head="BF16"))
    return runs.run(*rows, peers=[peer], work=work)


def busy() -> Run:
    """A machine that was busy around one row, a row that drifts, a row whose name is not what ran."""
    rows = [runs.row(step, 100.0, product_ms=[20.0] * 2) for step in runs.STEPS[:4]]
    rows[1].product_ms = [25.0] * 2
    rows[2].step_ms = [100.0] * 2 + [110.0] * 2
    rows[3].settings = replace(rows[3].settings, compiled=False)
    return runs.run(*rows, variables={"TORCHDYNAMO_DISABLE": "1"})


def model() -> Run:
    """A model that is not ours: one change is left out, one differs, one is skipped."""
    ours = {"0_fp32": [], "1_amp": ["AMP"], "2_sdpa": ["AMP", "fused attention"]}
    ours |= {"3_compile": ["AMP", "compile"], "4_graph": ["AMP", "compile", "CUDA graph"]}
    settings = {
        "0_fp32": replace(runs.SETTINGS["0_baseline"], attention_kernel="cudnn"),
        "1_amp": runs.SETTINGS["2_sdpa"],
        "2_sdpa": runs.SETTINGS["2_sdpa"],
        "3_compile": replace(runs.SETTINGS["3_compile"], captured=False),
        "4_graph": runs.SETTINGS["3_compile"],
    }
    times = {"0_fp32": 400.0, "1_amp": 200.0, "2_sdpa": 210.0, "3_compile": 100.0, "4_graph": 99.0}
    rows = []
    for name, changes in ours.items():
        source = "".join(f"change({change!r})\n" for change in changes) or "step()\n"
        code = "step()\n" if not changes else f"# once\n{source}\n# in each step\nstep()\n"
        row = runs.row(name, times[name], changes=changes, settings=settings[name], source=source, code=code)
        row.proof = Proof("0_fp32", False, 1.0, 0.99, "h.0.weight", repeated=1.0, limit=0.95)
        rows.append(row)
    rows[0].proof, rows[4].proof.cosine = None, 0.3
    rows.append(runs.row("5_fp8", status="skipped", reason="no FP8", changes=["AMP", "FP8"]))
    return runs.run(*rows, work=runs.workload(model="my_model.py", text="batches() of my_model.py"))


def patched() -> Run:
    """A model whose recommended changes were put into its file."""
    run = model()
    row = runs.row("6_patched", 100.5, changes=run.rows[3].changes, settings=run.rows[3].settings)
    row.code, row.proof = "--- a/my_model.py\n+++ b/my_model.py\n", run.rows[3].proof
    run.rows.append(row)
    return run


def cpu() -> Run:
    run = runs.ladder(300, 200, 100, device_type="cpu")
    for row in run.rows:
        row.profile.idle_ms = None
    return run


def scaling() -> Study:
    one = [
        runs.row(step, ms, profile=runs.profile(ms)) for step, ms in (("2_sdpa", 100.0), ("3_compile", 50.0))
    ]
    two = [
        runs.row(step, ms, profile=runs.profile(ms)) for step, ms in (("2_sdpa", 125.0), ("3_compile", 55.0))
    ]
    two[0].profile.categories["communication"], two[0].profile.communication_ms = 2.5, 20.0
    two[1].settings = replace(two[1].settings, captured=False)
    work = runs.workload(gpus=2, parallel="ddp")
    places = {"1": runs.run(*one), "2-ddp": runs.run(*two, work=work)}
    lost = replace(runs.run(runs.row("2_sdpa", status="not run")), workload=None)
    lost.problems.append("rows differ in torch: 1 in 2_sdpa; 2 in 3_compile")
    study = runs.study("scaling", places | {"2-fsdp": lost})
    study.command = "./run_all.sh --scaling && ./run_all.sh --scaling --parallel fsdp"
    return study


def sweep() -> Study:
    shapes = {}
    for width in (512, 128):
        rows = [runs.row(step, width / 2**k) for k, step in enumerate(runs.STEPS[:3])]
        shapes[f"w{width}"] = runs.run(*rows, work=runs.workload(n_embd=width))
    shapes["w512"].rows[0] = runs.row(runs.STEPS[0], status="oom", reason="too large")
    return runs.study("sweep", shapes)


def ablations() -> Study:
    rows = {"2_sdpa": runs.row("2_sdpa", 100.0), "no-mask": runs.row("2_sdpa", 90.0, source="y = 1\nz = 2\n")}
    rows["no-mask"].proof = Proof("2_sdpa", False, 1.0, 0.4, "attn.qkv.weight", limit=0.999)
    rows["odd"] = runs.row("2_sdpa", step_ms=[100.0] * 2 + [110.0] * 2, loss=[4.0, 4.5])
    return runs.study("ablations", {name: runs.run(row) for name, row in rows.items()})


def parity() -> Study:
    named = {}
    fp8 = Settings(fp8_recipe="delayed")
    for seed in (1, 2, 3):
        for step, more, settings in (("2_sdpa", 0.0, Settings()), ("4_te", 0.1, fp8)):
            losses = [9.0] * 30 + [2.0 + seed + more] * 10
            tests = [(10, 3.0), (20, 2.0 + more), (30, 1.7 + more), (40, 1.4 + more)]
            row = runs.row(step, 50.0, loss=losses, heldout=tests, settings=settings)
            named[f"{step}, seed {seed}"] = runs.run(row)
    return runs.study("parity", named)


KINDS = (ok, ended, passes, busy, model, patched, cpu, scaling, sweep, ablations, parity)


def outline(section: sections.Section, depth: int) -> list[str]:
    """All that a section says, and how long its bars are, as lines of text."""
    marks = [word for word in ("folded", "in_columns", "in_words") if getattr(section, word)]
    lines = [f"{'#' * depth} {section.heading} {' '.join(marks)}".rstrip(), section.text]
    lines += [f"{sign} {line}".rstrip() for sign, line in section.code]
    for bar in section.bars:
        parts = "; ".join(f"{what} = {length:.3f}" for what, length, _ in bar.parts)
        lines += [f"[{bar.name} | {bar.label} | {parts}]", *bar.code]
    lines += ["curves"] if section.curves else []
    if section.shown == sections.PAGE:  # others stand in report.md
        lines += [printers.aligned(section.rows), section.note] if section.rows else [section.note]
    return [*filter(None, lines)] + [
        line for part in section.parts if part for line in outline(part, depth + 1)
    ]


def text_of(make) -> str:
    """What a terminal shows, report.md, and the page in words."""
    record = make()
    shown, files = render(Path("results/x"), record)
    page = [line for section in sections.of(record).sections for line in outline(section, 1)]
    return "\n".join(
        ["$ terminal", shown, "", "$ report.md", files["report.md"].decode(), "$ page", *page, ""]
    )


if __name__ == "__main__":
    for kind in KINDS:
        (DATA / f"{kind.__name__}.txt").write_text(text_of(kind))
    sys.exit(0)
