"""What all steps share of the model: its shape, the shell around the blocks, the initial weights."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn as nn


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a GPT-2 style decoder. All fields count things; none has a unit."""

    n_layer: int
    n_head: int
    n_embd: int
    seq_len: int
    vocab_size: int


PRESETS = {  # shape, and sequences per step
    "tiny": (GPTConfig(2, 4, 128, 1024, 256), 2),
    "gpt2": (GPTConfig(12, 12, 768, 1024, 50304), 32),
    "gpt3-xl": (GPTConfig(24, 16, 2048, 2048, 50304), 4),
    "gpt3-6.7b-slice": (GPTConfig(6, 32, 4096, 2048, 50304), 8),  # 6 of GPT-3 6.7B's 32 layers
}


class GPT(nn.Module):
    """Token and position embeddings, `config.n_layer` blocks, and a head tied to the embedding.

    Build it under `with device:`; weights are drawn from `seed` on that device.

    Args:
        block: `block(config)` maps (B, T, C) to (B, T, C).
        head: `head(config)` maps (B, T, C) and targets (B, T) to the mean cross entropy, a scalar. Its
            `lm_head.weight` (vocab_size, C) is replaced by the token embedding.
        residual_dtype: dtype of the (B, T, C) stream that runs through the blocks.
    """

    def __init__(
        self, config: GPTConfig, block: Callable, head: Callable, seed: int, residual_dtype=torch.float32
    ):
        super().__init__()
        self.residual_dtype = residual_dtype
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.seq_len, config.n_embd)
        self.blocks = nn.ModuleList(block(config) for _ in range(config.n_layer))
        self.head = head(config)
        self.head.lm_head.weight = self.wte.weight
        self.init_weights(seed)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy in nats of `targets` (B, T) given `tokens` (B, T), both int64."""
        x = (self.wte(tokens) + self.wpe.weight[: tokens.size(1)]).to(self.residual_dtype)  # (B, T, C)
        for block in self.blocks:
            x = block(x)
        return self.head(x, targets)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """GPT-2's initialization, drawn in parameter order from one generator.

        The order matters: any block with the same matrices in the same order gets the same numbers, whatever
        modules it is made of. Raises ValueError for a block that has not four matrices: qkv and projection
        of attention, up and down of the MLP. Source of the residual scaling: GPT-2 paper, section 2.3
        (Radford et al., 2019).
        """
        generator = torch.Generator(self.wte.weight.device).manual_seed(seed)
        residual_std = 0.02 / math.sqrt(2 * len(self.blocks))
        residual_projections = set()
        for block in self.blocks:
            matrices = [p for p in block.parameters() if p.dim() == 2]
            if len(matrices) != 4:
                count = f"a block has {len(matrices)} weight matrices, and not four"
                raise ValueError(f"{count}: tell init_weights which of them end in the residual stream")
            residual_projections |= {matrices[1], matrices[3]}  # of attention and of the MLP
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                std = residual_std if parameter in residual_projections else 0.02
                parameter.normal_(std=std, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
