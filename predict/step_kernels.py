"""What `python -m predict` knows of each step: the kernels between its matrix products, and its memory.

They are counted by hand from the scripts: how many bytes kernels read and write for each number of a tensor
(FP32 has 4, BF16 2, FP8 1). A step that is not here is not predicted.
"""

from dataclasses import dataclass
from typing import NamedTuple


class Pass(NamedTuple):
    """Kernels that together move `bytes` for every number of a tensor, see predict.roofs.sizes."""

    tensor: str
    bytes: int
    kernels: int
    # A kernel of predict/roofs.py, whose measured time counts; without one, that of copies of the bytes.
    kernel: str | None = None


class Memory(NamedTuple):
    """Bytes that backward finds, on the records of an H200."""

    in_blocks: int  # of each number of (tokens, C), in every block
    outside: int  # of each number of (tokens, C), once
    of_logit: int
    of_score: int  # of attention that is written out, in every block
    of_last_score: int  # once more, in the block that runs


@dataclass(frozen=True)
class Step:
    """What one script does, as far as its time and memory depend on it."""

    in_a_block: tuple[Pass, ...]
    once: tuple[Pass, ...]  # outside the blocks
    memory: Memory
    precision: str | None = None  # of its matrix products; None: BF16 where the device multiplies it
    attention_by_hand: bool = False  # its scores are written to memory
    captured: bool = False


# Kernels of a block in mixed precision, launched. A vector is a bias or less: sums, cleared workspaces.
EAGER = (
    Pass("stream", 24, 4, "to fp32"),  # autocast runs LayerNorm in FP32: its input, in backward its gradient
    # Two LayerNorms in FP32, 8 each; outputs to BF16, backward gradients of inputs, 24; residual adds in
    # BF16, 6 each.
    Pass("stream", 64, 10),
    Pass("stream", 40, 2, "layer norm backward fp32"),
    Pass("hidden", 4, 1, "gelu half"),
    Pass("hidden", 6, 1),  # GELU's backward reads gradient and input, and writes
    Pass("width", 8, 4, "sum over tokens half"),  # the gradient of a bias is a sum over tokens: four biases
    Pass("qkv", 4, 1, "heads half"),  # split's backward joins the gradients of q, k and v
    Pass("weight", 24, 4),  # autocast casts four weights to BF16
    Pass("weight", 24, 4, "to fp32"),  # backward: their gradients to FP32
    Pass("vector", 0, 20),
)
# Kernels of one step, outside the blocks. Rows gathered, positions added, and their gradients, 28, with
# LayerNorm; the embedding's gradient cleared, 4, and the tied weight's two gradients added, 12; tokens
# sorted, 30 kernels.
EMBEDDING = (Pass("stream", 36, 5), Pass("stream", 20, 1, "layer norm backward fp32"), Pass("vector", 0, 30))
FUSED_ADAMW = Pass("parameters", 28, 1, "adamw")  # reads weight, gradient and both moments, writes three
COMPILED_LOSS = Pass("logits", 6, 1, "loss half")  # maximum and sum in one pass, and the gradient
ONCE_EAGER = (
    *EMBEDDING,
    Pass("embedding", 22, 3),  # also the head's weight to BF16
    Pass("embedding", 6, 1, "to fp32"),  # its gradient to FP32
    # Log-softmax and its backward, 16; the gradient of the picked ones cleared, and a cast's backward.
    Pass("logits", 26, 4),
    Pass("logits", 6, 1, "to fp32"),  # autocast picks log-probabilities in FP32: all are cast
    FUSED_ADAMW,
)

STEPS = {
    "0_baseline": Step(
        in_a_block=(
            # Forward and backward of / sqrt(D) and of the mask, 8 each; masked_fill copies its input first,
            # 16; softmax 8, backward 12 and a product of gradient and output, 12.
            Pass("scores", 80, 9),
            Pass("stream", 56, 7),  # heads made contiguous: q, k, v, output, three gradients
            Pass("stream", 64, 6),  # two LayerNorms, 8 each; two residual adds and their backward, 12 each
            Pass("stream", 40, 2, "layer norm backward fp32"),
            Pass("hidden", 20, 2),  # GELU, and its backward
            Pass("width", 16, 4),
            Pass("qkv", 8, 1),
            Pass("vector", 0, 12),
        ),
        # Log-softmax reads for maximum, sum and output, and writes; its backward as much; a gradient is
        # cleared.
        once=(*EMBEDDING, Pass("embedding", 16, 2), Pass("logits", 36, 3), FUSED_ADAMW),
        memory=Memory(64, 0, 12, 4, 12),
        precision="fp32",
        attention_by_hand=True,
    ),
    "1_cublas": Step(
        in_a_block=(
            # / sqrt(D), forward and backward, 4 each; masked_fill's copies, 8; softmax in FP32, 20, and its
            # product in backward, 12; weights back to BF16, and backward the gradient of scores, 12.
            Pass("scores", 60, 9),
            Pass("scores", 8, 2, "mask half"),
            Pass(
                "scores", 12, 2, "to fp32"
            ),  # autocast runs softmax in FP32: scores, and in backward a gradient
            Pass("stream", 28, 7, "heads half"),
            *EAGER,
        ),
        once=ONCE_EAGER,
        memory=Memory(30, 0, 10, 7, 8),
        attention_by_hand=True,
    ),
    "2_sdpa": Step(in_a_block=EAGER, once=ONCE_EAGER, memory=Memory(35, 8, 10, 0, 0)),
    "3_compile": Step(
        in_a_block=(
            # LayerNorm, 4; residual add with LayerNorm, 8; residual add, 6; their backward, 8 twice;
            # gradients of LayerNorm's weights and biases, 4 twice.
            Pass("stream", 42, 7),
            Pass("hidden", 4, 1, "gelu half"),
            Pass("hidden", 6, 1),
            Pass("width", 8, 4, "sum over tokens half"),
            Pass("qkv", 4, 1),
            Pass("weight", 48, 8),  # weights to BF16 in forward, their gradients to FP32 in backward
            Pass("vector", 0, 12),
        ),
        # The head's weight to BF16, its gradient to FP32.
        once=(
            Pass("stream", 44, 6),
            Pass("vector", 0, 30),
            Pass("embedding", 28, 4),
            COMPILED_LOSS,
            FUSED_ADAMW,
        ),
        memory=Memory(31, 12, 2, 0, 0),
        captured=True,
    ),
    "4_transformer_engine": Step(
        in_a_block=(
            # Two LayerNorms with their backward, 9 each; residual adds, 6 each; attention's output to FP8 in
            # two layouts, LayerNorms' FP8 outputs transposed, 8.
            Pass("stream", 50, 9),
            Pass("hidden", 3, 1, "gelu half"),  # GELU reads BF16 and writes FP8
            Pass(
                "hidden", 4, 2
            ),  # GELU's FP8 output transposed; GELU's backward reads its input while it casts
            Pass("weight", 24, 4),  # four weights read in FP32 and written in FP8 in two layouts
            Pass("width", 16, 4),  # gradients of four outputs read in BF16 and written in FP8 in two layouts
            Pass("weight", 24, 4, "to fp32"),
            Pass("qkv", 4, 1, "heads half"),
            Pass("vector", 0, 29),
        ),
        # The same in FP8: the weight, and the gradient of the logits, in two layouts.
        once=(
            Pass("stream", 37, 5),
            Pass("vector", 0, 30),
            Pass("embedding", 28, 3),
            COMPILED_LOSS,
            Pass("logits", 4, 1),
            FUSED_ADAMW,
        ),
        memory=Memory(27, 12, 4, 0, 0),
        precision="fp8",
        captured=True,
    ),
}
