"""The lines that a run recommends are a program: what they train is what the row trained."""

import json
import types

import pytest
import torch
from conftest import ROOT
from torch import nn

from common import promises
from common.record import Row
from ladder.rows import AMP, COMPILE, FP8, GRAPH
from mine import batch as model_batch
from mine import file as model_file
from mine import lines
from mine import row as model_row

MODEL = """
import torch
from torch import nn
import torch.nn.functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    def forward(self, x):
        return x + self.mlp(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
    def forward(self, x, y=None):
        for block in self.blocks:
            x = block(x)
        return x if y is None else F.mse_loss(x, y)

def model():
    return Net()
"""
LOSS = "def loss(model, batch):\n    x, y = batch\n    return F.mse_loss(model(x), y)\n"
BATCHES = "def batches():\n    while True:\n        yield "
KINDS = {
    "a loss of its own": f"{LOSS}{BATCHES}torch.randn(4, 16), torch.ones(4, 16)\n",
    "a tuple": f"{BATCHES}torch.randn(4, 16), torch.ones(4, 16)\n",
    "a dict": f"{BATCHES}{{'x': torch.randn(4, 16), 'y': torch.ones(4, 16)}}\n",
}


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """The arguments of a row of a file, after its check."""
    monkeypatch.setattr("sys.path", [*__import__("sys").path])

    def check(text):
        (tmp_path / "net.py").write_text(text)
        words = [
            str(tmp_path / "net.py"),
            "--device",
            "cpu",
            "--steps",
            "3",
            "--output",
            str(tmp_path / "r.json"),
        ]
        args = model_file.parse("run_all.sh", words)
        args.planned = model_file.check(args)
        args.amp_dtype = torch.bfloat16
        return args

    return check


def split(program):
    """The lines of once, and those of each step."""
    once, _, each = program.rpartition("# in each training step")
    return once, each


def train_by_lines(program, args, count=3):
    """The losses of a program's steps."""
    torch.manual_seed(args.seed)
    scope = {"torch": torch, "model": args.model(), args.path.stem: args.file}
    once, each = split(program)
    exec(once, scope)
    losses = []
    for (batch,) in args.batches()[:count]:
        exec(each, scope | {"batch": batch}, scope)
        losses.append(scope["loss"].item())
    return losses


@pytest.mark.parametrize("names", [[], [AMP], [AMP, COMPILE]], ids=lambda names: "+".join(names) or "none")
@pytest.mark.parametrize("kind", KINDS)
def test_the_lines_train_as_the_row_that_they_describe(kind, names, checked, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda work, **_: work)
    monkeypatch.setattr(nn.Module, "compile", lambda self: None)
    args = checked(MODEL + KINDS[kind])
    train_step, *_ = model_row.build(names, {}, args)
    expected = [train_step(*batch).item() for batch in args.batches()[:3]]
    assert train_by_lines(args.code, args) == expected and expected[0] != expected[1]


def test_blocks_are_named_and_nothing_of_this_project_is(checked):
    args = checked(MODEL + KINDS["a loss of its own"])
    model = args.model()
    program = lines.program([AMP, COMPILE, GRAPH, FP8], model, args.blocks, args)
    assert "for block in model.blocks:\n    block.compile()\n" in program
    assert "net.loss = torch.compile(net.loss)" in program and "capturable=True" in program
    assert 'with torch.autocast("cpu", torch.bfloat16):' in program
    assert not any(name in program for name in ("mine", "ladder", "common.", "changes."))
    compile(program, "program", "exec")
    whole = lines.program([COMPILE], model, [], args)
    assert "model.compile()" in whole and "torch.compiler.disable" not in whole


def test_what_the_file_does_itself_is_no_line(checked):
    text = MODEL + KINDS["a loss of its own"].replace(
        "return F", "with torch.autocast('cpu', torch.bfloat16):\n        return F"
    )
    args = checked(text)
    assert args.given == [AMP] and args.first == promises.AS_IT_IS
    assert "autocast" not in lines.program([COMPILE], args.model(), args.blocks, args)


def test_parts_of_pytorch_s_own_classes_compile_by_their_forward():
    model = nn.Module()
    model.layers = nn.ModuleDict({"a": nn.Sequential(nn.Linear(2, 2)), "b": nn.Sequential(nn.Linear(2, 2))})
    texts = lines.compile_lines(model, ["layers"], types.SimpleNamespace(file=None))
    assert texts[-2:] == [
        "for block in model.layers.values():",
        "    block.forward = torch.compile(block.forward)",
    ]
    assert model_batch.call_text({"a": 1}) == "model(**batch)" and json.dumps(Row("x").code) == "null"
    assert (ROOT / "mine" / "lines.py").read_text().count("import torch\n") == 0
