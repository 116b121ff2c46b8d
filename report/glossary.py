"""The terms of docs/glossary.md, linked where a page first uses them: in Markdown, and in report.html."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from markupsafe import escape

GLOSSARY = Path(__file__).resolve().parent.parent / "docs" / "glossary.md"
BOLD = re.compile(r"\*\*(.+?)\*\*")
LINK = re.compile(r"\[([^]]*)\]\([^()\s]*glossary\.md#[^()\s]*\)")
NOT_PROSE = re.compile(r"(`[^`]*`|!?\[[^]]*\]\([^)]*\)|<[^>]*>|https?://\S+)")
NOT_LINES = ("#", "|", "```", "<", "    ")
TAG = re.compile(r"(<(/?)(\w+)[^>]*>)")
LINKED_IN, NOT_IN = {"p", "li", "figcaption"}, {"a", "code", "nav", "samp", "svg"}  # elements of a page
TERMS_HERE = "<!-- terms -->"
# Prose also uses these words in another sense: they are linked by hand, where they mean the term.
ORDINARY = {"pass", "passes", "record", "records", "row", "rows", "slice", "step", "steps", "transformers"}


def anchor(term: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", term.lower()).strip("-")


def names(term: str) -> list[str]:
    """The words of one bold term: 'Quartiles, p25 and p75' has three, 'Multiprocessor (SM)' two."""
    return [name.strip("` ") for name in re.split(r", | and | \((?:also )?|\)", term) if name.strip("` ")]


def entries(text: str) -> dict[str, str]:
    """Anchor of each term -> its entry, a line of Markdown; the entry of several terms stands for each of them."""
    lines = [line for line in text.splitlines() if line.startswith("- ")]
    return {anchor(term): line[2:] for line in lines for term in BOLD.findall(line)}


def anchored(text: str) -> str:
    """The glossary's own text, with an anchor before each term of its lists."""

    def add(found: re.Match) -> str:
        return f'<a id="{anchor(found[1])}"></a>**{found[1]}**'

    lines = unanchored(text).split("\n")
    return "\n".join(BOLD.sub(add, line) if line.startswith("- ") else line for line in lines)


def unanchored(text: str) -> str:
    return re.sub(r'<a id="[^"]*"></a>', "", text)


class Linker:
    """Links the first use of each term of the glossary, over all the texts that it is given in turn."""

    def __init__(self, glossary: str, link: Callable[[str, str], str]):
        self.link, self.used = link, []  # anchors, in the order of first use
        terms = {name: anchor(term) for line in glossary.splitlines() if line.startswith("- ")
                 for term in BOLD.findall(line) for name in names(term)}  # fmt: skip
        self.anchors = {name if name.isupper() else name.lower(): at for name, at in terms.items()}
        longest_first = sorted(terms, key=len, reverse=True)
        words = "|".join(re.escape(n) if n.isupper() else f"(?i:{re.escape(n)})" for n in longest_first)
        self.pattern = re.compile(rf"(?<![\w.*/-])({words})(s?)(?![\w*/-]|\.\w)")

    def __call__(self, text: str) -> str:
        return self.pattern.sub(self._first, text)

    def _first(self, found: re.Match) -> str:
        at = self.anchors.get(found[1]) or self.anchors[found[1].lower()]
        if at in self.used or found[0].lower() in ORDINARY:
            return found[0]
        self.used.append(at)
        return self.link(found[0], at)


def linked(text: str, glossary: str, address: str) -> str:
    """A page of Markdown with each term linked where its prose first uses it. Earlier links are made anew."""
    link, fenced, lines = Linker(glossary, lambda word, at: f"[{word}]({address}#{at})"), False, []
    for line in unlinked(text).split("\n"):
        fenced ^= line.lstrip().startswith("```")
        if not fenced and not line.startswith(NOT_LINES):
            parts = NOT_PROSE.split(line)
            line = "".join(part if k % 2 else link(part) for k, part in enumerate(parts))
        lines.append(line)
    return "\n".join(lines)


def unlinked(text: str) -> str:
    """A page of Markdown without its links to terms, but those that were made by hand."""
    return LINK.sub(lambda found: found[0] if found[1].lower() in ORDINARY else found[1], text)


def with_terms(html: str) -> str:
    """A page of HTML with each term linked where a paragraph, list or caption first uses it, and their entries at its
    end, in place of TERMS_HERE. Raises OSError without the glossary."""
    glossary = GLOSSARY.read_text(encoding="utf-8")
    link = Linker(glossary, lambda word, at: f'<a class="term" href="#term-{at}">{word}</a>')
    pieces, inside = TAG.split(html), []  # text, then tag, slash and name, and so on
    for k in range(0, len(pieces) - 4, 4):
        if inside and LINKED_IN.intersection(inside) and not NOT_IN.intersection(inside):
            pieces[k] = link(pieces[k])
        _, closes, name = pieces[k + 1 : k + 4]
        if closes and name in inside:
            del inside[len(inside) - 1 - inside[::-1].index(name) :]
        elif not closes and name in LINKED_IN | NOT_IN:
            inside.append(name)
    page = "".join(piece for k, piece in enumerate(pieces) if k % 4 < 2)
    return page.replace(TERMS_HERE, _definitions(glossary, link.used))


def _definitions(glossary: str, used: list[str]) -> str:
    """The section of a page that holds the entries of these terms, each entry once, as the glossary orders them."""
    shown = dict.fromkeys(entry for at, entry in entries(glossary).items() if at in used)
    paragraphs = "".join(f"<p>{_html(entry)}</p>" for entry in shown)
    return f'<section id="terms"><h2>Terms</h2>{paragraphs}</section>' if shown else ""


def _html(entry: str) -> str:
    """One entry of the glossary as HTML; its terms have the ids that links lead to."""
    text = BOLD.sub(lambda found: f'<b id="term-{anchor(found[1])}">{found[1]}</b>', escape(unanchored(entry)))
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", re.sub(r"[*]([^*]+)[*]", r"<i>\1</i>", text))
