"""Hugging Face's GPT-2 (124 M), for ./run_all.sh --model examples/gpt2.py; without a GPU a small one."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

ON_GPU = torch.cuda.is_available()
SMALL = {} if ON_GPU else {"n_layer": 2, "n_embd": 128, "n_head": 4, "n_positions": 128}
BATCH_SIZE, T = (16, 1024) if ON_GPU else (2, 128)


def model():
    return GPT2LMHeadModel(GPT2Config(attn_pdrop=0, embd_pdrop=0, resid_pdrop=0, use_cache=False, **SMALL))


def batches():
    while True:
        tokens = torch.randint(50257, (BATCH_SIZE, T))
        yield {"input_ids": tokens, "labels": tokens}
