"""Step 3: one graph, by torch.compile, fused AdamW and a CUDA graph.

Change:   the compiler fuses what lies between a block's products, AdamW is one pass over
          its tensors, and the host launches the whole step at once, as a CUDA graph.
Run:      python 3_compile.py         Read: diff 2_sdpa.py 3_compile.py
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from common import cuda_graph, parallel
from common.benchmark import launch
from common.model import GPT


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x):
        (B, T, C), H = x.shape, self.n_head
        qkv = self.qkv(x).split(C, dim=-1)
        q, k, v = (t.view(B, T, H, -1).transpose(1, 2) for t in qkv)  # (B, H, T, D)
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
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)  # tied

    def forward(self, x, targets):
        logits = self.lm_head(self.ln_f(x))  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main(args):
    torch.set_float32_matmul_precision("high")  # TF32
    with args.device:
        model = GPT(args.config, Block, Head, args.seed, residual_dtype=args.amp_dtype)
    for part in (*model.blocks, model.head):
        part.compile(fullgraph=True)
    model = parallel.distribute(model, args)  # under torchrun; alone it is the model itself
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **args.adamw)

    def train_step(tokens, targets):
        with torch.autocast(args.device.type, args.amp_dtype, enabled=args.amp):
            loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    train_step = cuda_graph.capture(train_step, optimizer, args)  # sets capturable=True
    return train_step, model


if __name__ == "__main__":
    launch(main)
