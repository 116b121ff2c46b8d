"""Step 4 and the peers on a CPU: with stand-ins for what needs a GPU, they do the work of the other steps."""

import subprocess
import sys

import pytest
import stand_ins
import torch
from conftest import ROOT, STEPS, arguments, built, load_script, load_step

from common import hardware


@pytest.fixture
def pretended(monkeypatch):
    """The stand-ins, and the scripts as they were before a peer changed them."""
    stand_ins.install(monkeypatch)
    for name in ("3_compile", "4_transformer_engine"):
        monkeypatch.setitem(sys.modules, name, load_step(name))


def losses(module, **overrides):
    """What `main` returns, and its losses."""
    args = arguments(STEPS[3], steps=4, **overrides)
    parts = module.main(args)
    return parts, [parts[0](*batch).item() for batch in args.batches()]


@pytest.fixture
def expected():
    run = built(STEPS[2], steps=4)
    return [run.train_step(*batch).item() for batch in run.batches]


def test_step_4_does_the_work_of_the_others(pretended, expected):
    stand_ins.ENTERED.clear()
    parts, found = losses(load_step(STEPS[4]))
    assert len(stand_ins.ENTERED) == 5, "FP8 is on in every step"
    assert found == pytest.approx(expected, rel=1e-4) and len(parts) == 4
    assert not parts[0](*arguments(STEPS[4]).batches()[0]).requires_grad


@pytest.mark.parametrize("name", ["te_layer", "torchao_float8", "transformers_gpt2"])
def test_a_peer_with_the_ladder_s_weights_does_its_work(name, pretended, expected):
    peer = load_script(ROOT / "peers" / f"{name}.py")
    parts, found = losses(peer)
    assert found == pytest.approx(expected, rel=1e-4)
    assert (len(parts) == 4) == (name != "transformers_gpt2"), "a Trainer launches its steps"
    if name == "torchao_float8":
        assert all(type(block.mlp.fc).__name__ == "Float8Linear" for block in parts[1].blocks)


def test_nanogpt_begins_from_the_seed_and_is_launched(pretended):
    peer = load_script(ROOT / "peers" / "nanogpt.py")
    parts, found = losses(peer)
    assert len(parts) == 3, "without capture"
    assert found[-1] < found[0] and found == losses(peer)[1] != losses(peer, seed=7)[1]


def test_the_record_of_nanogpt_names_its_commit(pretended, tmp_path, monkeypatch):
    """A folder in another checkout, as a download without git would be, is of no commit."""
    peer = load_script(ROOT / "peers" / "nanogpt.py")
    monkeypatch.setattr(hardware, "CLONES", {})
    monkeypatch.setattr(peer.nanogpt, "__file__", str(tmp_path / "model.py"), raising=False)
    losses(peer)

    def git(*words):
        identity = ["-c", "user.name=a", "-c", "user.email=b"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True, text=True
        ).stdout

    def version():
        return hardware.describe(torch.device("cpu")).versions["nanogpt"]

    assert version() == "unknown"
    git("init", "-q")
    (tmp_path / "model.py").write_text("a = 1")
    git("add", "model.py")
    git("commit", "-qm", "first")
    assert version() == git("rev-parse", "HEAD").strip()
    (tmp_path / "model.py").write_text("a = 2")
    assert version().endswith("-dirty")
    (tmp_path / "part").mkdir()
    monkeypatch.setitem(hardware.CLONES, "nanogpt", tmp_path / "part")
    assert version() == "unknown"


def test_a_missing_nanogpt_is_a_skipped_row(pretended, monkeypatch):
    monkeypatch.delitem(sys.modules, "model")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "nanoGPT" not in path])
    peer = load_script(ROOT / "peers" / "nanogpt.py")
    with pytest.raises(peer.Skip, match="PYTHONPATH must name a clone of karpathy/nanoGPT"):
        peer.main(arguments(STEPS[3]))
