"""README, docs, Dockerfile and the names used of Transformer Engine: promises that text makes."""

import difflib
import itertools
import json
import re

import pytest
from conftest import ROOT, STEPS
from te_signatures import SCRIPTS, te_calls
from test_budget import code_lines

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_readme_shows_a_diff_and_every_page():
    readme = (ROOT / "README.md").read_text()
    commands = [f"{before}.py {after}.py" for before, after in itertools.pairwise(STEPS)]
    assert any(f"diff -y -W 190 {scripts}" in readme for scripts in commands)
    assert all(f"docs/{path.name}" in readme for path in DOCUMENTS[1:])


def changed_lines(before, after):
    """The lines of two scripts that differ, with their sign."""
    texts = [(ROOT / f"{step}.py").read_text().splitlines() for step in (before, after)]
    return {
        line
        for line in difflib.unified_diff(*texts, lineterm="", n=0)
        if line[0] in "+-" and line[:3] not in ("+++", "---")
    }


@pytest.mark.parametrize(("document", "least"), [("README.md", 1), ("docs/steps.md", 4)])
def test_diffs_in_documents_are_those_of_the_scripts(document, least):
    every = [changed_lines(*pair) for pair in itertools.pairwise(STEPS)]
    blocks = re.findall(r"```diff\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    for block in blocks:
        lines = {line for line in block.splitlines() if line[0] in "+-"}
        assert any(lines <= changes for changes in every), [lines - changes for changes in every]
    assert len(blocks) >= least


def test_the_diff_in_readme_is_all_of_step_2():
    (block,) = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    old, new = (code_lines((ROOT / f"{step}.py").read_text()) for step in STEPS[1:3])
    code = {f"-{line}" for line in old if line not in new} | {f"+{line}" for line in new if line not in old}
    shown = {line.partition("  #")[0].rstrip() for line in block.splitlines()}
    assert shown == {line for line in code if "import" not in line}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target, anchor in re.findall(r"\]\(([^)#:]*)(#[^)]*)?\)", document.read_text()):
        path = document.parent / target if target else document
        assert path.exists(), target
        if anchor and path.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor[1:] in slugs, (target, anchor)


def test_requirements_are_pinned_and_the_container_gets_the_same_releases():
    both = (ROOT / "requirements.txt").read_text() + (ROOT / "tests" / "requirements.txt").read_text()
    assert not [line for line in both.splitlines() if not re.match(r"[a-z0-9-]+==[\d.]+(;|$)", line)]
    pins = re.findall(
        r"(?:tabulate|msgspec|nvidia-ml-py|jinja2|matplotlib)==[\d.]+", (ROOT / "Dockerfile").read_text()
    )
    assert pins and all(pin in (ROOT / "requirements.txt").read_text() for pin in pins)


@pytest.mark.parametrize("version", ["2.9.0", "2.20.2"])
@pytest.mark.parametrize(("script", "fewest"), [*zip(SCRIPTS, (4, 1, 1), strict=True)])
def test_transformer_engine_has_what_the_scripts_call(script, fewest, version):
    signatures = json.loads((ROOT / "tests" / "data" / f"te-{version}.json").read_text())
    calls = te_calls((ROOT / script).read_text())
    for name, call in calls:
        signature = signatures[name]
        assert len(call.args) <= len(signature["parameters"]), name
        accepted = {*signature["parameters"], *signature["keyword_only"]}
        assert {keyword.arg for keyword in call.keywords} <= accepted, name
    assert len({name for name, _ in calls}) >= fewest
