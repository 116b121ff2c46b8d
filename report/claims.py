"""What is said of fast training, beside what was recorded here: the table of docs/claims.md.

A claim has a public source, and a function of report/findings.py, which reads one machine's records. A claim without a
function was not tested. The words and the figures of a claim are those of its source.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from report import findings
from report.findings import Finding
from report.records import CPU, GPU, Records
from report.table import pipe_table

MACHINES = {GPU: "H200", CPU: "CPU"}  # folder of docs/results -> column
LADDER, TRAFFIC = "the ladder", "traffic"  # docs/performance.md shows what these recorded
NO_RECORD, NOT_TESTED = "not recorded", "not tested"
# of anatomy and of ladders: two projects with other experiments and steps of these kinds
ANATOMY = "https://github.com/wadkars-lgtm/pytorch-gpu-anatomy/blob/2d03d7ff235f8eb22c0f82db4bb813af68819fd0/README.md"
EARLIER_LADDER = "https://github.com/faradawn/pytorch-example/blob/50cffe579d579957380f5a3d4ac9d1bf52e48655/README.md"
AMP = "https://docs.pytorch.org/tutorials/recipes/recipes/amp_recipe.html"
BENCHMARK = "https://docs.pytorch.org/tutorials/recipes/recipes/benchmark.html"
BF16 = "https://docs.pytorch.org/xla/release/r2.8/perf/amp.html"
BRRR = "https://horace.io/brrr_intro.html"
CHANNELS_LAST = "https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html"
CUDA_GRAPHS = "https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs/"
CUTLASS = "https://github.com/NVIDIA/cutlass/tree/main/examples/13_two_tensor_op_fusion"
DDP = "https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html"
EPILOGUE = "https://summarizeddata.com/how-pytorch-compile-speeds-up-models-with-kernel-fusion/"
FLASH = "https://arxiv.org/pdf/2205.14135"
FLASH_2 = "https://arxiv.org/abs/2307.08691"
FLASH_FIRST = (
    "https://github.com/danilop/micro-gpt-and-beyond/blob/345b812dc30a4409cc725ae441fcd2685b9fb80e/labs/"
    "20_tiled_attention/README.md"
)
FP8 = "https://lambdalabs.com/blog/nvidia-hopper-h100-and-fp8-support"
FUSION = "https://vishalkumarr2.github.io/Learning_from_building_systems/ml-compilers/weeks/week-02/day-13-operator-fusion-fundamentals.html"
GRAPPLER = "https://www.tensorflow.org/guide/graph_optimization"
GUARDS = (
    "https://docs.pytorch.org/docs/main/user_guide/torch_compiler/compile/"
    "programming_model.reducing_guard_overhead.html"
)
HUGGING_FACE = "https://github.com/huggingface/transformers/blob"  # by commit: later versions of the page say less
INFERENCE = f"{HUGGING_FACE}/0559c47bd90245da451bc9edf9bce4e757392829/docs/source/en/perf_torch_compile.md"
INITIALIZATION = "https://github.com/pytorch/pytorch/issues/3121"
LOOPS = "https://jakevdp.github.io/PythonDataScienceHandbook/02.03-computation-on-arrays-ufuncs.html"
MODES = "https://theneuralbase.com/huggingface-transformers/learn/advanced/warm-up-request-jit-compilation/"
OCCUPANCY = "https://docs.nvidia.com/cuda/cuda-c-best-practices-guide/index.html"
ONE_GPU = f"{HUGGING_FACE}/04b696acabab4a3ca21b1716a488d8223e57b726/docs/source/en/perf_train_gpu_one.md"
PRODUCTS = "https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html"
PYTORCH_2 = "https://pytorch.org/get-started/pytorch-2.0/"
ROUNDING = "https://25621.github.io/ai-learning-guides/guides/pytorch-deep-dive/projects/eager-vs-compile-diff/"
SIDE_BY_SIDE = (
    "https://forums.developer.nvidia.com/t/when-does-horizontal-fusion-happen-for-tensorrts-graph-optimization/238187"
)
TRITON = "https://triton-lang.org/main/getting-started/tutorials/03-matrix-multiplication.html"
TUNING = "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html"


class Claim(NamedTuple):
    text: str
    source: str  # address of a public page whose text says it
    where: str  # the experiment, LADDER or TRAFFIC, or an experiment and one of these
    finding: Callable[[Records], Finding] | None = None


CLAIMS = [
    Claim("FP8 is twice as fast as 16 bit", FP8, f"precision, {LADDER}", findings.fp8),
    Claim("mixed precision is 2 to 3 times as fast as FP32", AMP, f"techniques, {LADDER}",
          partial(findings.technique_and_steps, "mixed precision", "0", "1", 2, 3)),
    Claim("`torch.compile` makes training 21 to 51 % faster (of the ladder: step 2 to 3, with compiled AdamW and "
          "capture)", PYTORCH_2, f"techniques, {LADDER}",
          partial(findings.technique_and_steps, "torch.compile", "2", "3", 1.21, 1.51)),
    Claim("FlashAttention is the single most impactful optimization (said of inference)", FLASH_FIRST, LADDER,
          findings.fused_attention_first),
    Claim("FlashAttention is 2 to 4 times as fast as optimized baselines (here attention by hand)", FLASH_2,
          "techniques", partial(findings.technique, "FlashAttention", 2, 4)),
    Claim("FlashAttention moves 9 times fewer bytes through DRAM", FLASH, TRAFFIC,
          partial(findings.attention_traffic, 8, 10)),
    Claim("fused attention reduces DRAM access from 5x to 1x", EARLIER_LADDER, TRAFFIC,
          partial(findings.attention_traffic, 4.5, 5.5)),
    Claim("FlashAttention's memory grows with the length, not its square", FLASH_2, "attention",
          findings.attention_memory),
    Claim("a fused pointwise chain is faster by the memory traffic that it saves", BRRR, "fusion",
          findings.pointwise_fusion),
    Claim("fusion makes work that is bound by memory 2 to 5 times as fast", FUSION, "fusion",
          findings.fused_speeds),
    Claim("a product, its bias and its ReLU become one kernel automatically", EPILOGUE, "fusion",
          findings.product_epilogue),
    Claim("products with one input are merged (horizontal fusion, said of TensorRT)", SIDE_BY_SIDE, "rewrites",
          partial(findings.one_kernel, ("four products with one input",))),
    Claim("two products in a row are one kernel (said of CUTLASS)", CUTLASS, "rewrites",
          partial(findings.one_kernel, ("two products in a row",))),
    Claim("dead code is dropped, and constants are folded (said of TensorFlow)", GRAPPLER, "rewrites",
          partial(findings.one_kernel, ("dead code", "constant folding"))),
    Claim("fusion can change how numbers are rounded", ROUNDING, "rewrites", findings.other_rounding),
    Claim("`reduce-overhead` compiles fastest and optimizes least", MODES, "compile-modes",
          partial(findings.compile_modes, compiles="reduce-overhead", slowest="reduce-overhead")),
    Claim("`default` compiles fastest, and `max-autotune` gives the fastest code", INFERENCE, "compile-modes",
          partial(findings.compile_modes, compiles="default", fastest="max-autotune")),
    Claim("`torch.compile` makes vision models up to 30 % faster in inference", INFERENCE, "techniques",
          partial(findings.technique, "CNN inference under torch.compile", 1, 1.3)),
    Claim("CUDA graphs make training 1.12 to 1.7 times as fast (here 16 small linear layers)", CUDA_GRAPHS,
          "techniques", partial(findings.technique, "CUDA graphs", 1.12, 1.7)),
    Claim("checkpointing makes training about 20 % slower", ONE_GPU, "techniques",
          partial(findings.technique, "checkpointing", 0.78, 0.85)),
    Claim("channels-last makes convolutional networks 8 to 35 % faster", CHANNELS_LAST, "techniques",
          partial(findings.technique, "channels-last", 1.08, 1.35)),
    Claim("gradient accumulation can slow training down", ONE_GPU, "techniques",
          partial(findings.technique, "gradient accumulation", 0, 1)),
    Claim("a synchronization costs a constant 10 to 15 us", ANATOMY, "sync-points", findings.constant_sync),
    Claim("a synchronization is 1 % of an operation of 25 ms and 50 % of one of 18 us", ANATOMY, "sync-points",
          findings.sync_share),
    Claim("Python control flow on a result of the GPU, as `if tensor.any()`, waits for it", TUNING, "sync-points",
          findings.any_waits),
    Claim("a tensor that is not contiguous can be 2 to 10 times slower", ANATOMY, "contiguity", findings.transposed),
    Claim("shape operations cost nothing", ANATOMY, "host-cost", findings.views),
    Claim("`ScaledDotProductEfficientAttentionBackward0` is the node of fused attention", ANATOMY, "autograd",
          findings.marks_fusion),
    Claim("fusion turns attention's 20 or more backward nodes into one", ANATOMY, "autograd", findings.fewer_nodes),
    Claim("fused into one node, attention is 2 to 5 times as fast", ANATOMY, "attention", findings.attention_speeds),
    Claim("the size of the graph does not depend on batch or length", ANATOMY, "autograd", findings.fixed_graph),
    Claim("a small product, of low arithmetic intensity, is limited by memory", PRODUCTS, "roofline",
          findings.small_products),
    Claim("a short kernel in Triton is on par with cuBLAS", TRITON, "precision", findings.triton_product),
    Claim("on-chip memory is an order of magnitude faster than DRAM", FLASH, "memory-hierarchy",
          findings.shared_memory),
    Claim("from some point on, more occupancy does not help", OCCUPANCY, "memory-hierarchy", findings.occupancy),
    Claim("PyTorch runs 280 thousand small operations a second, one in 3.6 us", BRRR, "host-cost", findings.dispatch),
    Claim("a vector operation is orders of magnitude faster than a Python loop", LOOPS, "host-cost",
          findings.element_loop),
    Claim("where a function is cheap, its guards can take a measurable part of its time", GUARDS, "host-cost",
          findings.guards),
    Claim("the first run takes much longer: warm up before a benchmark", BENCHMARK, "host-cost", findings.warm_up),
    Claim("BF16 needs no gradient scaling, and FP16 does", BF16, "learning", findings.loss_scaling),
    Claim("the default initialization of embeddings is too large", INITIALIZATION, "learning",
          findings.initialization),
    Claim("`DataParallel` is slower than `DistributedDataParallel`", DDP, "nowhere: it needs several GPUs"),
]  # fmt: skip


def found(claim: Claim, records: Records) -> Finding:
    if claim.finding is None:
        return Finding("-", NOT_TESTED)
    return records.measured(claim.finding, Finding("-", NO_RECORD))


def verdict(by_machine: dict[str, Finding]) -> str:
    """The verdict of each machine with a record; one for all where they agree and all have a record."""
    recorded = {name: one.verdict for name, one in by_machine.items() if one.verdict not in (NO_RECORD, NOT_TESTED)}
    if not recorded:
        return next(iter(by_machine.values())).verdict
    verdicts = set(recorded.values())
    if len(verdicts) == 1 and len(recorded) == len(by_machine):
        return verdicts.pop()
    return "; ".join(f"{name}: {text}" for name, text in recorded.items())


def record_links(claim: Claim, by_machine: dict[str, Finding], results: Path) -> str:
    """Links, from docs/, to what each machine recorded of a claim."""
    recorded = [(folder, column) for folder, column in MACHINES.items() if by_machine[column].measured != "-"]
    pages = {column: f"results/{folder}/anatomy/{claim.where.partition(', ')[0]}.md" for folder, column in recorded}
    links = [f"[{column}]({page})" for column, page in pages.items() if (results.parent / page).exists()]
    shared = ["[performance](performance.md)"] if recorded and claim.where.endswith((LADDER, TRAFFIC)) else []
    return ", ".join(links + shared) or "-"


def source_link(claim: Claim) -> str:
    """Whose page it is, of GitHub the project, and the page."""
    _, _, host, *path = claim.source.split("/")
    whose = "/".join(path[:2]) if host == "github.com" else host.removeprefix("www.")
    return f"[{whose}]({claim.source})"


def claims_table(results: Path) -> str:
    recorded = {column: Records.read(results / folder) for folder, column in MACHINES.items()}
    cells, holding = [], 0
    for claim in CLAIMS:
        by_machine = {column: found(claim, records) for column, records in recorded.items()}
        judged = verdict(by_machine)
        measured = (one.measured for one in by_machine.values())
        holding += {one.verdict for one in by_machine.values()} - {NO_RECORD} == {findings.HOLDS}
        cells.append((claim.text, source_link(claim), claim.where, *measured, judged,
                      record_links(claim, by_machine, results)))  # fmt: skip
    untested = sum(cell[-2] in (NOT_TESTED, NO_RECORD) for cell in cells)
    about = f"Of {len(cells)} claims, {holding} hold on every machine with a record. "
    about += f"Not tested or not recorded: {untested}. Steps with a serious doubt about their times are left out."
    headers = ("claim", "source", "tested in", *recorded, "verdict", "record")
    return f"{about}\n\n{pipe_table(headers, cells, n_left=len(headers))}"
