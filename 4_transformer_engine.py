"""Step 4: FP8 matrix products, by Transformer Engine (TE).

Change:   TE's modules replace LayerNorm + Linear, Linear, LayerNorm + MLP and the head. They
          round what a product reads to FP8; a kernel before it, such as LayerNorm, may
          already write FP8. TE's modules are not compiled: the loss and AdamW still are. FP8
          has a small range, so tensors are scaled first. With delayed scaling, the default on
          Hopper, scales come from earlier passes. The first passes have none: they are
          rehearsed, without an update.
Why:      BF16 products are the largest part of the compiled step. FP8 tensor cores are nearly
          twice as fast.
Run:      python 4_transformer_engine.py        Read: diff 3_compile.py 4_transformer_engine.py
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from common import benchmark, cuda_graph, parallel
from common.model import GPT

te = benchmark.optional("transformer_engine.pytorch", "transformer-engine[pytorch]")


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.qkv = te.LayerNormLinear(config.n_embd, 3 * config.n_embd)
        self.proj = te.Linear(config.n_embd, config.n_embd)

    def forward(self, x):
        B, T, C = x.shape
        qkv = self.qkv(x).split(C, dim=-1)
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in qkv)  # (B, H, T, D)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, D)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attn = CausalSelfAttention(config)
        self.mlp = te.LayerNormMLP(config.n_embd, 4 * config.n_embd)

    def forward(self, x):  # (B, T, C)
        x = x + self.attn(x)
        return x + self.mlp(x)


class Head(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.lm_head = te.LayerNormLinear(config.n_embd, config.vocab_size, bias=False)  # tied
        self.loss = torch.compile(F.cross_entropy)

    def forward(self, x, targets):
        logits = self.lm_head(x)  # (B, T, V)
        return self.loss(logits.flatten(0, 1), targets.flatten())


def main(args):
    args.require_gpu("Transformer Engine")
    recipe = te.get_default_recipe()  # the one that suits this GPU
    reason = args.amp_note or te.is_fp8_available(return_reason=True)[1]
    if not reason:
        args.require_multiples_of(32 if recipe.mxfp8() else 16, "FP8")
    torch.set_float32_matmul_precision("high")  # TF32
    with args.device:
        model = GPT(args.config, Block, Head, args.seed, residual_dtype=args.amp_dtype)
    model = parallel.distribute(model, args, te.checkpoint)
    optimizer = torch.optim.AdamW(model.parameters(), **args.adamw)
    optimizer.step = torch.compile(optimizer.step)
    kernels = [  # in order of preference
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    # Scales the loss under FP16; under BF16 and FP32 it does nothing.
    scaler = torch.amp.GradScaler(args.device.type, enabled=args.amp_dtype is torch.float16)

    @sdpa_kernel(kernels, set_priority=True)
    def train_step(tokens, targets):
        amp = torch.autocast(args.device.type, args.amp_dtype, enabled=args.mixed_precision)
        losses = []
        for x, y in parallel.micro_batches(tokens, targets, model, args):
            with amp, te.autocast(enabled=not reason):
                losses.append(model(x, y) / args.accumulate)
            scaler.scale(losses[-1]).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return sum(losses)

    train_step = cuda_graph.capture(train_step, optimizer, args)  # one launch a step
    fp8 = {"note": f"no FP8: {reason}"} if reason else {"fp8_recipe": repr(recipe)}
    return benchmark.run(train_step, model, args, rehearse=optimizer, **fp8)


if __name__ == "__main__":
    benchmark.launch(main)
