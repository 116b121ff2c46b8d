"""What changed from one step to the next: lines of code, kinds of kernels, kernels in plain words."""

import re
from collections import defaultdict
from dataclasses import dataclass, field

from common.record import Kernel, Row
from common.text import one_line
from report.changes import code_diff
from report.figures import Figures, Line
from report.table import ms_number, number, status_or_ms

MOST_KERNELS = 12
LONGEST_NAME = 70  # of a kernel


@dataclass
class Card:
    """A step and the one before it. Cells are text."""

    name: str
    title: str  # what the script says of itself in its first line
    change: str  # and of its change
    outcome: str  # how fast it is, or why it has no time
    pair: list[Line] = field(default_factory=list)  # the nearest row before that has a time, and this one
    code: list[tuple[str, str]] = field(default_factory=list)  # (sign, line)
    categories: list[dict[str, str]] = field(default_factory=list)
    kernels: list[dict[str, str]] = field(default_factory=list)


def cards(made: Figures) -> list[Card]:
    """A card for every step but the first, and none for one that was left out."""
    found, before, script = [], None, None
    for line in made.steps:
        if script and line.row.status != "not run":
            card = Card(line.name, title(line.row), change(line.row), line.why_untimed)
            card.code = code_diff(script, line.row)
            if line.ms:
                card.outcome = _outcome(before, line)
            if line.ms and before:
                card.pair = [before, line]
            if card.pair and before.category_ms and line.category_ms:
                card.categories = _category_changes(before.category_ms, line.category_ms)
                card.kernels = _kernel_changes(before.row.profile.kernels, line.row.profile.kernels)
            found.append(card)
        before, script = line if line.ms else before, line.row
    return found


def _outcome(before: Line | None, line: Line) -> str:
    faster = line.over_before
    if faster is None:
        return f"{status_or_ms(line)} ms per step"
    if not faster.clear:
        return f"As fast as {before.name}, within the spread of the times"
    slower = faster.value < 1
    factor = 1 / faster.value if slower else faster.value
    return f"{factor:.2f}{faster.mark} times {'slower' if slower else 'faster'} than {before.name}"


def change(row: Row) -> str:
    """What a script's docstring says after its first line."""
    found = re.match(r'(?s)""".*?\n\n(.*?)"""', (row.source or "")[:3000])
    return " ".join(found[1].split()) if found else ""


def title(row: Row) -> str:
    """The first line of a script where it names its step, otherwise the script's name."""
    first = re.match(r'"""(Step .+)', row.source or "")
    return one_line(first[1].rstrip('."'), 120) if first else row.step


def _category_changes(old: dict[str, float], new: dict[str, float]) -> list[dict[str, str]]:
    """Milliseconds by kind of kernel, the largest change first."""
    ends = [(name, old.get(name, 0.0), new.get(name, 0.0)) for name in {**old, **new}]
    ends = sorted((one for one in ends if one[1] or one[2]), key=lambda one: -abs(one[2] - one[1]))
    return [
        {"ms per step": name, "before": number(a), "after": number(b), "change": number(b - a, "+,.1f")}
        for name, a, b in ends
    ]


def _kernel_changes(before: list[Kernel], after: list[Kernel]) -> list[dict[str, str]]:
    """Kernels in plain words, the largest change first."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * 4)  # ms and launches before, and after
    for k, kernels in ((0, before), (2, after)):
        for kernel in kernels:
            sums[readable(kernel.name)][k] += kernel.ms
            sums[readable(kernel.name)][k + 1] += kernel.launches
    largest = sorted(sums.items(), key=lambda one: -abs(one[1][2] - one[1][0]))[:MOST_KERNELS]
    return [
        {"kernel": words, "ms": f"{ms_number(a)} → {ms_number(b)}", "launches": f"{m:,.0f} → {n:,.0f}"}
        for words, (a, m, b, n) in largest
    ]


# --- kernels in the words of a colleague ----------------------------------------------------------

# What a name contains, and what it then is called; the first that matches wins.
WORDS = (
    (
        r"sdpa.*fprop|flash_fwd|scaled_dot_product_flash_attention_for_cpu$|cutlassF",
        "fused attention, forward",
    ),
    (
        r"sdpa.*bprop|flash_bwd|attention_for_cpu_backward|cutlassB|convert_dq|dot_do_o",
        "fused attention, backward",
    ),
    (r"^## Call CompiledFxGraph|^CompiledFunction|^Torch-Compiled Region", "compiled graph"),
    (r"^autograd::|Backward0$", "the backward engine's own work"),
    (r"LogSoftMaxBackward|log_softmax_backward", "log-softmax of the loss, backward"),
    (r"LogSoftMaxForward|^aten::_?log_softmax", "log-softmax of the loss, forward"),
    (r"nll_loss", "cross entropy"),
    (r"SoftMaxBackward|softmax_warp_backward|_softmax_backward", "softmax, backward"),
    (r"SoftMaxForward|softmax_warp_forward|^aten::_?softmax", "softmax, forward"),
    (r"layer_norm_grad|GammaBeta|layer_norm_backward|ln_bwd|rmsnorm_bwd", "LayerNorm, backward"),
    (r"layer_norm|LayerNorm|ln_fwd", "LayerNorm, forward"),
    (r"Gelu\w*Backward|dgelu|gelu_backward", "GELU, backward"),
    (r"[Gg]elu", "GELU, forward"),
    (r"masked_fill", "filling the masked scores"),
    (r"cast_transpose|fp8::detail::identity|transpose_\w*kernel", "cast to FP8, transpose in FP8"),
    (r"FusedAdam|multi_tensor_adam|_fused_adam|triton_for_fused", "AdamW, fused"),
    (r"multi_tensor_apply(?!.*native::Copy<)|_foreach_|Optimizer\.", "AdamW, one of its passes"),
    (r"bfloat16_copy", "cast to BF16"),
    (r"[\[{]lambda\(float\).*LoadWithCast", "cast to FP32"),
    (r"LoadWithCast|_to_copy", "cast"),
    (r"direct_copy|native::Copy<|Memcpy|^memcpy|aten::copy_|aten::clone|aten::contiguous", "copy"),
    (r"CatArray|aten::cat", "concatenation"),
    (r"FillFunctor|Memset|^memset|aten::(fill|zero)", "filling with a constant"),
    (
        r"embedding|sum_and_scatter|krn_partial|compute_grad_weight|radix_sort|cub::",
        "embedding and its gradient",
    ),
    (r"nccl|AllReduce|ReduceScatter|AllGather", "exchange between GPUs"),
    (r"MulFunctor|aten::mul|aten::div", "multiplication"),
    (r"CUDAFunctor(OnSelf)?_add|aten::add", "addition"),
    (r"reduce_kernel|aten::sum", "sum"),
)
FORMATS = (
    ("bf16", "BF16"),
    ("fp16|_h", "FP16"),
    ("tf32", "TF32"),
    ("sgemm|ffma", "FP32"),
)  # in names of products
NVJET = {
    "t": "BF16",
    "q": "FP8",
    "r": "FP8",
}  # how cuBLAS's names begin, by the precision of the recorded rows


def readable(name: str) -> str:
    """What a kernel or an operator is, in a few words; of one that no rule knows its name, shortened."""
    if product := _product(name):
        return product
    compiled = re.match(r"triton_(?:poi|red|per)_fused_+(\w+?)_\d+$", name)
    if compiled and "for_fused" not in name:
        return one_line(f"compiled: {' '.join(compiled[1].split('_'))}", LONGEST_NAME)
    noise = r"void |at::native::|\(anonymous namespace\)::|transformer_engine::|^aten::|[<(].*"
    words = next((words for pattern, words in WORDS if re.search(pattern, name)), None)
    return words or one_line(re.sub(noise, "", name), LONGEST_NAME)


def _product(name: str) -> str | None:
    """`matrix product, BF16, 128x256 tile`; None of another kernel."""
    if operator := re.match(r"(?:Optimizer\.step: )?aten::(mm|addmm|bmm|baddbmm|linear)$", name):
        return f"matrix product ({operator[1]})"
    is_attention = re.search("(?i)fmha|flash|attention", name)  # which may be named after matrix products too
    if is_attention or not re.search(r"gemm|^nvjet|tilesize|cutlass_\d+_(simt|tensorop|wmma)", name):
        return None
    nvjet = re.match(r"nvjet_sm\d+_([a-z])", name)
    precision = (
        NVJET.get(nvjet[1])
        if nvjet
        else next((text for mark, text in FORMATS if re.search(mark, name)), None)
    )
    tile = re.search(r"(?:sgemm_|tilesize)(\d+x\d+)", name) or re.search(r"_(\d+x\d+)", name)
    return ", ".join(filter(None, ["matrix product", precision, tile and f"{tile[1]} tile"]))
