"""The page's form: nothing is cut off at any width, and axe finds nothing wrong in any state."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from importlib.util import find_spec

import pytest
from page_helpers import HARD, WIDE, Page, Tab, until

# What is wider than the box that it is in, without a frame of its own that scrolls.
CUT_OFF = """() => [...document.querySelectorAll("body, body *")]
    .filter(element => !element.closest(".hidden, .skip, canvas") && element.clientWidth > 0)
    .filter(element => !element.closest(".scroll, textarea, input"))
    .filter(element => getComputedStyle(element).display !== "inline")
    .filter(element => element.scrollWidth > element.clientWidth + 1
        || element.getBoundingClientRect().right > innerWidth + 1)
    .map(element => `${element.outerHTML.slice(0, 80)}: ${element.scrollWidth} > ${element.clientWidth}`)"""
FRAMES_THAT_SCROLL = """() => [...document.querySelectorAll(".message .scroll")]
    .filter(element => element.scrollWidth > element.clientWidth).length"""


@contextmanager
def opened(browser: object, server: Page, **options: object) -> Iterator[Tab]:
    tab = Tab(browser, server, **options)
    yield tab
    assert (tab.errors, tab.elsewhere) == ([], [])
    tab.close()


def fill(tab: Tab) -> None:
    """Bring about all that can be wide: several answers, an edit, an error, the settings, the figures."""
    page = tab.page
    page.click("summary")
    page.fill("#n", "3")
    page.fill("#prompt", WIDE)
    page.click("#send")
    until(
        page, "document.querySelectorAll('.meta').length === 1 && !document.getElementById('send').disabled"
    )
    page.fill("#prompt", HARD)
    page.click("#send")
    until(
        page, "document.querySelectorAll('.meta').length === 2 && !document.getElementById('send').disabled"
    )
    page.fill("#temperature", "999999999999999999999999999")
    page.click("#send")
    until(page, "document.getElementById('problem').textContent")
    page.get_by_role("button", name="Edit", exact=True).first.click()
    page.evaluate(
        """text => {
            document.getElementById("race-figures").hidden = false;
            for (const element of document.querySelectorAll("main details")) element.open = true;
            for (const id of ["race-said", "race-problem", "race-note"])
                document.getElementById(id).textContent = text;
            for (const side of ["shared", "apart"]) {
                document.getElementById(`${side}-rate`).textContent = "1,234,567";
                document.getElementById(`${side}-computed`).textContent = "1,234,567,890";
                document.getElementById(`${side}-spread`).textContent = "1,234,567 to 1,345,678";
            }
        }""",
        "A sentence of some words that is longer than it was thought to be. " * 3,
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_cut_off_at_any_width(browser: object, page_server: Page, scheme: str) -> None:
    with opened(browser, page_server, color_scheme=scheme, viewport={"width": 1280, "height": 900}) as tab:
        fill(tab)
        for width in (320, 360, 375, 414, 768, 821, 1024, 1280, 1920):
            tab.page.set_viewport_size({"width": width, "height": 900})
            # The trees of the cache follow in the next frame.
            until(tab.page, f"document.documentElement.scrollWidth <= {width}")
            assert tab.page.evaluate(CUT_OFF) == [], width
            # Code and tables of each of the three answers move in frames of their own.
            assert tab.page.evaluate(FRAMES_THAT_SCROLL) >= 6


def violations(tab: Tab) -> list[str]:
    """What axe-core finds, of all its rules."""
    axe = files("axe_playwright_python").joinpath("axe.min.js").read_text()
    found = tab.page.evaluate(axe + "; axe.run()")["violations"]
    return [f"{rule['id']}: {node['html'][:200]}" for rule in found for node in rule["nodes"]]


@pytest.mark.skipif(
    find_spec("axe_playwright_python") is None, reason="axe-playwright-python is not installed"
)
@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 375)])
def test_axe_finds_nothing_in_any_state(browser: object, page_server: Page, scheme: str, width: int) -> None:
    options = {"color_scheme": scheme, "viewport": {"width": width, "height": 900}}
    with opened(browser, page_server, **options) as tab:
        page = tab.page
        assert violations(tab) == [], "empty"
        page.focus("#tree")
        assert violations(tab) == [], "tree"
        page.focus("#pool")
        assert violations(tab) == [], "pool"
        fill(tab)
        assert violations(tab) == [], "answers, an edit, a wrong setting and figures"
        page.keyboard.press("Escape")
        page.fill("#temperature", "1")
        page.fill("#prompt", "fail")
        page.click("#send")
        page.wait_for_selector(".message.error")
        assert violations(tab) == [], "error"
        # The browser itself says that a request was refused.
        tab.errors.clear()
        page.fill("#n", "1")
        page.fill("#prompt", "slow")
        page.click("#send")
        until(
            page, "document.querySelector('#messages article:last-child')?.textContent.includes('word word')"
        )
        assert violations(tab) == [], "an answer that comes"
        page.keyboard.press("Escape")
        until(page, "!document.getElementById('send').disabled")
