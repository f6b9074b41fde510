"""The official OpenAI client against a running server: a chat streamed, a tool call, JSON.

Run: uv run gemma-jax serve
Then: uv run python examples/openai_client.py [URL]
"""

import sys

import openai

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def main(url: str = "http://127.0.0.1:8000/v1", key: str = "none") -> None:
    with openai.OpenAI(base_url=url, api_key=key) as client:
        model = client.models.list().data[0].id

        for chunk in client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Tell me a story of a fox."}],
            max_tokens=64,
            stream=True,
            extra_body={"top_k": 40},  # sampling fields that OpenAI's API does not have
        ):
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        print()

        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Is it warm in Oslo?"}],
            tools=[WEATHER],
            max_tokens=64,
        )
        for call in answer.choices[0].message.tool_calls or ():
            print(f"asks for {call.function.name}({call.function.arguments})")

        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Describe a fox as JSON."}],
            response_format={"type": "json_object"},
            max_tokens=64,
        )
        print(answer.choices[0].message.content)


if __name__ == "__main__":
    main(*sys.argv[1:])
