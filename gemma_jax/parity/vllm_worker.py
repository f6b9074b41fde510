"""Runs vLLM for `gemma-jax parity record`: `python vllm_worker.py JOB.json OUT.jsonl …`.

A process of its own and the only file that imports vLLM; it imports nothing of this package, so any
interpreter that has vLLM can run it. Greedy tokens come from ordinary generation; given tokens are
scored as a prompt (`prompt_logprobs`). Several jobs share one engine, which is as large as the
largest needs; a job of a smaller batch is handed over in parts of its size. See `engines.py` for
the job and the output.

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


def build(jobs: list[dict[str, Any]]) -> Any:
    """The engine: no tokenizer, no prefix cache, and what the jobs' `vllm` says."""
    from vllm import LLM

    options = dict(jobs[0]["vllm"])
    attention = options.pop("attention", None)
    if attention:
        options["attention_config"] = {"backend": attention}
    longest = max(_length(job, request) for job in jobs for request in job["requests"])
    return LLM(
        model=jobs[0]["model"],
        dtype=jobs[0]["dtype"],
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_num_seqs=max(job["batch"] for job in jobs),
        max_model_len=longest + 1,
        # One more than the longest list that a token's own logprob makes.
        max_logprobs=max(job["logprobs"] for job in jobs) + 1,
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
    prompts = [r["prompt_token_ids"] for r in job["requests"]]
    rows = []
    for request, output in zip(job["requests"], _outputs(llm, job, prompts, params), strict=True):
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
    prompts = [r["prompt_token_ids"] + r["token_ids"] for r in job["requests"]]
    rows = []
    for request, output in zip(job["requests"], _outputs(llm, job, prompts, params), strict=True):
        steps = output.prompt_logprobs[len(request["prompt_token_ids"]) :]
        top = [best_first(step) for step in steps]
        rows.append({"id": request["id"], "token_ids": request["token_ids"], "top": top})
    return rows


def _outputs(llm: Any, job: dict[str, Any], prompts: list[list[int]], params: Any) -> list[Any]:
    """The engine's outputs, `batch` prompts at a time."""
    outputs: list[Any] = []
    for first in range(0, len(prompts), job["batch"]):
        part = [{"prompt_token_ids": ids} for ids in prompts[first : first + job["batch"]]]
        outputs += llm.generate(part, params, use_tqdm=False)
    return outputs


def info(job: dict[str, Any], batch: int) -> dict[str, Any]:
    """The fields of a record's header that only this process knows; `batch` is the engine's."""
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
        "vllm": job["vllm"] | {"max_num_seqs": batch},
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def main(*files: str) -> None:
    """Reads jobs and writes header fields and rows of each: JOB OUT JOB OUT …"""
    jobs = [json.loads(Path(name).read_text()) for name in files[::2]]
    llm = build(jobs)
    batch = max(job["batch"] for job in jobs)
    for job, output in zip(jobs, files[1::2], strict=True):
        rows = score(llm, job) if job["teacher_force"] else generate(llm, job)
        with open(output, "w") as file:
            print(json.dumps({"header": info(job, batch)}), file=file)
            for row in rows:
                print(json.dumps(row), file=file)


if __name__ == "__main__":
    main(*sys.argv[1:])
