"""The chat page in a real browser: streams, folds thoughts, shows the speed, stops."""

import chromium
import httpx
import pytest
from server_process import KEY, wait_for

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium.find() is None, reason="needs Chromium (Debian: chromium)"),
]

LAST_ANSWER = "[...document.querySelectorAll('article')].at(-1)"
NOTE = f"{LAST_ANSWER}.querySelector('.note').textContent"


@pytest.fixture(scope="module")
def page(server, tmp_path_factory):
    page = chromium.Page(tmp_path_factory.mktemp("chromium"), server.url + "/")
    yield page
    page.close()


def ask(page, text):
    page.run("document.getElementById('prompt').focus()")
    page.type(text)
    page.press_enter()


def test_the_page_asks_for_the_key_and_then_answers(page):
    page.wait("!document.getElementById('key-label').hidden")
    ask(page, "SHORT")
    assert "API key is missing or wrong" in page.wait(NOTE)
    page.run(f"const box = document.getElementById('key'); box.value = {KEY!r};")
    page.run("document.getElementById('key').dispatchEvent(new Event('change'))")
    page.wait("document.getElementById('model').textContent == 'nano'")
    ask(page, "SHORT")
    note = page.wait(NOTE)
    assert page.run(f"{LAST_ANSWER}.querySelector('.answer').textContent") == "Hello there, friend!"
    assert "tokens/s" in note
    assert note.endswith("(stop)")


def test_a_thought_is_folded(page):
    page.run("document.getElementById('thinking').click()")
    ask(page, "THINK")
    page.wait(NOTE)
    assert page.run(f"{LAST_ANSWER}.querySelector('details').open") is False
    assert page.run(f"{LAST_ANSWER}.querySelector('.thought').textContent") == "Let me see."
    assert page.run(f"{LAST_ANSWER}.querySelector('.answer').textContent") == "The answer is 4."
    assert "Let me see." not in page.text()


def test_stop_ends_the_answer_and_frees_its_place(page, server):
    ask(page, "tell me a story")
    page.wait(f"{LAST_ANSWER}.querySelector('.answer').textContent.length > 200")
    page.run("document.getElementById('stop').click()")
    note = page.wait(NOTE)
    assert note.endswith("(stopped)")
    assert not note.startswith("0 tokens")

    def is_idle():
        lines = httpx.get(server.url + "/metrics").text.splitlines()
        return 'gemma_jax:num_requests_running{model_name="nano"} 0.0' in lines

    wait_for(is_idle, seconds=5)


def test_text_of_the_model_is_text_and_nothing_is_loaded_from_elsewhere(page, server):
    ask(page, "<img src=x onerror=alert(1)> SHORT")
    page.wait(NOTE)
    assert page.run("document.querySelectorAll('main img').length") == 0
    loaded = page.run("performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert loaded
    assert all(name.startswith(server.url) for name in loaded)
    assert page.problems == []


def test_a_new_chat_is_empty(page):
    page.run("document.getElementById('reset').click()")
    assert page.run("document.getElementById('log').children.length") == 0
