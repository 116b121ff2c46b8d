"""Step 4: FP8 matrix products, by Transformer Engine (TE).

Change:   TE's fused modules replace LayerNorm + Linear, Linear, LayerNorm + MLP and the head. They
          quantize to FP8 inside their normalization kernels and, on Hopper, compute GELU inside the
          product before it; torch.compile is left for the loss and AdamW. The blocks' weight gradients
          leave the products in FP32, not in BF16. Delayed scaling takes its scales from earlier passes:
          the first ones train nothing.
Why:      compiled, the step was bound by BF16 products; FP8 tensor cores multiply twice as fast.
Run:      python 4_transformer_engine.py        Read: diff 3_compile.py 4_transformer_engine.py
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from common import benchmark
from common.model import GPT

try:
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling
except Exception as error:  # absent, or does not fit this torch or CUDA
    te, te_error = None, f'{benchmark.one_line(error)}: pip install --no-build-isolation "transformer-engine[pytorch]"'


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.qkv = te.LayerNormLinear(config.n_embd, 3 * config.n_embd, fuse_wgrad_accumulation=True)
        self.proj = te.Linear(config.n_embd, config.n_embd, fuse_wgrad_accumulation=True)

    def forward(self, x):
        B, T, C = x.shape
        qkv = self.qkv(x, is_first_microbatch=True).split(C, dim=-1)
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in qkv)  # (B, H, T, D)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, D)
        return self.proj(y.transpose(1, 2).reshape(B, T, C), is_first_microbatch=True)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attn = CausalSelfAttention(config)
        self.mlp = te.LayerNormMLP(config.n_embd, 4 * config.n_embd, fuse_wgrad_accumulation=True)
        self.mlp.gemm_gelu_fusion = torch.cuda.get_device_capability() == (9, 0)  # GELU in its product: on Hopper
        self.register_full_backward_pre_hook(Block.allocate_gradients)

    def allocate_gradients(self, _):  # in FP32, for the products to write to
        for weight in (p for p in self.parameters() if p.dim() == 2):
            weight.grad = weight.main_grad = torch.empty_like(weight)  # is_first_microbatch: written over, not added to

    def forward(self, x):  # (B, T, C)
        x = x + self.attn(x)
        return x + self.mlp(x, is_first_microbatch=True)


class Head(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.lm_head = te.LayerNormLinear(config.n_embd, config.vocab_size, bias=False)  # weight tied by GPT
        self.loss = torch.compile(F.cross_entropy, options={"coordinate_descent_tuning": True, "online_softmax": False})

    def forward(self, x, targets):
        logits = self.lm_head(x)  # (B, T, V)
        return self.loss(logits.flatten(0, 1), targets.flatten())


def main(args):
    if te is None or args.device.type != "cuda":
        raise benchmark.Skip(te_error if args.device.type == "cuda" else "Transformer Engine needs an NVIDIA GPU")
    available, reason = (False, args.amp_note) if args.amp_note else te.is_fp8_available(return_reason=True)
    if available:
        args.require_multiples_of(16, "FP8")
    recipe, note = (DelayedScaling(amax_history_len=16), None) if available else (None, f"no FP8: {reason}")
    torch.set_float32_matmul_precision("high")  # TF32
    with args.device:
        model = GPT(args.config, Block, Head, args.seed, residual_dtype=args.amp_dtype)
    optimizer = torch.optim.AdamW(model.parameters(), **args.adamw)
    optimizer.step = torch.compile(optimizer.step)
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if args.compute_capability >= (9, 0):
        backends.insert(0, SDPBackend.CUDNN_ATTENTION)  # the fastest kernel from Hopper on
    scaler = torch.amp.GradScaler(args.device.type, enabled=args.amp_dtype is torch.float16)

    def train_step(tokens, targets):
        for parameter in model.parameters():
            parameter.main_grad = None  # zero_grad knows only .grad
        amp = torch.autocast(args.device.type, args.amp_dtype, enabled=args.amp_dtype is not torch.float32)
        with amp, sdpa_kernel(backends, set_priority=True), te.autocast(enabled=recipe is not None, recipe=recipe):
            loss = model(tokens, targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    return benchmark.run(
        train_step, model, args, note=note, rehearse=recipe and optimizer, fp8_recipe=recipe and repr(recipe)
    )


if __name__ == "__main__":
    benchmark.launch(main)
