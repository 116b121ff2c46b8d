"""Kernels in the words of a colleague: `matrix product, BF16, 128x256 tile`."""

from __future__ import annotations

import re

from common.text import one_line

LONGEST_NAME = 70
# What a name contains, and what it then is called; the first that matches wins.
WORDS = (
    (r"sdpa.*fprop|flash_fwd|scaled_dot_product_flash_attention_for_cpu$|cutlassF", "fused attention, forward"),
    (r"sdpa.*bprop|flash_bwd|flash_attention_for_cpu_backward|cutlassB", "fused attention, backward"),
    (r"^## Call CompiledFxGraph|^CompiledFunction|^Torch-Compiled Region", "compiled graph"),
    (r"^autograd::|Backward0$", "the backward engine's own work"),
    (r"convert_dq", "fused attention, gradient of Q to 16 bits"),
    (r"dot_do_o", "fused attention, row sums for backward"),
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
    (r"split_with_sizes_copy_out", "distributing the gathered weights"),
    (r"chunk_cat", "collecting the gradients to exchange"),
    (r"native::Copy<", "casts and copies of many tensors"),
    (r"cast_transpose", "cast to FP8 with transpose"),
    (r"fp8::detail::identity", "cast to FP8"),
    (r"transpose_\w*kernel", "transpose in FP8"),
    (r"amax_and_scale|delayed_scaling", "update of the FP8 scales"),
    (r"FusedAdam|multi_tensor_adam|_fused_adam", "AdamW, fused"),
    (r"triton_for_fused", "AdamW, one of its compiled kernels"),
    (r"multi_tensor_apply|_foreach_|Optimizer\.", "AdamW, one of its passes"),
    (r"bfloat16_copy", "cast to BF16"),
    (r"[\[{]lambda\(float\).*LoadWithCast", "cast to FP32"),
    (r"LoadWithCast|_to_copy", "cast"),
    (r"direct_copy|Memcpy|^memcpy|aten::copy_|aten::clone|aten::contiguous", "copy"),
    (r"CatArray|aten::cat", "concatenation"),
    (r"FillFunctor|Memset|^memset|aten::(fill|zero)", "filling with a constant"),
    (r"splitKreduce", "sum of a divided matrix product"),
    (r"embedding|sum_and_scatter|krn_partial|compute_grad_weight|radix_sort|cub::", "embedding and its gradient"),
    (r"nccl|AllReduce|ReduceScatter|AllGather", "exchange between GPUs"),
    (r"MulFunctor|aten::mul|aten::div", "multiplication"),
    (r"CUDAFunctor(OnSelf)?_add|aten::add", "addition"),
    (r"reduce_kernel|aten::sum", "sum"),
)
# Operators that a compiled kernel's name lists, and what they are called. Views, which move nothing, are not.
COMPILED = {
    "native_layer_norm_backward": "LayerNorm backward", "native_layer_norm": "LayerNorm", "gelu_backward":
    "GELU backward", "gelu": "GELU", "log_softmax_backward_data": "log-softmax backward", "log_softmax": "log-softmax",
    "prepare_softmax": "softmax", "softmax": "softmax", "nll_loss": "cross entropy", "embedding": "embedding",
    "to_copy": "cast", "cat": "concatenation", "add": "addition", "sum": "sum", "mul": "multiplication",
    "transpose": "transpose", "clone": "copy",
}  # fmt: skip
ATTENTION = "(?i)fmha|flash|attention"  # whose kernels may be named after matrix products too
FORMATS = (("bf16", "BF16"), ("fp16|_h", "FP16"), ("tf32", "TF32"))  # of matrix products of other libraries
PRECISIONS = {"t": "BF16", "q": "FP8", "r": "FP8"}  # how cuBLAS's names begin in the recorded rows of that precision


def readable(name: str) -> str:
    """What a kernel or an operator is, in a few words; of one that no rule knows its name, shortened."""
    if product := _product(name):
        return product
    compiled = re.match(r"triton_(poi|red|per)_fused_(\w+?)_\d+$", name)
    words = next((words for pattern, words in WORDS if re.search(pattern, name)), None)
    if compiled and not (words or "").startswith("AdamW"):
        return one_line(f"compiled: {', '.join(_fused(compiled[2])) or compiled[2]}", LONGEST_NAME)
    dtype = next((known for mark, known in (("BFloat16", "BF16"), ("__nv_bfloat16", "BF16"), ("<float", "FP32"),
                                            ("Half", "FP16")) if mark in name), None)  # fmt: skip
    plain = words in ("multiplication", "addition", "sum", "softmax, forward", "softmax, backward")
    if words:
        return f"{words}, {dtype}" if plain and dtype else words
    noise = r"void |at::native::|\(anonymous namespace\)::|transformer_engine::|^aten::|[<(].*"
    return one_line(re.sub(noise, "", name), LONGEST_NAME)


def _product(name: str) -> str | None:
    """`matrix product, BF16, 128x256 tile`; None of another kernel."""
    if operator := re.match(r"(?:Optimizer\.step: )?aten::(mm|addmm|bmm|baddbmm|linear)$", name):
        return f"matrix product ({operator[1]})"
    bias = None
    if nvjet := re.match(r"nvjet_sm\d+_([a-z])\w*?_(\d+x\d+)_", name):
        precision, tile, bias = PRECISIONS.get(nvjet[1]), nvjet[2], "with bias" if "_bias" in name else None
    elif found := re.search(r"(?:sgemm_|tilesize)(\d+x\d+)", name):
        precision, tile = "FP32" if "sgemm" in name or "ffma" in name else None, found[1]
    elif re.search(r"gemm|^nvjet|cutlass_\d+_(simt|tensorop|wmma)", name) and not re.search(ATTENTION, name):
        precision = next((text for mark, text in FORMATS if re.search(mark, name)), None)
        tile = (re.search(r"\d+x\d+", name) or [None])[0]
    else:
        return None
    return ", ".join(filter(None, ["matrix product", precision, tile and f"{tile} tile", bias]))


def _fused(listed: str) -> dict[str, None]:
    """What the operators that are listed in a compiled kernel's name do, each once."""
    found = {}
    for operator, words in COMPILED.items():
        if operator in listed:
            found[words], listed = None, listed.replace(operator, "")
    return found
