"""Terms: each page links the first use of every term it has, once, and a page of its own holds their entries."""

import re

from conftest import ROOT

from report import documents, glossary

TERMS = "# Terms\n\n- **Host**: runs Python.\n- **Kernel (op)**: work of `one` *kind*. **Tensor core**: a unit.\n"
PAGES = documents.linked_pages(ROOT, {})


def test_the_first_use_in_prose_is_linked_and_no_other():
    prose = "See `host`, [the host](x.md) and two kernels on the HOST-side host."
    text = f"# A kernel\n\n{prose}\n\n```\nkernel\n```\nA kernel."
    made = glossary.linked(text, TERMS, "g.md")
    assert "two [kernels](g.md#kernel-op) on the HOST-side [host](g.md#host)." in made and made.count("](g.md#") == 2
    assert "# A kernel" in made and "`host`, [the host](x.md)" in made and made.endswith("\nA kernel.")


def test_pages_keep_what_they_say_and_links_are_made_anew():
    once = glossary.linked("A kernel on a host.", TERMS, "docs/glossary.md")
    earlier = once.replace("A [", "This kernel precedes a [")
    assert glossary.linked(once, TERMS, "docs/glossary.md") == once and glossary.unlinked(once) == "A kernel on a host."
    assert glossary.linked(earlier, TERMS, "docs/glossary.md").startswith("This [kernel](docs/glossary.md#kernel-op)")
    by_hand = "One [row](docs/glossary.md#host) and another row."
    assert glossary.linked(by_hand, TERMS + "- **Row**: a line.\n", "docs/glossary.md") == by_hand


def test_a_page_of_html_ends_with_the_entries_of_the_terms_that_it_links(monkeypatch, tmp_path):
    monkeypatch.setattr(glossary, "GLOSSARY", tmp_path / "glossary.md")
    glossary.GLOSSARY.write_text(glossary.anchored(TERMS))
    html = '<h1>A host</h1><p title="host">A <code>host</code> &lt;kernel&gt;</p><svg><p>host</p></svg><td>host</td>'
    made = glossary.with_terms(f"{html}\n{glossary.TERMS_HERE}")
    assert '<p title="host">A <code>host</code> &lt;<a class="term" href="#term-kernel-op">kernel</a>&gt;</p>' in made
    assert made.count('class="term"') == 1 and "runs Python" not in made, "only what is used"
    assert '<b id="term-kernel-op">Kernel (op)</b>: work of <code>one</code> <i>kind</i>.' in made
    assert glossary.with_terms(f"<p>Nothing.</p>{glossary.TERMS_HERE}") == "<p>Nothing.</p>"


def test_every_page_links_terms_and_every_link_leads_to_an_entry():
    entries = glossary.entries((ROOT / "docs" / "glossary.md").read_text())
    assert len(entries) > 140 and len(PAGES) > 40
    for path, text in PAGES.items():
        anchors = re.findall(r"glossary\.md#([^)]*)\)", text)
        assert set(anchors) <= set(entries), path.name
        assert anchors or path.name in ("glossary.md", "claims.md", "causes.md"), path.name
