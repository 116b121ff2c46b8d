"""The proof that rows do the same work: faults that losses hardly notice are seen in the gradients."""

import io
import json
import sys
import zipfile

import numpy as np
import pytest
import runs
import stand_ins
import torch
from conftest import ROOT, STEPS, arguments, built, load_script, load_step

from common import benchmark
from common import proof as sampling
from common.record import IN_TRAINING, Row, Settings
from ladder import patches
from report import ablations, doubts, proof, table
from report.derive import derive
from report.load import load


def sampled(module):
    """Samples of a script's `main`, from its initial weights."""
    args = arguments(STEPS[2])
    train_step, model, optimizer, *_ = module.main(args)
    return sampling.sample(train_step, optimizer, model, args.batches()[0])


@pytest.fixture(scope="module")
def first():
    return sampled(load_step(STEPS[0]))


def compared(first, other, ours=None, theirs=None):
    a, b = (runs.row("x", settings=runs.Settings(fp8_recipe=recipe)) for recipe in (ours, theirs))
    return proof.compare(a, first, b, other)


@pytest.mark.parametrize("step", STEPS[1:4])
def test_every_weight_of_a_step_has_the_gradient_of_step_0(step, first):
    found = compared(first, sampled(load_step(step)))
    assert found.paired == 1.0 and found.cosine > 0.9999 and found.weight in first


@pytest.mark.parametrize("fault", ["dead-mlp", "dead-mlp-all", "attention-without-its-mask"])
def test_a_fault_is_seen_in_the_gradients(fault, first, tmp_path):
    script = patches.write_script(fault, f"{STEPS[2]}.py", tmp_path)
    found = compared(first, sampled(load_script(script)))
    assert found.paired == 1.0 and found.cosine < 0.99 and proof.verdict(found) == "differs"


def test_weights_are_paired_by_their_values(first, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda work, **how: work)
    stand_ins.install(monkeypatch)
    for name in ("3_compile", "4_transformer_engine"):
        monkeypatch.setitem(sys.modules, name, load_step(name))
    other_names = compared(first, sampled(load_step(STEPS[4])))
    assert other_names.paired == 1.0 and other_names.cosine > 0.9999
    own_weights = compared(first, sampled(load_script(ROOT / "peers" / "nanogpt.py")))
    assert own_weights.paired < 0.9 and own_weights.cosine is None
    assert proof.verdict(own_weights) == "not proven"


def test_a_sample_leaves_the_step_as_it_is_and_its_places_are_of_the_size_alone():
    plain, other = built(STEPS[2]), built(STEPS[2])
    plain.train_step(*plain.batches[0])
    samples = sampling.sample(other.train_step, other.optimizer, other.model, other.batches[0])
    pairs = zip(plain.model.parameters(), other.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs) and not other.optimizer._optimizer_step_pre_hooks
    assert (samples["wte.weight"][0] != 0).all(), "of the weight, before its update"
    assert (sampling.places_of(1000) == sampling.places_of(1000)).all() and sampling.places_of(7).max() == 6


def test_a_matrix_without_numbers_does_not_cost_the_others_their_sample():
    model = torch.nn.ParameterDict({"full": torch.ones(2, 3), "empty": torch.ones(0, 3)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step():
        sum(weight.square().sum() for weight in model.values()).backward()
        optimizer.step()

    samples = sampling.sample(train_step, optimizer, model, ())
    assert {name.partition(" part ")[0] for name in samples} == {"full"}


def test_fp8s_scales_fit_the_initial_weights_again_before_gradients_are_sampled():
    plain, weights = built(STEPS[2]), []
    initial = benchmark.InitialState(plain.model, plain.optimizer)
    plain.train_step(*plain.batches[1])

    def train_step(*batch):
        weights.append(plain.model.wte.weight.detach().clone())
        return plain.train_step(*batch)

    parts = (train_step, plain.batches[0], initial)
    samples = benchmark.sample_gradients(*parts, in_fp8=True)
    anew = built(STEPS[2])
    assert len(weights) == 1 + benchmark.STEPS_TO_FIT_SCALES
    assert all(torch.equal(weight, anew.model.wte.weight) for weight in weights)
    of_anew = sampling.sample(anew.train_step, anew.optimizer, anew.model, anew.batches[0])
    assert all((samples[name] == of_anew[name]).all() for name in of_anew)
    weights.clear()
    benchmark.sample_gradients(*parts, in_fp8=False)
    assert len(weights) == 1, "without FP8 there are no scales"


@pytest.mark.parametrize("cosine", [1.0, 0.9995, 0.95, 0.5, -0.5])
def test_the_cosine_of_sketches_is_close_to_that_of_the_gradients(cosine, monkeypatch):
    monkeypatch.setattr(sampling, "CHUNK", 4 * sampling.NUMBERS)
    a, other = torch.randn(2, 100_003, generator=torch.Generator().manual_seed(0)).double()
    other -= (other @ a) / (a @ a) * a
    b = cosine * a / a.norm() + (1 - cosine**2) ** 0.5 * other / other.norm()
    assert 1 - of_sketches(a, b) == pytest.approx(1 - cosine, rel=0.2, abs=1e-6)


def of_sketches(a, b):
    return proof.cosine(sampling.sketch(a.flatten()).numpy(), sampling.sketch(b.flatten()).numpy())


def test_numbers_of_one_sign_and_of_every_chunk_count_in_a_sketch(monkeypatch):
    monkeypatch.setattr(sampling, "CHUNK", 4 * sampling.NUMBERS)
    a, b = torch.rand(2, 100_003, generator=torch.Generator().manual_seed(0))
    assert of_sketches(a, b) == pytest.approx(float(a @ b / a.norm() / b.norm()), abs=0.1)
    half_turned = torch.where(torch.arange(100_003) < 50_000, -a, a)
    assert of_sketches(a, half_turned) == pytest.approx(0, abs=0.15)


@pytest.mark.parametrize("width", [256, 768, 1024])
def test_a_heavy_column_does_not_decide_for_the_others(width):
    a, other = torch.randn(2, 600, width, generator=torch.Generator().manual_seed(0))
    a[:, 3] *= 100
    turned = a.clone()
    turned[:300, 3] = 100 * other[:300, 3]
    exact = proof.cosine(a.flatten().numpy(), turned.flatten().numpy())
    assert exact < 0.6 and of_sketches(a, turned) == pytest.approx(exact, abs=0.15)


def test_a_sketch_sees_every_number_and_weighs_the_rows_of_an_embedding_by_what_they_hold():
    numbers = 3 * sampling.NUMBERS + 7
    for place in (0, sampling.NUMBERS, numbers - 1):
        gradient = torch.zeros(numbers)
        gradient[place] = 2.0
        assert sampling.sketch(gradient).abs().sum() == 2.0
    gradient = torch.full((4096, 64), 1e-6)
    gradient[::1024] = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    rounded = gradient.to(torch.float8_e5m2).float()
    rounded[gradient == 1e-6] = -1e-6
    whole = proof.cosine(gradient.flatten().numpy(), rounded.flatten().numpy())
    assert whole > 0.99 and of_sketches(gradient, rounded) == pytest.approx(whole, abs=0.002)


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
    ("cosine", "ours", "theirs", "said"),
    [
        (0.9995, None, None, "agrees"),
        (0.998, None, None, "differs"),
        (0.97, None, "x", "agrees"),
        (0.97, "x", None, "agrees"),
        (0.9, "x", "x", "differs"),
    ],
)
def test_a_verdict_knows_what_fp8_rounds(cosine, ours, theirs, said):
    weight, gradient = np.ones(2, np.float32), np.array([1.0, 0.0], np.float32)
    turned = np.array([cosine, (1 - cosine**2) ** 0.5], np.float32)
    first, other = {"w": np.stack([weight, gradient])}, {"w": np.stack([weight, turned])}
    found = compared(first, other, ours, theirs)
    assert found.cosine == pytest.approx(cosine, abs=1e-4) and proof.verdict(found) == said
    assert proof.verdict(None) == ""


def put_samples(folder, step, gradient, output=None, **fields):
    """A row of a run folder, and samples of one weight and this gradient of it."""
    runs.put(folder, runs.row(step, **fields), output)
    weight = np.ones(sampling.NUMBERS, np.float32)
    sampling.write({"mlp.weight": np.stack([weight, gradient])}, folder / (output or f"{step}.json"))


GRADIENT = np.random.default_rng(0).normal(size=sampling.NUMBERS).astype(np.float32)
TURNED = np.where(np.arange(sampling.NUMBERS) < 100, -GRADIENT, GRADIENT)


def turned_by(share):
    """A sketch whose cosine with GRADIENT is 1 - 2 share, or nearly."""
    return np.where(np.arange(sampling.NUMBERS) < share * sampling.NUMBERS, -GRADIENT, GRADIENT)


@pytest.mark.parametrize(
    ("rounded", "in_fp8", "said"),
    [(0.0, False, "differs"), (0.02, False, "agrees"), (0.02, True, "not proven")],
    ids=["smooth", "router", "router in FP8"],
)
def test_where_rounding_alone_turns_a_gradient_the_limit_is_lower(rounded, in_fp8, said):
    weight = np.ones(sampling.NUMBERS, np.float32)
    sketches = {"gate": GRADIENT, "pass 1 gate": GRADIENT, "pass rounded gate": turned_by(rounded)}
    ours = {name: np.stack([weight, gradient]) for name, gradient in sketches.items()}
    other = Row("2_sdpa", settings=Settings(fp8_recipe="current" if in_fp8 else None))
    apart = turned_by(0.2 if in_fp8 else 0.05)
    theirs = {"gate": np.stack([weight, apart]), "pass 1 gate": np.stack([weight, apart])}
    assert proof.verdict(proof.compare(Row("0_fp32"), ours, other, theirs)) == said


@pytest.mark.parametrize(("zeros", "said"), [(1, "agrees"), (2, "not proven")])
def test_nothing_is_proven_where_most_gradients_are_zero(zeros, said):
    """As of a DiT, whose blocks begin with a gate of zero."""
    weight = np.ones(sampling.NUMBERS, np.float32)
    ours = {f"gate{k}": np.stack([(k + 2) * weight, 0 * GRADIENT]) for k in range(zeros)}
    ours["head"] = np.stack([weight, GRADIENT])
    assert proof.verdict(compared(ours, ours)) == said


def test_a_row_in_training_mode_is_not_compared_with_one_in_evaluation_mode():
    ours = {"w": np.stack([np.ones(sampling.NUMBERS, np.float32), GRADIENT])}
    rows = [Row("0_fp32"), Row("3_compile", note=f"{IN_TRAINING}, because evaluation fails (x)")]
    verdicts = [proof.verdict(proof.compare(a, ours, b, ours)) for a in rows for b in rows]
    assert verdicts == ["agrees", "not proven", "not proven", "agrees"]


def test_a_matrix_is_paired_with_a_whole_one_before_a_part_of_another():
    weight = np.ones(sampling.NUMBERS, np.float32)
    fused = {"qkv": np.stack([2 * weight, TURNED]), "qkv part 1/2": np.stack([weight, TURNED])}
    theirs = fused | {"proj": np.stack([weight, GRADIENT])}
    found = compared({"proj": np.stack([weight, GRADIENT])}, theirs)
    assert found.weight == "proj" and proof.verdict(found) == "agrees"


def test_variants_are_compared_with_the_script_that_they_change(tmp_path):
    outputs = [
        ("2_sdpa", "2_sdpa/2_sdpa.json"),
        ("2_sdpa", "right/2_sdpa.json"),
        ("2_sdpa", "wrong/2_sdpa.json"),
    ]
    folder = runs.plan(tmp_path, *outputs, kind="ablations")
    for (step, output), gradient in zip(outputs, (GRADIENT, GRADIENT, TURNED), strict=True):
        put_samples(folder, step, gradient, output)
    right, wrong = ablations.variant_rows(load(folder))
    assert (right["work"], wrong["work"]) == ("agrees", "differs")
    assert [run.problems for run in load(folder).runs.values()] == [[], [], []]
    runs.put(folder, runs.row("2_sdpa"), "wrong/2_sdpa.json", gpu_uuid="2")
    said = "rows differ in gpu_uuid: None in 2_sdpa; 2 in wrong"
    assert [run.problems for run in load(folder).runs.values()] == [[], [], [said]], "another card"


def test_where_the_first_row_has_no_time_the_next_one_is_compared_with_and_named(tmp_path):
    folder = runs.plan(tmp_path, *runs.STEPS[:3])
    runs.put(folder, runs.row(runs.STEPS[0], status="oom"))
    for step in runs.STEPS[1:3]:
        put_samples(folder, step, GRADIENT)
    (cells,) = table.proof_rows(derive(load(folder)))
    assert (cells["step"], cells["compared with"], cells["work"]) == ("2_sdpa", "1_cublas", "agrees")


def test_the_page_of_the_method_names_the_limits():
    method = (ROOT / "docs" / "method.md").read_text()
    assert f"**agrees** from {proof.AGREES} on" in method and f"the limit is {proof.AGREES_IN_FP8}" in method
    assert f"less than {100 * proof.PAIRED:.0f} % of the weights" in method


def test_an_observation_that_breaks_is_a_note_and_the_row_stands(monkeypatch):
    for name in ("profile.profile_steps", "proof.sample", "profile.observe"):
        monkeypatch.setattr(f"common.{name}", breaks)
    row = Row(STEPS[2])
    samples = benchmark.measure_row(load_step(STEPS[2]).main, arguments(STEPS[2], steps=1, profile=True), row)
    assert row.status == "ok" and samples == {}
    assert row.note == "not profiled: odd; not observed: odd; gradients not sampled: odd"


def breaks(*_):
    raise RuntimeError("odd")


def test_rows_of_a_run_are_compared_with_the_first_and_one_that_differs_is_named(tmp_path):
    folder = runs.plan(tmp_path, *runs.STEPS[:4])
    for step, gradient in zip(runs.STEPS, (GRADIENT, GRADIENT, TURNED), strict=False):
        put_samples(folder, step, gradient)
    runs.put(folder, runs.row(runs.STEPS[3]))
    (folder / f"{runs.STEPS[3]}.sketches.npz").write_bytes(b"PK damaged")
    figures = derive(load(folder))
    assert [line.same_work for line in figures.lines] == ["", "agrees", "differs", ""]
    cells = table.proof_rows(figures)[1]
    assert (
        cells["step"] == "2_sdpa"
        and cells["of the gradient of"] == "mlp.weight"
        and cells["work"] == "differs"
    )
    remark = next(remark for remark in doubts.remarks(figures) if "differs in its work" in remark)
    assert remark.startswith("2_sdpa: ") and "mlp.weight" in remark
    assert all(remark in shown for shown in runs.printed(load(folder))) and cells["agrees from"] == "0.999"


def archive_of(path, member, content):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)


def test_samples_that_could_harm_are_not_read_and_names_are_one_line(tmp_path):
    record, path = tmp_path / "0_x.json", tmp_path / "0_x.sketches.npz"
    archive_of(path, "a.txt", "hello")
    assert proof.read(record) == {}, "a member that is no array"
    zeros = io.BytesIO()
    np.save(zeros, np.zeros((2, 2**26), np.float32))
    archive_of(path, "fc.weight.npy", zeros.getvalue())
    assert path.stat().st_size < 2**20 and proof.read(record) == {}, "half a GiB in a small file"
    sampling.write({"\x1b[31mRED": np.ones((2, sampling.NUMBERS), np.float32)}, record)
    assert [*proof.read(record)] == [" [31mRED"]
    sampling.write({"again fc.weight": np.ones((2, 4), np.float32)}, record)
    assert proof.read(record) == {}, "samples of another length"


@pytest.mark.slow
def test_a_script_leaves_samples_next_to_its_record(tmp_path):
    record, main = tmp_path / "r.json", load_step(STEPS[1]).main
    assert benchmark.run_and_record(main, arguments(STEPS[1], output=record)) == 0
    samples = proof.read(record)
    assert len([name for name in samples if " part " not in name]) == 10 and all(
        part.shape == (2, sampling.NUMBERS) for part in samples.values()
    )
    assert "not sampled" not in (json.loads(record.read_text())["rows"][0]["note"] or "")
    assert benchmark.run_and_record(main, arguments(STEPS[1], output=record, cold=True)) == 0
    assert proof.read(record) == {}, "a cold row has no initial weights any more"
