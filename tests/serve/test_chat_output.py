"""Model turns taken apart: channels, calls, malformed calls, and any way the text may be cut."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemma_jax.chat_format import render_conversation
from gemma_jax.serve.chat_output import (
    SPECIAL_TOKENS,
    ChatOutputParser,
    Content,
    Reasoning,
    ToolArguments,
    ToolCallStart,
)
from gemma_jax.serve.tool_calls import MAX_DEPTH, MalformedCallError, parse_tool_call


def pieces_of(chunks, tools=True, thinking=True, **options):
    """What a parser gives for these chunks, neighbours of one kind joined."""
    numbers = itertools.count()
    parser = ChatOutputParser(tools, thinking, call_id=lambda: f"id{next(numbers)}", **options)
    pieces = [piece for chunk in chunks for piece in parser.push(chunk)] + parser.finish()
    joined = []
    for piece in pieces:
        if joined and type(piece) is type(joined[-1]) and isinstance(piece, Content | Reasoning):
            joined[-1] = type(piece)(joined[-1].text + piece.text)
        else:
            joined.append(piece)
    return joined


CALL = '<|tool_call>call:find{near:<|"|>Rome<|"|>,limit:3}<tool_call|>'
FOUND = '{"near": "Rome", "limit": 3}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello.", [Content("Hello.")]),
        ("<|channel>thought\nHm.\n<channel|>Yes.", [Reasoning("Hm."), Content("Yes.")]),
        ("<|channel>thought\n<channel|>Yes.", [Content("Yes.")]),
        ("<|channel>thought<channel|>Yes.", [Content("Yes.")]),
        ("<|channel>Hm.<channel|>Yes.", [Reasoning("Hm."), Content("Yes.")]),
        ("thought\nHm.<channel|>Yes.", [Reasoning("Hm."), Content("Yes.")]),
        ("thoughtful", [Content("thoughtful")]),
        ("<|channel>thought\nHm, ", [Reasoning("Hm,")]),
        ("<|channel>though", []),
        ("a < b <| c <|chan", [Content("a < b <| c <|chan")]),
        ("One<pad> two<turn|>", [Content("One two")]),
        (CALL, [ToolCallStart(0, "id0", "find"), ToolArguments(0, FOUND)]),
        (
            f"<|channel>thought\nLook.{CALL}{CALL}ok",
            [
                Reasoning("Look."),
                ToolCallStart(0, "id0", "find"),
                ToolArguments(0, FOUND),
                ToolCallStart(1, "id1", "find"),
                ToolArguments(1, FOUND),
                Content("ok"),
            ],
        ),
        ("<|tool_call>call:f{}", [ToolCallStart(0, "id0", "f"), ToolArguments(0, "{}")]),
        ("<|tool_call>call:f{a:", [Content("call:f{a:")]),
        ("<|tool_call>find Rome<tool_call|>.", [Content("find Rome.")]),
        (
            "<|tool_call>call:f{a:<|tool_call>call:g{}<tool_call|>",
            [Content("call:f{a:"), ToolCallStart(0, "id0", "g"), ToolArguments(0, "{}")],
        ),
    ],
)
def test_a_turn_is_taken_apart(text, expected):
    assert pieces_of([text]) == expected
    assert pieces_of(text) == expected  # a character at a time


def test_without_tools_a_call_is_content():
    assert pieces_of([CALL], tools=False) == [Content("call:find{near:Rome,limit:3}")]


def test_without_thinking_a_thought_needs_its_channel_token():
    assert pieces_of(["thought\nfor food"], thinking=False) == [Content("thought\nfor food")]
    text = "<|channel>thought\nHm.<channel|>Yes."
    assert pieces_of([text], thinking=False) == [Reasoning("Hm."), Content("Yes.")]


def test_special_tokens_stay_when_none_is_to_be_hidden():
    assert pieces_of(["a<pad>b"], hidden=()) == [Content("a<pad>b")]
    bad = "<|tool_call>call:f{a:<tool_call|>"
    assert pieces_of([bad], hidden=()) == [Content(bad)]


def test_text_is_given_out_as_soon_as_it_cannot_be_a_token():
    parser = ChatOutputParser(tools=True, thinking=False)
    assert parser.push("Hi <|ch") == [Content("Hi ")]
    assert parser.push("air") == [Content("<|chair")]
    assert parser.push("<|channel>thought\nWe") == [Reasoning("We")]
    assert parser.push(" are") == [Reasoning(" are")]


FRAGMENTS = st.sampled_from(
    [
        *SPECIAL_TOKENS,
        "thought\n",
        "thought",
        "call:f{",
        "a:1",
        "}",
        ",",
        "\n",
        " ",
        "<|",
        "é",
        CALL,
    ]
)
TURNS = st.lists(FRAGMENTS | st.text(max_size=4), max_size=12).map("".join)


@settings(max_examples=150, deadline=None)
@given(TURNS, st.lists(st.integers(0, 200), max_size=8), st.booleans(), st.booleans())
def test_any_way_to_cut_the_text_gives_the_same_pieces(text, cuts, tools, thinking):
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    chunks = [text[a:b] for a, b in itertools.pairwise(edges)]
    whole = pieces_of([text], tools, thinking)
    assert pieces_of(chunks, tools, thinking) == whole
    assert pieces_of(text, tools, thinking) == whole
    for piece in whole:
        if isinstance(piece, ToolArguments):
            json.loads(piece.text)


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ("call:f{}", "f", {}),
        (":f{a:1}", "f", {"a": 1}),
        ("call:f(a:1,b:x)", "f", {"a": 1, "b": "x"}),
        ("call: ns.f-1 { a : -1.5e3 , b : true,}", "ns.f-1", {"a": -1500.0, "b": True}),
        (
            'call:f{a:[1,<|"|>x, y<|"|>,{k:null}],b:{}}',
            "f",
            {"a": [1, "x, y", {"k": None}], "b": {}},
        ),
        ('call:f{a:"x\\n",<|"|>b c<|"|>:[]}', "f", {"a": "x\n", "b c": []}),
        ("call:f{when:next week (May)}", "f", {"when": "next week (May)"}),
        ("call:f{a:007,b:1.}", "f", {"a": "007", "b": "1."}),
        ('call:f{code:<|"|>if a {\n  "b": [1}\n<|"|>}', "f", {"code": 'if a {\n  "b": [1}\n'}),
    ],
)
def test_a_call_becomes_json(text, name, arguments):
    call = parse_tool_call(text)
    assert (call.name, json.loads(call.arguments)) == (name, arguments)


def test_numbers_keep_every_digit():
    call = parse_tool_call("call:f{a:123456789012345678901234567890,b:1e999}")
    assert call.arguments == '{"a": 123456789012345678901234567890, "b": 1e999}'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "f{}",
        "call:{}",
        "call:a b{}",
        "call:f",
        "call:f{",
        "call:f{a}",
        "call:f{a:}",
        "call:f{a:1",
        "call:f{a:1)",
        "call:f{a:1}}",
        "call:f{a:1} b",
        'call:f{a:<|"|>x}',
        'call:f{a:"x}',
        "call:f{a:[1}",
        "call:f{:1}",
        "call:f{a:1 b:2}" + "{",
        "call:f{a:" + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1) + "}",
        "call:f{a:" + "[" * 100_000,
    ],
)
def test_what_is_no_call_is_refused(text):
    with pytest.raises(MalformedCallError):
        parse_tool_call(text)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.from_regex(r"[a-z_]{1,6}", fullmatch=True), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.from_regex(r"[a-z_]{1,6}", fullmatch=True), VALUES, max_size=4))
def test_a_rendered_call_is_read_back(arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    text = render_conversation(
        messages, [], enable_thinking=False, add_generation_prompt=False, empty_thought=False
    )
    turn = text.removeprefix("<|turn>model\n").removesuffix("<|tool_response>")
    start, body = pieces_of([turn], hidden=())
    assert start.name == "f"
    assert json.loads(body.text) == arguments
