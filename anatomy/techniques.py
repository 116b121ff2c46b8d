"""What do accumulation, recomputation, compilation and mixed precision give, in time and in memory?

Prediction, for forward and backward of a small GPT of the blocks and the head of 2_sdpa.py, in FP32. Memory
is the peak above weights and gradients. A block keeps 16 numbers per token and channel for its backward: what
its two LayerNorms read 2 and write 2, queries, keys and values 3, the output of attention 1, and of the MLP 4
and 4. The logits come three times: themselves, their log-softmax and its gradient. So of B T tokens the peak
is 4 B T (16 L C + 3 V) bytes.

- Accumulation in 4 parts of a batch does the same work at a quarter of the peak.
- Recomputation keeps the input of each block and runs its forward again: 4 passes over the blocks, as
backward counts two, not 3. It keeps all of one block at a time, and 5 C of gradients: 4 B T (L C + 21 C), or
4 B T (L C + 3 V).
- Compilation, block by block, fuses what lies between the products: at most the same time.
- Mixed precision runs products at BF16's rate, and the rest, which is bytes, in half of its time.

Change: --batch 1. Which technique changes sides?
Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022), section 4.
"""

import importlib
import itertools
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from anatomy.lab import rate
from common import flops
from common.model import GPT, GPTConfig


def peak_bytes(lab, call):
    """The most bytes that tensors of one call take at a time, beyond what was there."""
    if lab.gpu:
        torch.cuda.reset_peak_memory_stats(lab.device)
        before = torch.cuda.memory_allocated(lab.device)
        call()
        return torch.cuda.max_memory_allocated(lab.device) - before
    with torch.profiler.profile(profile_memory=True) as profiler:
        call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    in_order = sorted(events, key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in in_order))


def run(lab, batch=None, layers=None):
    L, C, V = layers or lab.pick(2, 4, 6), lab.pick(128, 128, 1024), lab.pick(256, 256, 8192)
    T, B = lab.pick(128, 256, 1024), batch or 8
    step_2, config = importlib.import_module("2_sdpa"), GPTConfig(L, C // 64, C, T, V)
    with lab.device:
        tokens, models = (
            torch.randint(V, (B, T)),
            [GPT(config, step_2.Block, step_2.Head, seed=1337) for _ in range(3)],
        )
    plain, recomputing, compiled = models

    def step(model, parts=1, amp=False):
        chunks = tokens.chunk(parts)
        for part in chunks:
            with torch.autocast(lab.device.type, torch.bfloat16, enabled=amp):
                loss = model(part, part) / len(chunks)
            loss.backward()  # adds to the gradients that are there

    for block in recomputing.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    for part in (*compiled.blocks, compiled.head):
        part.compile()
    plain_s, work, numbers = lab.seconds(partial(step, plain)), flops.flops_per_step(config, B), 4 * B * T
    in_blocks, peak = 1 - V * C / flops.matmul_parameters(config), numbers * (16 * L * C + 3 * V)
    parts = len(tokens.chunk(4))  # of a small batch fewer
    less = numbers * (L * C + max(21 * C, 3 * V))
    forms = {  # what: (step, seconds predicted, peak predicted)
        "plain": (partial(step, plain), None, peak),
        f"accumulation in {parts} parts": (partial(step, plain, parts=parts), plain_s, peak / parts),
        "recomputation": (partial(step, recomputing), plain_s * (1 + in_blocks / 3), less),
        "compiled": (partial(step, compiled), plain_s, None),
    }
    if lab.amp:
        products_s, half_s = work / rate("fp32", lab.device), work / rate("bf16", lab.device)
        forms["mixed precision"] = (
            partial(step, plain, amp=True),
            half_s + max(0, plain_s - products_s) / 2,
            None,
        )
    lab.title = f"{L} blocks, C {C}, T {T}, V {V}, batch {B}, FP32"
    for what, (call, predicted_s, predicted_bytes) in forms.items():
        lab.row(f"{what}: time", lab.seconds(call), predicted_s, at_most=what == "compiled")
        lab.row(f"{what}: peak", peak_bytes(lab, call), predicted_bytes, "B")
    peaks = {row["what"]: row["measured"] for row in lab.rows}
    return f"Recomputation needs {peaks['recomputation: peak'] / peaks['plain: peak']:.2f} of the memory."
