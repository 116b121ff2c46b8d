"""The shapes of the weight matrices, and from them model FLOPs, parameters and bytes: one convention for all
steps.

Convention: a multiply-add is two FLOPs. Backward costs twice the forward. Causal attention counts only the
half of the (T, T) square that it needs; others count the full square. Embedding lookups, normalization,
activation, softmax and the optimizer count nothing. The figure is the work that the model needs, not the work
that an implementation does, so it is the same for every step.

Source: Kaplan et al. 2020, section 2.1 and table 1: 6 N per token, and 2 n_layer n_ctx d forward for
attention over half the square; times 3, for forward and backward, that is the term here.
"""

from common.model import GPTConfig


def weight_matrices(config: GPTConfig) -> list[tuple[int, int, int]]:
    """(outputs, inputs, count) of every weight that multiplies activations: four in each block, and the tied
    head."""
    C, L = config.n_embd, config.n_layer
    return [
        (3 * C, C, L),  # queries, keys and values
        (C, C, L),  # projection of attention
        (4 * C, C, L),  # MLP, up
        (C, 4 * C, L),  # MLP, down
        (config.vocab_size, C, 1),  # head
    ]


def matrix_products(config: GPTConfig, tokens: int) -> dict[tuple[int, int, int], int]:
    """(M, N, K) of every matrix product of a training step outside attention, and how often the step runs it.

    Each weight (N, K) has three: forward (tokens, N, K), input gradient (tokens, K, N), weight gradient (N,
    K, tokens).
    """
    products: dict[tuple[int, int, int], int] = {}
    for N, K, count in weight_matrices(config):
        for shape in ((tokens, N, K), (tokens, K, N), (N, K, tokens)):
            products[shape] = products.get(shape, 0) + count
    return products


def matmul_parameters(config: GPTConfig) -> int:
    """Parameters that multiply activations."""
    return sum(outputs * inputs * count for outputs, inputs, count in weight_matrices(config))


def parameters(config: GPTConfig) -> int:
    """All trained parameters. The tied embedding counts once."""
    biases_and_norms = config.n_layer * 13 * config.n_embd + 2 * config.n_embd
    return matmul_parameters(config) + biases_and_norms + config.seq_len * config.n_embd


def flops_per_step(config: GPTConfig, batch_size: int) -> int:
    """Model FLOPs of one training step, forward and backward, over `batch_size` sequences."""
    heads = config.n_layer * batch_size * config.n_head
    attention = attention_flops(heads, config.seq_len, config.n_embd // config.n_head)
    return 6 * matmul_parameters(config) * batch_size * config.seq_len + attention


def attention_flops(heads: int, T: int, D: int) -> int:
    """FLOPs of the causal attention of so many heads, of all layers and sequences, forward and backward."""
    return 6 * heads * T * T * D
