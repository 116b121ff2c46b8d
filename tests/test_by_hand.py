"""Attention that a file writes by hand: where it is plain, the file with one call trains the same."""

import ast
import json
import re
from textwrap import indent

import pytest
import torch

from common.text import Skip
from mine import by_hand, replace
from mine import check as model_check
from mine import file as model_file
from mine import row as model_row

FILE = """
import math
import torch
from torch import nn
from torch.nn import functional as F

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.drop, self.scale = nn.Linear(16, 48), nn.Dropout(0.0), 0.5
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)) == 0, persistent=False)
        window = torch.ones(8, 8).triu(1) + torch.ones(8, 8).tril(-8) > 0
        self.register_buffer(name="window", tensor=window, persistent=False)
        self.norm = nn.LayerNorm(8)
    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, 2, 8).permute(2, 0, 3, 1, 4)
BODY

def model():
    return Attention()
def loss(model, batch):
    return model(batch).square().mean()
def batches():
    while True:
        yield torch.randn(2, 8, 16)
"""
NANOGPT = """
        # causal
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.mask[:T, :T], float("-inf"))
        att = F.softmax(att, dim=-1)
        att = self.drop(att)
        y = att @ v  # (B, H, T, D)
        return y.transpose(1, 2).reshape(B, T, C)
"""


def made(mask):
    """The same with a mask that a statement of its own makes."""
    with_name = NANOGPT.replace("self.mask[:T, :T]", "hidden")
    return with_name.replace("        # causal", f"        hidden = {mask}")


NOT_CAUSAL = "is not causal: pass its mask"
PLAIN = {
    "nanoGPT": (
        NANOGPT,
        "(q, k, v, is_causal=True, dropout_p=self.drop.p if self.drop.training else 0.0, scale=1.0 / math.",
    ),
    "in few lines": (
        """
        a = ((q @ k.mT) / math.sqrt(8) / 1).masked_fill(self.mask, -1e9).softmax(-1)
        return (a @ v).transpose(1, 2).reshape(B, T, C)
""",
        None,  # two scales
    ),
    "without a mask": (
        """
        q = q * self.scale
        scores = torch.matmul(q, k.transpose(2, 3))
        scores = torch.softmax(scores.float(), dim=-1).type_as(q)
        return torch.matmul(scores, v).transpose(1, 2).reshape(B, T, C)
""",
        "F.scaled_dot_product_attention(q, k, v, scale=1.0)",
    ),
    "a mask in place": (
        """
        scores = q @ k.transpose(2, 3)
        hidden = self.mask.bool()[:T, :T]
        scores.masked_fill_(hidden, -torch.inf)
        weights = torch.softmax(scores / k.shape[-1] ** 0.5, dim=-1)
        weights = self.drop(weights)
        return (weights @ v).transpose(1, 2).reshape(B, T, C)
""",
        "dropout_p=self.drop.p if self.drop.training else 0.0, scale=1 / (k.shape[-1] ** 0.5))",
    ),
    "a name F of its own": (
        NANOGPT.replace("# causal", "F = C").replace("F.softmax(att, ", "att.softmax("),
        None,
    ),
    "a query that is masked in place": (
        NANOGPT.replace("        att = F.", "        q.masked_fill_(q > 9, -1e9)\n        att = F."),
        None,
    ),
    "queries and keys that are cast": (
        NANOGPT.replace("q @ k.transpose(-2, -1)", "q.float() @ k.float().transpose(-2, -1).float()"),
        "F.scaled_dot_product_attention(q, k, v, is_causal=True",
    ),
    "a division, and a dropout by function": (
        """
        scores = q @ k.transpose(-1, -2)
        hidden = self.mask[:T, :T]
        scores = scores / (2 * self.scale)
        scores = scores.masked_fill(hidden, -1e9)
        p = nn.functional.softmax(scores, dim=-1)
        p = F.dropout(p, p=0.0, training=self.training)
        return (p @ v).transpose(1, 2).reshape(B, T, C)
""",
        "is_causal=True, dropout_p=0.0 if self.training else 0.0, scale=1 / (2 * self.scale))",
    ),
    "weights that are used again": (NANOGPT.replace("return y", "self.seen = att\n        return y"), None),
    "an addition of a bias": (NANOGPT.replace("att.masked_fill", "(att + 1).masked_fill"), None),
    "two statements in a line": (NANOGPT.replace('-inf"))\n        att =', '-inf")); att ='), None),
    "a condition": (
        NANOGPT.replace("        att = att.masked", "        if T > 1:\n            att = att.masked"),
        None,
    ),
    "scores that are used again": (NANOGPT.replace("= att @ v", "= att @ v + att.sum()"), None),
    "a query that changes": (NANOGPT.replace("att = self.drop(att)", "q = q + 1"), None),
    "a mask that is given": (NANOGPT.replace("self.mask[:T, :T]", "x[:, None, :1, :1] > 9"), None),
    "a mask that is given, by a name": (made("x[:, None, :1, :1] > 9"), None),
    "the least number": (
        NANOGPT.replace('float("-inf")', "torch.finfo(att.dtype).min"),
        "(q, k, v, is_causal=True",
    ),
    "another least number": (NANOGPT.replace('float("-inf")', "self.scale.min"), None),
    "a mask of the last rows": (NANOGPT.replace("[:T, :T]", "[T - 1:T, :T]"), NOT_CAUSAL),
    "a mask that a method decides": (
        NANOGPT.replace("# causal", "self.hide(x)").replace("self.mask", "self.hide(x)"),
        None,
    ),
    "a mask that an input changes in place": (
        made("self.mask[:T, :T].clone()\n        hidden[:1].logical_or_(x[0, 0, :8] > 9)"),
        None,
    ),
    "keys that are dropped in training": (
        made("self.mask[:T, :T]\n        if self.training:\n            hidden[1:, 0] = True"),
        NOT_CAUSAL,
    ),
    "keys that are dropped in evaluation": (
        made("self.mask[:T, :T]\n        if not self.training:\n            hidden = self.mask.flip(1)"),
        NOT_CAUSAL,
    ),
    "a triangle with its type": (
        made("0").replace("hidden = 0", "hidden: torch.Tensor = self.mask[:T, :T]"),
        "(q, k, v, is_causal=True",
    ),
    "a query and values that are multiplied and filled": (
        NANOGPT.replace("(q @", "(q * self.norm(q) @").replace(
            "att @ v ", "att @ v.masked_fill(v > 9, 0.0) "
        ),
        "(q * self.norm(q), k, v.masked_fill(v > 9, 0.0), is_causal=True",
    ),
    "a query that is made where it is multiplied": (NANOGPT.replace("(q @", "(self.norm(q) @"), None),
    "another kind of division": (
        NANOGPT.replace("k.transpose(-2, -1)", "k.transpose(3, 2)").replace("* (1.0", "/ (1.0"),
        "scale=1 / (1.0 / math.sqrt(k.size(-1))))",
    ),
    "a scale that reads the scores": (
        NANOGPT.replace("* (1.0 / math.sqrt(k.size(-1)))", "\n        att = att / math.sqrt(att.size(-1))"),
        None,
    ),
    "a scale that is set anew": (
        NANOGPT.replace("(1.0 / math.sqrt(k.size(-1)))", "self.scale").replace(
            "        att = F.", "        self.scale = 1.0\n        att = F."
        ),
        None,
    ),
    "a mask by positions": (
        made("torch.arange(T)[None] > torch.arange(T)[:, None]"),
        "(q, k, v, is_causal=True",
    ),
    "positions of the last rows": (
        made("torch.arange(T)[None] > torch.arange(k.size(2) - T, T)[:, None]"),
        "(q, k, v, is_causal=True",
    ),
    "a triangle of ones": (
        made("~torch.tril(torch.ones(T, T, dtype=torch.bool), diagonal=0).view(1, 1, T, T)"),
        "(q, k, v, is_causal=True",
    ),
    "a triangle that is a parameter": (
        made("nn.Parameter(torch.ones(8, 8).triu(1), requires_grad=False)[:T, :T] == 1"),
        "(q, k, v, is_causal=True",
    ),
    "one minus a triangle": (made("(1 - torch.ones(T, T).tril()).bool()"), "(q, k, v, is_causal=True"),
    "another number than infinity": (NANOGPT.replace('float("-inf")', "0.0"), None),
    "a dropout inside another module": (NANOGPT.replace("self.drop(att)", "self.drops.attn(att)"), None),
    "a dropout that is conditional": (
        NANOGPT.replace("self.drop(att)", "F.dropout(att, p=0.1 if C else 0.0, training=self.training)"),
        "dropout_p=(0.1 if C else 0.0) if self.training else 0.0",
    ),
    "a dropout with other words": (NANOGPT.replace("self.drop(att)", "F.dropout(att, **self.how)"), None),
    "scores that are looked at": (
        NANOGPT.replace("        att = F.", "        z = att.mean()\n        att = F."),
        None,
    ),
    "a mask made in a branch": (
        NANOGPT.replace(
            "        # causal", "        m = self.mask\n        if C:\n            m = m | (x[0, 0, 0] > 9)"
        ).replace("self.mask[:T, :T]", "m"),
        None,
    ),
    "a module that is called": (
        NANOGPT.replace("y = att @ v  # (B, H, T, D)", "y = F.gelu(att @ v)"),
        "y = F.gelu(F.scaled_dot_product_attention(q, k, v",
    ),
    "a product in a loop": (
        NANOGPT.replace("        y = att", "        for _ in range(2):\n            y = att"),
        None,
    ),
    "another dimension": (NANOGPT.replace("dim=-1", "dim=-2"), None),
    "no softmax": ("        return self.qkv(x)[..., :16]\n", None),
}


@pytest.fixture
def arguments_of(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*__import__("sys").path])

    def checked(body, *changes):
        text = FILE.replace("BODY", body.strip("\n"))
        for change in changes:
            text = text.replace(*change)
        (tmp_path / "net.py").write_text(text)
        words = [tmp_path / "net.py", "--device", "cpu", "--steps", "3", "--output", tmp_path / "r.json"]
        args = model_file.parse("run_all.sh", [*map(str, words)])
        args.planned = model_check.check(args)
        return args

    return checked


def before(kernel="by hand"):
    return {"0_fp32": {"settings": {"attention_kernel": kernel}}}


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_attention_becomes_one_call_that_trains_the_same(kind, arguments_of):
    body, call = PLAIN[kind]
    edit = by_hand.fuse(FILE.replace("BODY", body.strip("\n")))
    assert (edit is None) is (call is None)
    if edit is None:
        return
    args = arguments_of(body)
    if call is NOT_CAUSAL:
        unchanged = args.file
        with pytest.raises(Skip, match=call):
            model_row.build(["2_sdpa"], before(), args)
        assert args.file is unchanged and args.attention is None
        return
    assert edit.place == "Attention.forward" and edit.text.count("softmax") == edit.is_masked
    train_step, *_ = model_row.build([], {}, args)
    expected = [train_step(*batch).item() for batch in args.batches()[:3]]
    args.code = None
    train_step, *_ = model_row.build(["2_sdpa"], before(), args)
    assert [train_step(*batch).item() for batch in args.batches()[:3]] == pytest.approx(expected, rel=1e-5)
    first, *_, last = re.findall(r"\d+", edit.lines)
    lines = args.path.read_text().splitlines()
    assert re.search("@ k|matmul", lines[int(first) - 1]) and " v" in lines[int(last) - 1]
    assert f"# in Attention.forward of net.py, in place of lines {edit.lines}\n# " in args.code
    assert call in re.sub(r"\(\s+", "(", re.sub(r"\s+\)", ")", args.attention.call))


LONG = """
        out = (
            torch.matmul(att, v)
            .transpose(1, 2)
            .reshape(B, T, C)
        )
        return out
"""


def test_the_lines_shown_are_the_whole_statement():
    begin = NANOGPT.partition("        y = att @ v")[0]
    edit = by_hand.fuse(FILE.replace("BODY", (begin + LONG.lstrip("\n")).strip("\n")))
    (shown,) = ast.parse(edit.call).body
    assert ast.unparse(shown.test) == "q.size(-2) == k.size(-2) in ()" and ast.unparse(shown.orelse) == "..."
    assert ast.unparse(shown.body).endswith(".transpose(1, 2).reshape(B, T, C)")


def test_a_model_that_is_made_on_import_keeps_its_weights(arguments_of):
    args = arguments_of(NANOGPT)
    model = args.model()
    args.file.model = lambda: model
    weights = [weight.clone() for weight in args.model().parameters()]
    replace.noisy_losses(args)
    assert all(map(torch.equal, weights, args.model().parameters()))


POOLED = """
class Switch(nn.Module):
    config = type("Config", (), {"_attn_implementation": "sdpa"})()
    def set_attn_implementation(self, name):
        pass
class Pooled(Attention):
    def __init__(self):
        super().__init__()
        self.frozen = Switch()
    def forward(self, x):
        x = super().forward(x)
        first = x[:, None, :1]
        return x + F.scaled_dot_product_attention(first, first, first)[:, 0]
"""


@pytest.mark.parametrize("frozen", ["", "Switch"])
def test_one_small_call_of_sdpa_does_not_hide_attention_by_hand(frozen, arguments_of):
    """Nor does a part of Hugging Face's, whose switch leaves it as it is."""
    switch = POOLED if frozen else POOLED.replace("set_attn_implementation", "unused")
    args = arguments_of(
        NANOGPT, ("def model():\n    return Attention()", f"{switch}def model():\n    return Pooled()")
    )
    assert type(args.model()).__name__ == "Pooled"
    assert args.rows_in_file == [] and "net.py line" in args.softmax_at
    train_step, *_ = model_row.build(["2_sdpa"], before(), args)
    assert args.attention and train_step(*args.batches()[0]).isfinite()


def test_the_patch_of_a_file_has_the_call_and_its_comments_stay(arguments_of):
    args = arguments_of(NANOGPT)
    rest = model_row.patch_file(["2_sdpa"], args)
    assert rest == [] and "+            y = F.scaled_dot_product_attention(" in args.code
    assert "+        if q.size(-2) == k.size(-2) == 8:" in args.code and "+        else:" in args.code
    assert "+            att = F.softmax(att, dim=-1)" in args.code and "-        # causal" not in args.code
    assert args.code.count("# (B, H, T, D)") == 3, "one goes, and each branch has it"


OUTSIDE = ("    return Attention()", "    net = Attention()\n    net.mask = CHANGED\n    return net")
WIDE = ("view(B, T, 3, 2, 8).permute(2, 0, 3, 1, 4)", "view(B, T, 3, 1, 2, 8).permute(2, 0, 3, 4, 1, 5)")
TOKENS = [
    ("torch.randn(2, 8, 16)", "torch.randint(9, (2, 8))"),
    ("B, T, C = x.shape", "x = self.tok(x)\n        B, T, C = x.shape"),
]
TOKENS += [("self.norm = nn", "self.tok, self.norm = nn.Embedding(9, 16), nn")]


def test_a_copy_that_fails_leaves_the_file(arguments_of, monkeypatch):
    args = arguments_of(NANOGPT)
    unchanged = args.file
    monkeypatch.delattr(torch.nn.functional, "scaled_dot_product_attention")
    with pytest.raises(Skip, match=r"net\.py lines .* cannot be one call of PyTorch's: .* no attribute"):
        model_row.build(["2_sdpa"], before(), args)
    assert args.file is unchanged


def test_the_losses_that_are_compared_begin_where_training_does(arguments_of):
    """A loss that counts its steps, as to anneal a weight."""
    counted = "STEP = 0\ndef loss(model, batch):\n    global STEP\n    STEP += 1\n"
    counted += "    return model(batch).square().mean() * (1 + STEP)\n"
    own = "def loss(model, batch):\n    return model(batch).square().mean()\n"
    args = arguments_of(NANOGPT, (own, counted))
    model_row.build(["2_sdpa"], before(), args)
    assert args.attention and args.file.STEP == 0


def test_a_call_that_would_refuse_a_model_in_bf16_is_not_made(arguments_of, tmp_path):
    """Rotary embeddings in FP32, for example: training in FP32 or with autocast shows nothing."""
    body = NANOGPT.replace("        # causal", "        q, k = q * torch.ones(8), k * torch.ones(8)")
    body = body.replace("dim=-1)\n", "dim=-1).to(v.dtype)\n")
    for batches in (TOKENS, []):  # or floats
        args = arguments_of(body, *batches)
        with pytest.raises(Skip, match=r"one dtype, as q\.to"):
            model_row.build(["2_sdpa"], before(), args)
        assert args.attention is None


NARROW = ("view(B, T, 3, 2, 8).permute(2, 0, 3, 1, 4)", "view(B, T, 3, 16).permute(2, 0, 1, 3)")
TRAINED = """net.register_forward_pre_hook(
        lambda net, _: setattr(net, "mask", net.mask | (net.training * torch.eye(8).flip(0) > 0))
    )"""


CACHED = """
        # with a cache
        if past is not None:
            k, v = torch.cat([past, k], 2), torch.cat([past, v], 2)
        S = k.size(2)
        hidden = torch.ones(T, S).triu(1 + S - T).bool()
"""
LAST = """
        # the last query alone, of a row that gives the whole
        S = T
        if not self.training:
            q = q[:, :, -1:]
            T = 1
        hidden = self.mask[S - T:S, :S]
"""
WINDOW = """
        # a window as long as a batch
        hidden = torch.ones(T, T).triu(1) + torch.ones(T, T).tril(-8) > 0
"""
HIDDEN = "hidden = torch.zeros(T, T).bool()"
MASK = "hidden = self.mask[:T, :T]"
PADS = """
    def set_pad(self, pad):
        self.pad = pad
    def forward(self, x, more=None):
"""


def fused_with(lines):
    """Of a file with these lines, which make the mask `hidden`; others set self.pad and globals."""
    body = NANOGPT.replace("self.mask[:T, :T]", "hidden").replace("        # causal", indent(lines, " " * 8))
    text = FILE.replace("BODY", body.strip("\n")).replace("    def forward(self, x):\n", PADS.lstrip("\n"))
    return by_hand.fuse(f"{text}def train(pad):\n    global PAD\n    PAD = PADS['now'] = pad\n")


@pytest.mark.parametrize(
    "lines",
    [
        f"{HIDDEN}\nif more:\n    {MASK}",
        f"{MASK}.clone()\nif more:\n    hidden[:, :more] = False",
        f"{MASK}.clone()\nfor row, n in enumerate(more):\n    hidden[row, n:] = True",
        f"{MASK}.clone()\nhidden.T[more] = True",
        f"{MASK}.clone()\nself.add_padding(hidden, more)",
        f"{MASK}.clone()\ntorch.logical_or(hidden, more, out=hidden)",
        f"{MASK}.clone()\nrows = hidden[:, 0]\nrows |= more",
        "masks = [self.mask[:T, :T]]\nif more is not None:\n    masks.append(more)\nhidden = sum(masks)",
        f"self.set_pad(more)\n{MASK} | self.window",
        f"{MASK}\nif more.any():\n    hidden = self.window",
        "hidden = self.build(T, more)",
        f"{MASK} | self.pad",
        f"{MASK} | PADS['now']",
        f"{MASK} | PAD",
        f"self.step += 1\n{MASK} if self.step < 500 else self.window",
        f"{MASK} | (torch.rand(()) < 0.1)",
        f"{MASK} if torch.is_grad_enabled() else self.window",
    ],
)
def test_a_mask_that_a_later_batch_may_decide_is_not_plain(lines):
    assert fused_with(lines) is None


@pytest.mark.parametrize(
    "lines",
    [
        MASK,
        f"if not hasattr(self, 'made'):\n    self.made = self.mask\n{MASK.replace('mask', 'made')}",
        f"self.last = q\nself.store.update(k, v)\n{MASK}",
        "hidden = x.new_ones(T, T).triu(1).bool()",
        "hidden = torch.ones_like(x[0] @ x[0].T).triu(1) > 0",
        f"if more is not None:\n    k = torch.cat((more, k), 2)\nS = k.size(2)\n{MASK}",
        f"assert x.dim() == 3\nwith torch.no_grad():\n    {MASK}",
        f"try:\n    {MASK}\nexcept IndexError:\n    {HIDDEN}",
    ],
)
def test_a_mask_that_lengths_alone_decide_is_plain(lines):
    assert fused_with(lines).is_masked


PAST = ("def forward(self, x):", "def forward(self, x, past=None):")


@pytest.mark.parametrize(
    ("lines", "takes"),
    [
        (CACHED, [(8, None), (5, None), (1, 7), (3, 3), (16, None)]),
        (LAST, [(8, None), (3, None), (1, None)]),
        (WINDOW, [(8, None), (5, None), (16, None)]),
    ],
)
def test_the_patched_file_does_the_same_at_other_lengths(lines, takes, arguments_of):
    """With a cache, a single query would see the first key alone; training shows none of it."""
    body = NANOGPT.replace("self.mask[:T, :T]", "hidden").replace("        # causal\n", lines.lstrip("\n"))
    args = arguments_of(body, PAST)
    model = args.model().eval()
    model_row.build(["2_sdpa"], before(), args)
    assert args.attention and "is_causal=True" in args.attention.text
    patched = args.model().eval()
    patched.load_state_dict(model.state_dict())
    for length, keys in takes:
        x, past = torch.randn(2, length, 16), None if keys is None else torch.randn(2, 2, keys, 8)
        torch.testing.assert_close(patched(x, past), model(x, past), rtol=1e-4, atol=1e-5)


def test_a_file_with_tabs_stays_one(arguments_of):
    args = arguments_of(NANOGPT, ("        ", "\t\t"), ("    ", "\t"))
    model_row.build(["2_sdpa"], before(), args)
    assert "\n\t\tif q.size" in args.attention.text and "\n\t\t\tatt = F.softmax" in args.attention.text


CROSS = """
        # causal, but not where they look at other tokens
        if self.training:
            k, v = k[:, :, :5], v[:, :, :5]
        S = k.size(2)
        hidden = self.mask[:T, :S] if S == T else torch.zeros(T, S).bool()
"""
CROSS = NANOGPT.replace("self.mask[:T, :T]", "hidden").replace("        # causal\n", CROSS.lstrip("\n"))
PENALTY = """
    batch = batch.requires_grad_()
    out = model(batch).square().mean()
    (slope,) = torch.autograd.grad(out, batch, create_graph=True)
    return out + slope.square().mean()
"""
FEWER = made("torch.ones(7, 8).triu(2) > 0\n        q = q[:, :, 1:]").replace("(B, T, C)", "(B, 7, C)")
HOOKED = ("net.mask = CHANGED", "net.drop.register_forward_hook(lambda *_: None)")


@pytest.mark.parametrize(
    ("body", "change", "said"),
    [
        (NANOGPT, ("nn.Dropout(0.0)", "nn.AlphaDropout(0.0)"), "no nn.Dropout"),
        (NANOGPT, (OUTSIDE[0], OUTSIDE[1].replace(*HOOKED)), "a self.drop with hooks"),
        (NANOGPT, (OUTSIDE[0], OUTSIDE[1].replace("CHANGED", "net.mask.flip(0)")), "19 to 23. is not causal"),
        (NANOGPT, (OUTSIDE[0], OUTSIDE[1].replace("net.mask = CHANGED", TRAINED)), "is not causal"),
        (NANOGPT.replace("(1.0 / math.sqrt(k.size(-1)))", "torch.ones(8, 8)"), ("", ""), "one by one"),
        (FEWER, ("", ""), "never as many queries as keys"),
        (CROSS, ("", ""), "is not causal"),
        (NANOGPT, ("    return model(batch).square().mean()\n", PENALTY.lstrip("\n")), "cannot be one call"),
        (NANOGPT.replace("transpose(1, 2)", "movedim(3, 1)"), WIDE, "scores of 5 dimensions"),
        (NANOGPT.replace("transpose(1, 2)", "contiguous()"), NARROW, "scores of 3 dimensions"),
    ],
)
def test_what_looks_plain_and_is_not_is_left_as_it_is(body, change, said, arguments_of):
    args = arguments_of(body, change)
    unchanged = args.file
    with pytest.raises(Skip, match=said):
        model_row.build(["2_sdpa"], before(), args)
    assert args.file is unchanged and args.attention is None


def test_a_window_longer_than_some_rows_is_seen_where_the_mask_is_made_elsewhere(arguments_of):
    """The losses hardly show it: one key of one row is hidden."""
    hidden = "net.mask.clone().index_put((torch.tensor(7), torch.tensor(0)), torch.tensor(True))"
    args = arguments_of(NANOGPT, (OUTSIDE[0], OUTSIDE[1].replace("CHANGED", hidden)))
    with pytest.raises(Skip, match="is not causal"):
        model_row.build(["2_sdpa"], before(), args)


IN_LINES = """
        att = F.softmax(
            (q @ k.transpose(-2, -1) * SCALE).masked_fill(self.mask[:T, :T], float("-inf")),
            dim=-1,
        )
        return (att @ v).transpose(1, 2).reshape(B, T, C)
"""


@pytest.mark.parametrize("scale", ["self.heat", "self.heat.expand(2, 1, 1)"])
@pytest.mark.parametrize("body", [NANOGPT.replace("(1.0 / math.sqrt(k.size(-1)))", "SCALE"), IN_LINES])
def test_a_scale_that_is_a_tensor_scales_the_query(body, scale, arguments_of):
    """PyTorch's call takes a number: it would wait for the GPU, and give the scale no gradient."""
    learned = ("        window =", "        self.heat = nn.Parameter(torch.tensor(0.3))\n        window =")
    args, gradients = arguments_of(body.replace("SCALE", scale), learned), []
    for names in ([], ["2_sdpa"]):
        args.code = None
        model_row.build(names, before(), args)
        args.loss((model := args.model()), args.drawn[0]).backward()
        gradients.append(model.heat.grad)
    assert f"q * {scale}" in args.attention.text and "scale=1.0" in args.attention.text
    assert gradients[0] != 0 and gradients[1] == pytest.approx(gradients[0].item(), rel=1e-4)


CAPPED = """
class Capped(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x).view(2, 8, 3, 2, 8).permute(2, 0, 3, 1, 4)
        a = torch.tanh(q @ k.mT).masked_fill(self.mask, float("-inf"))
        a = a.softmax(-1)
        return (a @ v).transpose(1, 2).reshape(x.shape)
"""


def test_plain_attention_that_is_not_the_largest_is_not_replaced(arguments_of):
    capped = ("def model():\n    return Attention()", f"{CAPPED}def model():\n    return Capped()")
    args = arguments_of(NANOGPT, capped)
    with pytest.raises(Skip, match=r"written by hand \((Capped\.)?forward, net.py line"):
        model_row.build(["2_sdpa"], before(), args)
    assert args.attention is None


def test_a_mask_that_a_later_batch_sets_elsewhere_is_seen(arguments_of):
    later = "    setattr(model, 'mask', model.mask | (batch[0, 0, 0] > 1e6))\n    return model(batch)"
    args = arguments_of(NANOGPT, ("    return model(batch)", later))
    assert by_hand.fuse(args.path.read_text())
    args.drawn[3][..., 0] = 1e7
    args.planned.text_sha256 = args.work_sha256()
    with pytest.raises(Skip, match="is not causal"):
        model_row.build(["2_sdpa"], before(), args)


@pytest.mark.parametrize(
    ("old", "new"),
    [("\n", "\r\n"), ("return model(batch)", "assert model.training\n    return model(batch)")],
)
def test_a_file_that_cannot_be_replaced_gets_the_advice(old, new, arguments_of):
    args = arguments_of(NANOGPT)
    args.path.write_bytes(args.path.read_text().replace(old, new).encode())
    args.file = model_file.load(args.path)
    args.planned.text_sha256 = args.work_sha256()
    with pytest.raises(Skip, match="written by hand"):
        model_row.build(["2_sdpa"], before(), args)


def test_attention_that_was_not_observed_is_not_replaced(arguments_of):
    args = arguments_of(NANOGPT)
    with pytest.raises(Skip, match="fused already"):
        model_row.build(["2_sdpa"], before("flash"), args)
    assert args.attention is None


def test_a_larger_batch_has_the_call_too_and_its_losses_are_compared_batch_by_batch(
    arguments_of, tmp_path, monkeypatch
):
    args, lengths, compare = arguments_of(NANOGPT), [], replace.noisy_losses
    ran = {"changes": ["fused attention"], "settings": before()["0_fp32"]["settings"], "peak_bytes": 1}
    for name in ("0_fp32", "2_sdpa"):
        row = {"status": "ok", "step_ms": [1.0] * 4, "source": ""} | ran
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": [row]}))
    monkeypatch.setattr(model_row, "planned_arguments", lambda words: (args, tmp_path))
    monkeypatch.setattr(model_row, "batches_that_fit", lambda *_: 3)
    monkeypatch.setattr(model_row.benchmark, "run_and_record", lambda main, args, _: main(args))
    monkeypatch.setattr(replace, "noisy_losses", lambda a: lengths.append(len(a.drawn[0])) or compare(a))
    one = len(args.drawn[0])
    train_step, *_ = model_row.main(["larger-batch", "2_sdpa", "net.py"])
    assert args.attention and lengths == [one] * 3 and len(args.drawn[0]) == 3 * one
    assert train_step(*args.batches()[0]).isfinite()


def test_the_place_of_a_softmax_is_named_beneath_pytorch(arguments_of):
    assert re.fullmatch(r"(Attention\.)?forward, net\.py line 21", arguments_of(NANOGPT).softmax_at)


def test_how_a_file_calls_its_functions():
    for text, name in (
        ("import torch.nn.functional as F", "F"),
        ("from torch.nn import functional", "functional"),
        ("import torch", "torch.nn.functional"),
    ):
        assert by_hand.functional_of(by_hand.ast.parse(text)) == name


def test_the_change_is_shared_by_later_rows(arguments_of, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda work, **_: work)
    args = arguments_of(NANOGPT)
    rows = before() | {"2_sdpa": {"settings": {"attention_kernel": "flash"}}}
    _, model, optimizer, *_ = model_row.build(["2_sdpa", "3_compile"], rows, args)
    (note,) = model_row.initial_state(args, model, optimizer).notes
    assert note == "attention of Attention.forward, lines 19 to 23, is one call of PyTorch's here"
    assert args.attention and "scaled_dot_product_attention" in args.code
