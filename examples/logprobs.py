"""How likely the model finds each word of a text, and what it would have said instead.

Run: uv run python examples/logprobs.py [MODEL]
"""

import sys

from gemma_jax import LLM, SamplingParams


def main(model: str = "nano", text: str = "And the king said unto him") -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    with LLM(model) as llm:
        (output,) = llm.generate(text, params)
    for token_id, position in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True):
        if position is None:  # nothing comes before the first token
            continue
        best = max(position.values(), key=lambda entry: entry.logprob)
        entry = position[token_id]
        print(
            f"{entry.decoded_token!r:>12} {entry.logprob:8.3f}   likeliest {best.decoded_token!r}"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
