"""The chat of the page: what it refuses, keeps, copies, edits and asks again."""

import json

from page_helpers import ANSWER, EACH, SLOW, Page, Tab, until

WRONG = {
    "temperature": ("5", "Temperature must be a number from 0 to 2; it is 5."),
    "top_p": ("0", "Top-p must be a number above 0 and at most 1; it is 0."),
    "max_tokens": ("0", "Most tokens must be a whole number from 1 to 32768; it is 0."),
    "n": ("1.5", "Answers must be a whole number from 1 to 8; it is 1.5."),
    "seed": ("-3", "Seed must be a whole number from 0 to 9007199254740991; it is -3."),
    "key": ("schlüssel", "API key must be visible ASCII characters without spaces."),
}


def ask(tab: Tab, text: str) -> None:
    page = tab.page
    count = page.locator(".meta").count()
    page.fill("#prompt", text)
    page.keyboard.press("Enter")
    until(page, f"document.querySelectorAll('.meta').length === {count + 1}")
    settle(tab)


def settle(tab: Tab) -> None:
    until(tab.page, "!document.getElementById('send').disabled")


def set_answers(tab: Tab, count: int) -> None:
    tab.page.evaluate("document.getElementById('settings').open = true")
    tab.page.fill("#n", str(count))


def button(tab: Tab, name: str, place: int = -1) -> object:
    return tab.page.get_by_role("button", name=name, exact=True).nth(place)


def test_a_wrong_setting_is_named_shown_and_focused(browser: object, page_server: Page) -> None:
    tab = Tab(browser, page_server)
    page = tab.page
    for field, (value, reason) in WRONG.items():
        by_button, by_key = (lambda: page.click("#send"), lambda: page.press("#prompt", "Enter"))
        for send, text in ((by_button, "hello"), (by_key, "hello"), (by_button, "")):
            before = page.input_value(f"#{field}")
            page.evaluate("document.getElementById('settings').open = true")
            page.fill(f"#{field}", value)
            page.evaluate("document.getElementById('settings').open = false")
            page.fill("#prompt", text)
            send()
            until(page, f"document.activeElement.id === '{field}'")
            assert page.locator("#problem").inner_text() == reason
            assert page.is_visible(f"#{field}")
            assert page.get_attribute(f"#{field}", "aria-invalid") == "true"
            assert page.input_value("#prompt") == text
            page.fill(f"#{field}", before)
            assert page.text_content("#problem") == ""
            assert page.get_attribute(f"#{field}", "aria-invalid") is None
    # What is no number at all; the browser has no value of it.
    page.fill("#temperature", "")
    page.type("#temperature", "e")
    page.click("#send")
    assert page.locator("#problem").inner_text() == "Temperature must be a number."
    page.fill("#temperature", "0.7512")
    page.fill("#prompt", " ")
    page.click("#send")
    assert page.locator("#problem").inner_text() == "Write a message first."
    assert page_server.bodies == []
    ask(tab, "hello")
    assert page_server.bodies[0]["temperature"] == 0.7512
    assert tab.errors == []
    tab.close()


def test_a_setting_that_the_server_refuses_is_shown_and_focused(browser: object, page_server: Page) -> None:
    tab = Tab(browser, page_server)
    page = tab.page
    for text, field in (("too many", "max_tokens"), ("no key", "key")):
        page.evaluate("document.getElementById('settings').open = false")
        page.fill("#prompt", text)
        page.click("#send")
        until(page, f"document.activeElement.id === '{field}'")
        assert page.is_visible(f"#{field}")
        assert page.text_content("#problem") == page.text_content(".message.error")
        # What was not answered is not lost.
        assert page.input_value("#prompt") == text
        settle(tab)
    tab.close()


def test_escape_stops_an_answer_and_keeps_what_came(browser: object, page_server: Page) -> None:
    tab = Tab(browser, page_server)
    page = tab.page
    page.fill("#prompt", SLOW)
    page.keyboard.press("Enter")
    until(page, "document.querySelector('.message.assistant')?.textContent.includes('word word')")
    assert button(tab, "Regenerate").is_disabled()
    page.keyboard.press("Escape")
    settle(tab)
    assert page.text_content(".meta").startswith("stopped")
    ask(tab, "on")
    sent = page_server.bodies[1]["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "user"]
    assert sent[1]["content"].startswith("word word")
    assert tab.errors == []
    tab.close()


def test_a_message_can_be_edited_and_asked_again_from_there(browser: object, page_server: Page) -> None:
    tab = Tab(browser, page_server)
    page = tab.page
    for text in ("first", "second", "third"):
        ask(tab, text)
    button(tab, "Edit", 1).click()
    area = page.get_by_role("textbox", name="Edit your message")
    assert area.input_value() == "second"
    # The buttons of a message that is edited are away.
    assert page.get_by_role("button", name="Edit", exact=True).count() == 2
    page.keyboard.press("Escape")
    assert area.count() == 0
    assert page.locator(".message.user").all_inner_texts() == ["first", "second", "third"]
    button(tab, "Edit", 1).click()
    area.fill("changed")
    page.get_by_role("button", name="Save and rerun").click()
    until(page, "document.querySelectorAll('.meta').length === 2")
    settle(tab)
    assert page.locator(".message.user").all_inner_texts() == ["first", "changed"]
    contents = [message["content"] for message in page_server.bodies[-1]["messages"]]
    assert contents == ["first", ANSWER, "changed"]
    # An edit that the server refuses changes nothing.
    button(tab, "Edit", 0).click()
    area.fill("fail")
    page.keyboard.press("Enter")
    page.wait_for_selector(".message.error")
    assert page.locator(".message.user").all_inner_texts() == ["first", "changed"]
    assert page.locator(".meta").count() == 2
    tab.close()


def test_an_answer_can_be_made_again(browser: object, page_server: Page) -> None:
    tab = Tab(browser, page_server)
    ask(tab, "first")
    ask(tab, "second")
    button(tab, "Regenerate").click()
    until(tab.page, "document.querySelectorAll('.meta').length === 2")
    settle(tab)
    assert page_server.bodies[2] == page_server.bodies[1]
    button(tab, "Regenerate", 0).click()
    until(tab.page, "document.querySelectorAll('.meta').length === 1")
    settle(tab)
    assert page_server.bodies[3]["messages"] == [{"role": "user", "content": "first"}]
    assert tab.errors == []
    tab.close()


def test_the_chosen_answer_continues_the_conversation(browser: object, page_server: Page) -> None:
    tab = Tab(browser, page_server)
    page = tab.page
    set_answers(tab, 3)
    ask(tab, EACH)
    radios = page.get_by_role("radio")
    assert [radios.nth(place).is_checked() for place in range(3)] == [True, False, False]
    page.get_by_role("radio", name="Answer 2").check()
    page.keyboard.press("ArrowDown")
    assert radios.nth(2).is_checked()
    page.reload()
    until(page, "document.querySelectorAll('.meta').length === 1")
    assert page.get_by_role("radio", name="Answer 3").is_checked()
    ask(tab, "on")
    assert page_server.bodies[1]["messages"][1]["content"] == "number 3"
    assert page.get_by_role("radio", name="Answer 3").first.is_disabled()
    assert tab.errors == []
    tab.close()


def test_the_conversation_is_kept_until_it_is_cleared(browser: object, page_server: Page) -> None:
    tab = Tab(browser, page_server)
    page = tab.page
    page.evaluate("document.getElementById('settings').open = true")
    page.fill("#key", "a-secret-key")
    ask(tab, "first")
    before = page.locator("#messages").inner_text()
    page.reload()
    until(page, "document.querySelectorAll('.meta').length === 1")
    assert page.locator("#messages").inner_text() == before
    assert "a-secret-key" not in page.evaluate("JSON.stringify({...localStorage, ...sessionStorage})")
    ask(tab, "second")
    assert [message["content"] for message in page_server.bodies[-1]["messages"]] == [
        "first",
        ANSWER,
        "second",
    ]
    # A question whose answer the reload cuts off keeps what came of it.
    page.fill("#prompt", SLOW)
    page.keyboard.press("Enter")
    until(page, "[...document.querySelectorAll('.message')].at(-1).textContent.includes('word word')")
    page.reload()
    until(page, "document.querySelectorAll('.meta').length === 3")
    assert "word word" in page.locator(".message").last.inner_text()
    page.get_by_role("button", name="New chat").click()
    assert page.evaluate("localStorage.length") == 0
    page.reload()
    assert page.locator(".message").count() == 0
    assert tab.errors == []
    tab.close()


def test_what_is_kept_is_bounded(browser: object, page_server: Page) -> None:
    tab = Tab(browser, page_server)
    page = tab.page
    answer = {"text": "word " * 2_000, "thought": ""}
    turns = [
        {"role": "user", "text": "q"},
        {"role": "assistant", "answers": [answer], "chosen": 0, "note": ""},
    ]
    page.evaluate("text => localStorage.setItem('octavo.chat /', text)", json.dumps(turns * 70))
    page.reload()
    ask(tab, "last")
    kept = page.evaluate("localStorage.getItem('octavo.chat /')")
    assert len(kept) <= 400_000
    turns = json.loads(kept)
    assert turns[0]["role"] == "user"
    assert turns[-2] == {"role": "user", "text": "last"}
    tab.close()


def test_what_cannot_be_read_is_left_out(browser: object, page_server: Page) -> None:
    tab = Tab(browser, page_server)
    user, answers = {"role": "user", "text": "x"}, {"role": "assistant", "chosen": 0, "note": ""}
    broken = [
        "{",
        "null",
        "3",
        '"text"',
        "{}",
        "[null]",
        '[{"role": "user"}]',
        '[{"role": "system", "text": "x"}]',
    ]
    good = {"text": "x", "thought": ""}
    for turn in ({}, {"answers": []}, {"answers": [3]}, {"answers": [{"text": 3, "thought": ""}]}):
        broken.append(json.dumps([user, {**answers, **turn}]))
    for chosen in (1, -1, 0.5, "length", None):
        broken.append(json.dumps([user, {**answers, "answers": [good], "chosen": chosen}]))
    for kept in broken:
        tab.page.evaluate("text => localStorage.setItem('octavo.chat /', text)", kept)
        tab.page.reload()
        until(tab.page, "document.getElementById('state').textContent === 'ready'")
        assert tab.page.locator(".message").count() == 0, kept
    ask(tab, "hello")
    assert len(page_server.bodies[0]["messages"]) == 1
    assert tab.errors == []
    tab.close()


def test_messages_and_code_can_be_copied(browser: object, page_server: Page) -> None:
    tab = Tab(browser, page_server, permissions=["clipboard-read", "clipboard-write"])
    page = tab.page
    ask(tab, "first")
    clipboard = "navigator.clipboard.readText()"
    button(tab, "Copy", 0).click()
    until(page, f"{clipboard}.then(text => text === 'first')")
    assert page.text_content("#said") == "Copied"
    button(tab, "Copy").click()
    until(page, f"{clipboard}.then(text => text === {json.dumps(ANSWER)})")
    button(tab, "Copy code").click()
    until(page, f"{clipboard}.then(text => text === \"print('<b>')\")")
    # A page that is not of this machine and not over TLS has no clipboard of the new kind.
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    set_answers(tab, 2)
    ask(tab, EACH)
    button(tab, "Copy answer 2").click()
    until(page, "document.getElementById('said').textContent === 'Copied'")
    page.focus("#prompt")
    page.keyboard.press("Control+V")
    assert page.input_value("#prompt") == "number 2"
    assert tab.errors == []
    tab.close()
