"""Continue prompts: a batch in one call, then one streamed word by word.

Run: uv run python examples/generate.py [MODEL]
"""

import sys

from gemma_jax import LLM, SamplingParams


def main(model: str = "nano") -> None:
    params = SamplingParams(temperature=0.7, top_p=0.95, seed=1, max_tokens=48)
    with LLM(model) as llm:
        for output in llm.generate(["Once upon a time", "The king said"], params):
            print(f"{output.prompt}{output.outputs[0].text}\n")

        print("In the beginning", end="")
        for chunk in llm.stream("In the beginning", params):
            print(chunk.text, end="", flush=True)
        print()


if __name__ == "__main__":
    main(*sys.argv[1:])
