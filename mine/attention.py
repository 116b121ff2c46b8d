"""The attention of a model: Hugging Face's switch, or what to do about what was observed."""

import sys
from pathlib import Path

import torch
from torch import nn

from common.hardware import ROOT
from ladder.rows import SDPA

BY_HAND = "by hand"  # as common/profile.py observes it


def switch_of(model: nn.Module) -> nn.Module | None:
    """The outermost module with Hugging Face's switch of attention; None without one."""
    modules = (module for module in model.modules() if hasattr(module, "set_attn_implementation"))
    return next(modules, None)


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


def calling_line() -> str:
    """Where the code that calls an operator is, beneath PyTorch: `Attention.forward, net.py line 31`."""
    ours, frame = (f"{Path(torch.__file__).parent}/", f"{ROOT / 'mine'}/"), sys._getframe(1)
    while frame and frame.f_code.co_filename.startswith(ours):
        frame = frame.f_back
    if frame is None:
        return ""
    function = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # since Python 3.11
    return f"{function}, {Path(frame.f_code.co_filename).name} line {frame.f_lineno}"


def advice_on_attention(model: nn.Module, kernel: str | None, place: str = "") -> str:
    """What to do about attention in a model that has no switch for it. `place` has its softmax."""
    if kernel == BY_HAND and any(isinstance(part, nn.MultiheadAttention) for part in model.modules()):
        return "nn.MultiheadAttention computes its weights to return them: call it with need_weights=False"
    if kernel == BY_HAND:
        where = f" ({place})" if place else ""
        return f"attention is written by hand{where}: call F.scaled_dot_product_attention, as 2_sdpa.py does"
    if kernel == "math":
        return (
            "PyTorch's attention is not fused here (math): dropout or a mask may be what keeps it from that"
        )
    if kernel is None:
        return "no attention was seen, so there is nothing to fuse"
    return f"attention is fused already ({kernel})"
