"""Runs transformers for `gemma-jax parity record`: `python hf_worker.py JOB.json OUT.jsonl …`.

A process of its own that imports torch and transformers and nothing of this package, so that any
interpreter that has them can run it. The model is loaded in its dtype with eager attention: casting
a loaded model would round the RoPE frequencies too. See `engines.py` for the job and the output.
"""

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Not packages of this environment.
# pyright: reportMissingImports=false

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

import numpy as np
import torch
from transformers import Gemma4ForCausalLM
from transformers.models.gemma4 import modeling_gemma4

PACKAGES = ("torch", "transformers", "numpy")
LOGPROB_DECIMALS = 7


def load(path: str, dtype: str) -> Any:
    """The checkpoint as a transformers model; raises if a weight is missing or not understood."""
    model, info = Gemma4ForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), attn_implementation="eager", output_loading_info=True
    )
    problems = {kind: sorted(names) for kind, names in info.items() if names}
    if problems:
        raise ValueError(f"{path}: transformers did not load every weight: {problems}")
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def best_first(logits: torch.Tensor, tokens: torch.Tensor, k: int) -> list[list[list[Any]]]:
    """[[id, logprob], …] of every row of float32 `logits` [T, V]: the best k and its token."""
    logprobs = logits.log_softmax(-1)
    # A stable descending sort puts the lowest id first among equal logits, as argmax does.
    values, order = logprobs.sort(stable=True, dim=-1, descending=True)
    own = logprobs.gather(1, tokens[:, None])
    top = []
    columns = (order[:, :k], values[:, :k], tokens, own)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for ids, best, token, (mine,) in rows:
        pairs = [[i, round(x, LOGPROB_DECIMALS)] for i, x in zip(ids, best, strict=True)]
        top.append(pairs if token in ids else [*pairs, [token, round(mine, LOGPROB_DECIMALS)]])
    return top


@torch.inference_mode()
def teacher_forced(model: Any, prompt: list[int], tokens: list[int], k: int) -> dict[str, Any]:
    """Candidates at every given token, from one forward over the whole sequence."""
    ids = torch.tensor([prompt + tokens], device=model.device)
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return {"token_ids": tokens, "top": best_first(logits, ids[0, len(prompt) :], k)}


@torch.inference_mode()
def greedy(model: Any, prompts: list[list[int]], limit: int, k: int) -> list[dict[str, Any]]:
    """Greedy continuations of prompts of one length, with the key-value cache, EOS ignored."""
    ids = torch.tensor(prompts, device=model.device)
    result = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=limit,
        eos_token_id=None, pad_token_id=0, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    logits = torch.stack(result.logits, 1).float()
    rows = []
    for row, tokens in zip(logits, result.sequences[:, ids.shape[1] :], strict=True):
        rows.append({"token_ids": tokens.tolist(), "top": best_first(row, tokens, k)})
    return rows


def run(job: dict[str, Any], model: Any) -> list[dict[str, Any]]:
    """Rows in the order of the requests."""
    k, requests = job["logprobs"], job["requests"]
    if job["teacher_force"]:
        return [
            {"id": r["id"]} | teacher_forced(model, r["prompt_token_ids"], r["token_ids"], k)
            for r in requests
        ]
    rows: dict[int, dict[str, Any]] = {}
    lengths = sorted({len(r["prompt_token_ids"]) for r in requests})
    for length in lengths:
        same = [i for i, r in enumerate(requests) if len(r["prompt_token_ids"]) == length]
        for first in range(0, len(same), job["batch"]):
            part = same[first : first + job["batch"]]
            prompts = [requests[i]["prompt_token_ids"] for i in part]
            for i, row in zip(part, greedy(model, prompts, job["max_tokens"], k), strict=True):
                rows[i] = {"id": requests[i]["id"]} | row
    return [rows[i] for i in range(len(requests))]


# --- sub-blocks ---------------------------------------------------------------------------------


class Capture:
    """Hooks that keep inputs and outputs of sub-blocks at some positions of one sequence."""

    def __init__(self, model: Any, positions: list[int], columns: np.ndarray):
        self.arrays: dict[str, np.ndarray] = {}
        self._at, self._columns = positions, columns
        self._handles: list[Any] = []
        inner = model.model
        self._output(inner.embed_tokens, "embed")
        for i, layer in enumerate(inner.layers):
            self._layer(layer, f"layers.{i}")
        self._output(inner.norm, "final_norm")
        self._handles.append(model.lm_head.register_forward_hook(self._raw_logits))

    def _layer(self, layer: Any, name: str) -> None:
        self._input(layer.input_layernorm, f"{name}/input")
        self._output(layer.input_layernorm, f"{name}/input_norm")
        attention = layer.self_attn
        for part in ("q", "k", "v"):
            if getattr(attention, f"{part}_proj", None) is not None:
                self._output(getattr(attention, f"{part}_proj"), f"{name}/{part}_raw")
        self._input(attention.o_proj, f"{name}/attention")
        self._output(attention.o_proj, f"{name}/o_proj")
        self._input(layer.pre_feedforward_layernorm, f"{name}/after_attention")
        self._output(layer.pre_feedforward_layernorm, f"{name}/mlp_norm")
        self._input(layer.mlp.down_proj, f"{name}/gate_up")
        self._output(layer.mlp.down_proj, f"{name}/down_proj")
        self._input(layer.post_feedforward_layernorm, f"{name}/mlp")
        if getattr(layer, "per_layer_input_gate", None) is not None:
            self._input(layer.per_layer_input_gate, f"{name}/after_mlp")
            self._input(layer.per_layer_projection, f"{name}/gated")
            self._output(layer.per_layer_projection, f"{name}/ple_projection")
        handle = layer.register_forward_pre_hook(self._per_layer_input(name), with_kwargs=True)
        self._handles.append(handle)
        self._output(layer, f"{name}/output")

    def _per_layer_input(self, name: str) -> Any:
        def hook(module, args, kwargs):
            inputs = kwargs.get("per_layer_input", args[1] if len(args) > 1 else None)
            if inputs is not None:
                self.keep(f"{name}/per_layer_input", inputs[0, self._at])

        return hook

    def _input(self, module: Any, name: str) -> None:
        def hook(module, args):
            self.keep(name, args[0].reshape(-1, args[0].shape[-1])[self._at])

        self._handles.append(module.register_forward_pre_hook(hook))

    def _output(self, module: Any, name: str) -> None:
        def hook(module, args, output):
            output = output[0] if isinstance(output, tuple) else output
            self.keep(name, output.reshape(-1, output.shape[-1])[self._at])

        self._handles.append(module.register_forward_hook(hook))

    def _raw_logits(self, module, args, output) -> None:
        self.keep("head", output[0][self._at][:, self._columns])

    def attention(self, module, query, key, value) -> None:
        """q at the positions, and an owner's k and v at all of them: heads after the tokens."""
        name = f"layers.{module.layer_idx}"
        self.keep(f"{name}/q", query[0].transpose(0, 1)[self._at])
        if not module.is_kv_shared_layer:
            self.keep(f"{name}/k", key[0].transpose(0, 1))
            self.keep(f"{name}/v", value[0].transpose(0, 1))

    def keep(self, name: str, value: torch.Tensor) -> None:
        """A copy as numpy; bfloat16 as its bits."""
        value = value.detach().clone().cpu()
        bits = value.dtype == torch.bfloat16
        self.arrays[name] = (
            value.view(torch.int16).numpy().view(np.uint16) if bits else value.numpy()
        )

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


@torch.inference_mode()
def capture(model: Any, hidden: dict[str, Any]) -> dict[str, np.ndarray]:
    """Sub-block outputs of one forward over `token_ids` at `positions`."""
    vocab = model.config.vocab_size
    columns = np.unique(np.linspace(0, vocab - 1, hidden["columns"]).astype(np.int64))
    hooks = Capture(model, hidden["positions"], columns)
    original = modeling_gemma4.eager_attention_forward

    def attention(module, query, key, value, *args, **kwargs):
        hooks.attention(module, query, key, value)
        return original(module, query, key, value, *args, **kwargs)

    modeling_gemma4.eager_attention_forward = attention
    try:
        ids = torch.tensor([hidden["token_ids"]], device=model.device)
        logits = model(ids, use_cache=False).logits[0]
    finally:
        modeling_gemma4.eager_attention_forward = original
        hooks.close()
    hooks.keep("softcap", logits[hidden["positions"]][:, columns])
    return hooks.arrays | {
        "columns": columns.astype(np.int32),
        "token_ids": np.array(hidden["token_ids"], np.int32),
        "positions": np.array(hidden["positions"], np.int32),
    }


def info(dtype: str) -> dict[str, Any]:
    """The fields of a record's header that only this process knows."""
    cuda = torch.cuda.is_available()
    return {
        "engine": "transformers",
        "versions": {name: version(name) for name in PACKAGES},
        "device": {
            "platform": "gpu" if cuda else "cpu",
            "kind": torch.cuda.get_device_name(0) if cuda else "cpu",
            "count": torch.cuda.device_count() if cuda else 1,
        },
        "dtype": dtype,
        "attention": "eager",
    }


def write(job: dict[str, Any], model: Any, output: str) -> None:
    """The header fields and the rows of a job, and the trace if one is asked for."""
    header = info(str(model.dtype).removeprefix("torch."))
    if job.get("hidden"):
        arrays = capture(model, job["hidden"])
        header_json = json.dumps(header | {"model": job["identity"]})
        named: dict[str, Any] = {"header": np.array(header_json), **arrays}
        with open(job["hidden"]["output"], "wb") as file:
            np.savez_compressed(file, **named)
    with open(output, "w") as file:
        print(json.dumps({"header": header}), file=file)
        for row in run(job, model):
            print(json.dumps(row), file=file)


def main(*files: str) -> None:
    """Reads jobs and writes their outputs: JOB OUT JOB OUT …; the model is loaded once."""
    jobs = [json.loads(Path(name).read_text()) for name in files[::2]]
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if jobs[0].get("threads"):
        torch.set_num_threads(jobs[0]["threads"])
    model = load(jobs[0]["model"], jobs[0]["dtype"])
    for job, output in zip(jobs, files[1::2], strict=True):
        write(job, model, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
