"""The scheduler's rules one by one, and all of them under random traffic on a simulated device."""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from scheduler_simulation import Simulation

from gemma_jax.buckets import prefill_row_buckets
from gemma_jax.errors import CapacityError, ConfigError, RequestError
from gemma_jax.serve.entry import DecodePlan, Drain, Entry, PrefillPlan, Status
from gemma_jax.serve.pages import CacheSizes, KVPages
from gemma_jax.serve.scheduler import Scheduler, SchedulerLimits

PAGE, WINDOW, CHUNK = 4, 8, 16
RING = CacheSizes.min_ring_pages(WINDOW, CHUNK, PAGE)


def simulation(full=200, window=200, prefix_caching=True, **limits) -> Simulation:
    sizes = CacheSizes(PAGE, full, window, WINDOW, RING)
    rows = limits.get("max_num_seqs", 4)
    defaults = {
        "max_num_seqs": rows, "max_num_batched_tokens": 64, "mixed_budget": 16,
        "row_buckets": prefill_row_buckets(rows), "chunk_buckets": (4, 8, CHUNK), "decode_steps": 8,
        "decode_steps_waiting": 2,
    }  # fmt: skip
    return Simulation(sizes, SchedulerLimits(**(defaults | limits)), prefix_caching)


def prompt(length, seed=0):
    return [random.Random(seed).randrange(1000) for _ in range(length)]


def prefills(sim) -> list[PrefillPlan]:
    return [plan for plan in sim.plans if isinstance(plan, PrefillPlan)]


def decodes(sim) -> list[DecodePlan]:
    return [plan for plan in sim.plans if isinstance(plan, DecodePlan)]


# ---- turns ------------------------------------------------------------------------------------


def test_a_short_prompt_is_served_while_a_long_one_prefills():
    sim = simulation(full=400, window=200)
    (long,) = sim.add(prompt(800, 1), 4)
    for _ in range(3):
        sim.step()
    (short,) = sim.add(prompt(4, 2), 4)
    for _ in range(8):
        sim.step()
    assert short.num_output > 0
    assert long.entry.status is Status.PREFILLING
    sim.run()


def test_a_long_prompt_keeps_its_turn_among_ever_new_short_ones():
    sim = simulation(max_num_seqs=3)
    (long,) = sim.add(prompt(160, 1), 4)
    for i in range(120):
        if sim.scheduler.num_waiting < 3:
            sim.add(prompt(4, i + 2), 2)
        sim.step()
    assert long.ended == "length"
    sim.run()


def test_only_a_few_long_prompts_take_turns():
    sim = simulation(max_num_seqs=8, max_num_batched_tokens=16)
    for i in range(8):
        sim.add(prompt(64, i), 1)
    for _ in range(8):
        sim.step()
    assert sim.scheduler.num_running == 4
    sim.run()


def test_prefill_and_decode_calls_alternate_while_rows_decode():
    sim = simulation()
    sim.add(prompt(4, 1), 40)
    sim.step()
    sim.add(prompt(160, 2), 4)
    for _ in range(10):
        sim.step()
    kinds = [type(plan) for plan in sim.plans[1:9]]
    assert kinds == [PrefillPlan, DecodePlan] * 4 or kinds == [DecodePlan, PrefillPlan] * 4
    sim.run()


# ---- prefill calls ----------------------------------------------------------------------------


def test_prompts_of_one_padded_length_share_a_call():
    sim = simulation()
    for length in (5, 16, 7, 6):
        sim.add(prompt(length, length), 1)
    sim.step()
    sim.step()
    first, second = prefills(sim)
    assert [chunk.length for chunk in first.chunks] == [5, 7, 6]
    assert (first.row_bucket, first.chunk_bucket) == (4, 8)
    assert [chunk.length for chunk in second.chunks] == [16]
    sim.run()


def test_the_budget_counts_padded_tokens():
    sim = simulation(max_num_batched_tokens=40)
    for i in range(5):
        sim.add(prompt(8, i), 1)
    sim.step()
    assert [plan.padded_tokens for plan in prefills(sim)] == [32]  # five rows would pad to eight
    sim.run()


def test_prompts_first_leaves_decoding_until_no_prompt_can_start():
    sim = simulation(max_num_seqs=3, prompts_first=True, max_num_batched_tokens=16)
    for i in range(3):
        sim.add(prompt(16, i), 8)
    sim.run()
    kinds = [isinstance(plan, PrefillPlan) for plan in sim.plans]
    assert sum(kinds) == 3
    assert all(kinds[:3])
    sim = simulation(max_num_seqs=3, max_num_batched_tokens=16)
    for i in range(3):
        sim.add(prompt(16, i), 8)
    sim.run()
    assert not all(isinstance(plan, PrefillPlan) for plan in sim.plans[:3])


def test_a_smaller_budget_applies_while_rows_decode():
    sim = simulation(mixed_budget=8)
    sim.add(prompt(4), 30)
    sim.step()
    sim.add(prompt(32, 1), 1)
    sim.step()
    sim.step()
    assert max(plan.padded_tokens for plan in prefills(sim)[1:]) == 8
    sim.run()


def test_a_chunk_that_continues_is_not_joined_to_a_first_one():
    sim = simulation(chunk_buckets=(4, 8, 16), max_num_batched_tokens=32)
    sim.add(prompt(13), 1)
    sim.run()
    sim.add(prompt(7, 5), 1)  # a head without past
    sim.add([*prompt(13)[:12], *prompt(6, 7)], 1)  # 12 cached tokens, then 6
    sim.step()
    head = prefills(sim)[-1]
    assert [chunk.start for chunk in head.chunks] == [0]
    sim.run()


def test_many_rows_that_would_mostly_pad_are_cut_in_two_chunks():
    limits = {"chunk_buckets": (512, 1024), "max_num_batched_tokens": 8192, "max_num_seqs": 8}
    ring = CacheSizes.min_ring_pages(WINDOW, 1024, PAGE)
    sizes = CacheSizes(PAGE, 2000, 3000, WINDOW, ring)
    rest = {"mixed_budget": 8192, "row_buckets": prefill_row_buckets(8)}
    scheduler = Scheduler(SchedulerLimits(**limits, **rest), KVPages(sizes))
    scheduler.add(*(Entry(i, prompt(512, i), 512, 513) for i in range(7)))
    scheduler.add(Entry(7, prompt(600), 600, 601))
    plan = scheduler.schedule()
    assert isinstance(plan, PrefillPlan)
    assert plan.chunk_bucket == 512  # the row of 600 would pad 8 rows to 1024
    alone = Scheduler(SchedulerLimits(**limits, **rest), KVPages(sizes))
    alone.add(Entry(0, prompt(600), 600, 601))
    plan = alone.schedule()
    assert isinstance(plan, PrefillPlan)
    assert plan.chunk_bucket == 1024


def test_rows_that_would_mostly_be_padding_wait_for_the_next_call():
    limits = SchedulerLimits(8, 16384, 16384, prefill_row_buckets(8), (2048,))
    ring = CacheSizes.min_ring_pages(512, 2048, 128)
    scheduler = Scheduler(limits, KVPages(CacheSizes(128, 400, 400, 512, ring)))
    scheduler.add(*(Entry(i, prompt(2048, i), 2048, 2050) for i in range(5)))
    plan = scheduler.schedule()
    assert isinstance(plan, PrefillPlan)
    assert (len(plan.chunks), plan.row_bucket) == (4, 4)


# ---- prefix cache -----------------------------------------------------------------------------


def test_completions_of_one_prompt_compute_it_once():
    sim = simulation(max_num_batched_tokens=256)
    added = sim.add(prompt(50), 5, n=4)
    sim.run()
    lengths = [chunk.length for plan in prefills(sim) for chunk in plan.chunks]
    assert sum(lengths) == 50 + 3 * 2
    assert [c.entry.num_cached for c in added] == [0, 48, 48, 48]
    assert sim.scheduler.prefix_query_tokens == 200
    assert sim.scheduler.prefix_hit_tokens == 144


def test_a_conversation_finds_its_earlier_turn():
    sim = simulation()
    (first,) = sim.add(prompt(20), 10)
    sim.run()
    (second,) = sim.add([*first.entry.tokens, *prompt(5, 3)], 4)
    sim.run()
    assert second.entry.num_cached == 28  # of 30, whole pages of 4


def test_prefix_hits_change_no_token():
    outputs = []
    for prefix_caching in (True, False):
        sim = simulation(prefix_caching=prefix_caching)
        added = [c for i in range(6) for c in sim.add([*prompt(30), i], 6)]
        sim.run()
        outputs.append([c.entry.tokens for c in added])
        assert (sim.scheduler.prefix_hit_tokens > 0) == prefix_caching
    assert outputs[0] == outputs[1]


# ---- decode calls -----------------------------------------------------------------------------


def test_decode_calls_are_long_when_nobody_waits():
    sim = simulation()
    sim.add(prompt(4), 20)
    sim.run()
    assert [plan.steps for plan in decodes(sim)] == [8, 8, 3]


def test_decode_calls_are_short_while_a_prompt_prefills():
    sim = simulation()
    sim.add(prompt(4), 40)
    sim.step()
    sim.add(prompt(160, 1), 1)
    for _ in range(8):
        sim.step()
    assert {plan.steps for plan in decodes(sim)} == {2}
    sim.run()


def test_a_decode_call_ends_with_the_first_row_that_frees_a_slot():
    sim = simulation(max_num_seqs=2)
    sim.add(prompt(4, 1), 6)
    sim.add(prompt(4, 2), 30)
    sim.add(prompt(4, 3), 30)
    sim.step()
    sim.step()
    assert [plan.steps for plan in decodes(sim)] == [5]
    sim.run()


def test_a_row_with_a_step_limit_shortens_the_call():
    sim = simulation()
    sim.add(prompt(4, 1), 9, max_steps=3)
    sim.add(prompt(4, 2), 9)
    sim.run()
    assert max(plan.steps for plan in decodes(sim) if len(plan.rows) == 2) == 3


def test_a_constrained_row_takes_one_step_and_is_never_queued_ahead():
    sim = simulation()
    (row,) = sim.add(prompt(4), 6, one_step=True)
    sim.add(prompt(4, 1), 20)
    while not row.ended:
        assert row.entry.pending <= 1
        sim.step()
    steps = [n for plan in decodes(sim) for entry, n in plan.rows if entry is row.entry]
    assert steps == [1] * 5
    sim.run()


# ---- pages run out ----------------------------------------------------------------------------


def test_calls_get_shorter_before_anyone_is_preempted():
    sim = simulation(full=7, prefix_caching=False)
    sim.add(prompt(4, 1), 11)
    sim.add(prompt(2, 2), 20)
    sim.run()
    # After 8 steps one page is left: enough for 2 more steps of both, after which the first ends.
    assert [plan.steps for plan in decodes(sim)][:2] == [8, 2]
    assert sim.scheduler.preemptions == 0


def test_the_latest_arrival_is_preempted_and_loses_no_token():
    sim = simulation(full=12, window=24, decode_steps=2)
    first, second, third = (sim.add(prompt(8, i), 24)[0] for i in range(3))
    preempted = set()
    while sim.step():
        sim.check()
        waiting = [c for c in (first, second, third) if c.entry.status is Status.WAITING]
        preempted |= {c for c in waiting if c.num_output}
    sim.check_ended()
    assert sim.scheduler.preemptions > 0
    assert first not in preempted
    assert third in preempted
    assert [c.num_output for c in (first, second, third)] == [24] * 3


def test_the_preempted_restart_from_what_survives_of_their_pages():
    sim = simulation(full=14, window=24, decode_steps=2)
    for i in range(3):
        sim.add(prompt(8, i), 24)
    sim.run()
    restarts = [c for p in prefills(sim) for c in p.chunks if c.start and c.entry.num_cached == 0]
    assert restarts


def test_entries_with_unread_calls_are_drained_before_they_are_preempted():
    sim = simulation(full=6, window=12, decode_steps=4, prefix_caching=False)
    sim.add(prompt(7, 1), 16)
    sim.add(prompt(7, 2), 16)
    plans = []
    for _ in range(6):  # nothing is read
        plans.append(sim.scheduler.schedule())
        if isinstance(plans[-1], Drain):
            break
    assert isinstance(plans[-1], Drain)
    assert sim.scheduler.preemptions == 0


def test_a_cache_of_one_sequence_serves_any_number_in_turn():
    sim = simulation(full=6, window=6)
    for i in range(6):
        sim.add(prompt(12, i), 12)
    sim.run()
    assert all(c.ended == "length" for c in sim.completions.values())


def test_nobody_overtakes_an_entry_that_waits_for_pages():
    sim = simulation(full=12, window=30)
    sim.add(prompt(20, 1), 20)
    sim.step()
    (big,) = sim.add(prompt(40, 2), 2)
    small = [c for i in range(5) for c in sim.add(prompt(2, 3 + i), 2)]
    while big.entry.status is Status.WAITING:
        sim.step()
        assert all(c.entry.status is Status.WAITING for c in small) or big.entry.slot is not None
    sim.run()


def test_a_prompt_starts_only_when_its_pages_leave_room_for_running_rows():
    sim = simulation(full=10, window=30)
    sim.add(prompt(16, 1), 22)
    sim.step()
    sim.add(prompt(16, 2), 4)  # its 5 pages and two of the first row's would just exceed 10
    sim.run()
    assert sim.scheduler.preemptions == 0


def test_prompts_of_one_call_are_not_promised_the_same_pages():
    sim = simulation(full=13, window=40)
    for i in range(4):
        sim.add(prompt(16, i), 8)  # 6 pages each
    sim.step()
    assert sim.scheduler.num_running == 2
    sim.run()
    assert sim.scheduler.preemptions == 0


# ---- in and out -------------------------------------------------------------------------------


def test_what_can_never_fit_is_refused_with_sizes_and_remedy():
    sim = simulation(full=4, window=12)
    with pytest.raises(CapacityError, match=r"18 tokens .* 5 full .* 4 tokens.*has 4 .* lower"):
        sim.add(prompt(8), 10)
    sim.add(prompt(8), 9)
    sim.run()


def test_a_full_queue_takes_all_completions_of_a_request_or_none():
    sim = simulation(max_queue=3)
    sim.add(prompt(4), 2, n=2)
    with pytest.raises(CapacityError, match=r"2 completions wait, 2 more came.*max_queue=3"):
        sim.add(prompt(4), 2, n=2)
    assert sim.scheduler.num_waiting == 2
    sim.run()


def test_a_request_without_prompt_or_room_is_refused():
    sim = simulation()
    with pytest.raises(RequestError, match="0 tokens"):
        sim.add([], 5)
    with pytest.raises(RequestError, match="at most 4 in all"):
        sim.add(prompt(4), 0)


def test_abort_frees_slot_and_pages_at_once():
    sim = simulation()
    (running,) = sim.add(prompt(20, 1), 30)
    for _ in range(3):
        sim.step()
    (waiting,) = sim.add(prompt(20, 2), 30)
    assert sim.scheduler.kv_usage > 0
    sim.abort(waiting)
    sim.abort(running)
    assert (sim.scheduler.num_running, sim.scheduler.num_waiting) == (0, 0)
    assert sim.scheduler.kv_usage == 0
    sim.abort(running)  # again: nothing happens
    assert running.entry.pages is None
    sim.run()


def test_calls_of_an_ended_entry_bring_nothing():
    sim = simulation()
    (row,) = sim.add(prompt(4), 30)
    sim.step()
    sim.step()
    sim.abort(row)
    tokens = list(row.entry.tokens)
    sim.run()
    assert row.entry.tokens == tokens


def test_nothing_to_do_gives_no_plan():
    assert simulation().scheduler.schedule() is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("decode_steps", 0), ("row_buckets", ()), ("chunk_buckets", (8, 4)), ("mixed_budget", 0)],
)
def test_impossible_limits_are_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=name):
        simulation(**{name: value})


# ---- random traffic ---------------------------------------------------------------------------


class Traffic(RuleBasedStateMachine):
    """Arrivals, aborts and calls in any order, over caches from tiny to ample."""

    sim: Simulation

    @initialize(data=st.data())
    def start(self, data):
        draw = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
        page, window = draw(1, 2, 3, 4), draw(0, 1, 3, 5, 8)
        chunks = draw((8,), (4, 8), (2, 4, 6), (4, 8, 16))
        chunk = draw(1, chunks[-1])  # a ring may be too small for the largest chunk
        ring = CacheSizes.min_ring_pages(window, chunk, page)
        self.longest = draw(12, 30, 60)
        pages = -(-self.longest // page)
        sizes = CacheSizes(
            page, pages + draw(0, 2, 40), min(pages, ring) + draw(0, 2, 40), window, ring
        )
        rows = draw(1, 2, 4, 6)
        limits = SchedulerLimits(
            rows, draw(8, 16, 64), draw(2, 8, 16), prefill_row_buckets(rows), chunks, draw(1, 4, 8),
            draw(1, 2, 4),
        )  # fmt: skip
        self.sim = Simulation(sizes, limits, prefix_caching=draw(True, True, True, False))
        self.base = [data.draw(st.integers(0, 3)) for _ in range(self.longest)]

    @rule(
        shared=st.integers(0, 59),
        own=st.lists(st.integers(0, 3), max_size=20),
        after=st.none() | st.integers(0, 99),
        max_tokens=st.integers(1, 30),
        n=st.sampled_from([1, 1, 1, 3]),
        stop_at=st.none() | st.integers(1, 10),
        host_stop_at=st.none() | st.integers(1, 10),
        max_steps=st.sampled_from([1, 3, 100]),
        one_step=st.sampled_from([False, False, False, True]),
        namespace=st.sampled_from([0, 0, 0, 1]),
    )
    def arrive(self, shared, own, after, max_tokens, **options):
        tokens = [*self.base[:shared], *own]
        if after is not None and self.sim.completions:  # a conversation goes on
            earlier = list(self.sim.completions.values())
            tokens = [*earlier[after % len(earlier)].entry.tokens, *own]
        tokens = tokens[: self.longest - 1] or [0]
        self.sim.add(tokens, min(max_tokens, self.longest - len(tokens)), **options)

    @rule(times=st.integers(1, 8))
    def go_on(self, times):
        for _ in range(times):
            self.sim.step()
            self.sim.check()

    @rule()
    def read_early(self):
        if self.sim.queued:
            self.sim.read()

    @rule(i=st.integers(0, 99))
    def abort(self, i):
        completions = list(self.sim.completions.values())
        if completions:
            self.sim.abort(completions[i % len(completions)])

    @invariant()
    def pages_and_slots_add_up(self):
        if hasattr(self, "sim"):
            self.sim.check()

    def teardown(self):
        if hasattr(self, "sim"):
            self.sim.run()


CALM = {"deadline": None, "suppress_health_check": list(HealthCheck)}


class TestTraffic(Traffic.TestCase):
    settings = settings(max_examples=30, stateful_step_count=40, derandomize=True, **CALM)


@pytest.mark.slow
class TestLongTraffic(Traffic.TestCase):
    settings = settings(max_examples=150, stateful_step_count=80, **CALM)


def overload(seed) -> Simulation:
    """300 events on a cache that holds a sequence or two, with more arrivals than it can take."""
    draw = random.Random(seed)
    window, page = draw.choice([0, 1, 3, 5, 8]), draw.choice([1, 2, 3, 4])
    ring = CacheSizes.min_ring_pages(window, draw.choice([1, 16]), page)
    longest = draw.choice([12, 30, 60])
    pages = -(-longest // page)
    spare = draw.choice([0, pages // 2, pages])
    sizes = CacheSizes(page, pages + spare, min(pages, ring) * 2 + spare, window, ring)
    limits = SchedulerLimits(
        4, draw.choice([8, 64]), draw.choice([2, 16]), (1, 2, 4), (4, 8, 16),
        draw.choice([1, 4, 8]), draw.choice([1, 2]),
    )  # fmt: skip
    sim = Simulation(sizes, limits, prefix_caching=draw.random() < 0.8)
    base = [draw.randrange(4) for _ in range(longest)]
    for _ in range(300):
        chance = draw.random()
        if chance < 0.2:
            length = draw.randint(1, longest // 2)
            shared = draw.randint(0, length)
            tokens = base[:shared] + [draw.randrange(4) for _ in range(length - shared)]
            sim.add(tokens, draw.randint(1, longest - length), n=draw.choice([1, 1, 2]))
        elif chance < 0.22 and sim.completions:
            sim.abort(draw.choice(list(sim.completions.values())))
        else:
            sim.step()
        sim.check()
    sim.run()
    return sim


def test_everything_ends_when_pages_are_always_short():
    sims = [overload(seed) for seed in range(12)]
    assert sum(sim.scheduler.preemptions for sim in sims) > 100
    assert sum(sim.scheduler.prefix_hit_tokens for sim in sims) > 1000


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_everything_ends_when_pages_are_always_short_at_length(block):
    for seed in range(1000 + block * 10, 1010 + block * 10):
        overload(seed)
