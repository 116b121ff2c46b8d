"""README, Dockerfile and the names used of Transformer Engine: promises that text makes."""

import ast
import itertools
import json
import re

import pytest
from conftest import ROOT, STEPS
from te_signatures import te_calls, te_name

from anatomy.__main__ import experiments
from report import documents, page, table
from report.load import read_run

README = (ROOT / "README.md").read_text()


def test_readme_is_short_and_its_table_is_fresh():
    assert len(README.splitlines()) <= 150
    for document, text in documents.documents(ROOT, ROOT / "docs" / "results").items():
        assert document.read_text() == text, f"stale: python -m report.documents ({document.name})"


def test_a_stale_table_is_noticed(tmp_path):
    copy = tmp_path / "README.md"
    copy.write_text(README.replace("| 0_baseline ", "| 0_changed ", 1))
    assert documents.between_markers(copy, documents.readme_table(ROOT / "docs" / "results")) != copy.read_text()


def test_readme_shows_every_diff_and_every_file():
    for before, after in itertools.pairwise(STEPS):
        assert f"diff {before}.py {after}.py" in README
    for path in [
        *ROOT.glob("common/*.py"),
        *ROOT.glob("ladder/*.py"),
        *ROOT.glob("report/*.py"),
        *ROOT.glob("peers/*.py"),
        *ROOT.glob("anatomy/*.py"),
        *ROOT.glob("*.sh"),
        ROOT / "Dockerfile",
        *ROOT.glob("[0-9]_*.py"),
    ]:
        if path.name != "__init__.py":
            assert path.name in README, path.name


def test_links_in_readme_lead_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


def test_requirements_are_pinned():
    for path in (ROOT / "requirements.txt", ROOT / "tests" / "requirements.txt"):
        for line in path.read_text().splitlines():
            assert re.match(r"[a-z0-9-]+==[\d.]+(;|$)", line), line
    dockerfile = (ROOT / "Dockerfile").read_text()
    for package in re.findall(r"(?:tabulate|msgspec|nvidia-ml-py|jinja2|matplotlib)==[\d.]+", dockerfile):
        assert package in (ROOT / "requirements.txt").read_text(), "the container gets the same release"


TE_VERSIONS = pytest.mark.parametrize("version", ["2.9.0", "2.20.2"])


def te_signatures(version: str) -> dict:
    return json.loads((ROOT / "tests" / "data" / f"te-{version}.json").read_text())


@TE_VERSIONS
@pytest.mark.parametrize("script, fewest", [(f"{STEPS[4]}.py", 6), ("peers/te_layer.py", 4)])
def test_transformer_engine_has_what_the_scripts_call(script, fewest, version):
    signatures, used = te_signatures(version), set()
    for name, call in te_calls(script):
        used.add(name)
        signature = signatures[name]
        assert len(call.args) <= len(signature["parameters"]), name
        accepted = {*signature["parameters"], *signature["keyword_only"]}
        assert {keyword.arg for keyword in call.keywords} <= accepted, name
    assert len(used) >= fewest, "modules, autocast, is_fp8_available and the recipe"


@TE_VERSIONS
def test_transformer_engine_has_what_step_4_passes_to_modules_and_sets_on_them(version):
    signatures, tree = te_signatures(version), ast.parse((ROOT / f"{STEPS[4]}.py").read_text())
    passed, assigned = set(), set()
    for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        stores = [(node.targets[0], node.value) for node in ast.walk(owner) if isinstance(node, ast.Assign)]
        modules = {
            ast.unparse(target): te_name(value.func, {}) for target, value in stores if isinstance(value, ast.Call)
        }
        for call in (node for node in ast.walk(owner) if isinstance(node, ast.Call)):
            if module := modules.get(ast.unparse(call.func)):
                passed |= {(module, keyword.arg) for keyword in call.keywords}
        for target, _ in stores:
            if isinstance(target, ast.Attribute) and (module := modules.get(ast.unparse(target.value))):
                assigned.add((module, target.attr))
    assert {name for _, name in passed} == {"is_first_microbatch"} and len(passed) == 3
    assert {name for _, name in assigned} == {"gemm_gelu_fusion"}
    assert all(name in signatures[module]["forward"] for module, name in passed)
    assert all(name in signatures[module]["attributes"] for module, name in assigned)


@pytest.mark.parametrize(
    "record", sorted((ROOT / "docs" / "results").glob("*/*/results.json")), ids=lambda p: p.parent.name
)
def test_recorded_reports_say_what_the_records_hold(record):
    markdown, html = ((record.parent / f"report.{kind}").read_text() for kind in ("md", "html"))
    run = read_run(record)
    assert table.render_markdown(run) == markdown, "stale: python -m report.documents"
    assert page.render(run) == html


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_links_in_docs_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_every_experiment_is_on_its_page():
    page = (ROOT / "docs" / "anatomy.md").read_text()
    for name in experiments():
        assert f"**`{name}`:" in page and f"h200/anatomy/{name}.md" in page
