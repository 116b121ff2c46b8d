"""Step 4: linear layers in FP8, numbers of eight bits, by NVIDIA's Transformer Engine (TE).

Tensor cores multiply FP8 twice as fast as BF16. Its range is small, so TE scales a tensor
before it rounds, by factors learned in earlier steps: of three recipes trained, this one
reached the same loss soonest (docs/parity.md). Weights stay FP32. The price: rounding, no
compiled block, and casts that cost a narrow model more than FP8 saves (docs/which-step.md).
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from common import parallel
from common.benchmark import measure
from common.model import GPT
from common.text import import_or_skip

te = import_or_skip("transformer_engine.pytorch", "transformer-engine[pytorch]")


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.qkv = te.LayerNormLinear(config.n_embd, 3 * config.n_embd)  # ln_1 and qkv
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
        # LayerNorm and the MLP of step 3, the same GELU included.
        self.mlp = te.LayerNormMLP(config.n_embd, 4 * config.n_embd)

    def forward(self, x):  # (B, T, C)
        x = x + self.attn(x)
        return x + self.mlp(x)


class Head(nn.Module):  # GPT ties the weight of lm_head to the token embedding
    def __init__(self, config):
        super().__init__()
        self.lm_head = te.LayerNormLinear(config.n_embd, config.vocab_size, bias=False)
        # torch.compile cannot trace TE's modules, only the loss. A CUDA graph holds both.
        self.loss = torch.compile(F.cross_entropy)

    def forward(self, x, targets):
        logits = self.lm_head(x)  # (B, T, V)
        return self.loss(logits.flatten(0, 1), targets.flatten())


def main(args):  # args: the options, checked, and what this machine supports
    # Skips this script without FP8 (Ada, Hopper and newer have it), or where channels,
    # tokens or vocabulary do not divide by 16.
    args.require_fp8()
    torch.set_float32_matmul_precision("high")  # TF32 for what autocast does not reach
    with args.device:
        # Optional, beyond autocast: the x of x + attn(x), the residual stream, in BF16.
        # Half the bytes, for a rounding at each add: GPT casts the embeddings to it.
        model = GPT(args.config, Block, Head, args.seed, residual_dtype=args.amp_dtype)
    model = parallel.distribute(model, args)  # DDP or FSDP2 under torchrun, else unchanged
    # Llama 2's numbers. fused: one kernel updates all weights, in one pass over memory.
    adamw = {"lr": args.lr, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}
    # capturable: without it AdamW refuses to be part of a graph.
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=True, **adamw)
    # Without BF16 matmuls in hardware, amp is off and amp_dtype is FP32.
    amp = torch.autocast(args.device.type, args.amp_dtype, enabled=args.amp)

    def train_step(tokens, targets):
        with amp, te.autocast():  # FP8 in TE's layers, in backward too; amp elsewhere
            loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def capture(tokens, targets):  # step 3 shows the loop around it
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

    # TE's scales begin at 1, where small gradients round to 0, and AdamW remembers that:
    # the loss lags. So `measure` trains ten steps and undoes all but the scales, as here:
    #     initial = [weight.detach().clone() for weight in model.parameters()]
    #     ...  # ten rounds of the loop in step 3, its capture among them
    #     with torch.no_grad():  # in place: the graph reads these tensors
    #         for weight, saved in zip(model.parameters(), initial):
    #             weight.copy_(saved)
    #         for state in optimizer.state.values():
    #             for tensor in state.values():  # the moments and the count
    #                 tensor.zero_()
    #     ...  # now train, by the captured step
    return train_step, model, optimizer, capture


if __name__ == "__main__":
    measure(main)  # reads the options, trains, times, and writes the record
