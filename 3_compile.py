"""Step 3: one graph, by torch.compile and a CUDA graph.

Change:   torch.compile fuses AdamW into one pass over its tensors, and the casts and pointwise
          operations between the matrix products. The whole step is captured as a CUDA graph.
Why:      AdamW and these operations read and wrote the same tensors several times. The host
          launched every kernel; with a captured graph it launches once a step. Which of the
          three, AdamW, the model or the graph, gains most depends on the model and the host,
          see docs/performance.md.
Run:      python 3_compile.py         Read: diff 2_sdpa.py 3_compile.py
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from common import benchmark, cuda_graph, parallel
from common.model import GPT


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x):
        B, T, C = x.shape
        qkv = self.qkv(x).split(C, dim=-1)
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in qkv)  # (B, H, T, D)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, D)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        return self.proj(F.gelu(self.fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x):  # (B, T, C)
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Head(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)  # tied by GPT

    def forward(self, x, targets):
        logits = self.lm_head(self.ln_f(x))  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main(args):
    torch.set_float32_matmul_precision("high")  # TF32
    with args.device:
        model = GPT(args.config, Block, Head, args.seed, residual_dtype=args.amp_dtype)
    for part in parallel.compile_units(model, args):
        part.compile(fullgraph=True)
    model = parallel.distribute(model, args)
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
            with amp:
                losses.append(model(x, y) / args.accumulate)
            scaler.scale(losses[-1]).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return sum(losses)

    train_step = cuda_graph.capture(train_step, optimizer, args)  # one launch a step
    return benchmark.run(train_step, model, args)


if __name__ == "__main__":
    benchmark.launch(main)
