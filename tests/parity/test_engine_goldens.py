"""Every committed record of another engine against our model, on a CPU and without that engine.

Records lie in `data/engines/MODEL/`; a file that is added there is compared too. The default suite
takes the sequences of one program (66 to 129 tokens: both sides of the short windows) of nano's
records and of the random models' float32 ones, the slow one bfloat16 ones and nano's sequences of
1,024 tokens and more. `bench.agreement` compares everything; its rows are committed and tested.

Of nano, and in float32, no flip may be unexplained. A random model in bfloat16 has a flip every
twenty tokens, at margins up to and beyond the limit, which is a percentile: of those beyond there
may be as many as that percentile leaves to two bfloat16 runs, and each must be bfloat16's doing.
"""

import dataclasses
from functools import cache
from pathlib import Path

import pytest

from bench.goldens import make_engine_goldens
from gemma_jax.llm import LLM
from gemma_jax.parity.bounds import lower_bound
from gemma_jax.parity.compare import compare
from gemma_jax.parity.flips import NoiseLimit, noise_limit
from gemma_jax.parity.identity import model_identity
from gemma_jax.parity.records import Record, check_model, read_record
from gemma_jax.testing.golden_models import BEYOND_LIMIT, GOLDEN_MODELS, golden_checkpoint

DATA = Path(__file__).parent / "data" / "engines"
SUFFIX, TWIN_SUFFIX = ".jsonl.xz", ".twin.jsonl.xz"
MAX_BYTES = 8 * 2**20

ONE_PROGRAM, LONG = range(66, 130), range(1024, 4097)
MIN_TOKENS, MIN_SEQUENCES = 2000, 5
LOGPROBS = 7
NO_TF32 = "ieee"

RECORDS = sorted(
    str(path.relative_to(DATA)).removesuffix(SUFFIX)
    for path in DATA.rglob(f"*{SUFFIX}")
    if not path.name.endswith(TWIN_SUFFIX)
)
QUICK = [name for name in RECORDS if name.startswith("nano/") or "bfloat16" not in name]


class Scorer:
    """A model that keeps what it scored: records of one engine share most sequences."""

    def __init__(self, llm: LLM):
        self.llm, self._scored = llm, {}
        self.model_config, self.max_model_len = llm.model_config, llm.max_model_len
        self.max_num_seqs = llm.max_num_seqs

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def score(self, token_ids, logprobs):
        assert logprobs <= LOGPROBS
        key = tuple(token_ids)
        if key not in self._scored:
            self._scored[key] = self.llm.score(token_ids, LOGPROBS)
        return self._scored[key]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Model name → folder."""
    folder = tmp_path_factory.mktemp("golden")
    return cache(lambda name: golden_checkpoint(name, folder))


@pytest.fixture(scope="module")
def scorer(checkpoint):
    """(model, dtype, rounding) → our model."""

    @cache
    def make(model, dtype, rounding):
        return Scorer(LLM(checkpoint(model), dtype=dtype, rounding=rounding, max_num_seqs=1))

    return make


@cache
def load(name: str) -> tuple[Record, Record | None, NoiseLimit]:
    """A record, its twin where it has one, and the limit that follows from the whole of both."""
    record = read_record(DATA / f"{name}{SUFFIX}")
    twin_path = DATA / f"{name}{TWIN_SUFFIX}"
    twin = read_record(twin_path) if twin_path.exists() else None
    return record, twin, noise_limit(record, twin, record.dtype or "")


def check(name, wanted, scorer):
    """Compares the sequences whose lengths are `wanted`: no flip may be unexplained."""
    record, twin, limit = load(name)
    model = name.split("/")[0]
    rounding = "vllm" if record.engine == "vllm" else "hf"
    some = tuple(s for s in record.streams if len(s.sequence) in wanted)
    comparison = compare(
        dataclasses.replace(record, streams=some),
        lambda dtype: scorer(model, dtype, rounding),
        record.dtype,
        twin=twin,
        noise=limit.nats,
    )
    print(f"{name}: {comparison.rate}, limit {limit.nats:.2g} nat", *comparison.flips, sep="\n")
    assert comparison.rate.trials >= 32 * MIN_SEQUENCES
    if model == "nano" or record.dtype == "float32":
        assert [str(flip) for flip in comparison.unexplained] == []
        return
    beyond = comparison.unexplained_rate
    assert lower_bound(beyond.events, beyond.trials) <= BEYOND_LIMIT
    assert all(flip.float32.agrees for flip in comparison.unexplained)


def test_records_are_complete_and_small():
    for engine in ("transformers", "vllm"):
        listed = make_engine_goldens.processes(engine, list(GOLDEN_MODELS))
        assert [f for p in listed for f in p.files() if not (DATA / f).exists()] == []
    assert sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file()) <= MAX_BYTES


@pytest.mark.parametrize("name", RECORDS)
def test_record_is_of_the_model_that_the_recipe_builds(name, checkpoint):
    record, twin, _ = load(name)
    check_model(record, model_identity(checkpoint(name.split("/")[0])))
    assert record.model["weights_sha256"]
    assert record.num_tokens >= MIN_TOKENS
    assert record.header["versions"]["transformers"]
    assert record.header["command"].startswith("python -m bench.goldens.")
    exact = record.dtype == "float32" and (
        record.engine != "vllm" or record.header["environment"]["TRITON_F32_DEFAULT"] == NO_TF32
    )
    assert (twin is None) == exact


@pytest.mark.parametrize("name", QUICK)
def test_no_flip_is_unexplained(name, scorer):
    check(name, ONE_PROGRAM, scorer)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(RECORDS) - set(QUICK)))
def test_flips_of_a_random_model_in_bfloat16_are_its_rounding(name, scorer):
    check(name, ONE_PROGRAM, scorer)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RECORDS if name.startswith("nano/")])
def test_no_flip_of_nano_beyond_a_thousand_tokens_is_unexplained(name, scorer):
    check(name, LONG, scorer)
