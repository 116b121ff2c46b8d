"""Causal attention by hand and fused, and the least bytes that either moves; for several experiments and traffic.py."""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from anatomy.experiment import NEAR, ms, near


def attention_by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention as scores, mask, softmax and product; all (B, H, T, D)."""
    future = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool, device=q.device).triu(diagonal=1)
    scores = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5
    return scores.masked_fill(future, float("-inf")).softmax(dim=-1) @ v


def attention_fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = True) -> torch.Tensor:
    """The same function as one fused kernel, which is cuDNN's where that runs; or the one without a mask."""
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    with sdpa_kernel(backends, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def cause_by_mask(predicted_s: float, causal_s: float, full_s: float) -> str | None:
    """Why fused causal attention is slower than predicted, which counts half of the scores, if it takes about as long
    as without a mask, `full_s` seconds."""
    if not near(causal_s, full_s):
        return None
    rest = ", which explains a factor of 2 and not more" if causal_s > 2 * NEAR * predicted_s else ""
    return f"without a mask it takes {ms(full_s)} ms: it saves no time on the scores above the diagonal{rest}"


ATTENTIONS = {"by hand": attention_by_hand, "fused": attention_fused}


def analytic_attention_bytes(
    which: str, B: int, H: int, T: int, D: int, itemsize: int = 2, autocast: bool = True
) -> int:
    """The least bytes of forward and backward: each kernel reads its inputs and writes its output once.

    By hand, a pass moves one (B, H, T, T) tensor of 2-byte numbers; an FP32 tensor counts as two. Under autocast the
    forward passes are: scores 1, scale 2, mask 4 (masked_fill copies first), cast to FP32 3, softmax 4, cast back 3,
    product 1. The backward passes are: products 4, casts 6, softmax 6, mask 4, scale 2. Without autocast there are no
    casts; all numbers have one dtype, and softmax takes 2 passes forward and 3 backward.
    Fused attention moves q, k, v, o forward and q, k, v, o, do, dq, dk, dv backward. By hand moves these as well.
    """
    head_tensor, score_tensor = itemsize * B * H * T * D, itemsize * B * H * T * T
    passes = 40 if autocast else 23
    return 12 * head_tensor + (passes * score_tensor if which == "by hand" else 0)
