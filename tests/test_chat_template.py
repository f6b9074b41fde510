"""Chat rendering: every rule of the built-in format, and templates run as transformers does."""

import json

import pytest

from gemma_jax.chat_template import load_chat_template, render_chat
from gemma_jax.errors import CheckpointError, ConfigError, RequestError, UnsupportedError

USER = {"role": "user", "content": "Hi"}
CALL = {"id": "c1", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
CALLING = {"role": "assistant", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "15 C"}
CALL_TEXT = '<|tool_call>call:weather{city:<|"|>Bern<|"|>}<tool_call|>'
RESULT_TEXT = '<|tool_response>response:weather{value:<|"|>15 C<|"|>}<tool_response|>'
USER_TEXT = "<bos><|turn>user\nHi<turn|>\n"


def test_a_user_turn_is_followed_by_the_opening_of_the_models_turn():
    assert render_chat([USER]) == "<bos><|turn>user\nHi<turn|>\n<|turn>model\n"


def test_without_generation_prompt_the_text_ends_with_the_last_turn():
    assert render_chat([USER], add_generation_prompt=False) == USER_TEXT


@pytest.mark.parametrize("role", ["assistant", "model"])
def test_assistant_and_model_are_the_model_role_and_content_is_trimmed(role):
    messages = [{"role": "user", "content": " Hi \n"}, {"role": role, "content": "\nHello. "}, USER]
    assert render_chat(messages) == (
        "<bos><|turn>user\nHi<turn|>\n<|turn>model\nHello.<turn|>\n"
        "<|turn>user\nHi<turn|>\n<|turn>model\n"
    )


@pytest.mark.parametrize("role", ["system", "developer"])
def test_system_and_developer_text_make_a_system_turn(role):
    assert render_chat([{"role": role, "content": " Be brief. "}, USER]) == (
        "<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\n"
    )


def test_a_later_developer_message_is_a_system_turn_too():
    messages = [USER, {"role": "developer", "content": "In French."}, USER]
    assert render_chat(messages, add_generation_prompt=False) == (
        "<bos><|turn>user\nHi<turn|>\n<|turn>system\nIn French.<turn|>\n<|turn>user\nHi<turn|>\n"
    )


def test_the_system_turn_holds_think_then_text_then_tools():
    tools = [{"type": "function", "function": {"name": n, "description": "d"}} for n in ("f", "g")]
    messages = [{"role": "system", "content": "S"}, USER]
    assert render_chat(messages, tools, enable_thinking=True).startswith(
        "<bos><|turn>system\n<|think|>\nS"
        '<|tool>declaration:f{description:<|"|>d<|"|>}<tool|>'
        '<|tool>declaration:g{description:<|"|>d<|"|>}<tool|><turn|>\n<|turn>user\n'
    )


def test_thinking_or_tools_alone_make_a_system_turn():
    assert render_chat([USER], enable_thinking=True) == (
        "<bos><|turn>system\n<|think|>\n<turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\n"
    )
    assert render_chat([USER], [{"name": "f", "description": "d"}]).startswith(
        '<bos><|turn>system\n<|tool>declaration:f{description:<|"|>d<|"|>}<tool|><turn|>\n'
    )


def test_an_empty_thought_is_appended_only_when_asked_and_not_thinking():
    assert render_chat([USER], empty_thought=True).endswith(
        "<|turn>model\n<|channel>thought\n<channel|>"
    )
    assert render_chat([USER], empty_thought=True, enable_thinking=True).endswith("<|turn>model\n")
    assert render_chat([USER], empty_thought=True, add_generation_prompt=False) == USER_TEXT
    assert render_chat([USER, CALLING, RESULT], empty_thought=True).endswith("<tool_response|>")


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        ("<|channel>thought\nHm.<channel|>Hello.", "Hello."),
        ("A<|channel>thought\nx<channel|>B<|channel>thought\ny<channel|> ", "AB"),
        ("Hello.<|channel>thought\nnever closed", "Hello."),
    ],
)
def test_history_drops_thoughts_from_model_turns(answer, kept):
    messages = [USER, {"role": "assistant", "content": answer, "reasoning": "Hm."}, USER]
    assert f"<|turn>model\n{kept}<turn|>\n<|turn>user" in render_chat(messages)


def test_a_users_own_channel_text_is_kept():
    text = "what is <|channel>thought<channel|>?"
    assert text in render_chat([{"role": "user", "content": text}])


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_stays_on_tool_calls_after_the_last_user_message(field):
    calling = {**CALLING, field: "Look it up."}
    kept = f"<|turn>model\n<|channel>thought\nLook it up.\n<channel|>{CALL_TEXT}{RESULT_TEXT}"
    assert render_chat([USER, calling, RESULT]) == USER_TEXT + kept
    later = render_chat([USER, calling, RESULT, {"role": "assistant", "content": "15 C."}, USER])
    assert "Look it up." not in later


def test_reasoning_without_tool_calls_is_dropped():
    messages = [USER, {"role": "assistant", "content": "Hello.", "reasoning": "Greet."}]
    assert "Greet." not in render_chat(messages, add_generation_prompt=False)


def test_the_model_continues_its_turn_after_tool_results():
    assert render_chat([USER, CALLING, RESULT]) == (
        f"{USER_TEXT}<|turn>model\n{CALL_TEXT}{RESULT_TEXT}"
    )
    assert render_chat(
        [USER, CALLING, RESULT, {"role": "assistant", "content": "It is 15 C."}]
    ) == (f"{USER_TEXT}<|turn>model\n{CALL_TEXT}{RESULT_TEXT}It is 15 C.<turn|>\n<|turn>model\n")


def test_a_second_round_of_calls_stays_in_the_same_turn():
    assert render_chat([USER, CALLING, RESULT, CALLING, RESULT]) == (
        f"{USER_TEXT}<|turn>model\n{CALL_TEXT}{RESULT_TEXT}{CALL_TEXT}{RESULT_TEXT}"
    )


def test_calls_without_results_end_in_an_open_tool_response():
    assert render_chat([USER, CALLING]) == (f"{USER_TEXT}<|turn>model\n{CALL_TEXT}<|tool_response>")


def test_results_that_a_user_turn_follows_close_the_models_turn():
    assert render_chat([USER, CALLING, RESULT, USER]) == (
        f"{USER_TEXT}<|turn>model\n{CALL_TEXT}{RESULT_TEXT}<turn|>\n"
        "<|turn>user\nHi<turn|>\n<|turn>model\n"
    )


def test_content_beside_tool_calls_comes_after_their_results():
    calling = {**CALLING, "content": "Here:"}
    assert render_chat([USER, calling, RESULT]) == (
        f"{USER_TEXT}<|turn>model\n{CALL_TEXT}{RESULT_TEXT}Here:<turn|>\n<|turn>model\n"
    )


def test_consecutive_assistant_messages_are_one_turn():
    messages = [
        USER,
        {"role": "assistant", "content": "One."},
        {"role": "assistant", "content": "Two."},
    ]
    assert render_chat(messages, add_generation_prompt=False) == (
        f"{USER_TEXT}<|turn>model\nOne.Two.<turn|>\n"
    )


def test_text_parts_are_trimmed_and_joined():
    parts = [{"type": "text", "text": " a "}, {"type": "text", "text": "b"}]
    messages = [{"role": r, "content": parts} for r in ("system", "user", "assistant")]
    assert render_chat(messages, add_generation_prompt=False) == (
        "<bos><|turn>system\na b<turn|>\n<|turn>user\nab<turn|>\n<|turn>model\nab<turn|>\n"
    )


# --- values, calls and results --------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x", '<|"|>x<|"|>'),
        ('a "quoted" {x}', '<|"|>a "quoted" {x}<|"|>'),
        ("", '<|"|><|"|>'),
        (True, "true"),
        (False, "false"),
        (3, "3"),
        (-1.5, "-1.5"),
        (None, "null"),
        ([1, "a", [True]], '[1,<|"|>a<|"|>,[true]]'),
        ({"b": 1, "A": {"d": [], "c": "x"}}, '{A:{c:<|"|>x<|"|>,d:[]},b:1}'),
    ],
)
def test_value_syntax(value, text):
    call = {"function": {"name": "f", "arguments": {"k": value}}}
    rendered = render_chat([USER, {"role": "assistant", "tool_calls": [call]}])
    assert f"<|tool_call>call:f{{k:{text}}}<tool_call|>" in rendered


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"b": 1, "A": "x"}', '{A:<|"|>x<|"|>,b:1}'),
        ({"b": 1, "A": "x"}, '{A:<|"|>x<|"|>,b:1}'),
        ("", "{}"),
        (None, "{}"),
    ],
)
def test_arguments_may_be_a_mapping_or_json_text(arguments, text):
    call = {"function": {"name": "f", "arguments": arguments}}
    rendered = render_chat([USER, {"role": "assistant", "tool_calls": [call]}])
    assert f"<|tool_call>call:f{text}<tool_call|>" in rendered


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("15 C", '{value:<|"|>15 C<|"|>}'),
        ({"unit": "C", "Now": 15}, '{Now:15,unit:<|"|>C<|"|>}'),
        (
            [{"type": "text", "text": "15 "}, {"type": "text", "text": "C"}],
            '{value:<|"|>15 C<|"|>}',
        ),
        (15, "{value:15}"),
        (None, "{value:null}"),
    ],
)
def test_a_result_that_is_no_map_becomes_a_value(content, text):
    rendered = render_chat([USER, CALLING, {**RESULT, "content": content}])
    assert rendered.endswith(f"<|tool_response>response:weather{text}<tool_response|>")


def test_results_are_named_by_call_id_then_name_then_order():
    calls = [
        {"id": i, "function": {"name": n, "arguments": {}}} for i, n in (("1", "f"), ("2", "g"))
    ]
    messages = [
        USER,
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "2", "content": "second"},
        {"role": "tool", "name": "named", "content": "by name"},
    ]
    rendered = render_chat(messages)
    assert 'response:g{value:<|"|>second<|"|>}' in rendered
    assert 'response:named{value:<|"|>by name<|"|>}' in rendered
    messages[2:] = [{"role": "tool", "content": "a"}, {"role": "tool", "content": "b"}]
    rendered = render_chat(messages)
    assert 'response:f{value:<|"|>a<|"|>}' in rendered
    assert 'response:g{value:<|"|>b<|"|>}' in rendered


def test_results_may_sit_on_the_assistant_message():
    calling = {**CALLING, "tool_responses": [{"name": "weather", "response": {"value": "15 C"}}]}
    assert render_chat([USER, calling]) == f"{USER_TEXT}<|turn>model\n{CALL_TEXT}{RESULT_TEXT}"


# --- tool declarations ----------------------------------------------------------------------


def declaration(properties, **fields):
    parameters = {"type": "object", "properties": properties, **fields}
    text = render_chat([USER], [{"name": "f", "description": "d", "parameters": parameters}])
    start = text.index("<|tool>") + len("<|tool>")
    return text[start : text.index("<tool|>")]


def test_a_declaration_lists_properties_then_required_then_type():
    assert declaration({"city": {"type": "string"}}, required=["city"]) == (
        'declaration:f{description:<|"|>d<|"|>,parameters:{properties:{city:{type:<|"|>STRING<|"|>}},'
        'required:[<|"|>city<|"|>],type:<|"|>OBJECT<|"|>}}'
    )


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (
            {"type": "string", "enum": ["x", "y"], "description": "D", "nullable": True},
            '{description:<|"|>D<|"|>,enum:[<|"|>x<|"|>,<|"|>y<|"|>],nullable:true,'
            'type:<|"|>STRING<|"|>}',
        ),
        ({"type": ["integer", "null"]}, '{nullable:true,type:<|"|>INTEGER<|"|>}'),
        (
            {"type": "array", "items": {"type": "string", "minLength": 1}},
            '{items:{minLength:1,type:<|"|>STRING<|"|>},type:<|"|>ARRAY<|"|>}',
        ),
        (
            {"type": "array", "items": {"type": "object", "properties": {"q": {"type": "number"}}}},
            '{items:{properties:{q:{type:<|"|>NUMBER<|"|>}},type:<|"|>OBJECT<|"|>},'
            'type:<|"|>ARRAY<|"|>}',
        ),
        (
            {
                "type": "object",
                "description": "D",
                "properties": {"b": {"type": "integer"}, "A": {"type": "boolean"}},
                "required": ["A"],
            },
            '{description:<|"|>D<|"|>,properties:{A:{type:<|"|>BOOLEAN<|"|>},'
            'b:{type:<|"|>INTEGER<|"|>}},required:[<|"|>A<|"|>],type:<|"|>OBJECT<|"|>}',
        ),
        ({"type": "object"}, '{properties:{},type:<|"|>OBJECT<|"|>}'),
        ({}, '{type:<|"|><|"|>}'),
    ],
)
def test_a_property_lists_its_fields_in_order_with_the_type_last(schema, text):
    assert f"properties:{{p:{text}}}," in declaration({"p": schema})


def test_a_declaration_may_describe_its_response():
    tool = {"name": "f", "description": "d", "response": {"type": "object", "description": "r"}}
    assert (
        'declaration:f{description:<|"|>d<|"|>,'
        'response:{description:<|"|>r<|"|>,type:<|"|>OBJECT<|"|>}}<tool|>'
    ) in render_chat([USER], [tool])


# --- bad input ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages is empty"),
        ("Hi", "expected a list of messages"),
        (USER, "expected a list of messages"),
        (["Hi"], r"messages\[0\] is 'Hi'"),
        ([USER, {"content": "x"}], r"messages\[1\]\.role is None; allowed are system, developer"),
        ([USER, USER, {"role": "bot", "content": "x"}], r"messages\[2\]\.role is 'bot'"),
        ([{"role": "user"}], r"messages\[0\]\.content is None"),
        ([USER, {"role": "assistant", "content": None}], r"messages\[1\]\.content is None"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\]\.content\[0\] is 'x'"),
        ([{"role": "user", "content": [{"type": "pdf"}]}], r"content\[0\]\.type is 'pdf'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]\.text is None"),
        ([{**USER, "tool_calls": [CALL]}], r"messages\[0\]\.tool_calls belongs to assistant"),
        ([{**CALLING, "reasoning": 3}], r"messages\[0\]\.reasoning is 3"),
        ([{**CALLING, "tool_calls": "x"}], r"messages\[0\]\.tool_calls is 'x'"),
        ([{**CALLING, "tool_calls": [{}]}], r"messages\[0\]\.tool_calls\[0\] is {}"),
        (
            [{**CALLING, "tool_calls": [{"function": {}}]}],
            r"tool_calls\[0\]\.function\.name is None",
        ),
        (
            [{**CALLING, "tool_calls": [{"function": {"name": "f", "arguments": "{x"}}]}],
            r"messages\[0\]\.tool_calls\[0\]\.function\.arguments is '{x', not JSON",
        ),
        (
            [{**CALLING, "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            r"function\.arguments is '\[1\]'; expected a mapping or a JSON object",
        ),
        ([{**CALLING, "tool_responses": [{}]}], r"messages\[0\]\.tool_responses\[0\] is {}"),
        ([USER, RESULT], r"messages\[1\]\.role is 'tool', but no assistant message"),
        ([RESULT], r"messages\[0\]\.role is 'tool', but no assistant message"),
        (
            [USER, CALLING, {**RESULT, "tool_call_id": "zz"}],
            r"messages\[2\]\.tool_call_id is 'zz'; the calls before it are \['c1'\]",
        ),
        (
            [USER, CALLING, RESULT, {"role": "tool", "content": "x"}],
            r"messages\[3\] is one more tool result",
        ),
    ],
)
@pytest.mark.parametrize("template", [None, "{{ messages }}"])
def test_a_malformed_message_names_the_field(messages, words, template):
    with pytest.raises(RequestError, match=words):
        render_chat(messages, template=template)


@pytest.mark.parametrize("kind", ["image", "image_url", "audio", "input_audio", "video"])
@pytest.mark.parametrize("template", [None, "{{ messages }}"])
def test_media_parts_are_refused(kind, template):
    messages = [USER, {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": kind}]}]
    with pytest.raises(UnsupportedError, match=rf"messages\[1\]\.content\[1\]\.type is '{kind}'"):
        render_chat(messages, template=template)


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ({"name": "f"}, "expected a list of tool descriptions"),
        (["f"], r"tools\[0\] is 'f'"),
        ([{"type": "web_search"}], r"tools\[0\]\.type is 'web_search'; allowed is 'function'"),
        ([{"type": "function", "function": {}}], r"tools\[0\]\.function\.name is None"),
        ([{"name": "f", "description": 3}], r"tools\[0\]\.function\.description is 3"),
        ([{"name": "f", "parameters": [1]}], r"tools\[0\]\.function\.parameters is \[1\]"),
        ([{"name": "f", "parameters": {"type": 3}}], r"function\.parameters\.type is 3"),
        ([{"name": "f", "parameters": {"required": "a"}}], r"parameters\.required is 'a'"),
        ([{"name": "f", "parameters": {"properties": [1]}}], r"parameters\.properties is \[1\]"),
        (
            [{"name": "f", "parameters": {"properties": {"p": {"items": {"type": 3}}}}}],
            r"parameters\.properties\.p\.items\.type is 3",
        ),
    ],
)
def test_a_malformed_tool_names_the_field(tools, words):
    with pytest.raises(RequestError, match=words):
        render_chat([USER], tools)


@pytest.mark.parametrize("template", [None, "{{ messages|tojson }}"])
def test_nesting_without_end_is_a_request_error(template):
    value = []
    for _ in range(3000):
        value = [value]
    call = {"function": {"name": "f", "arguments": {"a": value}}}
    with pytest.raises(RequestError, match="nested too deeply"):
        render_chat([{"role": "assistant", "tool_calls": [call]}], template=template)


# --- the checkpoint's own template ----------------------------------------------------------


@pytest.mark.parametrize("start", ["", "{{ bos_token }}", "{{ bos_token }}{{ bos_token }}"])
def test_a_template_gets_exactly_one_bos(start):
    assert render_chat([USER], template=start + "{{ messages[0].content }}") == "<bos>Hi"


def test_a_tokenizer_without_bos_gets_none():
    assert render_chat([USER], bos_token="").startswith("<|turn>user")
    assert render_chat([USER], template="x", bos_token="") == "x"


def test_a_template_sees_messages_tools_flags_and_extra_variables():
    template = (
        "{{ messages[0]['role'] }},{{ messages|length }},{{ tools[0].function.name }},"
        "{{ enable_thinking }},{{ add_generation_prompt }},{{ extra }},{{ eos_token is defined }}"
    )
    text = render_chat(
        [USER],
        [{"name": "f"}],
        enable_thinking=True,
        template=template,
        bos_token="",
        template_variables={"extra": 7},
    )
    assert text == "user,1,f,True,True,7,False"
    assert render_chat([USER], [], template="{{ tools is none }}", bos_token="") == "True"


def test_blocks_are_trimmed_and_loop_controls_work():
    template = """
    {% for message in messages %}
        {% if loop.index > 2 %}{% break %}{% endif %}
{{ message.content }}
    {% endfor %}
end"""
    assert render_chat([USER, USER, USER], template=template, bos_token="") == "\nHi\nHi\nend"


def test_tojson_keeps_html_and_unicode_and_takes_an_indent():
    message = {"role": "user", "content": "<é>"}
    assert render_chat([message], template="{{ messages[0]|tojson }}", bos_token="") == (
        '{"role": "user", "content": "<é>"}'
    )
    assert render_chat([message], template="{{ [1]|tojson(indent=1) }}", bos_token="") == "[\n 1\n]"


def test_generation_marks_and_the_clock_are_understood():
    template = (
        "{% generation %}{{ messages[0].content }}{% endgeneration %}{{ strftime_now('%%') }}"
    )
    assert render_chat([USER], template=template, bos_token="") == "Hi%"


def test_call_arguments_reach_a_template_as_a_mapping():
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    template = "{{ messages[0].tool_calls[0].function.arguments.a + 1 }}"
    assert render_chat(
        [{"role": "assistant", "tool_calls": [call]}], template=template, bos_token=""
    ) == ("2")


def test_messages_given_are_not_changed():
    messages = [USER, {"role": "model", "tool_calls": [CALL]}, dict(RESULT)]
    before = json.dumps(messages)
    render_chat(messages)
    assert json.dumps(messages) == before


def test_a_template_may_refuse_a_conversation():
    with pytest.raises(RequestError, match="cannot render these messages: only odd numbers"):
        render_chat([USER], template="{{ raise_exception('only odd numbers') }}")


@pytest.mark.parametrize(
    "template", ["{{ messages[0].x.y }}", "{{ 1 + 'a' }}", "{{ 1 / 0 }}", "{{ range(10 ** 9) }}"]
)
def test_a_template_that_fails_on_a_conversation_is_a_request_error(template):
    with pytest.raises(RequestError, match="cannot render these messages"):
        render_chat([USER], template=template)


def test_a_template_that_is_no_jinja_names_the_line():
    with pytest.raises(CheckpointError, match=r"not valid jinja2: line 2"):
        render_chat([USER], template="ok\n{% if %}")


@pytest.mark.parametrize(
    "template", ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"]
)
def test_the_sandbox_stops_a_template_that_reaches_out(template):
    with pytest.raises(CheckpointError, match="not allowed"):
        render_chat([USER], template=template)


def test_the_template_file_comes_before_the_tokenizer_config(tmp_path):
    assert load_chat_template(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "from config"}))
    assert load_chat_template(tmp_path) == "from config"
    config.write_text(
        json.dumps(
            {
                "chat_template": [
                    {"name": "rag", "template": "r"},
                    {"name": "default", "template": "d"},
                ]
            }
        )
    )
    assert load_chat_template(tmp_path) == "d"
    (tmp_path / "chat_template.jinja").write_text("from file é", encoding="utf-8")
    assert load_chat_template(tmp_path) == "from file é"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja is not UTF-8"):
        load_chat_template(tmp_path)


@pytest.mark.parametrize("template", [5, [{"name": "rag", "template": "r"}]])
def test_a_template_field_of_another_form_is_refused(tmp_path, template):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: chat_template is"):
        load_chat_template(tmp_path)
