"""Peer of 3_compile.py: GPT-2 of Hugging Face transformers, tuned as its documentation tells.

SDPA attention, BF16 autocast, torch.compile over model and loss, fused AdamW, no dropout and no cache; launched, as a
Trainer launches it. The residual stream stays FP32, as autocast leaves it. The loss is taken on the same targets as the
ladder's, and the weights begin with the ladder's numbers. Under its own name, compiled SDPA attention gets a mask of
booleans (huggingface/transformers issue 48925). Registered under another name, as the documentation of
AttentionInterface shows, it gets none and passes is_causal. Source: the model page of GPT-2, the guide "GPU"
(efficient training) and the page AttentionInterface of transformers.

Run:      python peers/transformers_gpt2.py         Needs: pip install transformers
"""

import importlib
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common.benchmark import launch, optional
from common.model import GPT

transformers = optional("transformers", "transformers")


class WithLoss(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, targets):
        logits = self.model(tokens).logits  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def begin_with_the_ladders_weights(model, args):
    """Both models list the same parameters in the same order; matrices of transformers' Conv1D are transposed."""
    plain = importlib.import_module("2_sdpa")
    ladder = GPT(args.config, plain.Block, plain.Head, args.seed)
    for (name, theirs), ours in zip(model.named_parameters(), ladder.parameters(), strict=True):
        theirs.copy_(ours.T if ".c_" in name and ours.dim() == 2 else ours)


def main(args):
    torch.set_float32_matmul_precision("high")
    shape, attentions = args.config, transformers.AttentionInterface()
    attentions.register("sdpa_without_mask", attentions["sdpa"])
    config = transformers.GPT2Config(
        vocab_size=shape.vocab_size,
        n_positions=shape.seq_len,
        n_embd=shape.n_embd,
        n_layer=shape.n_layer,
        n_head=shape.n_head,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        attn_implementation="sdpa_without_mask",
        bos_token_id=0,
        eos_token_id=0,
    )
    with args.device:
        model = WithLoss(transformers.GPT2LMHeadModel(config))
        begin_with_the_ladders_weights(model, args)
    model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **args.adamw)

    def train_step(tokens, targets):
        with torch.autocast(args.device.type, args.amp_dtype, enabled=args.amp):
            loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train_step, model


if __name__ == "__main__":
    launch(main)
