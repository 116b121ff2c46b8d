"""A training loop as people have it, in the manner of nanoGPT: GPT-2 124 M on a GPU, a toy on a CPU.

docs/guide.md makes it fast, one patch of this folder after the other.
"""

import math
import statistics
import sysconfig
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
L, H, C, T, V, B = (12, 12, 768, 1024, 50304, 8) if device == "cuda" else (2, 2, 64, 64, 256, 4)
steps, micro_steps, eval_every = (90, 2, 30) if device == "cuda" else (20, 2, 10)
top_rate, warmup = (6e-4, 30) if device == "cuda" else (5e-3, 3)

text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
splits = {"train": tokens[: -len(tokens) // 20], "test": tokens[-len(tokens) // 20 :]}


def get_batch(split):  # (2, B, T): tokens, and the next ones
    starts = torch.randint(len(splits[split]) - T - 1, (B, 1))
    excerpts = splits[split][starts + torch.arange(T + 1)].long()
    batch = torch.stack([excerpts[:, :-1], excerpts[:, 1:]])
    # From pinned memory the host does not wait for the copy.
    return batch.pin_memory().to(device, non_blocking=True) if device == "cuda" else batch


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.up, self.down = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x):  # (B, T, C)
        qkv = self.qkv(self.norm_1(x)).split(C, dim=-1)
        q, k, v = (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in qkv)  # (B, H, T, D)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))  # (B, H, T, T)
        future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
        y = scores.masked_fill(future, -math.inf).softmax(dim=-1) @ v
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, C), nn.Embedding(T, C)
        self.blocks = nn.ModuleList(Block() for _ in range(L))
        self.norm, self.head = nn.LayerNorm(C), nn.Linear(C, V, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, x, y):
        x = self.wte(x) + self.wpe.weight
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def rate_at(step):
    if step < warmup:
        return top_rate * (step + 1) / warmup
    return top_rate * (0.55 + 0.45 * math.cos(math.pi * (step - warmup) / (steps - warmup)))


def mark():  # the timer: a point on the GPU's own timeline, for which the host does not wait
    if device == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(start, end):
    return 1e3 * (end - start) if device == "cpu" else start.elapsed_time(end)


@torch.no_grad()
def evaluate():
    return torch.stack([model(*get_batch("test")) for _ in range(4)]).mean().item()


model = GPT().to(device)
torch.manual_seed(0)
for name, weight in model.named_parameters():
    if weight.dim() == 2:
        nn.init.normal_(weight, std=0.02)
    elif name.endswith("bias"):
        nn.init.zeros_(weight)
decayed = [weight for weight in model.parameters() if weight.dim() == 2]
others = [weight for weight in model.parameters() if weight.dim() < 2]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=top_rate, betas=(0.9, 0.95))


def train_step(batches):
    total = 0
    for x, y in batches:
        loss = model(x, y) / micro_steps
        loss.backward()
        total += loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return total


torch.manual_seed(1)  # of the batches
losses, marks = [], []
for step in range(steps):
    if step % eval_every == 0:
        print(f"step {step}: test loss {evaluate():.3f}")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")
    for group in optimizer.param_groups:
        group["lr"] = rate_at(step)
    batches = torch.stack([get_batch("train") for _ in range(micro_steps)])
    losses.append(train_step(batches))
    marks.append(mark())

losses = torch.stack(losses).tolist()  # waits for the GPU, once
times = [milliseconds(*pair) for pair in pairwise(marks)][steps // 3 :]  # without warm-up
print(f"{statistics.median(times):.1f} ms a step, loss {losses[-1]:.3f}")
