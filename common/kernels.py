"""What kernels and a CPU's operators are, by their names: one table of patterns, categories and plain words.

The names are those of PyTorch, Triton, cuBLAS, cuDNN, FlashAttention, Transformer Engine and NCCL, as
torch.profiler shows them. Matrix products include those of attention that is written out by hand.
The category "normalization and pointwise" includes kernels into which a compiler fused such operations, and
casts with them. Copies and casts include quantization to FP8.
"""

import functools
import re
from typing import NamedTuple

from common.text import one_line

NOISE = r"void |at::native::|\(anonymous namespace\)::|transformer_engine::|^aten::|[<(].*"  # in names
LONGEST_NAME = 70  # of a kernel that no rule has words for
COMPILED_GRAPH = "## Call CompiledFxGraph"  # what a CPU's trace calls a compiled graph
# What the names of attention's backward kernels contain: of cuDNN, FlashAttention, CUTLASS, softmax by hand,
# a CPU.
BACKWARD = r"bprop|bwd|[Bb]ackward|cutlassB|dot_do_o|convert_dq"


class Rule(NamedTuple):
    pattern: str  # what a name contains
    category: str  # of common.record.CATEGORIES
    words: str = ""  # in the words of a colleague; without them a shortened name is shown


POINTWISE, COPIES, PRODUCTS = "normalization and pointwise", "copies and casts", "matrix products"
RULES = (  # the first that matches wins
    Rule(r"^autograd::|Backward0$", "other", "the backward engine's own work"),
    Rule(
        r"nccl|gloo|^c10d::|^FSDP::(all_gather|post_backward_reduce)\b",
        "communication",
        "exchange between GPUs",
    ),
    Rule(r"FusedAdam|multi_tensor_adam|_fused_adam|triton_for_fused", "optimizer", "AdamW, fused"),
    Rule(
        r"multi_tensor_apply(?!.*native::Copy<)|[Aa]dam|_foreach_|Optimizer\.",
        "optimizer",
        "AdamW, one of its passes",
    ),
    # Inductor's templates, whatever is fused behind them.
    Rule(r"^triton_(tem_fused_\w*?)?(mm|addmm|bmm|baddbmm)(_|$)", PRODUCTS, "matrix product"),
    Rule(
        r"layer_norm_grad|GammaBeta|layer_norm_backward|ln_bwd|rmsnorm_bwd", POINTWISE, "LayerNorm, backward"
    ),
    Rule(r"layer_norm|LayerNorm|ln_fwd", POINTWISE, "LayerNorm, forward"),
    Rule(r"^(?!nvjet|.*gemm).*(Gelu\w*Backward|dgelu|gelu_backward)", POINTWISE, "GELU, backward"),
    Rule(r"^(?!nvjet|.*gemm).*[Gg]elu", POINTWISE, "GELU, forward"),
    Rule(r"normalization::|reduce_dbias", POINTWISE),
    Rule(r"LogSoftMaxBackward|log_softmax_backward", "loss", "log-softmax of the loss, backward"),
    Rule(r"softmax_warp_backward<[^<>]*\d+, true", "loss", "log-softmax of the loss, backward"),
    Rule(r"LogSoftMax|log_softmax", "loss", "log-softmax of the loss, forward"),
    Rule(r"softmax_warp_\w+<[^<>]*\d+, true", "loss", "log-softmax of the loss, forward"),
    Rule(r"nll_loss|cross_entropy", "loss", "cross entropy"),
    Rule(
        r"sdpa.*fprop|flash_fwd|scaled_dot_product_flash_attention_for_cpu$|cutlassF",
        "attention",
        "fused attention, forward",
    ),
    Rule(
        r"sdpa.*bprop|flash_bwd|attention_for_cpu_backward|cutlassB|convert_dq|dot_do_o",
        "attention",
        "fused attention, backward",
    ),
    Rule(r"SoftMaxBackward|softmax_warp_backward|_softmax_backward", "attention", "softmax, backward"),
    Rule(r"SoftMaxForward|softmax_warp_forward|^aten::_?softmax", "attention", "softmax, forward"),
    Rule(r"sdpa|flash|fmha|attention|SoftMax|softmax", "attention"),
    Rule(r"gemm|nvjet|cutlass_\d+_(simt|tensorop|wmma)|xmma", PRODUCTS, "matrix product"),
    Rule(r"^aten::(mm|addmm|bmm|baddbmm|linear)$", PRODUCTS, "matrix product"),
    Rule(r"splitKreduce|gemv|dot_kernel|cublas", PRODUCTS, "sum"),
    Rule(r"mkldnn|_linear_pointwise|onednn|mkl_linear", PRODUCTS, "matrix product"),
    Rule(
        r"fp8::detail::identity|transpose_\w*kernel|quantize_mxfp8", COPIES, "cast to FP8, transpose in FP8"
    ),
    Rule(r"delayed_scaling|chunk_cat|split_with_sizes_copy", COPIES),
    Rule(r"CatArray|^aten::cat$", COPIES, "concatenation"),
    Rule(r"FillFunctor|Memset|^memset\d+(_post)?$", COPIES, "filling with a constant"),
    Rule(r"^aten::(fill_|zero_|zeros|zeros_like)$", COPIES, "filling with a constant"),
    Rule(r"bfloat16_copy", COPIES, "cast to BF16"),
    Rule(r"direct_copy.*[\[{]lambda\(float\).*LoadWithCast", COPIES, "cast to FP32"),
    Rule(r"direct_copy.*LoadWithCast|^aten::(_to_copy|to)$", COPIES, "cast"),
    Rule(r"direct_copy|_copy_kernel|native::Copy<|Memcpy|^memcpy\d+(_post)?$", COPIES, "copy"),
    Rule(r"^aten::(copy_|clone|contiguous)$", COPIES, "copy"),
    Rule(r"triton_poi_fused(_+(to_copy|t|cat|unsafe_view|view|transpose|clone|permute))+_\d+$", COPIES),
    Rule(r"^CompiledFunction|^## Call CompiledFxGraph", POINTWISE, "compiled graph"),
    Rule(r"^Torch-Compiled Region", "other", "compiled graph"),
    Rule(r"masked_fill", POINTWISE, "filling the masked scores"),
    Rule(
        r"embedding|sum_and_scatter|krn_partial|compute_grad_weight|radix_sort|cub::",
        POINTWISE,
        "embedding and its gradient",
    ),
    Rule(r"MulFunctor|^aten::mul|^aten::div", POINTWISE, "multiplication"),
    Rule(r"CUDAFunctor(OnSelf)?_add|^aten::add", POINTWISE, "addition"),
    Rule(r"reduce_kernel|^aten::sum", POINTWISE, "sum"),
    # What is left of PyTorch's, Triton's and Transformer Engine's own kernels is pointwise or a reduction.
    Rule(r"elementwise|triton_|transformer_engine::|at::native|^aten::", POINTWISE),
)
NOTHING = Rule("", "other")
FORMATS = {"bf16": "BF16", "fp16|_h": "FP16", "tf32": "TF32", "sgemm|ffma": "FP32"}  # in names of matmuls
NVJET = {"t": "BF16", "q": "FP8", "r": "FP8"}  # the letter after nvjet_smNN_, as seen in recorded rows


@functools.lru_cache(4096)
def _rule(name: str) -> Rule:
    return next((rule for rule in RULES if re.search(rule.pattern, name)), NOTHING)


def categorize(name: str) -> str:
    """The category of a kernel, or of a CPU's operator."""
    return _rule(name).category


def in_words(name: str) -> str:
    """What a kernel or an operator is, in a few words."""
    compiled = re.match(r"triton_(?:poi|red|per)_fused_+(\w+?)_\d+$", name)
    if compiled and "for_fused" not in name:
        return one_line(f"compiled: {' '.join(compiled[1].split('_'))}", LONGEST_NAME)
    words = _rule(name).words
    if words == "matrix product":
        return f"matrix product{_details(name)}"
    return words or one_line(re.sub(NOISE, "", name), LONGEST_NAME)


def _details(name: str) -> str:
    """`, BF16, 128x256 tile` of a matrix product's name, or the operator in parentheses."""
    if operator := re.match(r"aten::(\w+)$", name):
        return f" ({operator[1]})"
    nvjet = re.match(r"nvjet_sm\d+_([a-z])", name)
    precision = NVJET.get(nvjet[1]) if nvjet else None
    if not nvjet:
        precision = next((text for mark, text in FORMATS.items() if re.search(mark, name)), None)
    tile = re.search(r"(?:sgemm_|tilesize)(\d+x\d+)", name) or re.search(r"_(\d+x\d+)", name)
    return "".join(f", {part}" for part in (precision, tile and f"{tile[1]} tile") if part)
