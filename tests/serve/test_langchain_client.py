"""A second client library, langchain-openai, against the live server."""

import json

import pytest
from server_process import KEY

pytest.importorskip("langchain_openai")
pytestmark = pytest.mark.slow


@pytest.fixture
def model(server):
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model="nano", base_url=server.url + "/v1", api_key=KEY, max_retries=0, max_tokens=60
    )


def test_a_chat_is_answered_whole_and_streamed(model):
    answer = model.invoke([("system", "be short"), ("user", "SHORT")])
    assert answer.content == "Hello there, friend!"
    assert answer.usage_metadata["output_tokens"] == 8
    assert answer.response_metadata["finish_reason"] == "stop"
    chunks = list(model.stream("SHORT"))
    assert "".join(chunk.content for chunk in chunks) == "Hello there, friend!"


def test_a_bound_tool_is_called_and_its_result_goes_back(model):
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    @tool
    def weather(city: str, days: int) -> str:
        """The weather of a city."""
        return f"sun in {city} for {days} days"

    question = HumanMessage("CALL")
    answer = model.bind_tools([weather]).invoke([question])
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Oslo", "days": 2})
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    assert result.content == "sun in Oslo for 2 days"
    after = model.bind_tools([weather]).invoke([question, answer, result, HumanMessage("SHORT")])
    assert after.content == "Hello there, friend!"


def test_structured_output_is_parsed(model):
    schema = {
        "title": "pet", "type": "object",
        "properties": {"name": {"type": "string"}}, "required": ["name"],
    }  # fmt: skip
    structured = model.with_structured_output(schema, method="json_schema")
    assert structured.invoke("JSON") == {"name": "fox"}
    assert json.loads(model.invoke("JSON").content) == {"name": "fox"}
