"""Every sentence that names a cause, with the figure behind it and its record: docs/causes.md.

A sentence stands here as it stands in its file. Its figure is one of report/causal_figures.py or of
report/causal_losses.py. Where the records lack it, the page says "not measured".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from report.causal_figures import (
    AT,
    POINTWISE,
    Measure,
    alone_in_step_3,
    attention_bytes,
    bf16_in_step_4,
    busy_host,
    capture_alone,
    casts_and_pointwise_of_step_2,
    casts_of_autocast,
    ceilings,
    change,
    clock_under_load,
    head_in_fp8,
    in_sweep,
    kernels_of_capture,
    largest_at,
    left_by_tensor_cores,
    losses_apart,
    masked_half,
    of_causes,
    parts_of_step_3,
    passes_apart,
    power_limit,
    share_of_products,
    step_4_by_width,
    tf32_and_bf16,
    zeros,
)
from report.causal_losses import (
    fp8_by_seed,
    fused_adamw,
    last_norm_in_bf16,
    peers_ended_higher,
    range_of_seeds,
    same_row_again,
    without_fp8,
)
from report.doubts import LEGEND, MARK
from report.records import CPU, GPU, SLICE, Records
from report.table import markdown, pipe_table

MARKED = f"{LEGEND} in [performance](performance.md)."
CONSISTENT = "consistent, not shown"
PAGE, README = "docs/performance.md", "README.md"
METHOD, PARITY, GUIDE = "docs/method.md", "docs/parity.md", "docs/guide.md"
WITH_PEERS = "h200-16f3e8d"  # the early run


@dataclass(frozen=True)
class Claim:
    where: str
    sentence: str
    measure: Measure
    machine: str = GPU
    shown: bool = True  # False: the figure agrees with the sentence, but another cause would give it as well


CLAIMS = [
    Claim("1_cublas.py", "FP32 arithmetic bounds the baseline.", share_of_products("0_baseline", 0.5), shown=False),
    Claim("1_cublas.py", "Tensor cores multiply many times faster.", ceilings("bf16", "fp32", 5, 100)),
    Claim("1_cublas.py", "The casts that autocast adds take back a part of the gain.",
          change("0_baseline", "1_cublas", "copies and casts", ratio=(1, math.inf))),
    Claim("2_sdpa.py", "attention by hand wrote the (T, T) scores to DRAM and read them several times.",
          attention_bytes),
    Claim("2_sdpa.py", "Fused, they stay on the chip,", attention_bytes),
    Claim("2_sdpa.py", "and the half that the mask hid is not computed.", of_causes(masked_half)),
    Claim("2_sdpa.py", "Autocast no longer casts them to FP32 for softmax, and back.",
          change("1_cublas", "2_sdpa", "copies and casts"), shown=False),
    Claim("3_compile.py", "AdamW and these operations read and wrote the same tensors several times.",
          change("2_sdpa", "3_compile", "optimizer", "copies and casts", POINTWISE), shown=False),
    Claim("3_compile.py", "The host launched every kernel; with a captured graph it launches once a step.",
          of_causes(capture_alone), shown=False),
    Claim("3_compile.py", "Which of the three, AdamW, the model or the graph, gains most depends on the model and the "
          "host", of_causes(parts_of_step_3), shown=False),
    Claim("4_transformer_engine.py", "BF16 products are the largest part of the compiled step.",
          share_of_products("3_compile", 0)),
    Claim("4_transformer_engine.py", "FP8 tensor cores are nearly twice as fast.", ceilings("fp8", "bf16", 1.7, 2)),
    Claim(README, "attention as one fused kernel: the (T, T) scores stay on the chip", attention_bytes),
    Claim(README, "if you train in FP32. At the same batch and length it gains more, the wider the model is.",
          in_sweep("0_baseline", "1_cublas", "n_embd"), shown=False),
    Claim(README, "if your attention is written by hand. At the same width it gains more, the longer the sequences "
          "are.", in_sweep("1_cublas", "2_sdpa", "seq_len"), shown=False),
    Claim(README, "casts, pointwise kernels or the optimizer. It gains more, the narrower the model is.",
          in_sweep("2_sdpa", "3_compile", "n_embd", rises=False), shown=False),
    Claim(README, "if your model is wide. It gains more, the wider the model is: at 256 channels it is slower than "
          "step 3, from 2048 channels on it is faster, and at 1024 channels it gains more, the "
          "more tokens a training step has.",
          in_sweep("3_compile", "4_transformer_engine", "n_embd", ends=(256, 2048)), shown=False),
    Claim(README, "so few training steps learn little, and another rounding alone can change their mean loss.",
          losses_apart, shown=False),
    Claim(PAGE, "seven tenths of its time, or more, are matrix products.", share_of_products("0_baseline", 0.7)),
    Claim(PAGE, "BF16 alone saves all that step 1 saves, so beside it TF32 saves nothing. TF32 alone saves nine tenths "
          "of it, but then a training step takes 1.6 times as long as in BF16 at the slice, and 1.2 times at gpt2 with "
          "batch 32.", of_causes(tf32_and_bf16)),
    Claim(PAGE, "Under autocast, copies and casts grow by 60 ms at the slice.", of_causes(casts_of_autocast, (SLICE,))),
    Claim(PAGE, "In step 1, the slice spends more time beside its products than in them. Step 2 removes two thirds of "
          "that time.", left_by_tensor_cores),
    Claim(PAGE, "Three quarters of what it saves, or more, are casts and pointwise kernels.",
          of_causes(casts_and_pointwise_of_step_2)),
    Claim(PAGE, "The half that the mask hides is less than a tenth, and the choice of cuDNN's kernel over "
          "FlashAttention's is as well.", of_causes(masked_half)),
    Claim(PAGE, "At the slice, two thirds of the step are then matrix products.",
          share_of_products("2_sdpa", 0.63, SLICE)),
    Claim(PAGE, "At the slice, AdamW in one pass and the compiled model save about the same. At gpt2 with batch 32, "
          "AdamW saves less than a tenth of what the compiled model saves.", of_causes(parts_of_step_3)),
    Claim(PAGE, "At both, the CUDA graph shortens the gaps, and saves nothing beyond the spread.",
          of_causes(capture_alone)),
    Claim(PAGE, "A CUDA graph needs an AdamW that counts its steps on the GPU. Where AdamW is not compiled, that adds "
          "kernels.", of_causes(kernels_of_capture), shown=False),
    Claim(PAGE, "Of the kinds of kernels, the optimizer's lose most time at the slice, and copies and casts at "
          "gpt2-batch-8.", largest_at({SLICE: "optimizer", "gpt2-batch-8": "copies and casts"})),
    Claim(PAGE, "steps 3 and 4 took the time that they took in another run, on another GPU, without that load.",
          busy_host, shown=False),
    Claim(PAGE, "Step 4 halves the time of the slice's matrix products",
          change("3_compile", "4_transformer_engine", "matrix products", names=(SLICE,), ratio=(0.45, 0.55))),
    Claim(PAGE, "Step 4 halves the time of the slice's matrix products, and adds casts.",
          change("3_compile", "4_transformer_engine", "copies and casts", ratio=(1, math.inf))),
    Claim(PAGE, "In BF16, Transformer Engine's modules save nothing beyond the spread: what step 4 saves is due to "
          "FP8.",
          of_causes(bf16_in_step_4)),
    Claim(PAGE, "The head has a seventh of that at the slice, a quarter at gpt2 with batch 32, and a twelfth at "
          "gpt3-xl.",
          of_causes(head_in_fp8, (*AT, "gpt3-xl"))),
    Claim(PAGE, "Step 4 gains more, the wider the model is. So it is among these workloads;",
          step_4_by_width, shown=False),
    Claim(PAGE, "casts and pointwise kernels cost more than the products save: step 4 is slower than step 3.",
          change("3_compile", "4_transformer_engine", "matrix products", "copies and casts", POINTWISE,
                 names=("narrow-320",), ratio=(1, math.inf))),
    Claim(PAGE, "The same products take longer in steps 2 and 3 of the slice than in step 1, at a lower clock that the "
          "power limit holds down.", power_limit),
    Claim(GUIDE, "In the recorded runs BF16 alone saved all that both lines save together. TF32 is for a loop that "
          "stays in FP32: alone it saved nine tenths of that time, but its training step took 1.2 to 1.6 times as long "
          "as in BF16.", of_causes(tf32_and_bf16)),
    Claim(GUIDE, "At gpt3-6.7b-slice the compiled model alone saved half of what the three save, and fused=True alone "
          "saved another half. At gpt2 with batch 32 the compiled model alone saved nine tenths of it, and fused=True "
          "less than one tenth.", of_causes(alone_in_step_3)),
    Claim(GUIDE, "The graph saved nothing at either, beyond the spread.", of_causes(capture_alone)),
    Claim(GUIDE, "it made the compiled step slower at 320 channels, and 1.6 times faster at 4096.",
          step_4_by_width, shown=False),
    Claim(GUIDE, "In BF16 the same modules saved nothing beyond the spread.", of_causes(bf16_in_step_4)),
    Claim(METHOD, "because a GPU lowers its clock until its power is within the limit", clock_under_load, shown=False),
    Claim(METHOD, "it runs faster at the same power limit.", zeros),
    Claim(METHOD, "On a shared machine a row can change by more from pass to pass than an optimization changes it.",
          passes_apart, CPU),
    Claim(PARITY, "In an early run of gpt2, with one seed and 105 steps, all three peers ended above step 0.",
          peers_ended_higher, WITH_PEERS),
    Claim(PARITY, "With PyTorch's fused AdamW in place of the compiled one, step 3 has the same loss after 105 steps, "
          "within a tenth of a per cent.", fused_adamw),
    Claim(PARITY, "After 105 steps, step 3's loss differs from seed to seed by more than the early run's peers in FP8 "
          "differed from step 0.", range_of_seeds),
    Claim(PARITY, "After 105 steps the rows in FP8 are below step 3 with one seed and above it with another.",
          fp8_by_seed),
    Claim(PARITY, "With the same seed, rows without FP8 end at most 0.008 nats from step 0, and step 4 without FP8 at "
          "most 0.003. Step 4 ends up to 0.043 below it.", without_fp8),
    Claim(PARITY, "A repeat of step 4 without FP8 ended up to 0.003 nats from the first time, seed by seed.",
          same_row_again),
    Claim(PARITY, "Three tenths of it are there without FP8 too, and these have a cause.", last_norm_in_bf16),
    Claim(PARITY, "With this rounding alone, step 2 lies above step 0 by nine tenths of what step 4 without FP8 does; "
          "over half as many steps, by less of it.", last_norm_in_bf16),
]  # fmt: skip


def claims_table(results: Path) -> str:
    """A row per claim: where it stands, its figure, the record, and whether the figure bears it out."""
    machines = {name: Records.read(results / name) for name in (GPU, CPU, WITH_PEERS)}
    cells = []
    for claim in CLAIMS:
        found = machines[claim.machine].measured(claim.measure)
        figure, record = (found.figure, f"{claim.machine}/{found.record}") if found else ("not measured", "-")
        agrees = "yes" if claim.shown else CONSISTENT
        verdict = "-" if found is None else agrees if found.holds else "no"
        cells.append((claim.sentence, claim.where, markdown(figure), markdown(record), verdict))
    table = pipe_table(("sentence", "stands in", "measured", "record", "holds"), cells, n_left=5)
    return f"{table}\n\n{MARKED}" if any(MARK in figure for _, _, figure, *_ in cells) else table
