"""Run a file of requests offline; started again, it goes on where it stopped.

Run: uv run python examples/batch.py [MODEL [FOLDER]]
"""

import json
import sys
import tempfile
from pathlib import Path

from gemma_jax import LLM
from gemma_jax.batch import BatchSettings, run_batch
from gemma_jax.batch_input import BatchInput
from gemma_jax.batch_output import BatchFile

PROMPTS = ("Once upon a time", "The king said", "In the beginning")


def main(model: str = "nano", folder: str | None = None) -> None:
    job = Path(folder or tempfile.mkdtemp())
    rows = [{"id": prompt, "prompt": prompt} for prompt in PROMPTS]
    (job / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))

    settings = BatchSettings(model="my-model", sampling={"max_tokens": 24, "temperature": 0.7})
    with (
        BatchInput.open(str(job / "in.jsonl")) as source,
        BatchFile(job / "out.jsonl") as output,
        LLM(model) as llm,
    ):
        progress = run_batch(source, output, llm.text_side, llm.engine, settings)

    for line in (job / "out.jsonl").read_text().splitlines():
        row = json.loads(line)
        print(f"{row['custom_id']}{row['response']['body']['choices'][0]['text']}\n")
    print(f"{progress.succeeded} rows, {progress.generated_tokens} tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
