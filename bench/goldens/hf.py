"""The transformers side of parity: load a checkpoint, run it greedily or teacher-forced.

Eager attention always, and the model is loaded in its dtype: casting a loaded model would round the
inverse RoPE frequencies too.
"""

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from transformers import Gemma4ForCausalLM

PACKAGES = ("torch", "transformers", "numpy")


def versions() -> dict[str, str]:
    """Package → version of everything that shaped the numbers."""
    return {name: version(name) for name in PACKAGES}


def load(path: str | Path, dtype: str) -> Gemma4ForCausalLM:
    """The checkpoint as a transformers model; raises if a weight is missing or not understood."""
    model, info = Gemma4ForCausalLM.from_pretrained(
        str(path),
        dtype=getattr(torch, dtype),
        attn_implementation="eager",
        output_loading_info=True,
    )
    problems = {kind: sorted(names) for kind, names in info.items() if names}
    if problems:
        raise ValueError(f"{path}: transformers did not load every weight: {problems}")
    return model.eval()


@torch.inference_mode()
def greedy(
    model: Gemma4ForCausalLM, prompts: Sequence[np.ndarray], max_tokens: int
) -> tuple[np.ndarray, torch.Tensor]:
    """Greedy continuations with the key-value cache, EOS ignored.

    Args:
      prompts: R arrays of token ids; equal lengths run as one batch.

    Returns:
      tokens [R, max_tokens] int32 and float32 logits [R, max_tokens, V].
    """
    tokens: list[np.ndarray] = [np.empty(0)] * len(prompts)
    logits: list[torch.Tensor] = [torch.empty(0)] * len(prompts)
    for length in sorted({len(prompt) for prompt in prompts}):
        rows = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
        ids = torch.tensor(np.stack([prompts[i] for i in rows]), dtype=torch.long)
        result = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        batch = torch.stack(result.logits, 1).float()
        for at, row in enumerate(rows):
            tokens[row] = result.sequences[at, length:].to(torch.int32).numpy()
            logits[row] = batch[at]
    return np.stack(tokens), torch.stack(logits)


@torch.inference_mode()
def teacher_forced(model: Gemma4ForCausalLM, token_ids: np.ndarray) -> torch.Tensor:
    """Float32 logits [T, V] of one forward over `token_ids` [T]."""
    ids = torch.tensor(token_ids, dtype=torch.long)[None]
    return model(ids, use_cache=False).logits[0].float()
