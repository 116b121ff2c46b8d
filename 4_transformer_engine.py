"""Step 4: FP8 matrix products, by Transformer Engine (TE).

Change:   TE's modules replace LayerNorm + Linear, Linear, LayerNorm + MLP and the head,
          and round what a product reads to FP8. They are not compiled; the loss still is.
Run:      python 4_transformer_engine.py    Read: diff 3_compile.py 4_transformer_engine.py
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from common import cuda_graph, parallel
from common.benchmark import launch, optional
from common.model import GPT

te = optional("transformer_engine.pytorch", "transformer-engine[pytorch]")


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.qkv = te.LayerNormLinear(config.n_embd, 3 * config.n_embd)
        self.proj = te.Linear(config.n_embd, config.n_embd)

    def forward(self, x):
        (B, T, C), H = x.shape, self.n_head
        qkv = self.qkv(x).split(C, dim=-1)
        q, k, v = (t.view(B, T, H, -1).transpose(1, 2) for t in qkv)  # (B, H, T, D)
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
        self.lm_head = te.LayerNormLinear(config.n_embd, config.vocab_size, bias=False)
        self.loss = torch.compile(F.cross_entropy)

    def forward(self, x, targets):
        logits = self.lm_head(x)  # (B, T, V)
        return self.loss(logits.flatten(0, 1), targets.flatten())


def main(args):
    args.require_fp8()  # or the row is skipped
    torch.set_float32_matmul_precision("high")  # TF32
    with args.device:
        model = GPT(args.config, Block, Head, args.seed, residual_dtype=args.amp_dtype)
    model = parallel.distribute(model, args)  # under torchrun; alone it is the model itself
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **args.adamw)

    def train_step(tokens, targets):
        with torch.autocast(args.device.type, args.amp_dtype), te.autocast():
            loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    train_step = cuda_graph.capture(train_step, optimizer, args)  # sets capturable=True
    return train_step, model


if __name__ == "__main__":
    launch(main)
