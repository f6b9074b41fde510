"""Runs vLLM for `gemma-jax parity record`: `python vllm_worker.py JOB.json OUT.jsonl`.

A process of its own and the only file that imports vLLM; it imports nothing of this package, so any
interpreter that has vLLM can run it. Greedy tokens come from ordinary generation; given tokens are
scored as a prompt (`prompt_logprobs`). See `engines.py` for the job and the output.

In float32, set TRITON_F32_DEFAULT=ieee in the environment to keep TF32 out of the Triton attention.
"""

import json
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# Not packages of this environment.
# pyright: reportMissingImports=false

os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

PACKAGES = ("vllm", "torch", "triton", "transformers")
ENVIRONMENT = ("TRITON_F32_DEFAULT", "VLLM_FLOAT32_MATMUL_PRECISION", "VLLM_USE_FLASHINFER_SAMPLER")
LOGPROB_DECIMALS = 7


def build(job: dict[str, Any]) -> Any:
    """The engine: no tokenizer, no prefix cache, and what the job's `vllm` says."""
    from vllm import LLM

    options = dict(job["vllm"])
    attention = options.pop("attention", None)
    if attention:
        options["attention_config"] = {"backend": attention}
    longest = max(_length(job, request) for request in job["requests"])
    return LLM(
        model=job["model"],
        dtype=job["dtype"],
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_num_seqs=job["batch"],
        max_model_len=longest + 1,
        # One more than the longest list that a token's own logprob makes.
        max_logprobs=job["logprobs"] + 1,
        **options,
    )


def _length(job: dict[str, Any], request: dict[str, Any]) -> int:
    given = request.get("token_ids") or []
    return len(request["prompt_token_ids"]) + (len(given) or job["max_tokens"])


def best_first(step: dict[int, Any]) -> list[list[Any]]:
    """[[id, logprob], …] of vLLM's id → Logprob mapping, the lowest id first among equals."""
    pairs = [[int(i), round(float(x.logprob), LOGPROB_DECIMALS)] for i, x in step.items()]
    return sorted(pairs, key=lambda pair: (-pair[1], pair[0]))


def generate(llm: Any, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Greedy tokens of every request, EOS ignored."""
    from vllm import SamplingParams

    limit = job["max_tokens"]
    params = SamplingParams(
        max_tokens=limit, min_tokens=limit, ignore_eos=True, temperature=0.0, detokenize=False,
        logprobs=job["logprobs"],
    )  # fmt: skip
    prompts = [{"prompt_token_ids": r["prompt_token_ids"]} for r in job["requests"]]
    rows = []
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for request, output in zip(job["requests"], outputs, strict=True):
        completion = output.outputs[0]
        top = [best_first(step) for step in completion.logprobs]
        rows.append({"id": request["id"], "token_ids": list(completion.token_ids), "top": top})
    return rows


def score(llm: Any, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Candidates at every given token: the whole sequence is one prompt."""
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=1, temperature=0.0, detokenize=False, prompt_logprobs=job["logprobs"]
    )
    prompts = [
        {"prompt_token_ids": r["prompt_token_ids"] + r["token_ids"]} for r in job["requests"]
    ]
    rows = []
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for request, output in zip(job["requests"], outputs, strict=True):
        steps = output.prompt_logprobs[len(request["prompt_token_ids"]) :]
        top = [best_first(step) for step in steps]
        rows.append({"id": request["id"], "token_ids": request["token_ids"], "top": top})
    return rows


def info(job: dict[str, Any]) -> dict[str, Any]:
    """The fields of a record's header that only this process knows."""
    import torch

    return {
        "engine": "vllm",
        "versions": {name: _version(name) for name in PACKAGES},
        "device": {
            "platform": "gpu",
            "kind": torch.cuda.get_device_name(0),
            "count": torch.cuda.device_count(),
        },
        "dtype": job["dtype"],
        "vllm": job["vllm"],
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def main(job_file: str, output: str) -> None:
    """Reads a job, writes the header fields and the rows."""
    job = json.loads(Path(job_file).read_text())
    llm = build(job)
    rows = score(llm, job) if job["teacher_force"] else generate(llm, job)
    with open(output, "w") as file:
        print(json.dumps({"header": info(job)}), file=file)
        for row in rows:
            print(json.dumps(row), file=file)


if __name__ == "__main__":
    main(*sys.argv[1:])
