"""What is said of fast training, beside what was recorded here: the table of docs/claims.md.

A claim has a public source and a function of report/findings.py, which reads one machine's records. A claim without a
function was not tested.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from report import findings
from report.findings import Finding, Machine
from report.table import pipe_table

MACHINES = {"h200": "H200", "epyc-2-cores": "CPU"}  # folder of docs/results -> column
LADDER, NO_RECORD, NOT_TESTED = "the ladder", "not recorded", "not tested"
BF16_ISSUE = "https://github.com/karpathy/autoresearch/issues/119"
AMP = "https://docs.pytorch.org/docs/stable/amp.html"
TUNING = "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html"
PYTORCH_2 = "https://pytorch.org/get-started/pytorch-2.0/"
FLASH = "https://arxiv.org/abs/2205.14135"
COMPILE = "https://docs.pytorch.org/docs/stable/generated/torch.compile.html"
MODES = "https://huggingface.co/docs/transformers/en/torch_compile.md"
SYNCS = "https://tomasruizt.github.io/posts/08_cpu_gpu_synchronization"
VIEWS = "https://jvoltci.github.io/mosaic/ml-execution/tensors-in-memory/contiguous-vs-non"
PRODUCTS = "https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html"
AUTOGRAD = "https://docs.pytorch.org/docs/stable/notes/autograd.html"
TRITON = "https://triton-lang.org/main/getting-started/tutorials/03-matrix-multiplication.html"
FUSED_LAYER = "https://livebook.manning.com/learn/concepts/tensor-fusion--technique/llms-in-production"
BRRR = "https://horace.io/brrr_intro.html"
DDP = "https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html"
INITIALIZATION = "https://github.com/pytorch/pytorch/issues/15314"
BENCHMARK = "https://docs.pytorch.org/tutorials/recipes/recipes/benchmark.html"
PROGRAMMING_GUIDE = "https://docs.nvidia.com/cuda/cuda-c-best-practices-guide/index.html"


class Claim(NamedTuple):
    text: str
    source: str  # a public address
    where: str  # the experiment, or LADDER
    finding: Callable[[Machine], Finding] | None = None


CLAIMS = [
    Claim("FP8 is about twice as fast as 16 bit", BF16_ISSUE, "precision", findings.fp8),
    Claim("mixed precision is 1.5 to 2 times as fast as FP32", TUNING, LADDER,
          partial(findings.steps_within, "0", "1", 1.5, 2)),
    Claim("`torch.compile` makes transformer training 1.3 to 1.5 times as fast (here with capture, step 2 to 3)",
          PYTORCH_2, LADDER, partial(findings.steps_within, "2", "3", 1.3, 1.5)),
    Claim("FlashAttention is the single most effective optimization", FLASH, LADDER, findings.fused_attention_first),
    Claim("fused attention is 2 to 4 times as fast as attention by hand", FLASH, "techniques",
          partial(findings.technique, "FlashAttention", 2, 4)),
    Claim("attention's DRAM traffic falls from 5x to 1x", FLASH, "attention", findings.attention_traffic),
    Claim("fused attention's memory grows with the length, not its square", FLASH, "attention",
          findings.attention_memory),
    Claim("a fused pointwise chain is faster by the bytes that it saves", BRRR, "fusion", findings.pointwise_fusion),
    Claim("a product, its bias and ReLU become one kernel automatically", FUSED_LAYER, "fusion",
          findings.product_epilogue),
    Claim("products with one input are merged into one (horizontal fusion)", PYTORCH_2, "rewrites",
          partial(findings.rewritten, ("three products with one input",), 1)),
    Claim("two products in a row are fused", PYTORCH_2, "rewrites",
          partial(findings.rewritten, ("two products in a row",), 1)),
    Claim("dead code is dropped, and constants are folded", PYTORCH_2, "rewrites",
          partial(findings.rewritten, ("dead code", "constant folding"), 1)),
    Claim("fusion does not change the numbers", COMPILE, "rewrites", findings.same_numbers),
    Claim("`reduce-overhead` compiles fastest and optimizes least", MODES, "compile-modes", findings.reduce_overhead),
    Claim("a convolutional network is 1.2 to 2 times as fast in inference when compiled", PYTORCH_2, "techniques",
          partial(findings.technique, "CNN inference under torch.compile", 1.2, 2)),
    Claim("CUDA graphs make small kernels 1.5 to 2 times as fast", TUNING, "techniques",
          partial(findings.technique, "CUDA graphs", 1.5, 2)),
    Claim("checkpointing costs a fifth to a third of the speed", TUNING, "techniques",
          partial(findings.technique, "checkpointing", 0.67, 0.8)),
    Claim("channels-last makes convolutions 1.1 to 1.3 times as fast", TUNING, "techniques",
          partial(findings.technique, "channels-last", 1.1, 1.3)),
    Claim("accumulating gradients costs at most a tenth of the speed", TUNING, "techniques",
          partial(findings.technique, "gradient accumulation", 0.9, float("inf"))),
    Claim("a synchronization costs a constant 10 to 15 us", SYNCS, "sync-points", findings.constant_sync),
    Claim("a synchronization is 1 % of an operation of 25 ms and 50 % of one of 18 us", SYNCS, "sync-points",
          findings.sync_share),
    Claim("`if tensor.any()` waits for the GPU", SYNCS, "sync-points", findings.any_waits),
    Claim("a tensor that is not contiguous is 2 to 10 times slower", VIEWS, "contiguity", findings.transposed),
    Claim("shape operations cost nothing", AUTOGRAD, "host-cost", findings.views),
    Claim("`ScaledDotProductEfficientAttentionBackward0` marks fused attention", AUTOGRAD, "autograd",
          findings.marks_fusion),
    Claim("fusion turns 20 or more backward nodes into one", AUTOGRAD, "autograd", findings.fewer_nodes),
    Claim("the size of the graph does not depend on batch or length", AUTOGRAD, "autograd", findings.fixed_graph),
    Claim("small matrix products are memory-bound", PRODUCTS, "roofline", findings.small_products),
    Claim("a kernel in Triton reaches 90 to 95 % of the vendor's product", TRITON, "precision",
          findings.triton_product),
    Claim("shared memory has about ten times the bandwidth of DRAM", PROGRAMMING_GUIDE, "memory-hierarchy",
          findings.shared_memory),
    Claim("full bandwidth needs full occupancy", PROGRAMMING_GUIDE, "memory-hierarchy", findings.occupancy),
    Claim("Python and the dispatcher cost 1 to 10 us an operator", BRRR, "host-cost", findings.dispatch),
    Claim("a Python loop over elements is hundreds of times slower than a vector operation", BRRR, "host-cost",
          findings.element_loop),
    Claim("guards of a compiled function cost less than a microsecond a tensor", COMPILE, "host-cost",
          findings.guards),
    Claim("a benchmark without a warm-up misleads", BENCHMARK, "host-cost", findings.warm_up),
    Claim("BF16 needs no loss scaling, and FP16 does", AMP, "learning", findings.loss_scaling),
    Claim("default initialization hurts", INITIALIZATION, "learning", findings.initialization),
    Claim("`DataParallel` is slower than `DistributedDataParallel`", DDP, "nowhere: it needs several GPUs"),
]  # fmt: skip


def machines(results: Path) -> dict[str, Machine]:
    """Column -> the records of one machine."""
    return {column: Machine.read(results / folder) for folder, column in MACHINES.items()}


def found(claim: Claim, machine: Machine) -> Finding:
    if claim.finding is None:
        return Finding("-", NOT_TESTED)
    try:
        return claim.finding(machine)
    except KeyError:
        return Finding("-", NO_RECORD)


def verdict(by_machine: dict[str, Finding]) -> str:
    """One verdict where all machines with a record agree, else the verdict of each."""
    recorded = {name: one.verdict for name, one in by_machine.items() if one.verdict not in (NO_RECORD, NOT_TESTED)}
    if not recorded:
        return next(iter(by_machine.values())).verdict
    verdicts = set(recorded.values())
    return verdicts.pop() if len(verdicts) == 1 else "; ".join(f"{name}: {text}" for name, text in recorded.items())


def record_links(claim: Claim, results: Path) -> str:
    """Links, from docs/, to what each machine recorded."""
    pages = {column: f"results/{folder}/anatomy/{claim.where}.md" for folder, column in MACHINES.items()}
    if claim.where == LADDER:
        return "[performance](performance.md)"
    here = [f"[{column}]({page})" for column, page in pages.items() if (results.parent / page).exists()]
    return ", ".join(here) or "-"


def site(address: str) -> str:
    """Whose page it is."""
    return address.split("/")[2].removeprefix("www.")


def claims_table(results: Path) -> str:
    recorded, cells = machines(results), []
    for claim in CLAIMS:
        by_machine = {name: found(claim, machine) for name, machine in recorded.items()}
        judged = verdict(by_machine)
        measured = (one.measured for one in by_machine.values())
        cells.append((claim.text, f"[{site(claim.source)}]({claim.source})", claim.where, *measured, judged,
                      record_links(claim, results)))  # fmt: skip
    holding = sum(cell[-2] == findings.HOLDS for cell in cells)
    untested = sum(cell[-2] in (NOT_TESTED, NO_RECORD) for cell in cells)
    about = f"Of {len(cells)} claims, {holding} hold as they stand, and {untested} have no record here."
    headers = ("claim", "source", "tested in", *recorded, "verdict", "record")
    return f"{about}\n\n{pipe_table(headers, cells, n_left=len(headers))}"
