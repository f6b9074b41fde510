"""OpenAI request bodies to checked requests: what the HTTP server and batch jobs both accept.

Plain Python over decoded JSON. A field is served, harmless (accepted and ignored), known but not
supported, or unknown; the last two are refused by name. null counts as absent, as in the API.
"""

import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gemma_jax.errors import GemmaError, RequestError, UnsupportedError
from gemma_jax.generation_config import GenerationDefaults
from gemma_jax.sampling_params import MAX_LOGPROBS, SamplingParams

Body = Mapping[str, Any]
TextOrIds = str | list[int]

MAX_COMPLETIONS = 128
"""Largest `n`, as in the OpenAI API."""
MAX_STOP_STRINGS = 64
"""Every new piece of text is searched for each of them."""
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
NO_DEFAULTS = GenerationDefaults()
_UNKNOWN = " is not a known field"

_SAMPLING_FIELDS = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos",
    "max_tokens", "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "skip_special_tokens", "include_stop_str_in_output", "prompt_logprobs",
)  # fmt: skip
_SHARED_FIELDS = (
    "model", "stream", "stream_options", "logprobs", "response_format", *_SAMPLING_FIELDS
)  # fmt: skip
_CHAT_FIELDS = (
    "messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice",
    "chat_template_kwargs", "reasoning_effort", *_SHARED_FIELDS,
)  # fmt: skip
_COMPLETION_FIELDS = ("prompt", "echo", *_SHARED_FIELDS)
# They do not change what is generated.
_HARMLESS_FIELDS = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
)  # fmt: skip
# Not supported, but some values ask for nothing: field -> these values.
_UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "beam_width": (),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": (),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "priority": (0,),
    "prompt_embeds": (),
    "reasoning": (),
    "structured_outputs": (),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}


@dataclass(frozen=True)
class ChatRequest:
    """A checked body of /v1/chat/completions.

    Attributes:
      model: the name asked for, or None.
      messages: as given; the chat template checks them.
      params: of every completion. Special tokens stay in the text (`skip_special_tokens=False`),
        because `ChatOutputParser` reads them.
      tools: function descriptions that go into the prompt; empty with `tool_choice` "none".
      thinking: ask the model to think first.
      grammar: llguidance grammar of `response_format`, or None.
      stream, include_usage: whether to stream, and to end the stream with a usage chunk.
      prompt_logprobs: answer with those of the prompt, too.
      hide_special_tokens: leave the special tokens out of what the client sees.
    """

    model: str | None
    messages: list[Any]
    params: SamplingParams
    tools: list[Any]
    thinking: bool
    grammar: str | None
    stream: bool
    include_usage: bool
    prompt_logprobs: bool
    hide_special_tokens: bool


@dataclass(frozen=True)
class CompletionRequest:
    """A checked body of /v1/completions.

    Attributes:
      model: the name asked for, or None.
      prompts: one text or id list a prompt, in order.
      params: of every completion of every prompt.
      echo: begin each text with its prompt, and log-probabilities with those of the prompt.
      prompt_only: generate nothing; each text is its prompt.
      grammar, stream, include_usage, prompt_logprobs: as in `ChatRequest`.
    """

    model: str | None
    prompts: list[TextOrIds]
    params: SamplingParams
    echo: bool
    prompt_only: bool
    grammar: str | None
    stream: bool
    include_usage: bool
    prompt_logprobs: bool


def chat_request(body: Any, defaults: GenerationDefaults = NO_DEFAULTS) -> ChatRequest:
    """Return the checked request of a /v1/chat/completions body.

    Args:
      body: the decoded JSON.
      defaults: of the checkpoint; they fill sampling fields that the body leaves out. Without a
        limit in either, an answer may take the rest of the context.

    Raises:
      RequestError: a field is unknown, missing, of the wrong type or out of range.
      UnsupportedError: a field or value that the API knows and this server does not.
    """
    fields = _checked_fields(body, _CHAT_FIELDS)
    if "messages" not in fields:
        raise RequestError("messages is missing; expected a list of messages")
    tools, thinking = _tools(fields), _thinking(fields)
    params = _chat_params(fields, defaults)
    return ChatRequest(
        model=_typed(fields, "model", str, None),
        messages=_typed(fields, "messages", list, []),
        params=params.replace(skip_special_tokens=False),
        tools=tools,
        thinking=thinking,
        grammar=_grammar(fields, thinking, bool(tools)),
        stream=_typed(fields, "stream", bool, False),
        include_usage=_include_usage(fields),
        prompt_logprobs=_prompt_logprobs(fields),
        hide_special_tokens=params.skip_special_tokens,
    )


def completion_request(body: Any, defaults: GenerationDefaults = NO_DEFAULTS) -> CompletionRequest:
    """Return the checked request of a /v1/completions body; arguments and errors as above.

    Without a limit in body or `defaults`, a completion has at most 16 tokens. With `echo` the limit
    may be 0.
    """
    fields = _checked_fields(body, _COMPLETION_FIELDS)
    if "prompt" not in fields:
        raise RequestError("prompt is missing; expected a string, token ids, or a list of these")
    echo = _typed(fields, "echo", bool, False)
    sampling = _sampling_fields(fields)
    if "logprobs" in fields:
        sampling["logprobs"] = fields["logprobs"]
        if echo:
            sampling["prompt_logprobs"] = _echoed_logprobs(fields)
    prompt_only = _prompt_only(fields, echo)
    if prompt_only:
        sampling["max_tokens"] = None
    return CompletionRequest(
        model=_typed(fields, "model", str, None),
        prompts=_prompts(fields["prompt"]),
        params=defaults.sampling_params().replace(**sampling),
        echo=echo,
        prompt_only=prompt_only,
        grammar=_grammar(fields, thinking=False, tools=False),
        stream=_typed(fields, "stream", bool, False),
        include_usage=_include_usage(fields),
        prompt_logprobs=_prompt_logprobs(fields),
    )


def field_of(error: GemmaError) -> str | None:
    """Return the body field that an error's message begins with, or None: `param` of the API."""
    message = str(error)
    if message.endswith(_UNKNOWN):
        return message.removesuffix(_UNKNOWN)
    known = {*_CHAT_FIELDS, *_COMPLETION_FIELDS, *_UNSUPPORTED_FIELDS, "body"}
    first = re.match(r"\w+", message)
    return first[0] if first and first[0] in known else None


def _checked_fields(body: Any, known: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a body that are set, all of them ones that are served."""
    if not isinstance(body, Mapping):
        raise RequestError(f"body is a JSON {_kind(body)}; expected an object")
    served = {}
    for name, value in body.items():
        if value is None or name in _HARMLESS_FIELDS:
            continue
        if name in known:
            served[name] = value
        elif name in _UNSUPPORTED_FIELDS:
            _check_neutral(name, value)
        elif name in _CHAT_FIELDS or name in _COMPLETION_FIELDS:
            raise RequestError(f"{name} is not a field of this endpoint")
        else:
            raise RequestError(f"{reprlib.repr(str(name))[1:-1]}{_UNKNOWN}")
    return served


def _check_neutral(name: str, value: Any) -> None:
    neutral = _UNSUPPORTED_FIELDS[name]
    if not any(type(value) is type(other) and value == other for other in neutral):
        hint = f" other than {neutral[0]!r}" if neutral else ""
        raise UnsupportedError(f"{name} is {reprlib.repr(value)}; not supported{hint}")


def _typed[T](fields: Body, name: str, kind: type, default: T) -> Any | T:
    """Return a field that must have this JSON type."""
    if name not in fields:
        return default
    value = fields[name]
    if not isinstance(value, kind):
        expected = {str: "a string", bool: "true or false", list: "a list", dict: "an object"}
        raise RequestError(f"{name} is {reprlib.repr(value)}; expected {expected[kind]}")
    return value


def _kind(value: Any) -> str:
    names = {list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")


def _sampling_fields(fields: Body) -> dict[str, Any]:
    sampling = {name: fields[name] for name in _SAMPLING_FIELDS if name in fields}
    n, stop = sampling.get("n"), sampling.get("stop")
    if isinstance(n, int) and n > MAX_COMPLETIONS:
        raise RequestError(f"n is {n}; expected at most {MAX_COMPLETIONS}")
    if isinstance(stop, list) and len(stop) > MAX_STOP_STRINGS:
        raise RequestError(f"stop has {len(stop)} strings; expected at most {MAX_STOP_STRINGS}")
    return sampling


def _chat_params(fields: Body, defaults: GenerationDefaults) -> SamplingParams:
    sampling = {"max_tokens": defaults.max_new_tokens} | _sampling_fields(fields)
    limit = fields.get("max_completion_tokens")
    if limit is not None:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise RequestError(
                f"max_completion_tokens is {reprlib.repr(limit)}; expected an integer >= 1"
            )
        if fields.get("max_tokens", limit) != limit:
            raise RequestError(
                f"max_completion_tokens is {limit}, but max_tokens is"
                f" {reprlib.repr(fields['max_tokens'])}; give one of them"
            )
        sampling["max_tokens"] = limit
    sampling["logprobs"] = _chat_logprobs(fields)
    return defaults.sampling_params().replace(**sampling)


def _chat_logprobs(fields: Body) -> int | None:
    wanted, top = _typed(fields, "logprobs", bool, False), fields.get("top_logprobs", 0)
    if isinstance(top, bool) or not isinstance(top, int) or not 0 <= top <= MAX_LOGPROBS:
        raise RequestError(
            f"top_logprobs is {reprlib.repr(top)}; expected an integer from 0 to {MAX_LOGPROBS}"
        )
    if top and not wanted:
        raise RequestError(f"top_logprobs is {top}, which needs logprobs to be true")
    return top if wanted else None


def _prompt_only(fields: Body, echo: bool) -> bool:
    """Return whether nothing is to be generated: `max_tokens` 0."""
    limit, least = fields.get("max_tokens"), fields.get("min_tokens")
    if not _is_integer(limit) or limit:
        return False
    if not echo:
        raise RequestError("max_tokens is 0; expected an integer >= 1, or 0 with echo=true")
    if least:
        raise RequestError(f"min_tokens is {reprlib.repr(least)}, more than max_tokens (0)")
    return True


def _echoed_logprobs(fields: Body) -> Any:
    """Return how many best tokens a position of an echoed prompt has."""
    wanted = fields["logprobs"]
    if fields.get("prompt_logprobs", wanted) != wanted:
        raise RequestError(
            f"prompt_logprobs is {reprlib.repr(fields['prompt_logprobs'])}, but logprobs, which"
            f" echo also gives of the prompt, is {reprlib.repr(wanted)}; give one of them"
        )
    return wanted


def _prompt_logprobs(fields: Body) -> bool:
    if "prompt_logprobs" in fields and fields.get("stream"):
        raise RequestError("prompt_logprobs is only for stream=false")
    return "prompt_logprobs" in fields


def _tools(fields: Body) -> list[Any]:
    """Return the tools that the model may call."""
    tools = _typed(fields, "tools", list, [])
    choice = fields.get("tool_choice", "auto" if tools else "none")
    if choice == "required" or isinstance(choice, Mapping):
        raise UnsupportedError(
            f"tool_choice is {reprlib.repr(choice)}; supported are 'auto' and 'none'"
        )
    if choice not in ("auto", "none"):
        raise RequestError(f"tool_choice is {reprlib.repr(choice)}; allowed are 'auto' and 'none'")
    if choice == "auto" and not tools:
        raise RequestError("tool_choice is 'auto', but there are no tools")
    return tools if choice == "auto" else []


def _thinking(fields: Body) -> bool:
    """Return whether to think: `chat_template_kwargs.enable_thinking`, else `reasoning_effort`."""
    effort = fields.get("reasoning_effort", "none")
    if effort not in REASONING_EFFORTS:
        raise RequestError(
            f"reasoning_effort is {reprlib.repr(effort)}; allowed are"
            f" {', '.join(REASONING_EFFORTS)} (all but none turn thinking on)"
        )
    variables = _typed(fields, "chat_template_kwargs", dict, {})
    for name in variables:
        if name != "enable_thinking":
            raise UnsupportedError(
                f"chat_template_kwargs has {reprlib.repr(name)}; supported is enable_thinking"
            )
    thinking = variables.get("enable_thinking")
    if thinking is None:
        return effort != "none"
    if not isinstance(thinking, bool):
        raise RequestError(
            f"chat_template_kwargs.enable_thinking is {reprlib.repr(thinking)};"
            " expected true or false"
        )
    return thinking


def _include_usage(fields: Body) -> bool:
    options = _typed(fields, "stream_options", dict, {})
    if options and not fields.get("stream"):
        raise RequestError("stream_options is only for stream=true")
    for name, value in options.items():
        if name not in ("include_usage", "include_obfuscation"):
            raise RequestError(f"stream_options has the unknown field {reprlib.repr(name)}")
        if not isinstance(value, bool):
            raise RequestError(
                f"stream_options.{name} is {reprlib.repr(value)}; expected true or false"
            )
    return options.get("include_usage", False)


def _grammar(fields: Body, thinking: bool, tools: bool) -> str | None:
    if "response_format" not in fields:
        return None
    try:
        from gemma_jax.serve.grammar import response_grammar
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"response_format needs the package {error.name}: pip install 'gemma-jax[serve]'"
        ) from error
    return response_grammar(fields["response_format"], thinking=thinking, tools=tools)


def _prompts(value: Any) -> list[TextOrIds]:
    """Return the prompts of a completion: one text or id list, or a list of either."""
    if isinstance(value, str):
        return [_prompt(value, "prompt")]
    if not isinstance(value, list):
        raise RequestError(
            f"prompt is {reprlib.repr(value)}; expected a string, token ids, or a list of these"
        )
    if not value:
        raise RequestError("prompt is an empty list; give at least one prompt")
    if _is_integer(value[0]):
        return [_prompt(value, "prompt")]
    return [_prompt(item, f"prompt[{index}]") for index, item in enumerate(value)]


def _prompt(value: Any, where: str) -> TextOrIds:
    if not value and isinstance(value, str | list):
        raise RequestError(f"{where} is empty; give at least one character or token id")
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RequestError(f"{where} is {reprlib.repr(value)}; expected a string or token ids")
    for index, item in enumerate(value):
        if not _is_integer(item):
            raise RequestError(f"{where}[{index}] is {reprlib.repr(item)}; expected a token id")
    return value


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


BODY_READERS: Mapping[str, Callable[..., ChatRequest | CompletionRequest]] = {
    "/v1/chat/completions": chat_request,
    "/v1/completions": completion_request,
}
"""The function that reads the body of each endpoint."""
