"""What holds a run back: every rule finds what is planted into a recorded row, and is silent on the rows as
they are."""

import re
from dataclasses import replace

import pytest
from conftest import ROOT

from common.record import Kernel, Symptoms
from report import findings
from report.cells import milliseconds
from report.derive import derive
from report.load import load, runs_of
from report.trainers import settings_of

RESULTS = ROOT / "docs" / "results"
FOUND = {  # in recorded runs, by folder: how what each says begins
    "h200/hugging-face-gpt2": "Unaligned matmuls take ",
    "h200/narrow-320": "Casts to FP8 take ",
}
ON_GPUS = [path.parent for path in sorted(RESULTS.glob("h[12]00*/*/results.json"))]


@pytest.mark.parametrize("folder", ON_GPUS, ids=lambda folder: f"{folder.parent.name}/{folder.name}")
def test_recorded_runs_have_what_is_known_of_them_and_no_more(folder):
    known = FOUND.get(f"{folder.parent.name}/{folder.name}")
    for run in runs_of(load(folder)).values():
        _, lines = findings.of(derive(run))
        if known:
            assert len(lines) == 1 and lines[0].startswith(known)
        assert known or not [line for line in lines if not line.startswith("Nothing: ")]


def named(name, ms, category):
    """Plants a kernel."""

    def plant(row):
        row.profile.kernels.append(Kernel(name, category, ms))
        row.profile.categories[category] += ms

    return plant


def seen(**symptoms):
    def plant(row):
        row.symptoms = Symptoms(**symptoms)

    return plant


def ran(**settings):
    def plant(row):
        row.settings = replace(row.settings, captured=False, **settings)

    return plant


def waits(row):
    row.settings.captured, row.profile.idle_ms = False, 12.0


def recompiles(row):
    row.recompiled = 3


ALIGN1 = "cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_32x6_tn_align1"
COPY = "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda>"
PLANTED = {
    "FP32": ([seen(fp32_share=0.12)], "12% of the matmuls' FLOPs are in FP32"),
    "all FP32": (
        [ran(amp_dtype="float32", float32_matmul_precision="highest"), seen(fp32_share=1.0)],
        "Matmuls run in FP32",
    ),
    "unaligned": (
        [named(ALIGN1, 9.0, "matrix products")],
        "Unaligned matmuls take 9.00 of {ms} ms: pad sizes",
    ),
    "unaligned sizes": (
        [seen(unaligned_share=0.3, unaligned_sizes=[770, 50257])],
        "of {ms} ms: pad 770 to 832 and 50257 to 50304",
    ),
    "by hand": ([ran(attention_kernel="by hand")], "Attention by hand takes {attention} of {ms} ms"),
    "math": ([ran(attention_kernel="math")], "Attention runs PyTorch's math kernel"),
    "a mask": ([seen(is_masked=True)], "Attention reads a mask, and takes {attention} of {ms} ms"),
    "given up": ([seen(compiled_modules=13, compiled_calls=1)], "12 of 13 compiled modules ran uncompiled"),
    "waits for numbers": (
        [waits, seen(synchronizations=1)],
        "The GPU waits for its host 12.0 of {ms} ms, which waits once a step",
    ),
    "masked": ([ran(attention_kernel="efficient")], "faster ones need a head size of at most 256"),
    "gaps": ([waits], "The GPU waits for its host 12.0 of {ms} ms: a CUDA graph"),
    "numbers": ([ran(), seen(synchronizations=2)], "The host waits 2 times a step for a number"),
    "compiler": ([recompiles], "The compiler worked in timed steps, on 3 graphs"),
    "graphs": ([seen(graph_breaks=["a call of print"])], "at one place (a call of print)"),
    "optimizer": (
        [ran(optimizer="AdamW, foreach"), named("multi_tensor_apply", 4.0, "optimizer")],
        "The optimizer (AdamW, foreach) takes {optimizer} of {ms} ms",
    ),
    "layout": ([named(COPY, 5.0, "copies and casts")], "nothing but the layout take 5.00 of {ms} ms"),
    "loss": ([named("cunn_SoftMaxForward", 5.0, "loss")], "The loss takes 5.00 of {ms} ms, in passes"),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_what_is_planted_is_named(kind):
    run = load(RESULTS / "h200" / "gpt2")
    plants, said = PLANTED[kind]
    row = next(row for row in run.rows if row.step == "3_compile")
    for plant in plants:
        plant(row)
    figures = derive(replace(run, rows=[row], peers=[]))
    taken = {name: milliseconds(row.profile.categories[name]) for name in ("attention", "optimizer")}
    said = said.format(ms=milliseconds(figures.first.ms), **taken)
    name, lines = findings.of(figures)
    assert name == "3_compile" and any(said in line for line in lines), (said, lines)
    assert len(lines) <= findings.MOST


def test_what_takes_most_comes_first_and_a_step_at_its_roof_is_told_what_the_card_allows():
    run = load(RESULTS / "h200" / "gpt2")
    row = next(row for row in run.rows if row.step == "3_compile")
    waits(row)
    seen(unaligned_share=0.2, unaligned_sizes=[50257])(row)
    _, lines = findings.of(derive(replace(run, rows=[row], peers=[])))
    assert lines[0].startswith("The GPU waits") and lines[1].startswith("Unaligned")
    wide = load(RESULTS / "h200" / "wide-8192")
    rows = [row for row in wide.rows if row.step == "3_compile"]
    (line,) = findings.of(derive(replace(wide, rows=rows)))[1]
    allowed = milliseconds(wide.roofs.allows_ms["bf16"])
    assert re.fullmatch(
        rf"Nothing: matmuls run at \d\d% of what they reach alone, in BF16; the card allows {allowed} ms",
        line,
    )


def test_what_does_not_apply_is_not_advised():
    """fused=True of an optimizer that has none; padding of a matmul in TF32, where align4 is all it needs."""
    for plants in (
        (ran(optimizer="Muon, foreach"), named("multi_tensor_apply", 4.0, "optimizer")),
        (named("cutlass_80_tensorop_s1688gemm_128x64_32x6_nn_align4", 20.0, "matrix products"),),
    ):
        run = load(RESULTS / "h200" / "gpt2")
        row = next(row for row in run.rows if row.step == "3_compile")
        for plant in plants:
            plant(row)
        _, lines = findings.of(derive(replace(run, rows=[row], peers=[])))
        assert not any("fused=True" in line or "Unaligned" in line for line in lines), lines


@pytest.mark.parametrize("change", ["on a CPU", "without a profile", "of other work"])
def test_nothing_is_said_of_a_row_that_cannot_be_judged(change):
    run = load(RESULTS / "h200" / "gpt2")
    row = next(row for row in run.rows if row.step == "3_compile")
    waits(row)
    if change == "on a CPU":
        row.profile.idle_ms = None
    elif change == "without a profile":
        row.profile = None
    else:
        row.proof = replace(row.proof, cosine=0.1)
    assert findings.of(derive(replace(run, rows=[row], peers=[]))) == ("", [])


def test_changes_are_settings_of_trainers_and_fp8_takes_the_place_of_bf16():
    lines = settings_of(["AMP", "compile", "CUDA graph", "FP8"], "AdamW, fused")
    trainer, accelerate, lightning, *others = lines
    assert 'optim="adamw_torch_fused", bf16=True' in trainer and "torch_compile=True" in trainer
    assert 'mixed_precision="fp8"' in accelerate and "bf16" not in accelerate + lightning
    assert [line for line in others if "no trainer captures" in line] and len(lines) == 6
    assert not any("Lightning" in line for line in settings_of(["fused attention"], "AdamW, fused"))
    assert not any("fused" in line for line in settings_of(["AMP"], "Muon, foreach"))
