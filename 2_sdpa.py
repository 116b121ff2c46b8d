"""Step 2: fused attention (FlashAttention): one kernel for scores, mask, softmax and sum.

It works in tiles that fit on the chip, so the (T, T) scores never go to memory; backward
computes them again, which is cheaper than reading them. It skips what the causal mask
hides, and divides by sqrt(D) itself. The longer T, the more it gains. The price: no weights
of attention to look at, and a slower kernel for FP32, or for a mask of your own.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from common import parallel
from common.benchmark import measure
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


class Head(nn.Module):  # GPT ties the weight of lm_head to the token embedding
    def __init__(self, config):
        super().__init__()
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, x, targets):
        logits = self.lm_head(self.ln_f(x))  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main(args):  # args: the options, checked, and what this machine supports
    torch.set_float32_matmul_precision("high")  # TF32 for what autocast does not reach
    with args.device:
        # Optional, beyond autocast: the x of x + attn(x), the residual stream, in BF16.
        # Half the bytes, for a rounding at each add: GPT casts the embeddings to it.
        model = GPT(args.config, Block, Head, args.seed, residual_dtype=args.amp_dtype)
    model = parallel.distribute(model, args)  # DDP or FSDP2 under torchrun, else unchanged
    # Llama 2's numbers. fused: one kernel updates all weights, in one pass over memory.
    adamw = {"lr": args.lr, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **adamw)
    # Without BF16 matmuls in hardware, amp is off and amp_dtype is FP32.
    amp = torch.autocast(args.device.type, args.amp_dtype, enabled=args.amp)

    def train_step(tokens, targets):
        with amp:  # around forward and loss: backward takes the dtypes of forward
            loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return train_step, model, optimizer


if __name__ == "__main__":
    measure(main)  # reads the options, trains, times, and writes the record
