"""The page in a real browser: headless Chromium, without a network beyond this machine."""

import re
import time

import pytest
from page_helpers import ANSWER, SLOW, Page, Tab, until


def test_the_engine_is_painted_and_explained(browser: object, page_server: Page) -> None:
    tab = Tab(browser, page_server, viewport={"width": 1280, "height": 900})
    page = tab.page
    assert page.title() == "Octavo"
    assert page.text_content("#model") == "tiny"
    # Seven colours of sequences at least, frames and free blocks.
    assert tab.colours("pool") >= 8
    assert tab.colours("tree") >= 2
    # The first block of the system prompt: one block, eight readers.
    box = page.locator("#pool").bounding_box()
    page.mouse.move(box["x"] + 6, box["y"] + 6)
    assert "one block with 8 readers" in page.text_content("#pool-words")
    assert page.locator("#requests tr.lit").count() == 8
    page.mouse.move(box["x"] + box["width"] - 6, box["y"] + 40)
    tree = page.locator("#tree").bounding_box()
    page.mouse.move(tree["x"] + 8, tree["y"] + 8)
    assert "read by 8 sequences now" in page.text_content("#tree-words")
    assert "Lookups found it 3 times" in page.text_content("#tree-words")
    assert "512 blocks of 4 tokens" in page.get_attribute("#pool", "aria-label")
    until(page, "parseFloat(document.getElementById('rate').textContent) > 0")
    assert (tab.errors, tab.elsewhere) == ([], [])
    tab.close()


def test_it_can_be_walked_by_keyboard(browser: object, page_server: Page) -> None:
    tab = Tab(browser, page_server)
    page = tab.page
    page.focus("#pool")
    assert page.text_content("#pool-words").startswith("Block 0 is one block with 8 readers")
    page.keyboard.press("ArrowRight")
    assert page.text_content("#pool-words").startswith("Block 1 ")
    page.keyboard.press("End")
    assert page.text_content("#pool-words").startswith("Block 511 is free")
    page.focus("#tree")
    assert "A beginning of prompts" in page.text_content("#tree-words")
    page.keyboard.press("ArrowDown")
    assert "A continuation" in page.text_content("#tree-words")
    unnamed = page.evaluate(
        """[...document.querySelectorAll("button, input, textarea, canvas[role=img], [role=region]")]
            .filter(element => !(element.ariaLabel || element.labels?.length || element.textContent.trim()))
            .map(element => element.outerHTML)"""
    )
    assert unnamed == []
    tab.close()


@pytest.mark.parametrize("page_server", [5819], indirect=True)
def test_of_a_large_pool_blocks_in_use_are_shown(browser: object, page_server: Page) -> None:
    tab = Tab(browser, page_server, viewport={"width": 1280, "height": 900})
    page = tab.page
    assert "each square" not in page.text_content("#pool-note")
    page.focus("#pool")
    assert page.text_content("#pool-words").startswith("Block 0 is one block with 8 readers")
    page.keyboard.press("End")
    last = page.text_content("#pool-words")
    assert "belongs to sequence" in last or "readers" in last
    assert int(last.split()[1]) < 512
    button = page.get_by_role("button", name="Whole pool")
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    assert "each square: 1 of 3" in page.text_content("#pool-note")
    page.focus("#pool")
    page.keyboard.press("End")
    assert page.text_content("#pool-words").startswith("Block 5,817 is free")
    assert "It stands for 3 blocks." in page.text_content("#pool-words")
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    # People look for prefixes first.
    assert (
        page.evaluate(
            "document.getElementById('tree').compareDocumentPosition(document.getElementById('pool'))"
        )
        == 4
    )
    assert tab.errors == []
    tab.close()


def test_a_comparison_without_a_difference_shows_none(browser: object, page_server: Page) -> None:
    """This server shares nothing: it answers all six alike, whatever their salts."""
    tab = Tab(browser, page_server)
    page = tab.page
    page.get_by_role("button", name="One prefix, many questions").click()
    until(page, "!document.getElementById('race').disabled")
    assert page.text_content("#race-problem") == ""
    assert page.text_content("#shared-computed") == page.text_content("#apart-computed") == "192"
    rates = [float(page.text_content(f"#{side}-rate")) for side in ("shared", "apart")]
    said = page.text_content("#race-said")
    ratio = float(re.search(r"([0-9.]+) times the tokens/s", said).group(1))
    assert ratio == pytest.approx(rates[0] / rates[1], rel=0.1)
    assert ("no difference" in said) or abs(ratio - 1) > 0.04
    assert tab.errors == []
    tab.close()


def test_nothing_overflows_on_a_phone_in_the_dark(browser: object, page_server: Page) -> None:
    tab = Tab(
        browser,
        page_server,
        color_scheme="dark",
        viewport={"width": 360, "height": 740},
        has_touch=True,
        is_mobile=True,
    )
    page = tab.page
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(16, 21, 27)"
    assert tab.colours("pool") >= 8
    page.locator("#pool").tap(position={"x": 6, "y": 6})
    assert "readers" in page.text_content("#pool-words")
    assert tab.errors == []
    tab.close()


def test_the_chat_streams_and_what_a_model_writes_stays_text(browser: object, page_server: Page) -> None:
    tab = Tab(browser, page_server)
    page = tab.page
    page.click("summary")
    page.fill("#n", "2")
    page.fill("#seed", "5")
    page.fill("#system", "Be brief.")
    page.fill("#prompt", "What is a block?")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('.meta')?.textContent.includes('50 written')")
    body = page_server.bodies[0]
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is a block?"},
    ]
    assert (body["model"], body["n"], body["seed"], body["stream"]) == ("tiny", 2, 5, True)
    answer = page.locator(".message.assistant > div:nth-child(4)")
    assert answer.locator("h4").inner_text() == "Two kinds"
    assert answer.locator("strong").inner_text() == "block"
    assert answer.locator("li").all_inner_texts() == ["free", "cached"]
    assert answer.locator("pre code").inner_text() == "print('<b>')"
    assert answer.locator("a").evaluate_all("links => links.map(link => link.href)") == [
        "https://example.org/a"
    ]
    assert "<img src=x onerror=" in answer.inner_text()
    assert page.locator(".message img, .message script").count() == 0
    assert page.title() == "Octavo"
    page.fill("#prompt", "And then?")
    page.click("#send")
    until(page, "document.querySelectorAll('.meta').length === 2")
    until(page, "!document.getElementById('send').disabled")
    assert [message["role"] for message in page_server.bodies[1]["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    assert page_server.bodies[1]["messages"][2]["content"] == ANSWER
    assert (tab.errors, tab.elsewhere) == ([], [])
    tab.close()


def test_an_answer_can_be_stopped_and_an_error_is_told(browser: object, page_server: Page) -> None:
    tab = Tab(browser, page_server)
    page = tab.page
    page.fill("#prompt", SLOW)
    page.click("#send")
    until(page, "document.querySelector('.message.assistant').textContent.includes('word word')")
    assert page.is_disabled("#send")
    page.click("#stop")
    until(page, "document.querySelector('.meta').textContent.startsWith('stopped')")
    assert page.is_enabled("#send")
    deadline = time.monotonic() + 60
    while page_server.num_left == 0 and time.monotonic() < deadline:
        page.wait_for_timeout(50)
    assert page_server.num_left == 1
    assert tab.errors == []
    page.fill("#prompt", "fail")
    page.click("#send")
    page.wait_for_selector(".message.error")
    assert page.text_content(".message.error") == "temperature must be <b>lower</b>"
    assert page_server.bodies[1]["messages"][0]["content"] == SLOW
    page.click("#clear")
    assert page.locator(".message").count() == 0
    tab.close()
