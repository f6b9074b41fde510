"""In the place of vLLM and of torch: modules with just what the workers touch."""

VLLM = """
class SamplingParams:
    def __init__(self, **fields):
        self.__dict__.update(fields)

class Entry:
    def __init__(self, logprob):
        self.logprob = logprob

class LLM:
    def __init__(self, **settings):
        import json, os
        seen = {name: os.environ.get(name) for name in ("TRITON_F32_DEFAULT", "VLLM_CACHE_ROOT")}
        with open(os.environ["SETTINGS_FILE"], "a") as file:
            print(json.dumps(settings | seen), file=file)

    def generate(self, prompts, params, use_tqdm):
        import types
        outputs = []
        for prompt in prompts:
            ids = prompt["prompt_token_ids"]
            step = lambda t: {t + 1: Entry(-0.25), t + 2: Entry(-2.0)}
            new = [ids[-1] + 1 + i for i in range(params.max_tokens)]
            completion = types.SimpleNamespace(
                token_ids=new, logprobs=[step(t - 1) for t in new])
            scored = [None, *(step(t) | {n: Entry(-0.25 if n == t + 1 else -9.0)}
                              for t, n in zip(ids, ids[1:]))]
            outputs.append(types.SimpleNamespace(outputs=[completion], prompt_logprobs=scored))
        return outputs
"""
TORCH = """
class cuda:
    @staticmethod
    def get_device_name(index):
        return "a GPU"
    @staticmethod
    def device_count():
        return 1
"""
