"""What holds a run back: rules over the record of its fastest row on a GPU. A rule is a function of a line
that returns a finding, or None; the three that cost most are shown."""

import re
from typing import NamedTuple

from common.kernels import COPIES, PRODUCTS, in_words
from common.record import UNFUSED, Symptoms
from report.cells import milliseconds
from report.figures import GAPS, TENSOR_CORES, Figures, Line, is_mixed

MOST = 3  # that are shown
UNALIGNED = r"align[124]\b"  # in the names of CUTLASS's kernels: how many numbers they load at once
IN_FP32 = re.compile(r"sgemm|s1688gemm_\d|tf32")  # there align4 is 16 bytes
GOOD_SIZE = 64  # to multiples of it a size is padded, as nanoGPT does
# Shares of a step, from which a cost is named. The last rows of this project's runs on H100 and H200 have
# less: tests/test_findings.py.
LEAST_UNALIGNED, LEAST_GAPS, LEAST_OPTIMIZER, LEAST_COPIES, LEAST_LOSS = 0.05, 0.08, 0.03, 0.05, 0.05
LEAST_MASKED = 0.05
CAN_FUSE = ("Adam", "AdamW", "SGD", "Adagrad")  # the optimizers of PyTorch that have fused=True
LEAST_FP32 = 0.02  # of the FLOPs of matmuls
AT_ROOF = 0.7  # of what bare products reach: a step that has so much, and no finding, is near its end


class Finding(NamedTuple):
    ms: float  # of a step that it takes, at least: by it findings are ordered
    text: str  # the figure, then the remedy


def of(figures: Figures) -> tuple[str, list[str]]:
    """The name of the fastest step that can be judged, and at most three lines on it, what takes most first;
    where there is none, how near it is to its roof. Both are empty where no step can be judged."""
    line = fastest(figures)
    if line is None:
        return "", []
    found = [finding for rule in RULES if (finding := rule(line))]
    in_fp8 = [line for line in figures.timed_steps if line.row.settings.fp8_recipe]
    found += filter(None, map(casts_of_fp8, in_fp8[-1:]))
    texts = [finding.text for finding in sorted(found, key=lambda finding: -finding.ms)]
    return line.name, texts[:MOST] or at_its_roof(line)


def fastest(figures: Figures) -> Line | None:
    """Of a GPU's steps that do the same work, the fastest; None where that one has no profile."""
    sound = [line for line in figures.timed_steps if line.same_work != "differs"]
    line = min(sound, key=lambda line: line.ms, default=None)
    return line if line and line.profile and line.profile.idle_ms is not None else None


def of_step(ms: float, line: Line) -> str:
    return f"{milliseconds(ms)} of {milliseconds(line.ms)} ms"


def symptoms_of(line: Line) -> Symptoms:
    return line.row.symptoms or Symptoms()


# --- rules ----------------------------------------------------------------------------------------


def products_in_fp32(line: Line) -> Finding | None:
    share = symptoms_of(line).fp32_share or 0.0
    if share < LEAST_FP32 or line.row.settings.fp8_recipe or line.capability < TENSOR_CORES:
        return None
    ms = share * line.category_ms[PRODUCTS]
    if not is_mixed(line):
        name = "FP32" if line.row.settings.float32_matmul_precision == "highest" else "TF32"
        return Finding(ms, f"Matmuls run in {name}: autocast to BF16 runs them on faster tensor cores")
    where = "autocast leaves them out: look for .float(), autocast(enabled=False) and FP32 buffers"
    return Finding(ms, f"{share:.0%} of the matmuls' FLOPs are in FP32; {where}")


def unaligned_products(line: Line) -> Finding | None:
    """Rows of numbers that do not begin at multiples of 16 bytes are loaded one number or two at a time.
    Source: NVIDIA, Matrix Multiplication Background User's Guide."""
    kernels = [kernel for kernel in line.profile.kernels if kernel.category == PRODUCTS]
    slow = [each.ms for each in kernels if re.search(UNALIGNED, each.name) and not IN_FP32.search(each.name)]
    share = 0.0 if line.row.settings.fp8_recipe else symptoms_of(line).unaligned_share or 0.0
    ms = sum(slow) or share * line.category_ms[PRODUCTS]
    if not is_mixed(line) or ms < LEAST_UNALIGNED * line.ms:
        return None
    vocabulary = (line.run.workload.vocab_size if line.run.workload else None) or 0
    sizes = symptoms_of(line).unaligned_sizes or ([vocabulary] if vocabulary % 8 else [])
    pads = [f"{size} to {-(-size // GOOD_SIZE) * GOOD_SIZE}" for size in sizes[-2:]]
    remedy = f"pad {' and '.join(pads)}" if pads else f"pad sizes to multiples of {GOOD_SIZE}"
    return Finding(ms, f"Unaligned matmuls take {of_step(ms, line)}: {remedy}")


def slow_attention(line: Line) -> Finding | None:
    kernel, ms = line.row.settings.attention_kernel, line.category_ms["attention"]
    taking = f"{of_step(ms, line)}, its matmuls not counted"
    fused = "F.scaled_dot_product_attention writes no (T, T) scores"
    if not is_mixed(line):
        return None
    if kernel == "by hand":
        return Finding(ms, f"Attention by hand takes {taking}: {fused}")
    if kernel in UNFUSED:
        why = "give it BF16, a head size that divides by 8, and is_causal=True in place of a mask"
        return Finding(ms, f"Attention runs PyTorch's math kernel, {taking}: {why}")
    if symptoms_of(line).is_masked and ms >= LEAST_MASKED * line.ms:
        why = "where it only hides what is to come, is_causal=True halves the work"
        return Finding(ms, f"Attention reads a mask, and takes {of_step(ms, line)}: {why}")
    if kernel == "efficient" and line.capability >= TENSOR_CORES:
        why = "faster ones need a head size of at most 256 that divides by 8, and no mask"
        return Finding(ms, f"Attention runs the efficient kernel, {of_step(ms, line)}: {why}")
    return None


def waiting_gpu(line: Line) -> Finding | None:
    """Gaps between kernels, and a host that waits for the GPU, which is one of their causes."""
    ms, count = line.category_ms[GAPS], symptoms_of(line).synchronizations
    waits, is_captured = ms >= LEAST_GAPS * line.ms, line.row.settings.captured
    begin = f"The GPU waits for its host {of_step(ms, line)}"
    if count and not is_captured:
        begin = f"{begin}, which waits" if waits else "The host waits"
        times = "once" if count == 1 else f"{count} times"
        remedy = "keep such numbers on the GPU; no CUDA graph can hold them"
        return Finding(ms, f"{begin} {times} a step for a number (.item(), `if tensor`, x[mask]): {remedy}")
    if not waits:
        return None
    if is_captured:
        return Finding(ms, f"{begin}: a larger batch makes its kernels longer")
    remedy = "a CUDA graph launches all kernels at once, and a larger batch makes them longer"
    return Finding(ms, f"{begin}: {remedy}")


def compiler_at_work(line: Line) -> Finding | None:
    graphs = line.row.recompiled
    if not graphs:
        return None
    text = f"The compiler worked in timed steps, on {graphs} graphs: a size or a number changes"
    return Finding(line.ms, f"{text}; TORCH_LOGS=recompiles names it")


def eager_modules(line: Line) -> Finding | None:
    compiled, calls = symptoms_of(line).compiled_modules, symptoms_of(line).compiled_calls
    if calls >= compiled:
        return None
    text = f"{compiled - calls} of {compiled} compiled modules ran uncompiled, because a size or a"
    return Finding(
        line.category_ms["normalization and pointwise"],
        f"{text} number changes; TORCH_LOGS=recompiles names it",
    )


def broken_graphs(line: Line) -> Finding | None:
    reasons = symptoms_of(line).graph_breaks
    if not (line.row.settings.compiled and reasons):
        return None
    places = "at one place" if len(reasons) == 1 else f"for {len(reasons)} reasons"
    return Finding(
        0.0, f"The compiler breaks its graph {places} ({reasons[0]}); TORCH_LOGS=graph_breaks shows where"
    )


def unfused_optimizer(line: Line) -> Finding | None:
    ms, optimizer = line.category_ms["optimizer"], line.row.settings.optimizer
    kind, _, how = (optimizer or "").partition(", ")
    if kind not in CAN_FUSE or how == "fused" or ms < LEAST_OPTIMIZER * line.ms:
        return None
    return Finding(
        ms, f"The optimizer ({optimizer}) takes {of_step(ms, line)}: fused=True is one pass over the weights"
    )


def copies_by_layout(line: Line) -> Finding | None:
    kernels = [kernel for kernel in line.profile.kernels if kernel.category == COPIES]
    ms = sum(each.ms for each in kernels if in_words(each.name) in ("copy", "concatenation"))
    work = line.run.workload
    if ms < LEAST_COPIES * line.ms or (work and work.gpus > 1):  # DDP copies gradients into its buckets
        return None
    remedy = "views in place of .contiguous(), reshape after permute, cat and repeat_interleave"
    return Finding(ms, f"Copies that change nothing but the layout take {of_step(ms, line)}: {remedy}")


def loss_in_passes(line: Line) -> Finding | None:
    kernels = [kernel for kernel in line.profile.kernels if kernel.category == "loss"]
    ms = sum(each.ms for each in kernels if not each.name.startswith("triton"))
    if ms < LEAST_LOSS * line.ms:
        return None
    return Finding(ms, f"The loss takes {of_step(ms, line)}, in passes over FP32 logits: compile it")


def casts_of_fp8(line: Line) -> Finding | None:
    """Of a row in FP8, whose casts take more than its products save."""
    before = line.before
    if not (before and before.category_ms and line.category_ms) or before.row.settings.fp8_recipe:
        return None
    casts = line.category_ms[COPIES] - before.category_ms[COPIES]
    saved = before.category_ms[PRODUCTS] - line.category_ms[PRODUCTS]
    if casts <= max(saved, 0.0):
        return None
    text = f"Casts to FP8 take {milliseconds(casts)} ms more than {before.name} has, and its matmuls save"
    return Finding(casts - saved, f"{text} {milliseconds(max(saved, 0.0))} ms: FP8 pays with more channels")


RULES = (
    products_in_fp32,
    unaligned_products,
    slow_attention,
    waiting_gpu,
    compiler_at_work,
    eager_modules,
    broken_graphs,
    unfused_optimizer,
    copies_by_layout,
    loss_in_passes,
)


def at_its_roof(line: Line) -> list[str]:
    """What a step without a finding is limited by; empty where that is not its matmuls."""
    share = line.roofline_share
    if not share or share < AT_ROOF or line.precision not in ("bf16", "fp8"):
        return []
    allowed = line.run.roofs.allows_ms.get(line.precision)
    ends = f"; the card allows {milliseconds(allowed)} ms" if allowed else ""
    return [
        f"Nothing: matmuls run at {share:.0%} of what they reach alone, in {line.precision.upper()}{ends}"
    ]
