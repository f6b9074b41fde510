"""`gemma-jax chat` and ChatSession around a model that answers at once."""

import io

import pytest

from gemma_jax import cli
from gemma_jax.chat import ChatSession
from gemma_jax.errors import RequestError
from gemma_jax.sampling_params import SamplingParams

pytestmark = pytest.mark.fast


def type_lines(monkeypatch, *lines, terminal=False):
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    if terminal:
        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)


def test_session_remembers_its_turns(llm):
    session = ChatSession(llm, system="be kind")
    assert session.chat("hello") == "2 messages: hello "
    assert session.chat("again") == "4 messages: again "
    roles = [message["role"] for message in session.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant"]


def test_reset_keeps_the_system_message(llm):
    session = ChatSession(llm, system="be kind")
    session.chat("hello")
    session.reset()
    assert session.messages == [{"role": "system", "content": "be kind"}]


def test_stopped_answer_is_remembered_as_far_as_it_went(llm):
    session = ChatSession(llm)
    pieces = session.stream("hello")
    next(pieces)
    pieces.close()
    assert session.messages[-1] == {"role": "assistant", "content": "1 "}


def test_turn_that_failed_is_forgotten(llm):
    session = ChatSession(llm)
    session.chat("hello")
    before = session.messages
    with pytest.raises(RequestError, match="longer than the context"):
        session.chat("too long")
    assert session.messages == before


def test_session_answers_as_long_as_the_context_allows_by_default(llm):
    ChatSession(llm).chat("hello")
    params = llm.calls[0][1]
    assert params.max_tokens is None
    assert params.top_k == 64


@pytest.mark.parametrize("text", ["", " \n"])
def test_empty_message_is_refused(text, llm):
    with pytest.raises(RequestError, match="message is empty"):
        ChatSession(llm).chat(text)


def test_session_with_several_answers_a_turn_is_refused(llm):
    with pytest.raises(RequestError, match="n is 2"):
        ChatSession(llm, sampling_params=SamplingParams(n=2))


def test_changing_the_returned_messages_does_not_change_the_session(llm):
    session = ChatSession(llm)
    session.chat("hello")
    session.messages[0]["content"] = "x"
    session.messages.clear()
    assert session.messages[0]["content"] == "hello"


def test_pipe_is_answered_line_by_line_with_answers_alone_on_stdout(llm, monkeypatch, capsys):
    type_lines(monkeypatch, "hello", "", "again")
    assert cli.main(["chat"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "1 messages: hello \n3 messages: again \n"
    assert captured.err == ""


def test_reset_help_and_exit(llm, monkeypatch, capsys):
    type_lines(monkeypatch, "hello", "/reset", "again", "/help", "/exit", "never")
    assert cli.main(["chat", "--system", "s"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "2 messages: hello \n2 messages: again \n"
    assert "/reset " in captured.err


def test_ctrl_c_stops_the_answer_and_not_the_program(llm, monkeypatch, capsys):
    type_lines(monkeypatch, "one interrupt two", "again")
    assert cli.main(["chat"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "1 messages: one 3 messages: again \n"
    assert "(stopped)" in captured.err


def test_ctrl_c_at_the_prompt_drops_the_line_and_ctrl_d_leaves(llm, monkeypatch, capsys):
    events = iter([KeyboardInterrupt, "hello", EOFError])

    def scripted(prompt):
        event = next(events)
        if isinstance(event, str):
            return event
        raise event

    type_lines(monkeypatch, terminal=True)
    monkeypatch.setattr("builtins.input", scripted)
    assert cli.main(["chat"]) == 0
    assert "1 messages: hello" in capsys.readouterr().out


@pytest.mark.parametrize("line", ["too long", "/rest"])
def test_failed_turn_of_a_pipe_exits_with_1_after_the_others(line, llm, monkeypatch, capsys):
    type_lines(monkeypatch, line, "hello")
    assert cli.main(["chat"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "1 messages: hello \n"
    assert captured.err != ""
