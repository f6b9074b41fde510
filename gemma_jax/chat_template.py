"""From messages to a prompt: the checkpoint's chat template, or the built-in Gemma 4 format.

A template is run as transformers runs it: jinja2 in an immutable sandbox, blocks trimmed, loop
controls, `tojson` without HTML escapes, `raise_exception` and `strftime_now`.
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import ext, nodes, parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gemma_jax.chat_format import render_conversation
from gemma_jax.chat_messages import normalise_messages, normalise_tools
from gemma_jax.errors import CheckpointError, ConfigError, RequestError
from gemma_jax.jsonfile import read_json_object


def load_chat_template(path: str | Path) -> str | None:
    """Return the chat template of the checkpoint in folder `path`, or None when it brings none.

    `chat_template.jinja` comes first, then `chat_template` in `tokenizer_config.json` (a string,
    or a list of named templates of which `default` is taken).

    Raises:
      ConfigError: the field has another form, or the file is not UTF-8.
    """
    file = Path(path) / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file} is not UTF-8 text: {error}") from error
    config_file = Path(path) / "tokenizer_config.json"
    template = read_json_object(config_file).get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, Mapping)}
        template = named.get("default", named)
    if template is None or isinstance(template, str):
        return template
    raise ConfigError(
        f"{config_file}: chat_template is {template!r}; expected a string, or a list of "
        "{name, template} with one named 'default'"
    )


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    enable_thinking: bool = False,
    add_generation_prompt: bool = True,
    template: str | None = None,
    empty_thought: bool = False,
    bos_token: str = "<bos>",
    template_variables: Mapping[str, Any] | None = None,
) -> str:
    """Return the prompt text of a conversation; it starts with exactly one `bos_token`.

    Args:
      messages: `{"role", "content"}` mappings; content is a string or a list of text parts.
        Roles: system, developer, user, assistant (or model), tool. Assistant messages may carry
        `tool_calls` and `reasoning`, tool messages `tool_call_id` or `name`.
      tools: function descriptions as in the OpenAI API.
      enable_thinking: ask the model to think before it answers.
      add_generation_prompt: end with the opening of the model's turn.
      template: jinja2 source, from `load_chat_template`; None renders the built-in format.
      empty_thought: with the built-in format and thinking off, append an empty thought channel,
        as the published templates of 12B, 26B-A4B and 31B do.
      bos_token: text of the BOS token; "" for a tokenizer without one.
      template_variables: more variables for `template`.

    Raises:
      RequestError: a message or tool is malformed (the message names the field), or the template
        refused the conversation.
      UnsupportedError: a content part is an image, audio or video.
      CheckpointError: the template is not valid jinja2, or does what the sandbox forbids.
    """
    try:
        checked, checked_tools = normalise_messages(messages), normalise_tools(tools)
        if template is None:
            text = render_conversation(
                checked,
                checked_tools,
                enable_thinking=enable_thinking,
                add_generation_prompt=add_generation_prompt,
                empty_thought=empty_thought,
            )
        else:
            variables = {
                **(template_variables or {}),
                "messages": checked,
                "tools": checked_tools or None,
                "enable_thinking": enable_thinking,
                "add_generation_prompt": add_generation_prompt,
                "bos_token": bos_token,
            }
            text = _render_template(template, variables)
    except RecursionError as error:
        raise RequestError("messages or tools are nested too deeply to render") from error
    return _with_one_bos(text, bos_token)


def _with_one_bos(text: str, bos_token: str) -> str:
    if not bos_token:
        return text
    while text.startswith(bos_token):
        text = text[len(bos_token) :]
    return bos_token + text


def _render_template(source: str, variables: Mapping[str, Any]) -> str:
    template = _compile(source)
    try:
        return template.render(**variables)
    except jinja2.exceptions.SecurityError as error:
        raise CheckpointError(f"the chat template does what is not allowed: {error}") from error
    except RecursionError:
        raise  # the caller's message serves both kinds of template
    except Exception as error:  # a template is a program, which may fail in any way
        raise RequestError(f"the chat template cannot render these messages: {error}") from error


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(
            f"the chat template is not valid jinja2: line {error.lineno}: {error.message}"
        ) from error


class _GenerationBlock(ext.Extension):
    """`{% generation %}…{% endgeneration %}`, which marks training targets: here its content."""

    tags = {"generation"}  # noqa: RUF012  (the name and type that jinja2 reads)

    def parse(self, parser: parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
