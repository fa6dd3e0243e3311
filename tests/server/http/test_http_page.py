"""The page beside the real server: what "One prefix, many questions" shows is what the server did."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from http_helpers import LiveServer
from page_helpers import until

NAME = "One prefix, many questions"
TEXT = "The ferry leaves at nine, carries forty people and comes back at noon. " * 12


@contextmanager
def opened(browser: object, server: LiveServer) -> Iterator[object]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})  # type: ignore[attr-defined]
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(server.url)
    until(page, "document.getElementById('state').textContent === 'ready'")
    page.evaluate("for (const element of document.querySelectorAll('details')) element.open = true")
    yield page
    assert errors == []
    context.close()


def figure(page: object, name: str) -> float:
    return float(page.text_content(f"#{name}").split()[0].replace(",", ""))  # type: ignore[attr-defined]


def wait_for_the_end(page: object) -> int:
    """Return the most requests that ran or waited meanwhile."""
    deadline, most = time.monotonic() + 240, 0
    while page.is_disabled("#race"):  # type: ignore[attr-defined]
        assert time.monotonic() < deadline
        counts = page.text_content("#running").split(", ")  # type: ignore[attr-defined]
        most = max(most, sum(int(count) for count in counts if count.isdigit()))
        time.sleep(0.1)
    return most


def test_one_prefix_many_questions_shows_what_the_server_did(browser: object, real: LiveServer) -> None:
    bodies: list[dict] = []
    with opened(browser, real) as page:
        page.on(
            "request", lambda request: bodies.append(request.post_data_json) if request.post_data else None
        )
        page.fill("#race-text", TEXT)
        before = real.http.get("/metrics").text
        page.get_by_role("button", name=NAME, exact=True).click()
        assert page.get_by_role("button", name="Cancel").is_visible()
        most = wait_for_the_end(page)
        assert page.text_content("#race-problem") == ""
        # A browser opens six connections to a server, and the snapshots must not take one of these.
        assert most == 6
        # Six answers of 32 tokens for each leg; the first leg is short and not counted.
        assert [body["max_tokens"] for body in bodies] == [4] * 6 + [32] * (len(bodies) - 6)
        legs = [bodies[start : start + 6] for start in range(0, len(bodies), 6)]
        is_shared = [len({body["cache_salt"] for body in leg}) == 1 for leg in legs]
        # One that is not counted, then rounds in which either goes first by turns.
        assert is_shared[:3] == [True, True, False]
        assert (
            is_shared[3:]
            == [False, True, True, False, False, True, True, False, False, True][: len(legs) - 3]
        )
        assert len(legs) % 2 == 1
        # No salt is used again, so no leg finds what another one has left.
        assert len({body["cache_salt"] for body in bodies}) == sum(1 if one else 6 for one in is_shared)
        messages = [[body["messages"] for body in leg] for leg in legs]
        assert all(leg == messages[0] for leg in messages)
        length = tokens_of(real, messages[0])
        assert figure(page, "apart-computed") == sum(length)
        # What is shared is computed once: all but what follows the text, in blocks of 16 tokens.
        assert figure(page, "shared-computed") < max(length) + 6 * 48
        assert figure(page, "shared-rate") > 0
        assert figure(page, "apart-rate") > 0
        assert "times the tokens/s" in page.text_content("#race-said")
        assert page.locator("#race-answers li").count() == 6
        assert written(real, before) == 6 * (4 + 32 * (len(legs) - 1))


def tokens_of(server: LiveServer, prompts: list[list[dict]]) -> list[int]:
    return [server.http.post("/tokenize", json={"messages": one}).json()["count"] for one in prompts]


def written(server: LiveServer, before: str) -> int:
    def count(text: str) -> int:
        lines = [line for line in text.splitlines() if line.startswith("vllm:generation_tokens_total")]
        return int(float(lines[0].split()[-1]))

    return count(server.http.get("/metrics").text) - count(before)


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_a_comparison_can_be_cancelled(browser: object, real: LiveServer, how: str) -> None:
    with opened(browser, real) as page:
        page.get_by_role("button", name=NAME, exact=True).click()
        page.get_by_role("button", name="Cancel").click() if how == "button" else page.keyboard.press(
            "Escape"
        )
        wait_for_the_end(page)
        assert page.text_content("#race-said") == "Cancelled."
        assert page.locator("#race-cancel").is_hidden()
        assert page.evaluate("document.activeElement.id") == "race"


def test_a_comparison_says_why_it_cannot_run(browser: object, real: LiveServer) -> None:
    with opened(browser, real) as page:
        page.fill("#race-text", " ")
        page.click("#race")
        assert page.text_content("#race-problem") == "Put a text before the questions first."
        assert page.evaluate("document.activeElement.id") == "race-text"
        page.fill("#race-text", "far too long " * 20_000)
        assert page.text_content("#race-problem") == ""
        page.click("#race")
        wait_for_the_end(page)
        assert "8191" in page.text_content("#race-problem")
        assert not any(letter.isdigit() for letter in page.text_content("#shared-rate"))


def test_a_comparison_says_that_others_ran_meanwhile(browser: object, real: LiveServer) -> None:
    others = {"prompt": "One, two, three", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with opened(browser, real) as page, real.http.stream("POST", "/v1/completions", json=others) as answer:
        # Kept: httpx closes what nobody reads any more.
        lines = answer.iter_lines()
        assert next(lines).startswith("data")
        page.fill("#race-text", TEXT)
        page.click("#race")
        wait_for_the_end(page)
        assert "Other requests ran meanwhile" in page.text_content("#race-said")
