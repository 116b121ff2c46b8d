"""What does a mask cost, and which one do packed documents need?

Several documents in one sequence must not see each other, and `is_causal=True` alone lets them. A mask as a
tensor forbids it, but then PyTorch takes a kernel that computes the whole (T, T) square and reads the mask.
FlexAttention compiles a kernel from a function of two positions, and skips blocks of 128 x 128 scores that
the function rules out.

Prediction, for P documents of equal length. Causal attention needs half of the square. So a dense mask takes
at least twice as long as `is_causal`, whatever it forbids. Documents need 1 / 2P of the square, and
FlexAttention at least the share of its blocks that are not empty. Both are predicted from the time of
`is_causal`, at its rate.

Change: --documents 1. What does FlexAttention cost where it has nothing to skip?
Source: Dong et al., Flex Attention (2024); PyTorch's documentation of scaled_dot_product_attention.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

BLOCK = 128  # scores in each direction, of FlexAttention's default


def document_of(T: int, documents: int, device: torch.device) -> torch.Tensor:
    """The document that each position (T,) belongs to."""
    return torch.arange(T, device=device) * documents // T


def dense_mask(document: torch.Tensor) -> torch.Tensor:
    """(T, T) booleans: whether a query sees a key, which is of its document and not after it."""
    return (document[:, None] == document[None, :]).tril()


def kept_share(T: int, documents: int) -> float:
    """The blocks that hold a score of a causal document mask, as a share of those of a causal mask."""
    blocks, of_document = -(-T // BLOCK), T / documents
    kept = sum(row - int(int(row * BLOCK // of_document) * of_document) // BLOCK + 1 for row in range(blocks))
    return kept / (blocks * (blocks + 1) / 2)


def forward_backward(attention, qkv):
    """A call that runs both."""
    gradient = torch.randn_like(qkv[0])

    def call():
        return torch.autograd.grad(attention(*qkv), qkv, gradient)

    return call


def flexible(document: torch.Tensor):
    """FlexAttention with a causal document mask, compiled."""

    def sees(b, h, query, key):
        return (query >= key) & (document[query] == document[key])

    T, device = len(document), document.device
    blocks = create_block_mask(sees, None, None, T, T, device=device)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=blocks)


def run(lab, length=None, documents=None, batch=None, heads=None):
    T, P = length or lab.pick(512, 1024, 4096), documents or 8
    if P > T:
        raise ValueError(f"--documents {P} are more than --length {T} has tokens")
    B, H, D = batch or lab.pick(1, 1, 4), heads or lab.pick(2, 4, 16), 64
    dtype = torch.bfloat16 if lab.amp else torch.float32
    qkv = [torch.randn(B, H, T, D, device=lab.device, dtype=dtype, requires_grad=True) for _ in range(3)]
    document = document_of(T, P, lab.device)
    masks = {"dense causal mask": dense_mask(torch.zeros_like(document))}
    masks[f"dense mask of {P} documents"] = dense_mask(document)
    lab.title = f"Forward and backward, B {B}, H {H}, T {T}, D {D}, {dtype}"
    causal_s = lab.seconds(forward_backward(partial(F.scaled_dot_product_attention, is_causal=True), qkv))
    lab.row("is_causal", causal_s)
    for name, mask in masks.items():
        seconds = lab.seconds(forward_backward(partial(F.scaled_dot_product_attention, attn_mask=mask), qkv))
        lab.row(name, seconds, 2 * causal_s)
    name, predicted_s = f"FlexAttention, {P} documents", causal_s * kept_share(T, P)
    if not lab.gpu:
        lab.row(name, "needs a GPU", predicted_s)
        return f"A dense mask took {seconds / causal_s:.1f} times as long as is_causal."
    flex = flexible(document)
    flex_s = lab.seconds(forward_backward(flex, qkv))
    lab.row(name, flex_s, predicted_s)
    lab.title = "The same numbers?"
    apart = (
        (flex(*qkv) - F.scaled_dot_product_attention(*qkv, attn_mask=dense_mask(document))).abs().max().item()
    )
    lab.row("largest difference between FlexAttention and the dense mask", apart, unit="")
    return f"With {P} documents FlexAttention took {flex_s / seconds:.2f} of the time of a dense mask."
