"""Links of documents lead somewhere: files and folders exist, and pages have the headings that links name.

Markdown is parsed, so links in code do not count, while links by reference, pictures and tags of HTML do.
The network is not asked: a link to another site must only begin with https.
"""

import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PARSER = MarkdownIt("commonmark").enable("table")
OF_HTML = re.compile(r"""\b(?:href|src|srcset)\s*=\s*["']([^"']+)["']""")
ID_OF_HTML = re.compile(r"""\b(?:id|name)\s*=\s*["']([^"']+)["']""")


def flat(tokens: list[Token]) -> Iterator[Token]:
    for token in tokens:
        yield token
        yield from flat(token.children or [])


@cache
def links(text: str) -> list[str]:
    """Return what a page's links, pictures and tags lead to."""
    found = []
    for token in flat(PARSER.parse(text)):
        found += [str(token.attrs[name]) for name in ("href", "src") if name in token.attrs]
        found += OF_HTML.findall(token.content) if token.type in ("html_block", "html_inline") else []
    return found


def slug(heading: str) -> str:
    """Return the anchor of a heading, as GitHub and the site make it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@cache
def anchors(path: Path) -> frozenset[str]:
    """Return the anchors of a page: its headings', numbered where they repeat, and ids of tags."""
    tokens = PARSER.parse(path.read_text())
    found = set(ID_OF_HTML.findall(" ".join(t.content for t in flat(tokens) if t.type.startswith("html"))))
    for opening, inline in pairwise(tokens):
        if opening.type == "heading_open":
            # Code and text show; the marks of links and emphasis do not.
            name = slug(
                "".join(t.content for t in inline.children or [] if t.type in ("text", "code_inline"))
            )
            repeats = (f"{name}-{number}" if number else name for number in range(1000))
            found.add(next(each for each in repeats if each not in found))
    return frozenset(found)


def fault(page: Path, link: str) -> str | None:
    """Return what is wrong with a link of a page, or None."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        is_address = parts.scheme == "https" or parts.hostname == "127.0.0.1" or parts.scheme == "mailto"
        return None if is_address else "it must begin with https://"
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if parts.path.startswith("/") or not target.is_relative_to(ROOT):
        return "it leads out of the repository"
    if not target.exists():
        return "there is no such file"
    if not parts.fragment:
        return None
    if target.suffix != ".md":
        return "only pages have anchors"
    return None if unquote(parts.fragment) in anchors(target) else "the page has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    faults = {link: found for link in links(page.read_text()) if (found := fault(page, link))}
    assert faults == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](docs/gone.md)", "there is no such file"),
        ("[a](README.md#no-such-heading)", "the page has no such heading"),
        ("[a](#no-such-heading)", "the page has no such heading"),
        ("[a][b]\n\n[b]: docs/gone.md 'title'", "there is no such file"),
        ("![a](docs/images/gone.png)", "there is no such file"),
        ('<img src="docs/images/gone.png">', "there is no such file"),
        ('| a |\n|---|\n| <a href="gone.md">b</a> |', "there is no such file"),
        ("[a](LICENSE#line)", "only pages have anchors"),
        ("[a](../elsewhere.md)", "it leads out of the repository"),
        ("[a](/README.md)", "it leads out of the repository"),
        ("[a](http://example.com)", "it must begin with https://"),
        ("`[a](gone.md)`\n\n```\n[a](gone.md)\n```", None),
        ("[a](README.md#speed) [b](docs/) [c](https://example.com/x#y) [d](docs/design/step.md)", None),
    ],
)
def test_every_kind_of_broken_link_is_found(text: str, expected: str | None) -> None:
    faults = [found for link in links(text) if (found := fault(ROOT / "README.md", link))]
    assert faults == ([] if expected is None else [expected])


def test_anchors_are_those_of_github(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# GGUF: which *models*?\n\n## `--flag`, a_b & [c](d.md)\n\n## Speed\n\n## Speed\n\n<a id='x'></a>"
    )
    assert anchors(page) == {"gguf-which-models", "--flag-a_b--c", "speed", "speed-1", "x"}


def test_every_page_of_docs_is_reached_from_the_readme() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        paths = (urlsplit(link).path for link in links(page.read_text()) if "://" not in link)
        waiting += [(page.parent / unquote(path)).resolve() for path in paths if path]
    # The page of a package index has no links: they would break there.
    assert set(PAGES) - reached == {ROOT / "docs" / "package.md"}


def test_the_site_shows_every_page_but_single_decisions() -> None:
    shown = re.findall(r"^ +- (?:[\w ]+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    # The index of decisions and the log lead to the others; an index of packages has a page of its own.
    by_others = {
        "docs/package.md",
        *(page for page in names() if page.startswith(("docs/adr/", "docs/log/"))),
    }
    assert len(shown) == len(set(shown))
    assert set(shown) <= names()
    assert names() - set(shown) <= by_others


def names() -> set[str]:
    return {str(page.relative_to(ROOT)) for page in PAGES}
