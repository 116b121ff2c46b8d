"""Peer: GPT-2 of Hugging Face transformers, tuned as its documentation says.

SDPA attention, BF16 autocast, torch.compile over model and loss, fused AdamW, TF32 for what stays FP32,
no dropout and no cache. Source: the model page of GPT-2 and the guide "GPU" (efficient training) of transformers.
Its loss is taken on the same targets as the ladder's; its weights are drawn by transformers. Compiled, release 5.17
gives attention a mask of booleans instead of is_causal, which is slower (huggingface/transformers issue 48925).

Run:      python peers/transformers_gpt2.py         Needs: pip install transformers
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import benchmark
from common.errors import Skip

transformers = benchmark.optional("transformers", "transformers")


class WithLoss(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, targets):
        logits = self.model(tokens).logits  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main(args):
    if args.amp_dtype is torch.float16:
        raise Skip("this peer has no loss scaling: it runs under BF16 or FP32")
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(args.seed)
    shape = args.config
    config = transformers.GPT2Config(
        vocab_size=shape.vocab_size, n_positions=shape.seq_len, n_embd=shape.n_embd, n_layer=shape.n_layer,
        n_head=shape.n_head, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        attn_implementation="sdpa", bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with args.device:
        model = torch.compile(WithLoss(transformers.GPT2LMHeadModel(config)))
    optimizer = torch.optim.AdamW(model.parameters(), **args.adamw, fused=True)

    def train_step(tokens, targets):
        with torch.autocast(args.device.type, args.amp_dtype, enabled=args.amp_dtype is not torch.float32):
            loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return benchmark.run(train_step, model, args)


if __name__ == "__main__":
    benchmark.launch(main)
