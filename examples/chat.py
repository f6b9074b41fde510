"""A conversation of two turns that remembers the first.

Run: uv run python examples/chat.py [MODEL]
"""

import sys

from gemma_jax import LLM, ChatSession, SamplingParams


def main(model: str = "nano") -> None:
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=64)
    with LLM(model) as llm:
        session = ChatSession(llm, system="You tell short tales.", sampling_params=params)
        for message in ("Tell me of a fox.", "And then?"):
            print(f"> {message}")
            for piece in session.stream(message):
                print(piece, end="", flush=True)
            print()


if __name__ == "__main__":
    main(*sys.argv[1:])
