"""The matrix: cells against their baseline, rows that name what differs, and resuming."""

import json

import pytest
from record_files import row as record_row
from record_files import write

from gemma_jax.cli import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_OK, main
from gemma_jax.config import ModelConfig
from gemma_jax.outputs import CompletionOutput, Logprob, RequestOutput
from gemma_jax.parity import matrix
from gemma_jax.records import read_records

CONFIG = ModelConfig(vocab_size=64, num_hidden_layers=6, max_position_embeddings=128)


class FakeLLM:
    """The next token is the last one + 1; a wrong batch size adds 2 with some margin."""

    model_config = CONFIG
    wrong_batch, margin = None, 1.0
    made: list = []  # noqa: RUF012

    def __init__(self, model, **settings):
        self.settings = settings
        self.max_model_len, self.max_num_seqs = settings["max_model_len"], settings["max_num_seqs"]
        FakeLLM.made.append(settings)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def generate(self, prompts, params, use_tqdm):
        return [
            self._greedy(p["prompt_token_ids"], q) for p, q in zip(prompts, params, strict=True)
        ]

    def score(self, token_ids, logprobs):
        return [None, *map(self._step, token_ids[:-1])]

    def _step(self, last):
        good, other = (last + 1) % 64, (last + 2) % 64
        wrong = self.settings["max_num_seqs"] == FakeLLM.wrong_batch
        values = (-1.0 - FakeLLM.margin, -1.0) if wrong else (-1.0, -1.0 - FakeLLM.margin)
        return {good: Logprob(values[0]), other: Logprob(values[1])}

    def _greedy(self, prompt, params):
        ids, steps = list(prompt), []
        for _ in range(params.max_tokens):
            steps.append(self._step(ids[-1]))
            ids.append(max(steps[-1], key=lambda i: steps[-1][i].logprob))
        completion = CompletionOutput(0, "", ids[len(prompt) :], logprobs=steps)
        return RequestOutput("0", None, prompt, outputs=[completion], finished=True)


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(matrix, "LLM", FakeLLM)
    monkeypatch.setattr(FakeLLM, "made", [])
    return monkeypatch


def plan(**changes):
    fields = {
        "model": "m", "dtype": "bfloat16", "rounding": "hf", "contexts": [8, 100, 200],
        "batches": [1, 4], "fast_prefills": [True, False], "kernels": ["reference"],
        "chunks": [0, 16], "prompts": 3, "max_tokens": 5, "logprobs": 2, "seed": 0, "noise": 0.1,
    }  # fmt: skip
    return matrix.Plan(**(fields | changes))


def rows(wanted):
    run = matrix.Matrix(wanted, CONFIG).run
    return [run(cell) for cell in wanted.cells()]


def test_every_combination_is_a_cell_after_the_baseline_of_its_context(fake):
    cells = list(plan().cells())
    assert len(cells) == 3 * (1 + 2 * 2 * 1 * 2)
    assert len({cell.id for cell in cells}) == len(cells)
    assert [cell.is_baseline for cell in cells[:9]] == [True] + [False] * 8
    got = rows(plan())
    assert {row["status"] for row in got if row["context"] == 200} == {"skipped"}
    assert {row["status"] for row in got if row["context"] < 200} == {"ok"}
    assert FakeLLM.made[0] == {
        "dtype": "bfloat16", "rounding": "hf", "max_num_seqs": 1, "fast_prefill": False,
        "kernels": "reference", "max_model_len": 13, "batch_invariant": False,
    }  # fmt: skip
    assert FakeLLM.made[2]["max_num_batched_tokens"] == 16


def test_a_batch_is_filled_with_the_prompts_in_turn_and_equal_runs_are_bit_equal(fake):
    row = next(row for row in rows(plan()) if row["batch"] == 4)
    assert (row["sequences"], row["whole"], row["bit_equal"]) == (4, 4, 4)
    assert row["max_delta_logprob"] == 0
    assert not matrix.failed(row)


@pytest.mark.parametrize(("margin", "kind"), [(1.0, "unexplained"), (0.05, "noise")])
def test_difference_of_one_batch_size_is_found_in_its_cells_only(fake, margin, kind):
    fake.setattr(FakeLLM, "wrong_batch", 4)
    fake.setattr(FakeLLM, "margin", margin)
    got = [row for row in rows(plan()) if row["context"] == 8 and not row["is_baseline"]]
    for row in got:
        bad = row["batch"] == 4
        assert row["classes"][kind] == (4 if bad else 0)
        assert matrix.failed(row) == (bad and kind == "unexplained")
    assert f"{'0/0/4' if kind == 'unexplained' else '0/4/0'}" in matrix.table(got)


def test_batch_invariant_cells_need_no_float32_run_and_forgive_no_margin(fake):
    fake.setattr(FakeLLM, "wrong_batch", 4)
    fake.setattr(FakeLLM, "margin", 0.05)
    wanted = plan(contexts=[8], batch_invariant=True, noise=None)
    got = [row for row in rows(wanted) if not row["is_baseline"]]
    assert {settings["dtype"] for settings in FakeLLM.made} == {"bfloat16"}
    assert [matrix.failed(row) for row in got] == [row["batch"] == 4 for row in got]


def test_cells_that_run_out_of_memory_or_are_unsupported_are_rows(fake):
    from gemma_jax.errors import UnsupportedError

    class Failing(FakeLLM):
        def __init__(self, model, **settings):
            if settings["max_num_seqs"] == 4:
                raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
            if settings["fast_prefill"]:
                raise UnsupportedError("no such thing")
            super().__init__(model, **settings)

    fake.setattr(matrix, "LLM", Failing)
    got = rows(plan(contexts=[8]))
    assert {row["status"] for row in got if row["batch"] == 4} == {"oom"}
    assert {row["status"] for row in got if row["batch"] == 1 and row["fast_prefill"]} == {
        "unsupported"
    }
    assert "oom: RESOURCE_EXHAUSTED" in matrix.table(got)
    assert not any(map(matrix.failed, got))


def test_interrupted_matrix_goes_on_and_refuses_other_settings(fake, tiny_model, tmp_path, capsys):
    output = tmp_path / "m.jsonl"
    command = [
        "parity", "matrix", "--model", tiny_model, "--output", str(output), "--contexts", "20",
        "--batches", "1,2", "--fast-prefills", "on", "--kernels", "reference", "--max-tokens", "4",
        "--prompts-per-context", "2", "--noise", "0.001", "--logprobs", "2",
    ]  # fmt: skip
    assert main(command) == EXIT_OK
    whole = output.read_text()
    assert capsys.readouterr().out.count("  2/2  ") >= 2
    lines = whole.splitlines(keepends=True)
    output.write_text("".join(lines[:-1]) + lines[-1][:30])
    assert main(command) == EXIT_OK
    assert capsys.readouterr().err.count("batch 2") == 1
    again = [{**row, "seconds": 0} for row in read_records(output).rows]
    assert again == [{**json.loads(line), "seconds": 0} for line in lines[1:]]
    assert main([*command, "--seed", "1"]) == EXIT_BAD_INPUT
    assert "settings.seed was 0 and is now 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("--batches", "-1", "at least 1"),
        ("--batches", "8,0", "at least 1"),
        ("--contexts", "0", "at least 1"),
        ("--contexts", "many", "at least 1"),
        ("--chunks", "7", "at least 16 prompt tokens, or 0"),
        ("--chunks", "-3", "at least 0"),
        ("--max-tokens", "0", "at least 1"),
        ("--prompts-per-context", "0", "at least 1"),
        ("--logprobs", "1", "2 to 20"),
        ("--seed", "-1", "at least 0"),
    ],
)
def test_sizes_that_no_cell_could_have_are_refused_before_anything_is_read(
    flag, value, expected, tmp_path, capsys
):
    output = tmp_path / "m.jsonl"
    argv = ["parity", "matrix", "--model", "/no/such/model", "--output", str(output), flag, value]
    try:
        code = main(argv)
    except SystemExit as usage:
        code = usage.code
    message = capsys.readouterr().err
    assert code == EXIT_BAD_INPUT
    assert flag in message
    assert value in message
    assert expected in message
    assert not output.exists()


def counting(row_id, prompt, tokens):
    """A row that counts on from its prompt, as `FakeLLM` does."""
    top = [[[3 + prompt + t, -1.0], [4 + prompt + t, -2.0]] for t in range(tokens)]
    return record_row(row_id, list(range(3, 3 + prompt)), top)


@pytest.fixture
def against(fake, tiny_model, tmp_path, capsys):
    """Runs a small matrix against a reference of these rows: code, rows of cells, stderr."""

    def run(reference, header, *flags):
        path = write(tmp_path / "ref.jsonl", reference, header)
        output = tmp_path / "m.jsonl"
        argv = [
            "parity", "matrix", "--model", tiny_model, "--output", str(output), "--batches", "2",
            "--fast-prefills", "on", "--kernels", "reference", "--prompts-per-context", "2",
            "--noise", "0.001", "--logprobs", "2", "--max-tokens", "4", "--contexts", "4,8,9000",
            "--reference", str(path), *flags,
        ]  # fmt: skip
        code = main(argv)
        cells = list(read_records(output).rows) if output.exists() else []
        return code, cells, capsys.readouterr().err

    return run


def test_every_context_says_how_many_reference_rows_it_compares(against):
    reference = [counting(0, 2, 4), counting(1, 3, 6), counting(2, 8, 4), counting(3, 20, 4)]
    code, cells, err = against(reference, {"engine": "x"})
    assert code == EXIT_OK
    for words in ("context 4: 1 of 4 ref", "context 8: 2 of 4 ref", "1 of 4 reference rows fit no"):
        assert words in err
    assert "context 9000:" not in err  # beyond the model
    compared = {c["context"]: c["parity"]["sequences"] for c in cells if c.get("parity")}
    assert compared == {4: 1, 8: 2}


@pytest.mark.parametrize(
    ("reference", "header", "words"),
    [
        ([counting("a", 20, 4), counting("b", 25, 5)], {}, "ref.jsonl: no row is compared; its"
         " prompts have 20 to 25 tokens and its continuations 4 to 5, but no context of --cont"),
        ([counting("a", 3, 4)], {"model": {"vocab_size": 63}}, "a vocabulary of 63, but the model"),
        ([counting("a", 3, 4) | {"prompt_token_ids": [9999]}], {}, "prompt_token_ids[0]=9999"),
        ([counting("a", 3, 4) | {"token_ids": [1, 1, 1, 1]}], {}, "only 0 of 4 tokens are the eng"),
    ],
    ids=["too long", "vocabulary", "id", "sampled"],
)  # fmt: skip
def test_reference_that_no_cell_could_compare_is_refused_before_any_runs(
    against, reference, header, words
):
    code, cells, err = against(reference, header)
    assert (code, cells, FakeLLM.made) == (EXIT_BAD_INPUT, [], [])
    assert words in err


@pytest.mark.slow
def test_reference_with_another_continuation_fails_the_matrix(tiny_model, tmp_path, capsys):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"id": 0, "prompt_token_ids": [2, 300, 301]}\n')
    reference = tmp_path / "r.jsonl"
    flags = ["--model", tiny_model]
    record = ["parity", "record", "--engine", "gemma-jax", *flags, "--prompts", str(prompts)]
    assert main([*record, "--output", str(reference), "--max-tokens", "4"]) == EXIT_OK
    header, row = map(json.loads, reference.read_text().splitlines())
    (first, x), (second, y), *rest = row["top"][0]
    row["top"][0] = [[second, x], [first, y], *rest]
    row["token_ids"][0] = second
    reference.write_text(json.dumps(header) + "\n" + json.dumps(row) + "\n")
    command = [
        "parity", "matrix", *flags, "--output", str(tmp_path / "m.jsonl"), "--contexts", "20",
        "--batches", "1", "--fast-prefills", "off", "--kernels", "reference", "--max-tokens", "4",
        "--prompts-per-context", "2", "--reference", str(reference), "--dtype", "float32",
    ]  # fmt: skip
    assert main(command) == EXIT_FAILED
    assert "UNEXPLAINED" in capsys.readouterr().err


def test_in_batch_invariant_mode_any_other_bit_fails(fake):
    fake.setattr(FakeLLM, "wrong_batch", 4)
    fake.setattr(FakeLLM, "margin", 0.01)
    for invariant in (False, True):
        wanted = plan(contexts=[8], kernels=["auto"], chunks=[0], batch_invariant=invariant)
        found = rows(wanted)
        assert found[0]["kernels"] == ("auto" if invariant else "reference")
        assert {made["batch_invariant"] for made in FakeLLM.made} == {invariant}
        assert [matrix.failed(row) for row in found] == [
            invariant and row["batch"] == 4 for row in found
        ]
        FakeLLM.made.clear()


def test_the_matrix_refuses_kernels_of_two_kinds_in_batch_invariant_mode(tmp_path, capsys):
    argv = ["parity", "matrix", "--batch-invariant", "--output", str(tmp_path / "m.jsonl")]
    argv += ["--kernels", "auto,pallas"]
    assert main(argv) == EXIT_BAD_INPUT
    assert "--kernels auto,pallas: with --batch-invariant give one" in capsys.readouterr().err
