"""Step 3: blocks and head compiled, and the whole training step replayed as a CUDA graph.

The compiler fuses what lies between matmuls (LayerNorm, residual add, GELU, casts, loss):
fewer trips to memory, but a slow first step. Python starts kernels one by one, and a GPU
waits if they are short (gaps in a profile); a graph starts a whole step's, AdamW's too, by
one launch, but Python inside, its `if`s too, runs no more. Either can be copied alone.
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
    # Equal blocks compile once, however many. DDP and FSDP2 wrap what is compiled already.
    for part in (*model.blocks, model.head):
        part.compile(fullgraph=True)  # what it cannot trace is an error, not a slow detour
    model = parallel.distribute(model, args)  # DDP or FSDP2 under torchrun, else unchanged
    # Llama 2's numbers. fused: one kernel updates all weights, in one pass over memory.
    adamw = {"lr": args.lr, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}
    # capturable: without it AdamW refuses to be part of a graph.
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=True, **adamw)
    # Without BF16 matmuls in hardware, amp is off and amp_dtype is FP32.
    amp = torch.autocast(args.device.type, args.amp_dtype, enabled=args.amp)

    def train_step(tokens, targets):
        with amp:  # around forward and loss: backward takes the dtypes of forward
            loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    # In a loop of your own, as in `measure` (whose rate is constant):
    #     lr = torch.tensor(3e-4, device="cuda")  # AdamW(lr=lr): a float would be frozen
    #     for i, (tokens, targets) in enumerate(loader):  # on the GPU; of one shape
    #         if i == 3:  # ordinary steps have compiled all and made AdamW's states
    #             train_step = capture(tokens, targets)
    #         lr.fill_(rate_at(i))
    #         loss = train_step(tokens, targets)
    # Dropout, clipping and accumulation may be inside, .item() not. Between replays the
    # model may run as ever, to validate. DDP needs i == 11; FSDP2 cannot be captured.
    def capture(tokens, targets):
        """Called once, after ordinary steps. Its result takes the place of `train_step`."""
        batch = [tokens.clone(), targets.clone()]  # what every replay reads
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = train_step(*batch)  # recorded, not run: it trains nothing

        def replay(tokens, targets):
            batch[0].copy_(tokens)
            batch[1].copy_(targets)
            graph.replay()  # the whole step, by one launch
            return loss.clone()  # the next replay overwrites `loss`

        return replay

    return train_step, model, optimizer, capture


if __name__ == "__main__":
    measure(main)  # reads the options, trains, times, and writes the record
