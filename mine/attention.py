"""The attention of a model: Hugging Face's switch, or what to do about what was observed."""

import sys
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from common.hardware import ROOT
from ladder.rows import SDPA

BY_HAND = "by hand"  # as common/profile.py observes it
MULTI_HEAD = "multi_head_attention_forward"  # PyTorch's, of nn.MultiheadAttention too


def switch_of(model: nn.Module) -> nn.Module | None:
    """The outermost module with Hugging Face's switch of attention, not what torch.compile wraps around it;
    None without one."""
    modules = (module for module in model.modules() if hasattr(module, "set_attn_implementation"))
    return next((module for module in modules if not hasattr(module, "_orig_mod")), None)


def has_switch(model: nn.Module, file: str, softmax_at: str) -> bool:
    """Whether a switch decides how the model's largest attention runs: its softmax is not in the user's
    file."""
    return switch_of(model) is not None and f" {file} line " not in softmax_at


def needs_mask(switch: nn.Module, is_masked: bool) -> bool:
    """Whether attention may need more than a causal mask: unless the model is known to be causal, without a
    window, and gets no mask of its own."""
    is_causal = "CausalLM" in type(switch).__name__ or "LMHead" in type(switch).__name__
    windows = ("sliding_window", "attention_chunk_size")
    has_window = any(getattr(switch.config, name, None) is not None for name in windows)
    return not is_causal or has_window or is_masked


def kernels_before(before: dict[str, dict]) -> list[str | None]:
    """Which attention the rows ran that stand before the one that fuses it: names begin with numbers."""
    return [row.get("settings", {}).get("attention_kernel") for name, row in before.items() if name < SDPA]


def calling_frame() -> FrameType | None:
    """The code that calls an operator, beneath PyTorch."""
    ours, frame = (f"{Path(torch.__file__).parent}/", f"{ROOT / 'mine'}/"), sys._getframe(1)
    while frame and frame.f_code.co_filename.startswith(ours):
        frame = frame.f_back
    return frame


def calling_line() -> str:
    """Where that is: `Attention.forward, net.py line 31`; of what PyTorch's multi-head attention calls, with
    its name."""
    frame, inside = calling_frame(), sys._getframe(1)
    if frame is None:
        return ""
    while inside is not frame and inside.f_code.co_name != MULTI_HEAD:
        inside = inside.f_back
    function = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # since Python 3.11
    place = f"{function}, {Path(frame.f_code.co_filename).name} line {frame.f_lineno}"
    return place if inside is frame else f"{place}, in {MULTI_HEAD}"


def advice_on_attention(kernel: str | None, place: str = "") -> str:
    """What to do about attention in a model that has no switch for it. `place` has its softmax."""
    where = f" ({place})" if place else ""
    if kernel == BY_HAND and MULTI_HEAD in place:
        return f"multi-head attention computes its weights to return them{where}: pass need_weights=False"
    if kernel == BY_HAND:
        how = "is_causal=True, or attn_mask for another mask or a bias"
        return (
            f"attention is written by hand{where}: call F.scaled_dot_product_attention ({how}); "
            "capped scores need flex_attention"
        )
    if kernel == "math":
        return (
            "PyTorch's attention is not fused here (math): dropout or a mask may be what keeps it from that"
        )
    if kernel is None:
        return "no attention was seen, so there is nothing to fuse"
    return f"attention is fused already ({kernel})"
