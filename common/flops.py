"""Model FLOPs, parameter counts and least bytes, analytic, by one convention for all steps.

Convention: a multiply-add is two FLOPs; backward costs twice the forward; causal attention counts
only the half of the (T, T) square it needs (others count the full square); embedding lookups,
normalization, activation, softmax and the optimizer count nothing. So the figure is the work the
model needs, not the work an implementation does, and it is the same for every step.

Source: Kaplan et al. 2020, section 2.1 and table 1: 6 N per token, and 2 n_layer n_ctx d forward for
attention over half the square, which times 3 is the term here.
"""

from __future__ import annotations

from common.model import GPTConfig


def matmul_parameters(config: GPTConfig) -> int:
    """Parameters that multiply activations: 12 C^2 per block (3 C^2 qkv, C^2 projection, 8 C^2 MLP),
    and the tied head's V C."""
    return config.n_layer * 12 * config.n_embd**2 + config.vocab_size * config.n_embd


def parameters(config: GPTConfig) -> int:
    """All trained parameters; the tied embedding counts once."""
    biases_and_norms = config.n_layer * 13 * config.n_embd + 2 * config.n_embd
    return matmul_parameters(config) + biases_and_norms + config.seq_len * config.n_embd


def flops_per_step(config: GPTConfig, batch_size: int) -> int:
    """Model FLOPs of one training step, forward and backward, over `batch_size` sequences."""
    tokens = batch_size * config.seq_len
    dense = 6 * matmul_parameters(config) * tokens
    causal_attention = 6 * config.n_layer * config.seq_len * config.n_embd * tokens
    return dense + causal_attention


def least_bytes_per_step(config: GPTConfig, batch_size: int) -> int:
    """Bytes that one training step moves through memory at least, the same for every step.

    Each operand of a matrix product travels once per product: activations in 2 bytes, read and written in the
    forward product and in the two backward ones, 3 x 2 x tokens x (inputs + outputs), where a block's products have
    7 C inputs and 9 C outputs. Weights in 4 bytes: read forward, read backward, their gradient written, 12 a
    parameter; AdamW reads weight, gradient and two moments and writes three of them, 28 more. Everything between
    the products, attention and the loss could in principle stay on the chip, and counts nothing.
    """
    tokens = batch_size * config.seq_len
    widths = config.n_layer * 16 * config.n_embd + config.n_embd + config.vocab_size
    return 6 * tokens * widths + 40 * parameters(config)
