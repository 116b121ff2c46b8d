"""What each rung moves through memory, counted from its script: one `Pass` a kind of kernel, with the reason.

A count is the bytes that a kernel reads and writes for each number of one tensor: FP32 has 4, BF16 2, FP8 1. Matrix
products and fused attention are not here, see ladder/predict.py. `weight` and `width` are means over a block's four.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.passes import TE_NORM
from common.record import Workload

POINTWISE, COPIES, ATTENTION = "normalization and pointwise", "copies and casts", "attention"
LOSS, OPTIMIZER = "loss", "optimizer"
BY_HAND = "01"  # steps that write the (T, T) scores of attention to memory
FOREACH_NUMBERS = 320 * 65536  # that one launch of a foreach kernel takes: 320 blocks of 64 Ki numbers


@dataclass(frozen=True)
class Pass:
    """Kernels that each move `bytes` for every number of a tensor, see `sizes`."""

    tensor: str
    bytes: int
    kernels: int
    category: str  # of common.record.CATEGORIES
    kernel: str | None  # of common/passes.py: its measured time counts; without one, that of a copy of these bytes
    why: str
    most: int | None = None  # numbers that one launch takes


def sizes(shape: Workload) -> dict[str, int]:
    """Numbers in each tensor."""
    C, tokens = shape.n_embd, shape.batch_size * shape.seq_len
    return {
        "stream": tokens * C,
        "qkv": 3 * tokens * C,
        "hidden": 4 * tokens * C,
        "width": 9 * tokens * C // 4,  # outputs of 3 C, C, 4 C and C
        "scores": shape.batch_size * shape.n_head * shape.seq_len**2,
        "logits": tokens * shape.vocab_size,
        "weight": 3 * C * C,  # 3 C x C, C x C, 4 C x C and C x 4 C
        "embedding": shape.vocab_size * C,
        "parameters": shape.parameters,
        "vector": 0,  # a bias, or less: what it costs is the launch
    }


# fmt: off
# --- kernels of one block -------------------------------------------------------------------------

BY_HAND_FP32 = (
    Pass("scores", 8, 2, POINTWISE, None, "scores / sqrt(D) reads and writes, forward and backward"),
    Pass("scores", 8, 2, COPIES, None, "masked_fill copies its input first, forward and backward"),
    Pass("scores", 8, 2, POINTWISE, "mask fp32", "masked_fill then reads and writes the copy, forward and backward"),
    Pass("scores", 8, 1, ATTENTION, "softmax fp32", "softmax reads and writes"),
    Pass("scores", 12, 1, POINTWISE, None, "softmax backward first multiplies gradient and output"),
    Pass("scores", 12, 1, ATTENTION, None, "softmax backward reads that and the output, and writes"),
    Pass("stream", 8, 7, COPIES, "heads fp32", "heads made contiguous: q, k, v, output, three gradients"),
)
BY_HAND_BF16 = (
    Pass("scores", 4, 2, POINTWISE, None, "scores / sqrt(D) reads and writes, forward and backward"),
    Pass("scores", 4, 2, COPIES, None, "masked_fill copies its input first, forward and backward"),
    Pass("scores", 4, 2, POINTWISE, "mask half", "masked_fill then reads and writes the copy, forward and backward"),
    Pass("scores", 6, 2, COPIES, "to fp32", "autocast runs softmax in FP32: scores, and in backward a gradient"),
    Pass("scores", 8, 1, ATTENTION, "softmax fp32", "softmax reads and writes FP32"),
    Pass("scores", 6, 2, COPIES, "to half", "weights back to BF16; backward: the gradient of scores"),
    Pass("scores", 12, 1, POINTWISE, None, "softmax backward first multiplies gradient and output"),
    Pass("scores", 12, 1, ATTENTION, None, "softmax backward reads that and the output, and writes"),
    Pass("stream", 4, 7, COPIES, "heads half", "heads made contiguous: q, k, v, output, three gradients"),
)
EAGER_FP32 = (
    Pass("stream", 8, 2, POINTWISE, "layer norm fp32", "LayerNorm reads and writes, twice in a block"),
    Pass("stream", 20, 2, POINTWISE, "layer norm backward fp32", "its backward reads gradient and input, twice"),
    Pass("stream", 12, 4, POINTWISE, None, "residual adds read two and write one; backward adds the two branches"),
    Pass("hidden", 8, 1, POINTWISE, "gelu fp32", "GELU reads and writes"),
    Pass("hidden", 12, 1, POINTWISE, "gelu backward fp32", "its backward reads gradient and input, writes"),
    Pass("width", 4, 4, POINTWISE, "sum over tokens fp32", "the gradient of a bias is a sum over tokens: four biases"),
    Pass("qkv", 8, 1, COPIES, "heads fp32", "split's backward joins the gradients of q, k and v"),
    Pass("vector", 0, 12, COPIES, None, "workspaces of products and of sums are cleared"),
)
EAGER_BF16 = (
    Pass("stream", 6, 4, COPIES, "to fp32", "autocast runs LayerNorm in FP32: its input, in backward its gradient"),
    Pass("stream", 8, 2, POINTWISE, "layer norm fp32", "LayerNorm reads and writes FP32"),
    Pass("stream", 20, 2, POINTWISE, "layer norm backward fp32", "its backward reads gradient and input, twice"),
    Pass("stream", 6, 4, COPIES, "to half", "LayerNorm's output to BF16; backward: the gradient of its input"),
    Pass("stream", 6, 4, POINTWISE, None, "residual adds read two and write one; backward adds the two branches"),
    Pass("hidden", 4, 1, POINTWISE, "gelu half", "GELU reads and writes"),
    Pass("hidden", 6, 1, POINTWISE, "gelu backward half", "its backward reads gradient and input, writes"),
    Pass("width", 2, 4, POINTWISE, "sum over tokens half", "the gradient of a bias is a sum over tokens: four biases"),
    Pass("qkv", 4, 1, COPIES, "heads half", "split's backward joins the gradients of q, k and v"),
    Pass("weight", 6, 4, COPIES, "to half", "autocast casts four weights to BF16"),
    Pass("weight", 6, 4, COPIES, "to fp32", "backward: their gradients to FP32"),
    Pass("vector", 0, 8, COPIES, None, "the same of four biases"),
    Pass("vector", 0, 12, COPIES, None, "workspaces of products and of sums are cleared"),
)
COMPILED = (
    Pass("stream", 8, 2, POINTWISE, None, "residual add and LayerNorm in one kernel: reads two, writes sum and output"),
    Pass("stream", 8, 2, POINTWISE, None, "their backward in one kernel: reads gradient, input, other branch; writes"),
    Pass("stream", 4, 2, POINTWISE, None, "gradients of LayerNorm's weight and bias read gradient and input"),
    Pass("hidden", 4, 1, POINTWISE, "gelu half", "GELU reads and writes"),
    Pass("hidden", 6, 1, POINTWISE, "gelu backward half", "its backward reads gradient and input, writes"),
    Pass("width", 2, 4, POINTWISE, "sum over tokens half", "the gradient of a bias is a sum over tokens: four biases"),
    Pass("qkv", 4, 1, COPIES, None, "the gradients of q, k and v are joined"),
    Pass("weight", 6, 8, COPIES, None, "weights to BF16 in forward, their gradients to FP32 in backward"),
    Pass("vector", 0, 12, COPIES, None, "casts of biases; sums of a second stage; a buffer cleared for attention"),
)
TRANSFORMER_ENGINE = (
    Pass("stream", 9, 2, POINTWISE, TE_NORM, "LayerNorm reads BF16 and writes FP8; its backward reads two, writes one"),
    Pass("stream", 6, 4, POINTWISE, None, "residual adds read two and write one; backward adds the two branches"),
    Pass("hidden", 3, 1, POINTWISE, "gelu half", "GELU reads BF16 and writes FP8"),
    Pass("stream", 4, 1, COPIES, None, "attention's output to FP8 in two layouts, for the projection"),
    Pass("stream", 2, 2, COPIES, None, "LayerNorm's FP8 output transposed for the weight gradient"),
    Pass("hidden", 2, 1, COPIES, None, "GELU's FP8 output transposed for the weight gradient"),
    Pass("weight", 6, 4, COPIES, None, "four weights read in FP32 and written in FP8 in two layouts"),
    Pass("width", 4, 4, COPIES, None, "gradients of four outputs read in BF16 and written in FP8 in two layouts"),
    Pass("hidden", 2, 1, COPIES, None, "one of them also reads the input of GELU, whose backward is in that kernel"),
    Pass("weight", 6, 4, COPIES, "to fp32", "weight gradients to FP32"),
    Pass("qkv", 4, 1, COPIES, "heads half", "split's backward joins the gradients of q, k and v"),
    Pass("vector", 0, 16, COPIES, None, "four biases and LayerNorm's four vectors to BF16, their gradients to FP32"),
    Pass("vector", 0, 4, POINTWISE, None, "the second stages of four bias sums"),
    Pass("vector", 0, 9, COPIES, None, "buffers of products, attention and largest values are cleared"),
)
# --- kernels of one step, outside the blocks --------------------------------------------------------

EMBEDDING = (
    Pass("stream", 8, 1, POINTWISE, None, "rows of the token embedding are gathered"),
    Pass("stream", 8, 1, POINTWISE, None, "positions are added"),
    Pass("stream", 4, 1, POINTWISE, None, "the gradient of positions is a sum over sequences"),
    Pass("stream", 8, 1, POINTWISE, None, "gradient rows are added to the rows of their tokens"),
    Pass("embedding", 4, 1, COPIES, None, "the embedding's gradient is cleared first"),
    Pass("embedding", 12, 1, POINTWISE, None, "the tied weight's two gradients are added"),
    Pass("vector", 0, 30, POINTWISE, None, "tokens are sorted, so that equal ones are summed together"),
)
LAST_NORM_FP32 = (
    Pass("stream", 8, 1, POINTWISE, "layer norm fp32", "the last LayerNorm reads and writes"),
    Pass("stream", 20, 1, POINTWISE, "layer norm backward fp32", "and its backward, as in a block"),
)
LAST_NORM_COMPILED = (
    Pass("stream", 8, 1, POINTWISE, None, "the last residual add and LayerNorm in one kernel"),
    Pass("stream", 12, 1, POINTWISE, None, "and its backward, with the gradients of its weight and bias in another"),
)
LAST_NORM_TE = (Pass("stream", 9, 1, POINTWISE, TE_NORM, "the last LayerNorm, forward and backward"),)
LOSS_FP32 = (
    Pass("logits", 16, 1, LOSS, "softmax of vocabulary fp32", "log-softmax reads for maximum, sum and output; writes"),
    Pass("logits", 4, 1, COPIES, None, "the gradient of the picked log-probabilities is cleared first"),
    Pass("logits", 16, 1, LOSS, None, "backward reads the gradient for its sum, again, and the output, and writes"),
)
LOSS_BF16 = (
    Pass("logits", 8, 1, LOSS, "softmax of vocabulary half", "log-softmax reads for maximum, sum and output; writes"),
    Pass("logits", 6, 1, COPIES, "to fp32", "autocast picks log-probabilities in FP32: all are cast"),
    Pass("logits", 4, 1, COPIES, None, "the gradient of the picked ones is cleared first, in FP32"),
    Pass("logits", 6, 1, COPIES, "to half", "backward of that cast"),
    Pass("logits", 8, 1, LOSS, None, "backward reads the gradient for its sum, again, and the output, and writes"),
    Pass("embedding", 6, 1, COPIES, "to half", "the head's weight to BF16"),
    Pass("embedding", 6, 1, COPIES, "to fp32", "its gradient to FP32"),
)
LOSS_COMPILED = (
    Pass("logits", 2, 1, LOSS, "softmax of vocabulary half", "maximum and sum in one pass; exponentials bound it"),
    Pass("logits", 4, 1, LOSS, None, "the gradient from logits, maximum and sum: reads and writes"),
)
LOGITS_BF16 = (
    Pass("embedding", 6, 2, COPIES, None, "the head's weight to BF16, its gradient to FP32"),
)
LOGITS_FP8 = (
    Pass("logits", 4, 1, COPIES, None, "the gradient of the logits read in BF16 and written in FP8 in two layouts"),
    Pass("embedding", 12, 1, COPIES, None, "the head's weight to FP8 in two layouts; its gradient to FP32"),
)
FOREACH_ADAMW = (
    Pass("parameters", 8, 2, OPTIMIZER, None, "decay scales the weight, beta2 the second moment", FOREACH_NUMBERS),
    Pass("parameters", 12, 1, OPTIMIZER, None, "lerp: gradient and first moment, written", FOREACH_NUMBERS),
    Pass("parameters", 12, 1, OPTIMIZER, None, "addcmul: gradient and second moment, written", FOREACH_NUMBERS),
    Pass("parameters", 8, 3, OPTIMIZER, None, "square root, bias correction and eps, in a copy", FOREACH_NUMBERS),
    Pass("parameters", 16, 1, OPTIMIZER, None, "addcdiv: weight, first moment and root, written", FOREACH_NUMBERS),
)
FUSED_ADAMW = (
    Pass("parameters", 28, 1, OPTIMIZER, None, "one kernel reads weight, gradient and both moments, writes three"),
)
# fmt: on

ONCE_EAGER = (*EMBEDDING, *LAST_NORM_FP32, *LOSS_BF16, *FOREACH_ADAMW)
IN_A_BLOCK = {  # by the first character of a script's name: kernels of one block
    "0": BY_HAND_FP32 + EAGER_FP32,
    "1": BY_HAND_BF16 + EAGER_BF16,
    "2": EAGER_BF16,
    "3": COMPILED,
    "4": TRANSFORMER_ENGINE,
}
ONCE_A_STEP = {
    "0": (*EMBEDDING, *LAST_NORM_FP32, *LOSS_FP32, *FOREACH_ADAMW),
    "1": ONCE_EAGER,
    "2": ONCE_EAGER,
    "3": (*EMBEDDING, *LAST_NORM_COMPILED, *LOSS_COMPILED, *LOGITS_BF16, *FUSED_ADAMW),
    "4": (*EMBEDDING, *LAST_NORM_TE, *LOSS_COMPILED, *LOGITS_FP8, *FUSED_ADAMW),
}
