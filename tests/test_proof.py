"""The proof that rows do the same work: faults that losses hardly notice are seen in the gradients."""

import json
import sys

import numpy as np
import pytest
import runs
import stand_ins
import torch
from conftest import FAST, ROOT, STEPS, arguments, built, load_script, load_step, run_python

from common import proof as sampling
from common.record import Proof
from ladder import patches
from report import documents, proof, table
from report.figures import derive
from report.load import load
from report.page import render


def sampled(module):
    """Samples of a script's `main`, from its initial weights."""
    args = arguments(STEPS[2])
    train_step, model, optimizer, *_ = module.main(args)
    return sampling.sample(train_step, optimizer, model, args.batches()[0])


@pytest.fixture(scope="module")
def first():
    return sampled(load_step(STEPS[0]))


@pytest.mark.parametrize("step", STEPS[1:4])
def test_every_weight_of_a_step_has_the_gradient_of_step_0(step, first, traced_only):
    found = proof.compare(first, sampled(load_step(step)))
    assert found.paired == 1.0 and found.cosine > 0.9999 and found.weight in first


@pytest.mark.parametrize("fault", ["dead-mlp", "dead-mlp-all", "attention-without-its-mask"])
def test_a_fault_is_seen_in_the_gradients(fault, first, tmp_path):
    script = patches.write_script(fault, f"{STEPS[2]}.py", tmp_path)
    row = runs.row(STEPS[2], proof=proof.compare(first, sampled(load_script(script))))
    assert row.proof.paired == 1.0 and row.proof.cosine < 0.99 and proof.verdict(row) == "differs"


def test_weights_are_paired_by_their_values(first, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda work, **how: work)
    stand_ins.install(monkeypatch)
    for name in ("3_compile", "4_transformer_engine"):
        monkeypatch.setitem(sys.modules, name, load_step(name))
    other_names = proof.compare(first, sampled(load_step(STEPS[4])))
    assert other_names.paired == 1.0 and other_names.cosine > 0.9999
    own_weights = proof.compare(first, sampled(load_script(ROOT / "peers" / "nanogpt.py")))
    assert own_weights.paired < 0.9 and own_weights.cosine is None


def test_a_sample_leaves_the_step_as_it_is_and_its_places_are_of_the_size_alone():
    run = built(STEPS[2])
    sampling.sample(run.train_step, run.optimizer, run.model, run.batches[0])
    assert not run.optimizer._optimizer_step_pre_hooks
    assert (sampling.places_of(1000) == sampling.places_of(1000)).all() and sampling.places_of(7).max() == 6


def test_cosines():
    up, right = np.array([0.0, 2.0], np.float32), np.array([3.0, 0.0], np.float32)
    assert [proof.cosine(up, up), proof.cosine(up, -up), proof.cosine(up, right)] == [1.0, -1.0, 0.0]
    nothing, infinite = 0 * up, np.array([0.0, np.inf], np.float32)
    assert [proof.cosine(nothing, nothing), proof.cosine(up, nothing), proof.cosine(up, infinite)] == [
        1,
        0,
        0,
    ]


@pytest.mark.parametrize(
    ("cosine", "recipe", "said"),
    [
        (0.9995, None, "agrees"),
        (0.998, None, "differs"),
        (0.97, "x", "agrees"),
        (0.9, "x", "differs"),
        (None, None, "not proven"),
    ],
)
def test_a_verdict_knows_what_fp8_rounds(cosine, recipe, said):
    row = runs.row(
        "x", settings=runs.Settings(fp8_recipe=recipe), proof=Proof(1.0 if cosine else 0.5, cosine, "w")
    )
    assert proof.verdict(row) == said
    assert proof.verdict(runs.row("x")) == ""


def test_rows_of_a_run_are_compared_with_the_first_and_one_that_differs_is_named(tmp_path):
    rng = np.random.default_rng(0)
    weight, gradient = rng.normal(size=(2, 512)).astype(np.float32)
    turned = np.where(np.arange(512) < 100, -gradient, gradient)
    folder = runs.plan(tmp_path, *runs.STEPS[:4])
    for step, its in zip(runs.STEPS, (gradient, gradient, turned), strict=False):
        runs.put(folder, runs.row(step))
        sampling.write({"mlp.weight": np.stack([weight, its])}, folder / f"{step}.json")
    runs.put(folder, runs.row(runs.STEPS[3]))
    (folder / f"{runs.STEPS[3]}.gradients.npz").write_bytes(b"PK damaged")
    figures = derive(load(folder))
    assert [line.same_work for line in figures.lines] == ["", "agrees", "differs", ""]
    cells = table.proof_rows(figures)[1]
    assert (
        cells["step"] == "2_sdpa"
        and cells["of the gradient of"] == "mlp.weight"
        and cells["work"] == "differs"
    )
    remark = next(remark for remark in figures.remarks if "differs in its work" in remark)
    assert remark.startswith("2_sdpa: ") and "mlp.weight" in remark
    assert remark in documents.for_terminal(figures, "x") and "differs" in render(figures)
    assert "The same work" in documents.as_markdown(figures)


def test_a_script_leaves_samples_next_to_its_record(tmp_path):
    record = tmp_path / "r.json"
    assert run_python(f"{STEPS[1]}.py", *FAST, "--output", record).returncode == 0
    samples = proof.read(record)
    assert len(samples) == 10 and all(part.shape == (2, 512) for part in samples.values())
    assert json.loads(record.read_text())["rows"][0]["note"] is None
    assert run_python(f"{STEPS[1]}.py", *FAST, "--cold", "--output", record).returncode == 0
    assert proof.read(record) == {}, "a cold row has no initial weights any more"
