"""./run_all.sh --model: the contract of a file, what each row changes, what is kept, the decision."""

import inspect
import json
import random
import re
import sys
import sysconfig
import time
from collections import Counter, OrderedDict, namedtuple
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import runs
import stand_ins
import torch
from conftest import ROOT, is_alive, program_of
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from common import benchmark, profile
from common import proof as sampling
from common.record import Profile, Proof, Row, Settings, write_json
from common.text import Skip, explain
from ladder import rows as planned
from ladder import running
from mine import attention as model_attention
from mine import batch as model_batch
from mine import blocks as model_blocks
from mine import changes
from mine import check as model_check
from mine import file as model_file
from mine import patch as model_patch
from mine import program as model_program
from mine import row as model_row
from mine import state as model_state
from mine.program import Program
from report import proof, sections, sentences, table
from report.derive import derive
from report.promises import contradiction

BATCHES = "def batches():\n    while True:\n        yield torch.randn(4, 16)\n"
SUM = "def loss(model, batch):\n    return model(batch).square().mean()\n"
LINEAR = "def model():\n    return torch.nn.Linear(16, 16)\n"


def file_of(folder, text):
    path = folder / "my_model.py"
    path.write_text(f"import torch\n{text}")
    return path


@pytest.fixture
def arguments_of(tmp_path, monkeypatch):
    """The arguments of a row, for the text of a model's file."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def parsed(text, *words):
        path = file_of(tmp_path, text)
        words = [str(path), "--device", "cpu", "--steps", "3", "--output", str(tmp_path / "r.json"), *words]
        return model_file.parse("run_all.sh", words)

    return parsed


def built(names, args, before=None):
    """What `main` of a row returns, in the order of a step's."""
    args.planned = SimpleNamespace(text_sha256=args.work_sha256())
    return model_row.build([*names], before or {}, args)


# --- the file -------------------------------------------------------------------------------------


def test_too_little_memory_while_a_file_is_imported_is_one_line(arguments_of, capsys):
    with pytest.raises(SystemExit, match="2"):
        arguments_of("raise MemoryError\n")
    error = capsys.readouterr().err
    assert error.startswith("run_all.sh: error: ") and "memory" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (LINEAR, "my_model.py lacks batches(): see examples/gpt2.py"),
        ("x = 1\n", "lacks model() and batches()"),
        (
            "from . import layers\n",
            "line 2: ImportError: attempted relative import with no known parent package: ",
        ),
        ("model = torch.nn.Linear(16, 16)\n" + BATCHES, "is a Linear: let it be a function, model()"),
        (
            LINEAR + BATCHES + "fp8 = False\n",
            "fp8 of my_model.py is a bool: let it be a function, fp8(model)",
        ),
        (
            "import not_there\n",
            "my_model.py, line 2: ModuleNotFoundError: No module named 'not_there': install it for ",
        ),
        ("def f(:\n", "SyntaxError"),
        (
            "raise SystemExit(3)\n",
            "my_model.py, line 2: SystemExit: 3: let what reads options or exits stand",
        ),
        ("open('none.txt')\n", "so name a file by Path(__file__).parent"),
    ],
)
def test_a_file_that_does_not_fit_gets_one_line(text, said, arguments_of, refused):
    assert said in refused(arguments_of, text)


def test_an_error_in_a_step_names_the_line_of_the_file(arguments_of):
    args = arguments_of(LINEAR + BATCHES + "def loss(m, b):\n    return m(b, 3)\n")
    with pytest.raises(TypeError) as raised:
        args.loss(args.model(), args.drawn[0])
    assert explain(raised.value) == ("failed", f"my_model.py, line 8: {raised.value}")


def test_a_path_that_is_no_python_file_and_a_rate_gets_one_line(tmp_path, arguments_of, refused):
    for name in ("none.py", "x.txt", ""):
        assert "no such Python file" in refused(model_file.parse, "run_all.sh", [str(tmp_path / name)])
    (tmp_path / "x.txt").write_text(LINEAR + BATCHES)
    own = "def optimizer(parameters, **how):\n    return torch.optim.SGD(parameters, 0.1)\n"
    text = LINEAR + BATCHES + own
    assert "has an optimizer of its own" in refused(arguments_of, text, "--lr", "0.1")
    assert "--lr 2.0 is not above 0" in refused(arguments_of, LINEAR + BATCHES, "--lr", "2")
    assert arguments_of(text).lr is None and arguments_of(LINEAR + BATCHES).lr == 1e-4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "def model():\n    return torch.nn.Linear(16, 16).bfloat16()\n" + BATCHES + SUM,
            "weight is bfloat16: model() must give FP32 weights; model.float() makes them FP32",
        ),
        ("def model():\n    return 3\n" + BATCHES, "returns no torch.nn.Module"),
        (
            LINEAR + BATCHES,
            "returns a tensor of shape (4, 16): write in my_model.py `def loss(model, batch): return",
        ),
        (
            LINEAR + "def batches():\n    yield torch.ones(2, 16), torch.ones(2)\n",
            "2 positional arguments but 3 were given: a batch is the model's arguments, unless my_model.py",
        ),
        (LINEAR + "def batches():\n    return []\n" + SUM, "batches() of my_model.py yields nothing"),
        (
            LINEAR + "def batches():\n    yield 'x'\n" + "def loss(m, b):\n    return m.bias.sum()\n",
            "yields a str without tensors",
        ),
        (
            LINEAR + "def batches():\n    yield torch.ones(0, 16)\n" + SUM,
            "a Tensor without tensors that hold numbers",
        ),
        (
            LINEAR + BATCHES + "def loss(m, b):\n    return m(b.mul_(0.5)).sum()\n",
            "changes its batch, which comes again: let it change a clone",
        ),
        (
            LINEAR + "def batches():\n    yield {'x': torch.randn(4, 16), 'y': torch.ones(4)}\n"
            "def loss(m, b):\n    return m(b.pop('x')).sum()\n",
            "changes its batch, which comes again: let it begin with batch = dict(batch)",
        ),
        (
            LINEAR + BATCHES + "class E(BaseException): pass\ndef loss(m, b):\n    raise E(3)\n",
            "line 9: E: 3",
        ),
        (LINEAR + BATCHES + "def loss(m, b):\n    return m(b).sum() * float('nan')\n", "first loss of"),
        (LINEAR + BATCHES + "def loss(m, b):\n    return m(b, 3)\n", "my_model.py, line 8: TypeError"),
        (
            LINEAR + BATCHES + "def loss(m, b):\n    return m(b).sum()[None]\n",
            "is no scalar: its shape is (1,)",
        ),
        (
            LINEAR + BATCHES + "def loss(m, b):\n    return m(b).argmax(-1).sum()\n",
            "is of torch.int64, which has no gradient",
        ),
        (
            "def model():\n    return torch.nn.Linear(16, 16).requires_grad_(False)\n" + BATCHES + SUM,
            "has no weight to train",
        ),
        (
            LINEAR + BATCHES + "def loss(m, b):\n    y = m(b).sum()\n    y.backward()\n    return y\n",
            "loss() of my_model.py calls backward(): let it return the loss alone",
        ),
        (
            "class M(torch.nn.Linear):\n    def forward(self, x):\n        y = super().forward(x)\n"
            "        return y, y.sum()\ndef model():\n    return M(16, 16)\n" + BATCHES,
            "returns (a tensor of shape (4, 16), a tensor of shape ()): write in my_model.py "
            "`def loss(model, batch): return model(batch)[1]`",
        ),
        (
            "class M(torch.nn.Linear):\n    def forward(self, x):\n        return {'y': x, 'loss': x.sum()}\n"
            "def model():\n    return M(16, 16)\ndef batches():\n    yield (torch.ones(4, 16),)\n",
            "returns a dict of y, loss: write in my_model.py "
            "`def loss(model, batch): return model(*batch)['loss']`",
        ),
        (
            "def model():\n    return torch.nn.Linear(16, 16).to(torch.complex64)\n" + BATCHES + SUM,
            "weight is complex, which neither BF16 nor FP8 multiplies: keep two FP32 weights",
        ),
        (
            "def model():\n    return torch.nn.LazyLinear(16)\n" + BATCHES + SUM,
            "weight has no size yet: let model() call the model once on a batch",
        ),
        (LINEAR + BATCHES + SUM + "def optimizer(p, **how):\n    return []\n", "and no list of these"),
        (
            LINEAR + BATCHES + SUM + "W = [torch.nn.Parameter(torch.ones(2, 2))]\n"
            "def optimizer(p, **how):\n    return torch.optim.SGD(W, 0.1)\n",
            "optimizer() of my_model.py has weights that are not model()'s",
        ),
        (
            LINEAR + BATCHES + SUM + "def optimizer(p, **how):\n    return torch.optim.LBFGS(p)\n",
            "returns LBFGS",
        ),
        (
            LINEAR + BATCHES + "def loss(m, b):\n    return torch.zeros((), requires_grad=True) + 1\n",
            "gives no weight of model() a gradient",
        ),
        (LINEAR + BATCHES + "def loss(m, b):\n    return m(b).sum().detach()\n", "has no gradient: was it"),
        (
            "class G:\n    def __init__(self):\n        self.x = torch.ones(4, 16)\n"
            + LINEAR
            + "def batches():\n    yield G(), torch.ones(2)\n"
            + SUM,
            "batches() yields a G that holds tensors",
        ),
        (
            LINEAR + BATCHES + SUM + "def optimizer(parameters):\n    return 3\n",
            "optimizer() got an unexpected keyword argument 'fused'",
        ),
        (
            "K = iter(range(9))\ndef model():\n    m = torch.nn.Linear(16, 16)\n"
            "    m.register_buffer('b', torch.full((2,), 1.0 * next(K)))\n    return m\n" + BATCHES + SUM,
            "makes other weights or buffers each time",
        ),
        (
            "K = iter(range(9))\ndef model():\n    m = torch.nn.Linear(16, 16)\n"
            "    torch.nn.init.constant_(m.bias, next(K))\n    return m\n" + BATCHES + SUM,
            "makes other weights or buffers each time",
        ),
        (
            LINEAR
            + "K = iter(range(9))\ndef batches():\n    yield torch.full((2, 16), 1.0 * next(K))\n"
            + SUM,
            "yields other numbers each time",
        ),
    ],
)
def test_a_model_that_cannot_be_compared_gets_one_line(text, said, arguments_of, capsys, monkeypatch):
    args = arguments_of(text)
    monkeypatch.setattr(model_check, "parse", lambda *_: args)
    assert model_check.main([]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_the_work_of_a_step_is_counted(arguments_of, tmp_path, monkeypatch):
    args = arguments_of(LINEAR + BATCHES + SUM)
    args.steps = 0
    monkeypatch.setattr(model_check, "parse", lambda *_: args)
    assert model_check.main([]) == 0
    facts = json.loads(args.output.read_text())
    work = facts["workload"]
    assert (work["unit"], work["tokens_per_step"], work["parameters"]) == ("samples", 4, 16 * 17)
    assert work["flops_per_step"] == 2 * 2 * 4 * 16 * 16, (
        "a multiply-add is two FLOPs; the batch needs no gradient"
    )
    assert facts["pinned"] == {"--steps": "14"} and work["steps"] == 14 and work["model"] == "my_model.py"
    assert facts["messages"][1] == "my_model.py: 0.0 M parameters, 4 samples a step"


def test_a_model_is_made_from_one_seed_of_every_kind_and_trains(arguments_of):
    drawn = "import random, numpy\ndef model():\n    m = torch.nn.Linear(16, 16).eval()\n"
    drawn += "    torch.nn.init.constant_(m.bias, random.random() + numpy.random.rand())\n    return m\n"
    args = arguments_of(drawn + BATCHES + SUM)
    torch.set_float32_matmul_precision("high")
    _, model, _ = built([], args)
    assert torch.equal(model.bias, args.model().bias) and model.training
    assert torch.get_float32_matmul_precision() == "highest", "TF32 comes with AMP"
    args.weights_sha256 = "of another process"
    with pytest.raises(RuntimeError, match="makes other weights in each process"):
        built([], args)


def test_tokens_are_integers_of_two_dimensions():
    tokens, picture = torch.zeros(2, 5, dtype=torch.int64), torch.zeros(3, 4, 4)
    assert model_batch.units_of({"x": torch.zeros(2), "y": [tokens]}) == ("tokens", 10)
    assert model_batch.units_of({"x": picture, "y": [tokens]}) == ("samples", 3), "labels of pictures"
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    moved = model_batch.copied(packed, torch.device("meta"))
    assert moved.data.is_meta and not moved.batch_sizes.is_meta and type(moved) is type(packed)
    inside = SimpleNamespace(store=SimpleNamespace(mapping={"x": picture}))
    with pytest.raises(Skip, match="SimpleNamespace that holds tensors"):
        model_batch.check_parts((inside, tokens))
    model_batch.check_parts((SimpleNamespace(note=["a"]), tokens, torch.long))
    assert model_batch.units_of({"labels": tokens[:, :1], "input_ids": tokens}) == ("tokens", 10)
    assert model_batch.units_of((picture, torch.zeros(3, dtype=torch.int64))) == ("samples", 3)
    assert model_batch.units_of(torch.zeros(())) == ("samples", 1)
    assert model_batch.units_of((picture, torch.zeros(3, 9, dtype=torch.bool))) == ("samples", 3)


def test_attention_with_fewer_heads_of_keys_is_counted_by_its_queries():
    q, k = torch.empty(2, 8, 64, 16, device="meta"), torch.empty(2, 2, 64, 16, device="meta")
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    assert model_check.FORMULAS[flash](q, k, k) == 2 * 2 * (2 * 8 * 64 * 64 * 16)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    assert model_check.FORMULAS[backward](q, q, k, k) == 5 * 2 * (2 * 8 * 64 * 64 * 16)


def test_a_loss_that_differentiates_is_trained_and_its_flops_are_not_counted(arguments_of):
    inside = "def loss(model, batch):\n    x = batch.requires_grad_()\n    y = model(x).square().sum()\n"
    inside += "    return torch.autograd.grad(y, x, create_graph=True)[0].square().mean()\n"
    args = arguments_of(LINEAR + BATCHES + inside)
    work = model_check.check(args)
    assert work.flops_per_step == 0 and work.tokens_per_step == 4
    train_step, *_ = built([], args)
    assert train_step(args.batches()[0][0]) > 0


def test_flops_of_a_recurrent_layer_are_not_counted(arguments_of):
    recurrent = "def model():\n    return torch.nn.GRU(16, 16)\n"
    loss = "def loss(model, batch):\n    return model(batch)[0].square().sum()\n"
    assert model_check.check(arguments_of(recurrent + BATCHES + loss)).flops_per_step == 0


def test_a_batch_is_copied_with_all_that_it_holds():
    tensor = torch.ones(2)
    batch = model_batch.copied({"a": (tensor, "x"), "b": [tensor]}, None)
    assert type(batch["a"]) is tuple and type(batch["b"]) is list, "as the file made them"
    assert batch["a"][1] == "x" and len([*model_batch.tensors_of(batch)]) == 2
    batch["a"][0].zero_()
    assert tensor.sum() == 2 and batch["b"][0].sum() == 2
    pair = namedtuple("Pair", "x y")(tensor, 3)
    assert model_batch.copied(pair, None).y == 3


class AttrDict(dict):
    def __init__(self, *parts):
        super().__init__(*parts)
        self.__dict__ = self


class Attributes(dict):
    __getattr__ = dict.__getitem__


class Mirror(dict):
    def __init__(self, parts):
        for name, part in parts.items():
            self[name] = part

    def __setitem__(self, name, part):
        super().__setitem__(name, part)
        setattr(self, name, part)


class Parts(list):
    pass


@pytest.mark.parametrize("kind", [AttrDict, Attributes, Mirror, Parts, OrderedDict])
def test_a_batch_keeps_its_class(kind):
    tensor = torch.ones(2)
    batch = kind([tensor] if kind is Parts else {"x": tensor})
    copy = model_batch.copied(batch, None)
    assert type(copy) is kind
    part = {Parts: lambda: copy[0], OrderedDict: lambda: copy["x"]}.get(kind, lambda: copy.x)()
    assert part is not tensor and torch.equal(part, tensor)


def test_batches_that_fill_one_tensor_are_copied_as_they_are_drawn(arguments_of):
    again = "def batches():\n    x = torch.empty(3)\n    while True:\n        yield x.normal_()\n"
    batches = arguments_of(LINEAR + again + SUM).batches()
    assert len({batch.sum().item() for (batch,) in batches}) == len(batches) == 4


def test_arrays_are_part_of_the_work_and_notes_are_not():
    hashes = [model_batch.sha256_of([torch.ones(2), more]) for more in (np.ones(2), np.zeros(2), 1.5, "late")]
    assert len({*hashes}) == 3 and hashes[2] == hashes[3]
    array = np.ones(2)
    (copy,) = model_batch.copied([array], None)
    array[:] = 0
    assert copy.sum() == 2


def test_fewer_batches_than_steps_and_the_same_numbers_each_time(arguments_of):
    args = arguments_of(LINEAR + "def batches():\n    yield torch.rand(1)\n    yield torch.rand(1)\n" + SUM)
    first = args.batches()
    args.draw_again()
    assert len(first) == 2 and first[0][0] == args.batches()[0][0] != first[1][0]
    one = arguments_of(LINEAR + "def batches():\n    yield torch.rand(3)\n" + SUM).batches()
    assert len(one) == 2 and torch.equal(one[0][0], one[1][0]), "one of them is untimed"
    shapes = "def batches():\n    yield torch.rand(3)\n    yield torch.rand(4)\n"
    with pytest.raises(Skip, match="tensors of several shapes: pad them to one"):
        arguments_of(LINEAR + shapes + SUM).batches()
    assert args.command == "./run_all.sh --model my_model.py" and args.about()[1:] == ["model of my_model.py"]
    before = args.work_sha256()
    assert len(before) == 16
    args.path.write_text(args.path.read_text() + "# another file\n")
    assert args.work_sha256() != before


def test_a_module_beside_the_file_is_part_of_its_work(arguments_of, tmp_path):
    (elsewhere := tmp_path / "elsewhere").mkdir()
    for folder in (tmp_path, elsewhere):
        (folder / "net_beside.py").write_text("import torch\nSIZE = 16\n")
    sys.path.insert(0, str(elsewhere))
    late = "def loss(model, batch):\n    import net_beside\n    return model(batch).sum()\n"
    args = arguments_of(LINEAR + BATCHES + late)
    model_check.check(args)
    assert args.beside == [str(tmp_path / "net_beside.py")], "imported late, and first of its name"
    own = {"common.text", "ladder.rows", "net_beside"}
    assert model_check.modules_beside(ROOT / "x.py", own) == [], "the project's are not the user's"
    python = Path(sysconfig.get_path("stdlib")).parent.parent / "x.py"
    assert model_check.modules_beside(python, {"json", "numpy", "torch"}) == [], "nor Python's"
    before = args.work_sha256()
    (tmp_path / "net_beside.py").write_text("import torch\nSIZE = 32\n")
    assert args.work_sha256() != before
    args.planned = SimpleNamespace(text_sha256=before)
    with pytest.raises(RuntimeError, match=r"my_model\.py, or what it imports or reads, has changed"):
        model_row.build([], {}, args)
    del sys.modules["net_beside"]


@pytest.mark.slow
def test_a_file_finds_its_own_modules_and_words_and_its_seed_is_set(tmp_path):
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "layers.py").write_text("SIZE = 16\n")
    text = "import argparse\nfrom common.layers import SIZE\nargparse.ArgumentParser().parse_args()\n"
    text += "DRAWN = torch.randn(16)\nopen(__file__ + '.drawn', 'a').write(f'{DRAWN.sum()}\\n')\n"
    path = file_of(tmp_path, text + LINEAR + BATCHES + SUM)
    for _ in range(2):
        planned.check(["--device", "cpu", "--steps", "2"], model=str(path))
    first, second = path.with_name("my_model.py.drawn").read_text().splitlines()
    assert first == second


def test_a_batch_may_have_its_parts_as_attributes(arguments_of):
    """As Hugging Face's BatchEncoding has them."""
    text = "import collections\nclass Encoding(collections.UserDict):\n"
    text += "    def __getattr__(self, name):\n        return self.__dict__['data'][name]\n"
    text += LINEAR + "def batches():\n    while True:\n        yield Encoding(x=torch.randn(4, 16))\n"
    text += "def loss(model, batch):\n    return model(batch.x).square().mean()\n"
    args = arguments_of(text)
    args.planned = model_check.check(args)
    assert args.planned.tokens_per_step == 4
    assert type(args.batches()[0][0]).__name__ == "Encoding"
    args.join_batches(2)
    assert args.drawn[0].x.shape == (8, 16)


def test_a_batch_may_be_a_dataclass_and_optimizers_several(arguments_of):
    text = "import dataclasses\n@dataclasses.dataclass\nclass Batch:\n    x: torch.Tensor\n    name: str\n"
    text += LINEAR + "def batches():\n    while True:\n        yield Batch(torch.randn(4, 16), 'x')\n"
    text += "def loss(model, batch):\n    return model(batch.x).square().mean()\n"
    text += "def optimizer(parameters, **how):\n    a, b = parameters\n"
    text += "    return [torch.optim.SGD([a], 0.1, momentum=0.9), torch.optim.AdamW([b], 0.1, **how)]\n"
    args = arguments_of(text)
    assert model_check.check(args).tokens_per_step == 4
    train_step, model, optimizer = built([], args)
    state, before = model_state.ModelState(model, optimizer), model.weight.detach().clone()
    losses = [
        [train_step(*batch).item() for batch in args.batches()] for _ in range(2) if not state.restore()
    ]
    assert losses[0] == losses[1] and losses[0][-1] != losses[0][0] and not torch.equal(model.weight, before)
    samples = state.sample(train_step, args.batches()[0])
    assert (
        {"weight", "pass 1 weight"} <= samples.keys() and "pass 2 weight" not in samples and not state.notes
    )


def test_what_the_proof_cannot_sample_is_named(arguments_of):
    class Odd(nn.Module):
        """Fails in evaluation, and has a sparse gradient."""

        def __init__(self):
            super().__init__()
            self.table, self.out = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4)

        def forward(self, x):
            return self.out(self.table(x)).square().mean() if self.training else None

    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = program_of(model, optimizer).train_step()
    state = model_state.ModelState(model, optimizer)
    assert {name for name in state.sample(step, (torch.arange(3),)) if "part" not in name} == {
        "out.weight",
        "pass 1 out.weight",
        "pass rounded out.weight",
    }
    assert "evaluation fails" in state.notes[0] and state.notes[1].startswith(
        "not in the proof: table, whose"
    )


@pytest.mark.slow
def test_a_check_ends_and_answers_whatever_the_file_prints_or_leaves_running(tmp_path):
    text = "import atexit, subprocess, sys, threading, time\natexit.register(print, 'bye')\n"
    text += "threading.Thread(target=time.sleep, args=(1000,)).start()\nsys.stdout.write('loading...')\n"
    text += "left = subprocess.Popen(['sleep', '1000'])\nprint(left.pid, file=open(__file__ + '.pid', 'w'))\n"
    path = file_of(tmp_path, text + LINEAR + BATCHES + SUM)
    facts = planned.check(["--device", "cpu", "--steps", "2"], model=str(path))
    assert facts["workload"]["model"] == "my_model.py" and facts["pinned"] == {"--steps": "2"}
    pid = int(path.with_name("my_model.py.pid").read_text())
    deadline = time.monotonic() + 10  # it was killed, and may take a moment to go
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_alive(pid), "what it started has ended with it"


# --- rows -----------------------------------------------------------------------------------------


def put(folder, name, ms, status="ok", **fields):
    write_json(folder / f"{name}.json", runs.run(runs.row(name, ms, status, **fields)))


def test_a_row_keeps_the_changes_that_did_not_make_a_step_slower(tmp_path):
    for name, ms in (("0_fp32", 100), ("1_amp", 50), ("3_compile", 55), ("4_graph", 50)):
        put(tmp_path, name, ms)
    put(tmp_path, "2_sdpa", 1, status="skipped")
    before = model_row.rows_before(tmp_path, "5_fp8")
    assert [*before] == ["0_fp32", "1_amp", "3_compile", "4_graph"]
    assert model_row.rows_to_keep(before, "cuda") == ["1_amp", "4_graph"]
    assert model_row.rows_to_keep(before, "cpu") == ["1_amp", "3_compile", "4_graph"]
    assert model_row.rows_to_keep(model_row.rows_before(tmp_path, "0_fp32"), "cuda") == []
    for ms, names in ((56.0, ["1_amp", "3_compile"]), (52.0, ["1_amp"])):
        times = {"0_fp32": [100.0], "1_amp": [44.0, 50.0, ms, 60.0], "3_compile": [54.5, 55.0, 55.5]}
        rows = {name: {"step_ms": step_ms} for name, step_ms in times.items()}
        assert model_row.rows_to_keep(rows, "cuda") == names, "where times overlap, no change is slower"
    assert [*model_row.rows_before(tmp_path, "3_compile")] == ["0_fp32", "1_amp"]


def test_a_slower_row_whose_kernels_take_less_time_is_kept_until_a_later_one_decides(tmp_path):
    """On a slow host a compiled row waits for its launches, which a CUDA graph makes at once."""

    def kept(name="5_fp8"):
        return model_row.rows_to_keep(model_row.rows_before(tmp_path, name), "cuda")

    put(tmp_path, "0_fp32", 100, profile=profile_of(90))
    put(tmp_path, "1_amp", 27.4, profile=profile_of(26.4))
    for kernels, names in ((26.0, ["1_amp"]), (21.0, ["1_amp", "3_compile"])):
        put(tmp_path, "3_compile", 32.7, profile=profile_of(kernels))
        assert kept() == kept("4_graph") == names
    put(tmp_path, "4_graph", 21.5, profile=profile_of(21.0))
    assert kept() == ["1_amp", "3_compile", "4_graph"]
    put(tmp_path, "3_compile", 32.7, profile=profile_of(21.0, idle_ms=None))
    assert kept("4_graph") == ["1_amp"], "a CPU's profile tells nothing of a host"


def profile_of(kernels_ms, idle_ms=1.0):
    return Profile(idle_ms, {"matrix products": kernels_ms / 2, "other": kernels_ms / 2}, [], 9)


def block(size=32):
    return nn.Sequential(nn.Linear(size, size), nn.GELU(), nn.Linear(size, size))


class Layers(nn.Module):
    """Lists of several kinds."""

    def __init__(self, embeddings=0, kind=nn.ModuleList):
        super().__init__()
        made = {nn.Sequential: lambda blocks: nn.Sequential(*blocks), nn.ModuleList: nn.ModuleList}
        made[nn.ModuleDict] = lambda blocks: nn.ModuleDict({str(k): each for k, each in enumerate(blocks)})
        self.blocks = made[kind]([block() for _ in range(3)])
        self.heads = nn.ModuleList(nn.Linear(32, 16) for _ in range(4))
        self.tables = nn.ModuleList(
            nn.Sequential(nn.Embedding(embeddings, 32)) for _ in range(2 if embeddings else 0)
        )

    def forward(self, x):
        for each in self.blocks.children():
            x = each(x)
        return sum(head(x) for head in self.heads).sum()


BLOCKS = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(16, 16)) for _ in range(3))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
def model():
    return Net()
"""


@pytest.mark.parametrize("kind", [nn.ModuleList, nn.Sequential, nn.ModuleDict])
def test_blocks_are_equal_modules_that_hold_most_of_the_weights_and_of_the_work(kind):
    model = Layers(kind=kind)
    with (
        FlopCounterMode(display=False) as counter,
        model_blocks.count_blocks(model, counter.get_total_flops) as flops,
    ):
        model(torch.ones(2, 32))
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    work = counter.get_total_flops()
    assert (
        flops.pop("") == work and flops == {"blocks": 3 * 2 * 2 * 2 * 32 * 32} and work > flops["blocks"]
    ), "not those of layers alone"
    assert model_blocks.list_blocks(model, flops, work) == ["blocks"]
    assert model_blocks.blocks_of(model, ["blocks"]) == [*model.blocks.children()]
    said = "compiles the 3 modules of blocks (75% of the weights) and the loss"
    assert model_blocks.say_blocks(model, ["blocks"], " and the loss") == said
    assert model_blocks.list_blocks(Layers(embeddings=999), flops, work) == [], "most weights do no work"
    assert model_blocks.list_blocks(model, {}, 0) == ["blocks"], "not counted"
    assert model_blocks.list_blocks(nn.Linear(2, 2), {}, 0) == []


def test_blocks_whose_forward_is_called_are_no_blocks(arguments_of):
    called = BLOCKS.replace("block(x)", "block.forward(x)")
    lists = BLOCKS.replace("Sequential", "ModuleList").replace(
        "(torch.nn.Linear(16, 16))", "([torch.nn.Linear(16, 16)])"
    )
    lists = lists.replace("block(x)", "block[0](x)")
    for text, blocks in ((BLOCKS, ["blocks"]), (called, []), (lists, ["blocks"])):
        args = arguments_of(text + BATCHES + SUM)
        model_check.check(args)
        assert args.blocks == blocks


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        ("by hand", "written by hand (attend, net.py line 3): call F.scaled_dot_product_attention"),
        (None, "no attention was seen"),
        ("flash", "fused already (flash)"),
        ("math", "not fused here (math)"),
    ],
)
def test_a_model_without_a_switch_is_told_what_was_seen(kernel, said, arguments_of):
    before = {"0_fp32": {}, "1_amp": {"settings": {"attention_kernel": kernel}}}
    args = arguments_of(LINEAR + BATCHES + SUM)
    args.softmax_at = "attend, net.py line 3"
    with pytest.raises(Skip) as skipped:
        built(["2_sdpa"], args, before)
    assert said in str(skipped.value)


MULTI_HEAD = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.small, self.qkv = torch.nn.MultiheadAttention(16, 2, batch_first=True), torch.nn.Linear(16, 48)
    def forward(self, x):
        y, _ = self.small(x[:, :SMALL], x, x)
        q, k, v = self.qkv(x).chunk(3, -1)
        a = torch.softmax(torch.tanh(q @ k.mT), -1)
        return (a @ v).sum() + y.sum()
def model():
    return Net()
def batches():
    while True:
        yield torch.ones(2, 32, 16)
"""


@pytest.mark.parametrize(
    ("small", "said"),
    [
        (32, r"return them \((Net\.)?forward, my_model.py line 8, in multi_.*: pass need_weights=False"),
        (2, r"written by hand \((Net\.)?forward, my_model.py line 10\)"),
    ],
)
def test_attention_of_pytorch_is_told_to_leave_its_weights_where_it_is_the_largest(small, said, arguments_of):
    args = arguments_of(MULTI_HEAD.replace("SMALL", str(small)))
    model_check.check(args)
    told = model_attention.advice_on_attention("by hand", args.softmax_at)
    assert re.search(said, told), told


def test_a_compile_of_the_users_own_gets_one_line(arguments_of):
    own = "class Net(torch.nn.Linear):\n    def compile(self, how=None):\n        self.how = how\n"
    args = arguments_of(own + LINEAR.replace("torch.nn.Linear", "Net") + BATCHES + SUM)
    with pytest.raises(Skip, match=r"Net\.compile is not PyTorch's: give yours another name"):
        built(["3_compile"], args)


EQUAL_BLOCKS = """
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(16, 16), torch.nn.LayerNorm(16)
    def forward(self, x):
        return x + self.b(self.a(x))
""" + BLOCKS.replace("torch.nn.Sequential(torch.nn.Linear(16, 16))", "Block()")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "    def forward(self, x):\n        return x +",
            "    @torch.compiler.disable\n    def forward(self, x):\n        return x +",
            r"torch.compiler.disable keeps Block.forward from",
        ),
        ("(Block()", "(torch.jit.script(Block())", "Block is TorchScript"),
        ("\ndef model", "\ntorch._dynamo.config.suppress_errors = True\ndef model", "suppress_errors hides"),
    ],
)
def test_what_keeps_blocks_from_being_compiled_is_said_and_not_that_they_are(old, new, said, arguments_of):
    with torch._dynamo.config.patch(suppress_errors=False):
        args = arguments_of(EQUAL_BLOCKS + BATCHES + SUM)
        model_check.check(args)
        assert args.blocks == ["blocks"] and any("3 modules of blocks" in line for line in args.remarks)
        args = arguments_of(EQUAL_BLOCKS.replace(old, new) + BATCHES + SUM)
        model_check.check(args)
        assert not any("compiles" in line for line in args.remarks)
        with pytest.raises(Skip, match=said):
            built(["3_compile"], args)


DRAWN = """
import random
from types import SimpleNamespace
RANDOM, STEP = random.Random(0), random.Random
CONFIG = SimpleNamespace(held={"one": RANDOM})
"""


@pytest.mark.parametrize(
    ("draw", "is_drawn_once"),
    [
        ("RANDOM.random()", True),
        ("self.own.choice([1, 2])", True),
        ("CONFIG.held['one'].gauss()", True),
        ("STEP(3).uniform(0, 1)", True),
        ("random.random() + random.choice([1, 2])", False),
        ("random.SystemRandom().random()", False),
        ("1", False),
    ],
)
def test_what_the_compiler_would_draw_once_is_not_compiled(draw, is_drawn_once, arguments_of):
    """A number of a random.Random, which it reads while it traces, and never again."""
    text = DRAWN + EQUAL_BLOCKS.replace(
        "        self.a,", "        self.own = random.Random(0)\n        self.a,"
    )
    text = text.replace("return x +", f"return x * ({draw}) +")
    args = arguments_of(text + BATCHES + SUM)
    model_check.check(args)
    line = text.split("\n").index(f"        return x * ({draw}) + self.b(self.a(x))") + 2  # and an import
    assert args.drawn_at == (f"my_model.py line {line}" if is_drawn_once else "")
    assert not {"random", "getrandbits"} & {*vars(random.Random)}
    if is_drawn_once:
        with pytest.raises(Skip, match=rf"repeats it \(my_model.py line {line}\): draw by the functions"):
            built(["3_compile"], args)


def test_a_module_that_draws_while_it_is_imported_draws_nothing_in_a_step(arguments_of, tmp_path):
    """sympy does, which PyTorch imports when it first compiles."""
    (tmp_path / "drawing.py").write_text("import random\nONE = random.Random(0).randint(1, 1)\n")
    text = EQUAL_BLOCKS.replace("return x +", "return x * importlib.reload(drawing).ONE +")
    args = arguments_of("import importlib, drawing\n" + text + BATCHES + SUM)
    model_check.check(args)
    assert args.drawn_at == ""


def test_a_draw_outside_of_what_is_compiled_is_drawn_each_time(arguments_of):
    layers = EQUAL_BLOCKS.replace("            x = block(x)", "            x = block(x) * RANDOM.random()")
    loss = SUM.replace("model(batch)", "model(batch * RANDOM.uniform(0, 1))")  # of another length, for .pyc
    for text, is_drawn_once in ((layers + BATCHES + SUM, False), (EQUAL_BLOCKS + BATCHES + loss, True)):
        args = arguments_of(DRAWN + text)
        model_check.check(args)
        assert bool(args.drawn_at) is is_drawn_once
        args.blocks = []
        model_check.look_into_loss(args, args.model())
        assert args.drawn_at and args.is_called


@pytest.mark.slow
def test_a_block_that_the_compiler_skips_is_not_compiled(arguments_of):
    """It does so without a word where it cannot trace a recurrent layer, or a print within `try`."""
    recurrent = EQUAL_BLOCKS.replace("torch.nn.LayerNorm(16)", "torch.nn.LSTM(16, 16)")
    recurrent = recurrent.replace("self.b(self.a(x))", "self.b(self.a(x))[0]")
    for text, is_compiled in ((EQUAL_BLOCKS, True), (recurrent, False)):
        args = arguments_of(text + BATCHES + SUM)
        model_check.check(args)
        torch._dynamo.reset()
        train_step, model, *_ = built(["3_compile"], args)
        for batch in args.drawn[:2]:
            train_step(batch)
        settings, symptoms = profile.observe(partial(train_step, args.drawn[0]), model, args.device)
        assert settings.compiled is is_compiled
        assert symptoms.graph_breaks[-1:] == ([] if is_compiled else ["Block.forward: the compiler skips it"])
    row = Row("3_compile", settings=settings, symptoms=symptoms, changes=["compile"])
    assert "did not run (Block.forward: the compiler skips it; TORCH" in contradiction(row, False, {})


@pytest.mark.parametrize("draw", ["torch.randn(4, 16, generator=OWN)", "torch.randn(4, 16)"])
def test_a_generator_that_no_seed_sets_is_named(draw, arguments_of):
    own = "OWN = torch.Generator().manual_seed(0)\n"
    args = arguments_of(own + LINEAR + BATCHES + SUM.replace("model(batch)", f"model(batch + {draw})"))
    train_step, model, optimizer, *_ = built([], args)
    state = model_state.ModelState(model, optimizer)
    state.sample(train_step, args.batches()[0])
    assert any("passes of one seed differ" in note for note in state.notes) is ("OWN" in draw)


def test_code_that_has_no_hash_is_seen_too():
    """The compiler's has dicts among its constants, where it calls torch.func.vmap."""

    def step():
        return 1

    step.__code__ = step.__code__.replace(co_consts=(*step.__code__.co_consts, {}))
    with pytest.raises(TypeError, match="unhashable"):
        hash(step.__code__)
    assert id(step.__code__) in profile._code_run_by(step)


@pytest.mark.parametrize(("biases", "kernel"), [(0, "by hand"), (2, "by hand"), (3, None)])
def test_products_may_lie_between_scores_and_their_softmax(biases, kernel):
    """As those of relative positions, in Segment Anything's encoder."""
    scores, bias = ("bmm", [[8, 6, 16], [8, 16, 6]]), ("bmm", [[6, 8, 16], [6, 16, 3]])
    parts = [scores, *[bias] * biases, ("_softmax", [[8, 6, 6], []]), ("bmm", [[8, 6, 6], [8, 6, 16]])]
    assert profile._attention_kernel(Counter(), parts) == kernel
    assert profile._attention_kernel(Counter(), parts[:-1]) is None


@pytest.mark.slow
def test_a_model_that_is_compiled_in_the_graph_of_its_loss_is_compiled(arguments_of):
    """The compiler holds no code of its forward(), which is part of the loss's."""
    args = arguments_of(EQUAL_BLOCKS + BATCHES + SUM)
    model_check.check(args)
    args.blocks = []
    train_step, model, *_ = built(["3_compile"], args)
    for batch in args.drawn[:2]:
        train_step(batch)
    settings, symptoms = profile.observe(partial(train_step, args.drawn[0]), model, args.device)
    assert settings.compiled and symptoms.graph_breaks == []
    model.other = torch.nn.TransformerEncoderLayer(16, 2)  # of another class, which no step calls
    model.other.compile()
    _, symptoms = profile.observe(partial(train_step, args.drawn[0]), model, args.device)
    assert symptoms.graph_breaks == ["TransformerEncoderLayer.forward: the compiler skips it"]
    del model.other
    with torch.compiler.set_stance("force_eager"):
        _, symptoms = profile.observe(partial(train_step, args.drawn[0]), model, args.device)
    assert symptoms.graph_breaks == ["Net.forward: the compiler skips it"]


def test_blocks_of_a_model_that_the_loss_does_not_call_are_compiled_with_it(arguments_of):
    parts = EQUAL_BLOCKS.replace("def forward(self, x):\n        for", "def encode(self, x):\n        for")
    args = arguments_of(parts + BATCHES + SUM.replace("model(batch)", "model.encode(batch)"))
    model_check.check(args)
    assert args.blocks == [] and "compiles the loss and what it calls" in args.remarks[-1]
    *_, model, _ = built(["3_compile"], args)
    assert not any(part._compiled_call_impl for part in model.modules())


def test_a_loss_that_is_kept_from_the_compiler_and_calls_no_model_leaves_nothing_to_compile(arguments_of):
    parts = EQUAL_BLOCKS.replace("def forward(self, x):\n        for", "def encode(self, x):\n        for")
    own = SUM.replace("model(batch)", "model.encode(batch)")
    args = arguments_of(f"{parts}{BATCHES}@torch.compiler.disable\n{own}")
    model_check.check(args)
    assert len(args.remarks) == 1
    with pytest.raises(Skip, match=r"torch.compiler.disable keeps the loss .* no model\(x\)"):
        built(["3_compile"], args)


def test_a_loss_that_is_kept_from_the_compiler_stays_eager(arguments_of):
    args = arguments_of(EQUAL_BLOCKS + BATCHES + "@torch.compiler.disable\n" + SUM)
    args.planned = model_check.check(args)
    assert args.loss_module is None and args.remarks[-1].endswith("torch.compiler.disable keeps out")
    text, placed = model_patch.edit(args.path.read_text(), ["3_compile"], args.model(), args.blocks, args)
    assert placed == ["3_compile"] and "@torch.compile\n" not in text and "block.compile()" in text


def test_a_loss_that_forward_computes_and_keeps_is_not_computed_by_loss(arguments_of):
    text = EQUAL_BLOCKS.replace(
        "        return x\ndef", "        self.last = x.square().mean()\n        return x\ndef"
    )
    args = arguments_of(f"{text}{BATCHES}def loss(model, batch):\n    model(batch)\n    return model.last\n")
    model_check.check(args)
    assert not args.computes_loss and "but not the loss, which forward() computes" in args.remarks[-1]


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
@pytest.mark.parametrize(
    "line",
    [
        "value = model(batch).square().mean()",
        "model(batch); value = model.last",
        "model(batch); value = 2 * model.last",
    ],
)
def test_a_loss_is_made_where_it_is_made_whatever_is_called_without_gradients(mode, line, arguments_of):
    text, by_model = EQUAL_BLOCKS, "model.last" in line
    if by_model:
        kept = "        self.last = x.square().mean()\n        return x\ndef"
        text = text.replace("        return x\ndef", kept)
    metric = f"    with torch.{mode}():\n        model(batch)\n    return value\n"
    args = arguments_of(f"{text}{BATCHES}def loss(model, batch):\n    {line}\n{metric}")
    model_check.check(args)
    assert args.computes_loss is not by_model and ("but not the loss" in args.remarks[-1]) is by_model


WITH_LOSS = EQUAL_BLOCKS.replace(
    "    def forward(self, x):\n        for",
    "    loss_function = property(lambda self: self.own, lambda self, it: setattr(self, 'own', it))\n"
    "    own = staticmethod(lambda x: x.square().mean())\n    def forward(self, x):\n        for",
)
OF_MODEL = WITH_LOSS.replace("        return x\ndef", "        return self.loss_function(x)\ndef")
OF_LIBRARY = WITH_LOSS.replace("        return x\ndef", "        return x.square().mean()\ndef")
WRAPPED = (
    OF_MODEL
    + """class Wrapper(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.blocks = (inner := Net()), inner.blocks
        self.loss_function = inner.loss_function
    def forward(self, x):
        return self.inner(x)
def model():
    return Wrapper()
"""
)


LOSS = """def loss(model, batch):
    x = batch * torch.ones(16, requires_grad=True)
    out = model(x)
    return {}
"""
BOTH = "def loss(model, batch):\n    out, loss = model(batch)\n    return loss + 0.1 * out.mean()\n"
HOLDS_A_LOSS = """class Holder(Net):
    def __init__(self):
        super(Net, self).__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        self.add_module("criterion", torch.nn.MSELoss())
    loss_function = property(lambda self: self.criterion, lambda self, it: setattr(self, "criterion", it))
def model():
    return Holder()
"""


@pytest.mark.parametrize(
    ("text", "loss", "compiled"),
    [
        (WITH_LOSS, SUM, "my_model.loss = torch.compile(my_model.loss)"),
        (OF_MODEL, "", "model.loss_function = torch.compile(model.loss_function)"),
        (OF_LIBRARY, "", ""),
        (WRAPPED, "", ""),
        (OF_MODEL, "def loss(model, batch):\n    return model(batch * 2)\n", "model.loss_function = "),
        (OF_LIBRARY, "def loss(model, batch):\n    return model(batch * 2)\n", ""),
        (OF_LIBRARY, LOSS.format("(out + out.detach()).mean()"), ""),
        (OF_LIBRARY, LOSS.format("out + model.blocks[0].a.weight.square().sum()"), ""),
        (OF_LIBRARY.replace("square().mean()", "square().mean(-1)"), LOSS.format("out.mean()"), ""),
        (WITH_LOSS, LOSS.format("out.square().mean() + model(x.detach()).mean().detach()"), "my_model"),
        (OF_LIBRARY, LOSS.format("out + torch.autograd.grad(out, x, create_graph=True)[0].sum()"), ""),
        (
            WITH_LOSS.replace("return x\ndef", "return x.mean(-1)\ndef"),
            LOSS.format("out.square().mean()"),
            "my_model",
        ),
        (OF_LIBRARY + HOLDS_A_LOSS, "", ""),
        (OF_MODEL, LOSS.format("out + x.square().mean()"), "model.loss_function = "),
        (
            WITH_LOSS.replace("return x\ndef", "return x, self.loss_function(x)\ndef"),
            BOTH,
            "model.loss_function = ",
        ),
        (
            WITH_LOSS.replace("return x\ndef", "return type('Given', (), {'y': x})\ndef"),
            LOSS.format("out.y.square().mean()"),
            "my_model",
        ),
    ],
)
def test_the_loss_is_compiled_where_it_is_computed(text, loss, compiled, arguments_of):
    args = arguments_of(text + BATCHES + loss)
    args.planned = model_check.check(args)
    said = "(100% of the weights) and the loss" if compiled else "not the loss, which forward() computes"
    assert said in args.remarks[-1]
    lines = changes.loss_lines(args.model(), args)
    assert compiled in lines[-1] if compiled else not lines
    patched, _ = model_patch.edit(args.path.read_text(), ["3_compile"], args.model(), args.blocks, args)
    assert ("@torch.compile" in patched) == ("my_model" in compiled or loss is BOTH)
    assert ("loss_function = torch.compile" in patched) == ("model.loss_function" in compiled)


def test_parts_in_evaluation_stay_so_and_a_whole_model_trains(arguments_of):
    """A frozen BatchNorm, for example; from_pretrained() gives a whole model in evaluation."""
    layers = "torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout())"
    cases = (("net[1].eval()", [True, True, False]), ("net.eval()", [True, True, True]))
    for line, expected in (*cases, ("net.eval()[1].train()", [False, False, True])):
        text = f"def model():\n    net = {layers}\n    {line}\n    return net\n"
        model = arguments_of(text + BATCHES + SUM).model()
        assert [each.training for each in model.modules()] == expected


@pytest.mark.slow
def test_what_a_file_keeps_from_the_compiler_inside_a_block_breaks_its_graph(arguments_of):
    text = EQUAL_BLOCKS.replace("self.a(x)", "self.part(x)").replace(
        "class Net",
        "    @torch.compiler.disable\n    def part(self, x):\n        return self.a(x)\nclass Net",
    )
    args = arguments_of(text + BATCHES + SUM)
    model_check.check(args)
    torch._dynamo.utils.counters.clear()
    torch._dynamo.reset()
    train_step, model, *_ = built(["3_compile"], args)
    train_step(args.drawn[0])
    (reason,) = profile._graph_breaks(model)
    assert "Block.part" in reason and " at 0x" not in reason


def test_what_this_machine_cannot_change_is_skipped_with_its_reason(arguments_of, monkeypatch):
    args = arguments_of(LINEAR + BATCHES + SUM)
    args.amp_dtype = torch.float32
    for names, said in (
        (["1_amp"], "does not multiply BF16"),
        (["4_graph"], "CUDA graphs need a GPU"),
        (["5_fp8"], "FP8 needs an NVIDIA GPU"),
    ):
        with pytest.raises(Skip, match=said):
            built(names, args)
    monkeypatch.setattr(args, "device", SimpleNamespace(type="cuda"))
    args.capture = False
    with pytest.raises(Skip, match="--no-capture"):
        built(["4_graph"], args)


def test_the_optimizer_is_the_files_or_fused_adamw(arguments_of):
    *_, optimizer = built([], arguments_of(LINEAR + BATCHES + SUM, "--lr", "0.01"))
    (group,) = optimizer.param_groups
    assert group["fused"] and group["lr"] == 0.01 and not group["capturable"]
    own = "def optimizer(parameters, **how):\n    return torch.optim.{}\n"
    *_, optimizer = built([], arguments_of(LINEAR + BATCHES + SUM + own.format("SGD(parameters, 0.1)")))
    assert isinstance(optimizer, torch.optim.SGD)
    with pytest.raises(Skip, match=r"returns no torch.optim.Optimizer"):
        built([], arguments_of(LINEAR + BATCHES + SUM + own.format("Adam")))


def test_groups_of_an_optimizer_hold_every_weight(arguments_of):
    own = """
def optimizer(parameters, **how):
    groups = [[p for p in parameters if (p.dim() < 2) is small] for small in (True, False)]
    return torch.optim.AdamW([{"params": group} for group in groups], **how)
"""
    *_, optimizer = built([], arguments_of(LINEAR + BATCHES + SUM + own))
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1], "it looks at them twice"


def test_rows_draw_the_same_random_numbers_in_a_loss(arguments_of):
    noisy = "def loss(model, batch):\n    return model(batch + torch.randn_like(batch)).square().mean()\n"
    noisy += "K = iter(range(9))\ndef optimizer(parameters, **how):\n    torch.rand(next(K))\n"
    args = arguments_of(LINEAR + BATCHES + noisy + "    return torch.optim.AdamW(parameters, **how)\n")
    losses = [built([], args)[0](args.batches()[0][0]).item() for _ in range(2)]
    assert losses[0] == losses[1], "whatever building a row drew"


def test_a_step_trains_as_a_loop_of_ones_own(arguments_of):
    args = arguments_of(LINEAR + BATCHES + SUM)
    train_step, *_ = built([], args)
    twin, ((batch,), *_) = args.model(), args.batches()
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    loss = twin(batch).square().mean()
    loss.backward()
    optimizer.step()
    assert train_step(batch).item() == loss.item() and not train_step(batch).requires_grad
    built_again, again, _ = built([], args)
    built_again(batch)
    assert torch.equal(again.weight, twin.weight) and again.weight.grad is None


def test_contexts_are_entered_again_and_again(arguments_of, monkeypatch):
    args = arguments_of(
        f"import stand_ins\n{LINEAR}{BATCHES}{SUM}def fp8(model):\n    return stand_ins.autocast\n"
    )
    monkeypatch.setattr(changes.hardware, "require_fp8", print)
    train_step, *_ = built(["5_fp8"], args)
    stand_ins.ENTERED.clear()
    for batch in args.batches()[:2]:
        train_step(*batch)
    assert len(stand_ins.ENTERED) == 2 and "with fp8_context():" in args.code


def test_a_compiled_model_of_hugging_face_is_looked_at(arguments_of):
    """The wrapper has no len(), and so no truth; the switch of attention is the wrapped model's."""
    pytest.importorskip("transformers")
    shape = "n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32, use_cache=False, "
    shape += "attn_pdrop=0, embd_pdrop=0, resid_pdrop=0"
    args = arguments_of(
        "from transformers import GPT2Config, GPT2LMHeadModel\n"
        f"def model():\n    return torch.compile(GPT2LMHeadModel(GPT2Config({shape})))\n"
        "def batches():\n    while True:\n        ids = torch.randint(64, (2, 8))\n"
        "        yield {'input_ids': ids, 'labels': ids}\n"
    )
    args.planned = model_check.check(args)
    assert args.rows_in_file == ["3_compile"], "attention without a mask is still to be tried"
    assert model_patch.edit(args.path.read_text(), ["2_sdpa"], args.model(), [], args)[1] == ["2_sdpa"]


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_the_switch_of_hugging_face_changes_attention_and_not_the_work(model, monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "path", [*sys.path])
    words = [str(ROOT / "examples" / f"{model}.py"), "--device", "cpu", "--steps", "1"]
    words += ["--output", str(tmp_path / "r.json")]
    samples, kernels = [], []
    for names in ([], ["2_sdpa"]):
        args = model_file.parse("run_all.sh", words)
        if model == "gpt2":
            small = {"n_layer": 2, "n_embd": 64, "n_head": 2}
            monkeypatch.setattr(args.file, "GPT2Config", partial(args.file.GPT2Config, **small))
            args.loss_text = "model(**{batch}).loss"
        train_step, network, optimizer = built(names, args)
        batch = args.batches()[0]
        samples.append(sampling.sample(train_step, optimizer, network, batch))
        kernels.append(benchmark.profile.observe(partial(train_step, *batch), network, args.device)[0])
    assert [settings.attention_kernel for settings in kernels] == ["flash (CPU)"] * 2
    same = proof.compare(runs.row("a"), samples[0], runs.row("b"), samples[1])
    assert same.paired == 1.0 and same.cosine > 0.999


class Own(nn.Module):
    def forward(self, x):
        return x


class Switched(nn.Module):
    """A model with Hugging Face's switch, and parts with one of their own."""

    def __init__(self, switch, parts=(), **config):
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation="eager", **config)
        self.switch, self.parts = switch, nn.ModuleList(parts)

    def set_attn_implementation(self, name):
        self.switch(self, name)


def refuse(part, name):
    raise ValueError("Odd does not support an attention implementation yet")


def choose(part, name):
    part.config._attn_implementation = name


@pytest.mark.parametrize(
    ("switch", "config", "said"),
    [
        (lambda part, name: None, {}, "Switched has attention of its own"),
        (refuse, {}, "Switched has no such switch: Odd does not support"),
        (
            choose,
            {"attn_logit_softcapping": 50.0},
            "Switched caps its attention scores, which SDPA leaves out",
        ),
    ],
)
def test_a_model_whose_attention_no_switch_changes_is_told(switch, config, said):
    with pytest.raises(Skip, match=said):
        changes.fuse_attention(program_of(Switched(switch, **config)), {})


def test_a_switch_that_is_on_already_or_does_not_turn_is_told():
    seen = {"0_fp32": {"settings": {"attention_kernel": "math"}}}
    on = Switched(choose)
    on.config._attn_implementation = "sdpa"
    with pytest.raises(Skip, match="not fused here"):
        changes.fuse_attention(program_of(on), seen)
    stuck = type("StuckForCausalLM", (Switched,), {})(lambda part, name: None)
    stuck.config._attn_implementation = "sdpa"
    (program := program_of(stuck)).args.is_masked = False
    program.run = lambda lines: None
    with pytest.raises(Skip, match="attention of its own, which no switch changes"):
        changes.fuse_attention(program, seen)


def test_a_model_without_attention_is_told_so_and_not_of_its_switch():
    seen = {"0_fp32": {"settings": {"attention_kernel": None}}}
    with pytest.raises(Skip, match="no attention was seen, so there is nothing to fuse"):
        changes.fuse_attention(program_of(Switched(refuse)), seen)


@pytest.mark.parametrize(("call", "rows"), [("model(batch)", []), ("model(batch, batch)", ["2_sdpa"])])
def test_a_fused_model_gets_the_switch_only_where_no_mask_is_needed(call, rows, arguments_of):
    fused = MASKED.replace("class Base", "class BaseForCausalLM").replace("Base()", "BaseForCausalLM()")
    fused = fused.replace(
        "return self.layer(x)", "q = self.layer(x)[None, None]\n        return ATTEND(q, q, q)"
    )
    fused = fused.replace("ATTEND", "torch.nn.functional.scaled_dot_product_attention")
    fused = fused.replace("    set_attn_implementation = print\n", "", 2).replace(
        "    def __init__", "    config = None\n    set_attn_implementation = print\n    def __init__", 1
    )
    args = arguments_of(f"{fused}{BATCHES}def loss(model, batch):\n    return {call}.sum()\n")
    model_check.check(args)
    assert args.rows_in_file == rows and args.is_masked is bool(rows)


def test_a_switch_reaches_parts_with_a_configuration_of_their_own():
    whole = Switched(choose, [Switched(choose), Switched(choose)])
    whole.parts[0].config = whole.config
    changes.fuse_attention(program := program_of(nn.Sequential(whole)), {})
    assert {part.config._attn_implementation for part in (whole, *whole.parts)} == {"sdpa"}
    assert program.setup[0] == "for part in model[0].modules():"
    whole.parts[1].config = whole.config
    changes.fuse_attention(program := program_of(nn.Sequential(whole)), {})
    assert program.setup == ['model[0].set_attn_implementation("sdpa")']


def test_a_mask_is_left_out_only_where_the_model_is_known_to_need_none():
    def model_of(name, **config):
        return type(name, (), {"config": SimpleNamespace(**config)})()

    causal = model_of("LlamaForCausalLM", sliding_window=None)
    assert not model_attention.needs_mask(causal, False) and model_attention.needs_mask(causal, True)
    assert not model_attention.needs_mask(model_of("GPT2LMHeadModel"), False)
    assert model_attention.needs_mask(model_of("MistralForCausalLM", sliding_window=4), False)
    assert model_attention.needs_mask(model_of("BertForMaskedLM"), False)


MASKED = """
class Base(torch.nn.Module):
    set_attn_implementation = print
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)
    def forward(self, x, attention_mask=None, position_ids=None):
        return self.layer(x)
class Net(torch.nn.Module):
    set_attn_implementation = print
    def __init__(self):
        super().__init__()
        self.base = Base()
    def forward(self, x, *more, **keywords):
        return self.base(x, *more, **keywords)
def model():
    return Net()
"""


@pytest.mark.parametrize(
    ("call", "seen"),
    [
        ("model(batch)", False),
        ("model(batch, None)", False),
        ("model(batch, torch.ones(4))", True),
        ("model(batch, attention_mask=torch.ones(4))", True),
        ("model(batch, position_ids=torch.arange(4))", True),
        ("model.base(batch, attention_mask=torch.ones(4))", True),
    ],
)
def test_a_mask_is_seen_however_a_file_gives_it(call, seen, arguments_of):
    args = arguments_of(f"{MASKED}{BATCHES}def loss(model, batch):\n    return {call}.sum()\n")
    model_check.check(args)
    assert args.is_masked is seen
    model = args.model()
    with model_check.watch_masks(model):
        assert model._forward_pre_hooks
    assert not model._forward_pre_hooks and not model.base._forward_pre_hooks


def test_blocks_and_loss_are_compiled_and_what_lies_between_is_not(arguments_of, monkeypatch):
    compiled = []

    def compile(function):
        """Notes a loss, or the module whose `forward` is to be compiled."""
        compiled.append(function.__self__ if inspect.ismethod(function) else function)
        return function

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(nn.Module, "compile", lambda part: compiled.append(part))
    args = arguments_of(LINEAR + BATCHES + SUM)
    loss, blocks = args.file.loss, [Own() for _ in range(14)]
    model = Own()
    model.blocks, args.blocks = nn.ModuleList(blocks), ["blocks"]
    with torch._dynamo.config.patch(recompile_limit=8):
        changes.compile_blocks(Program(model, args))
        assert torch._dynamo.config.recompile_limit == 28, "blocks that read their own number"
    assert compiled == [*blocks, loss] and "forward" in vars(model)
    compiled.clear()
    whole, args.blocks = Own(), []
    changes.compile_blocks(Program(whole, args))
    assert compiled == [whole, loss] and not hasattr(whole.forward, "_torchdynamo_disable")
    compiled.clear()
    del args.file.loss
    whole.loss_function = print
    changes.compile_blocks(Program(whole, args))
    assert compiled == [whole, print]


@pytest.mark.slow
@pytest.mark.parametrize(
    "block",
    [
        lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU()),
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    ],
)
def test_blocks_of_pytorch_itself_are_compiled(block):
    model, x = nn.Sequential(*(block() for _ in range(3))), torch.randn(2, 4, 8, requires_grad=True)
    expected, graphs = model(x), torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    whole = nn.Sequential(model)
    exec("\n".join(model_program.compile_lines(whole, ["0"])), {"model": whole, "torch": torch})
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
    assert graphs["unique_graphs"] == before + 1, "one for all equal blocks"


@pytest.mark.slow
def test_numbered_layers_and_an_item_in_a_block_are_compiled(arguments_of):
    layer = """
class Layer(torch.nn.Module):
    def __init__(self, k):
        super().__init__()
        self.k, self.a = k, torch.nn.Linear(16, 16)
    def forward(self, x):
        return x + self.a(x) * (1.0 + self.k if x.mean().item() > -9 else 0.0)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(k / 100) for k in range(14))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
def model():
    return Net()
"""
    args = arguments_of(layer + BATCHES + SUM)
    ((batch,), *_) = args.batches()
    losses = [built(names, args)[0](batch).item() for names in ([], ["3_compile"])]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_fp8_is_the_files_or_torchaos(arguments_of, monkeypatch):
    monkeypatch.setattr(model_row.hardware, "compute_capability", lambda device: (9, 0))
    stand_ins.install(monkeypatch)

    def converted(blocks, text=""):
        args = arguments_of(LINEAR + BATCHES + SUM + text)
        model, args.blocks = nn.Sequential(nn.ModuleList([nn.Sequential(*blocks)])), ["0"]
        changes.convert_to_fp8(program := Program(model, args))
        return model[0][0], program

    (first, second), _ = converted([nn.Linear(32, 32), nn.Linear(20, 32)])
    with pytest.raises(Skip, match=r"no nn.Linear of the blocks has two sizes"):
        converted([nn.Sequential(nn.Linear(20, 20))])
    assert (type(first).__name__, type(second).__name__) == ("Float8Linear", "Linear")
    with pytest.raises(Skip, match=r"no nn.Linear for torchao: define fp8\(model\)"):
        converted([nn.Embedding(2, 2)])
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(Skip, match=r"torchao does not import .*: pip install torchao"):
        converted([nn.Linear(2, 2)])
    for returned, contexts in (("None", []), ("torch.no_grad", ["fp8_context()"])):
        _, program = converted([], f"def fp8(model):\n    return {returned}\n")
        assert program.contexts == contexts
    for wrong in ("__import__('contextlib').nullcontext()", "True", "model"):
        with pytest.raises(Skip, match="let it return what makes the context of a step"):
            converted([], f"def fp8(model):\n    return {wrong}\n")


def test_a_size_that_fp8_cannot_multiply_skips_its_row_alone():
    def train_step(batch):
        a, b = (torch.empty(size, 8, device="meta").to(torch.float8_e4m3fn) for size in (16, 32))
        torch._scaled_mm(a, b.t(), *[torch.empty((), device="meta")] * 2, out_dtype=torch.bfloat16)

    with pytest.raises(Skip, match=r"batch x length too \(.*got self.size\(1\)=8\): change"):
        model_row.skip_unsupported(train_step, ["5_fp8"])(None)
    with pytest.raises(RuntimeError, match="divisible by 16"):
        model_row.skip_unsupported(train_step, ["3_compile"])(None)


# --- a captured step ------------------------------------------------------------------------------


def train(weight, optimizer, n=3):
    for _ in range(n):
        weight.sin().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weight.detach().clone()


@pytest.mark.parametrize(
    ("kind", "options", "is_zero"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9}, True),
        ("Adafactor", {"lr": 0.1}, True),
        ("Adagrad", {"initial_accumulator_value": 0.1}, False),
        ("NAdam", {"lr": 0.1}, False),
        ("Rprop", {}, False),
        ("ASGD", {"lr": 0.1}, False),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}, False),
    ],
)
def test_any_optimizer_begins_anew_with_its_first_rate(kind, options, is_zero):
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 12).view(4, 3))
    optimizer = getattr(torch.optim, kind)([weight], **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    initial, trained = model_state.ModelState(nn.Module(), optimizer), []
    for _ in range(2):
        trained.append(train(weight, optimizer))
        scheduler.step()
        initial.restore()
    assert torch.equal(*trained)
    if is_zero:
        model_state.check_states(optimizer)
    else:
        with pytest.raises(Skip, match=f"states of {kind} may not begin at zero.* give --cold"):
            model_state.check_states(optimizer)


class Empty(nn.Module):
    """A model without members, whose buffers come and go."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def __len__(self):
        return 0


def test_a_buffer_that_a_forward_makes_is_left_and_others_come_back():
    model = Empty()
    initial = model_state.ModelState(model, torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1))
    model.mean = model.mean + 1  # replaced, as a forward may do
    model.register_buffer("mask", torch.ones(2))
    initial.restore()
    assert not model.mean.any() and model.mask.all()


def test_a_replay_with_other_losses_is_refused(arguments_of, monkeypatch):
    args = arguments_of(LINEAR + BATCHES + SUM)
    train_step, model, optimizer = built([], args)
    (batch,) = args.batches()[0]
    off = iter([1.0, 1.0019, 1.0, 1.0, 1.003, 1.0])

    def capture(batch):
        return lambda batch: train_step(batch) * next(off)

    parts = (SimpleNamespace(model=model, capture=capture), train_step, optimizer, False, args, batch)
    model_state.capture(*parts)
    with pytest.raises(Skip, match=r"a replay is not the step: its loss 2 is .* --no-capture does without"):
        model_state.capture(*parts)
    with pytest.raises(Skip):
        model_state.check_replay([1.0], [float("nan")], 0.002)
    args.cold = True
    model_state.capture(*parts)


def test_a_step_that_cannot_be_captured_is_skipped_with_its_cause(arguments_of, monkeypatch):
    args = arguments_of(LINEAR + BATCHES + SUM)
    train_step, model, optimizer = built([], args)
    errors = iter([RuntimeError("an .item() inside"), torch.OutOfMemoryError("CUDA out of memory")])

    def capture(_):
        raise next(errors)

    program = SimpleNamespace(model=model, capture=capture)
    parts = (program, train_step, optimizer, False, args, args.batches()[0][0])
    with pytest.raises(Skip, match=r"cannot be captured, --no-capture launches it: an .item"):
        model_state.capture(*parts)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        model_state.capture(*parts)
    assert explain(raised.value)[0] == "oom"


# --- the proof and the decision -------------------------------------------------------------------


def test_a_weight_is_found_in_a_half_or_a_third_of_another_and_by_its_numbers():
    ours = nn.ModuleList(nn.Linear(8, 6, bias=False) for _ in range(4))
    theirs = nn.ParameterList()
    theirs.append(torch.cat([ours[k].weight.detach() for k in (1, 0)]))
    theirs.append(torch.cat([ours[k].weight.detach() for k in (2, 3, 2)]))
    for weight in [*ours.parameters(), *theirs]:
        weight.grad = weight.detach().clone()
    first = {k: v for name, w in ours.named_parameters() for k, v in sampling.samples_of(name, w).items()}
    other = {k: v for name, w in theirs.named_parameters() for k, v in sampling.samples_of(name, w).items()}
    found = proof.compare(runs.row("a"), first, runs.row("b"), other)
    assert found.paired == 1.0 and found.cosine == 1.0 and found.weight.endswith(("1/2", "2/2", "1/3", "2/3"))
    del other["1 part 2/3"]
    assert proof.compare(runs.row("a"), first, runs.row("b"), other).paired == 0.75


def passes(*gradients):
    """Samples of a row whose only weight has these gradients."""
    weight = np.ones(len(gradients[0]), np.float32)
    sketches = [np.stack([weight, np.array(each, np.float32)]) for each in gradients]
    samples = {"w": sketches[0]}
    for k, each in enumerate(sketches[1:], start=1):
        samples |= sampling.renamed({"w": each}, k)
    return samples


def noisy(seed, turned=0.0, n=8):
    """Gradients of passes that random numbers turn, about a direction that a fault turns."""
    draw = np.random.default_rng(seed)
    return [[1.0, turned, *draw.normal(0, 0.1, 30)] for _ in range(n)]


def test_random_numbers_lower_the_limit_by_their_spread():
    ours = noisy(0)
    first = passes(*ours)
    equal, drawn_alike, faulty = (
        proof.compare(runs.row("a"), first, runs.row("b"), passes(*each))
        for each in (noisy(1), ours, noisy(2, turned=1.0))
    )
    assert [proof.verdict(each) for each in (equal, drawn_alike, faulty)] == ["agrees", "agrees", "differs"]
    assert drawn_alike.cosine == 1.0 and drawn_alike.limit == 0.95 > equal.limit > 0.8 > faulty.cosine
    blunt = passes(*np.random.default_rng(0).normal(0, 1, (8, 32)))
    other = passes(*np.random.default_rng(1).normal(0, 1, (8, 32)))
    assert proof.verdict(proof.compare(runs.row("a"), blunt, runs.row("b"), other)) == "not proven"
    exact = proof.compare(
        runs.row("a"), passes([1, 0], [1, 0]), runs.row("b"), passes([0.9, 0.4], [0.9, 0.4])
    )
    assert (exact.limit, exact.repeated, proof.verdict(exact)) == (0.95, 1.0, "differs")
    limits = {(False, 1.0): 0.95, (True, 1.0): 0.75, (True, None): 0.95}
    for (in_fp8, repeated), limit in limits.items():
        assert proof.limit(Proof("a", in_fp8, 1.0, repeated=repeated)) == limit, "an older record"


MODEL = runs.workload(
    model="my_model.py",
    n_layer=None,
    n_head=None,
    n_embd=None,
    seq_len=None,
    vocab_size=None,
    batch_size=None,
)


def model_run(*ms, work=MODEL, **proofs):
    """Rows of a model in which each keeps all changes before it, unless it is slower than the fastest."""
    rows, changes, fastest = [], [], None
    names = [name for name in planned.MODEL_ROWS if name != planned.AS_IT_IS]
    for name, each_ms in zip(names, ms, strict=False):
        word = planned.MODEL_ROWS[name]
        own = [*changes, *([word] if word else [])]
        rows.append(
            runs.row(
                name, each_ms, changes=own, settings=Settings(), proof=proofs.get(word), source=f"{own}\n"
            )
        )
        if fastest is None or each_ms <= fastest:
            changes, fastest = own, each_ms
    return runs.run(*rows, work=work)


@pytest.mark.parametrize(
    ("ms", "said"),
    [
        (
            (100, 50, 40, 20, 19.8),
            "Take AMP, fused attention, compile: 5.00 x. Leave out CUDA graph (1.01 x)",
        ),
        (
            (100, 50, 40, 20, 19.8, 10),
            "Take AMP, fused attention, compile, FP8: 10.0 x, with CUDA graph (1.01 x)",
        ),
        (
            (100, 50, 60, 25, 26),
            "Take AMP, compile: 4.00 x. Leave out fused attention (0.83 x), CUDA graph (0.96 x)",
        ),
        ((100, 110), "Take none of the changes. Leave out AMP (0.91 x)"),
    ],
)
def test_the_decision(ms, said):
    assert sentences.headline(derive(model_run(*ms))) == said


def test_a_slower_row_that_later_ones_keep_is_judged_with_the_next():
    changes = [["AMP"], ["AMP", "compile"], ["AMP", "compile", "CUDA graph"]]
    names = ["1_amp", "3_compile", "4_graph"]
    left = "Take AMP: 4.00 x. Leave out compile (0.83 x, where the GPU waits for its host)"
    for graph_ms, said in (
        (20, "Take AMP, compile, CUDA graph: 5.00 x"),
        (25, f"{left}, CUDA graph (with compile 1.00 x)"),
    ):
        run = model_run(100)
        for name, ms, own in zip(names, (25, 30, graph_ms), changes, strict=True):
            waits = profile_of(20, idle_ms=10.0) if name == "3_compile" else None
            run.rows.append(runs.row(name, ms, changes=own, settings=Settings(), source=name, profile=waits))
        assert sentences.headline(derive(run)) == said
    del run.rows[-1]
    assert sentences.headline(derive(run)) == left


def test_a_change_of_the_work_is_not_recommended_and_without_a_first_row_gains_are_over_the_next():
    differs = Proof("0_fp32", False, 1.0, 0.5, "w", 1.0)
    run = model_run(100, 50, **{"AMP": differs})
    assert sentences.headline(derive(run)) == "Take none of the changes. Leave out AMP (its work differs)"
    run = model_run(100, 50, 25, **{"AMP": differs})
    said = "Take none of the changes. Leave out AMP (its work differs), fused attention (2.00 x)"
    assert sentences.headline(derive(run)) == said, "it holds the change of the work"
    assert sentences.headline(derive(model_run(100))) == "No change has a time"
    run = model_run(100, 50, 25)
    run.rows[0].status, run.rows[0].step_ms = "oom", []
    assert sentences.headline(derive(run)) == "Take AMP, fused attention: 2.00 x over 1_amp"
    run.rows[2].step_ms = [51.0] * 3
    said = "Nothing tells what AMP gives: no row before it has a time. Leave out fused attention (0.98 x)"
    assert sentences.headline(derive(run)) == said


def test_a_change_whose_times_overlap_with_those_before_is_not_recommended():
    run = model_run(100, 95)
    assert sentences.headline(derive(run)) == "Take AMP: 1.05 x"
    run.rows[1].step_ms = [85.0, 95.0, 105.0]
    said = "Take none of the changes. Not decided, because times overlap: AMP (1.05 x)"
    assert sentences.headline(derive(run)) == said
    run = model_run(100, 95, 94)
    run.rows[1].step_ms = [85.0, 95.0, 105.0]
    said = "Take none of the changes. Leave out fused attention (1.01 x). Not decided, because"
    assert sentences.headline(derive(run)).startswith(said)


def test_a_change_whose_time_may_be_wrong_is_judged_with_the_next_sure_one():
    run = model_run(100, 50, 25, 25)
    run.rows[1].step_ms = [40.0] * 4 + [50.0] * 4  # it drifts
    said = "Take AMP, fused attention: 4.00 x. Leave out compile (1.00 x)"
    assert sentences.headline(derive(run)) == said, "together they are sure"
    run = model_run(100, 50)
    run.rows[1].step_ms = [40.0] * 4 + [50.0] * 4
    assert sentences.headline(derive(run)).startswith("Not decided"), "no sure row follows"


def test_nothing_is_recommended_from_a_row_that_did_not_run_what_its_name_says():
    """TORCHDYNAMO_DISABLE=1, a compiled model, autocast inside."""
    half = {"amp_dtype": "bfloat16", "float32_matmul_precision": "high", "compiled": False}
    fp32 = Settings("float32", "highest", compiled=False)
    run = model_run(100, 50, 40, 20)
    for row in run.rows:
        row.settings = Settings(**half) if row.changes else fp32
    said = "Take AMP, fused attention: 2.50 x. "
    said += "Not decided, because figures with ? may be wrong: compile (2.00? x)"
    assert sentences.headline(derive(run)) == said
    run = model_run(100, 50)
    run.rows[0].settings = Settings("float32", "highest", compiled=True)
    figures = derive(run)
    assert sentences.headline(figures) == "Not decided, because figures with ? may be wrong: AMP (2.00? x)"
    assert figures.lines[0].doubts == [
        "its name is not what ran: compile ran too (model() returns a compiled model)"
    ]
    run.rows[0].settings = Settings("bfloat16", "high", compiled=False)
    (doubt,) = derive(run).lines[0].doubts
    assert doubt.startswith(
        "its name is not what ran: AMP and TF32 ran too (the model or its loss uses autocast"
    )
    run = model_run(100, 50, 40, 30)
    run.environment.device_type = "cpu"
    for row, change in zip(run.rows[2:], ("fused attention", "CUDA graph"), strict=True):
        row.status, row.changes = "skipped", [change]
    said = f"{sentences.CPU_SHOWS}. On a GPU it tries AMP and CUDA graph, and says which to take"
    assert sentences.headline(derive(run)) == said, "no attention is no matter of the device"


def test_changes_that_together_are_slower_are_not_taken():
    run = model_run(100, 50, 25)
    for row, ms in zip(run.rows, (100.0, 160.0, 125.0), strict=True):
        row.step_ms = [ms] * 3
    said = "Take none of the changes. Leave out AMP (0.62 x), fused attention (with AMP 0.80 x)"
    assert sentences.headline(derive(run)) == said, "each state of a loop keeps those before it"


def test_the_report_of_a_model():
    figures = derive(model_run(100, 50, 60, 25))
    assert figures.plain is None and table.main_rows(figures, detailed=True)[3]["made from"] == "1_amp"
    text, page, _ = runs.printed(figures.run)
    assert (
        text.startswith("Take AMP, compile: 4.00 x")
        and "PyTorch's counter" in text
        and "cards.md" not in text
    )
    compiled = figures.steps[3]
    assert compiled.base.name == "1_amp" and compiled.over_before.value == 2.0
    uncounted = derive(model_run(100, 50, work=replace(MODEL, flops_per_step=0)))
    assert "counter does not know all FLOPs" in runs.printed(uncounted.run)[0]
    named = [row.get("made from") for row in table.main_rows(figures)]
    assert named == ["-", "0_fp32", "1_amp", "1_amp"], "all, where one is not made from the row above"
    assert "made from" not in table.main_rows(derive(model_run(100, 50, 25)))[0], (
        "each is made from the one above"
    )
    assert "my_model.py: 2,048 tokens a step" in page and "hardly learned" not in page
    assert sections.card(compiled).parts[0].code[-1] == ("+", "['AMP', 'compile']")
    run = model_run(100, 50, work=runs.workload(model="x.py", unit="samples"))
    assert "samples/s" in table.main_rows(derive(run))[0] and "tokens/s" not in runs.printed(run)[1]


def test_what_excludes_a_model(refused):
    from ladder.__main__ import main

    for word in ("--scaling", "--sweep", "--gpus=1", "--peers", "--batch-size=2", "--data=x.txt"):
        assert "--model" in refused(main, ["--model", "x.py", word])
    assert "give some of 0,1,2,3,4,5" in refused(main, ["--model", "x.py", "--only", "7"])
    assert "--from is for --model" in refused(main, ["--from", "amp"])
    seen = {"first": planned.FP32, "rows_in_file": []}
    rows = planned.of_model("m.py", ["--steps", "3"], "1,3", seen)
    assert [row.arguments for row in rows] == [
        ["1_amp", "m.py", "--steps", "3"],
        ["3_compile", "m.py", "--steps", "3"],
    ]
    assert [row.output for row in planned.repeat(rows, 2)][2:] == [
        "pass-2/1_amp.json",
        "pass-2/3_compile.json",
    ]


@pytest.mark.parametrize(
    ("own", "start", "first", "given"),
    [
        ("", None, "0_fp32", []),
        ("with torch.autocast('cpu', torch.bfloat16):", None, "0_as_it_is", ["1_amp"]),
        ("with torch.autocast('cpu', torch.bfloat16):", "amp", "0_as_it_is", ["1_amp"]),
        ("with torch.autocast('cpu', torch.bfloat16):", "fp32", None, "showed AMP, too. Leave --from out"),
        ("", "sdpa", None, "a step of my_model.py showed no AMP and no fused attention. Leave"),
        ("torch.set_float32_matmul_precision('high')\n    if True:", None, "0_as_it_is", []),
    ],
)
def test_a_run_begins_with_what_the_file_does_itself(own, start, first, given, arguments_of):
    loss = f"def loss(model, x):\n    {own or 'if True:'}\n        return model(x).square().mean()\n"
    text = f"{LINEAR}{BATCHES}\n\n{loss}"
    args = arguments_of(text, *(["--from", start] if start else []))
    if first is None:
        with pytest.raises(Skip, match=given):
            model_check.check(args)
        return
    model_check.check(args)
    assert (args.first, args.rows_in_file) == (first, given)
    names = [
        row.arguments[0] for row in planned.of_model("m", [], None, {"first": first, "rows_in_file": given})
    ]
    assert names == [first, *(name for name in list(planned.MODEL_ROWS)[2:] if name not in given)]


def test_the_reference_of_a_file_that_casts_itself_is_eager_fp32(arguments_of):
    model = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    program = program_of(model, optimizer, "model({batch}).square().mean()")
    program.contexts.append('torch.autocast("cpu", torch.bfloat16)')
    step = program.train_step()
    batch = (torch.randn(8, 16),)
    model(*batch).square().mean().backward()
    exact = sampling.samples_of("weight", model.weight)["weight"][1]
    states = [model_state.ModelState(model, optimizer, in_fp32=in_fp32) for in_fp32 in (True, False)]
    samples = [state.sample(step, batch) for state in states]
    assert (samples[0]["weight"][1] == exact).all() and (samples[1]["weight"][1] != exact).any()
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_step_that_cannot_be_observed_is_said(arguments_of, monkeypatch):
    def breaks(*_):
        raise RuntimeError("no profiler")

    monkeypatch.setattr(model_check.profile, "observe", breaks)
    for words, first, given in (((), "0_as_it_is", []), (("--from", "amp"), "0_as_it_is", ["1_amp"])):
        args = arguments_of(f"{LINEAR}{BATCHES}{SUM}", *words)
        model_check.check(args)
        assert (args.first, args.rows_in_file) == (first, given) and "not seen" in " ".join(args.remarks)


@pytest.mark.parametrize(
    ("count", "said"), [(2, ["batches() ends after 2: in 3 training steps they"]), (4, [])]
)
def test_batches_that_come_again_are_told(count, said, arguments_of):
    batches = f"def batches():\n    return (torch.randn(4, 16) for _ in range({count}))\n"
    args = arguments_of(f"{LINEAR}{batches}{SUM}", "--steps", "3")
    model_check.check(args)
    assert [text[: len(said[0])] for text in args.remarks if "come again" in text] == said


@pytest.mark.parametrize(
    ("own", "said", "given"),
    [
        ("    with torch.autocast('cpu', torch.float16):\n", "matmuls in float16: no row 1_amp", ["1_amp"]),
        ("    torch.compile(lambda x: x + 1)(batch)\n    if True:\n", "with compile in a part", []),
        (
            "    with torch.autocast('cpu', torch.bfloat16):\n        batch[:1] @ batch[:1].T\n    if 1:\n",
            "AMP in a part",
            [],
        ),
    ],
)
def test_what_a_file_does_in_a_part_leaves_the_row(own, said, given, arguments_of):
    loss = f"def loss(model, batch):\n{own}        return model(batch).square().mean()\n"
    args = arguments_of(f"{LINEAR}{BATCHES}{loss}")
    model_check.check(args)
    assert said in " ".join(args.remarks) and (args.first, args.rows_in_file) == ("0_as_it_is", given)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("    model.to(torch.bfloat16)\n    batch = batch.bfloat16()\n", "casts weight to bfloat16: cast"),
        ("    calls.append(1)\n    if len(calls) > 3: raise ValueError('fourth')\n", "ValueError: fourth"),
    ],
)
def test_an_error_of_the_observed_steps_is_the_file_s(line, said, arguments_of):
    loss = f"calls = []\ndef loss(model, batch):\n{line}    return model(batch).float().square().mean()\n"
    with pytest.raises(Skip, match=said):
        model_check.check(arguments_of(f"{LINEAR}{BATCHES}{loss}"))


def test_a_compiled_loss_or_most_of_the_weights_compiled_is_compiled():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    assert not model_check.compiles_most(model, None) and model_check.compiles_most(
        model, torch.compile(print)
    )
    model[0] = torch.compile(model[0])
    assert not model_check.compiles_most(model, None), "a third"
    model[1].compile()
    assert model_check.compiles_most(model, None)
    model.forward = torch.compiler.disable(model.forward)
    assert profile._compiled_modules(model) == 2, "what is kept from the compiler is not compiled"
    assert not model_check.compiles_most(nn.Linear(4, 4), torch.compiler.disable(print))


def test_a_folder_is_not_continued_from_another_start():
    plans = [
        {"seen": {"first": "0_fp32", "rows_in_file": given}, "code": {}, "rows": []}
        for given in ([], ["2_sdpa"])
    ]
    running.refuse_another(plans[0], plans[0], "f")
    with pytest.raises(Skip, match="--from, or what the file does itself"):
        running.refuse_another(*plans, "f")
