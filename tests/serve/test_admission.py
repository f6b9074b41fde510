"""Admission after a preemption: nobody, until an entry has ended or none is left."""

import pytest

from gemma_jax.serve.admission import Admission
from gemma_jax.serve.entry import Entry, Status
from gemma_jax.serve.pages import CacheSizes, KVPages
from gemma_jax.serve.roster import Roster
from gemma_jax.serve.scheduler_limits import SchedulerLimits

LIMITS = SchedulerLimits(4, 64, 64, (1, 2, 4), (4, 8))


@pytest.fixture
def roster():
    return Roster(KVPages(CacheSizes(4, 100)), num_slots=4)


def queued(roster, entry_id):
    entry = Entry(entry_id, [1, 2, 3], 3, 8)
    entry.chain = roster.kv.chain()
    roster.queue(entry)
    return entry


def ready(roster):
    """As of a new plan."""
    return Admission(LIMITS, roster).front_is_ready()


def admitted(roster, entry_id):
    entry = queued(roster, entry_id)
    Admission(LIMITS, roster).admit(entry, roster.kv.match(entry.tokens, entry.chain))
    return entry


def test_after_a_preemption_nobody_is_admitted_until_an_entry_ends(roster):
    first, second, third = (admitted(roster, i) for i in range(3))
    roster.preempt(third)
    assert third.status is Status.WAITING
    assert not ready(roster)  # though pages abound
    roster.finish(second)
    assert ready(roster)
    assert first.slot is not None


def test_with_nothing_admitted_a_preempted_entry_may_return(roster):
    roster.preempt(admitted(roster, 0))
    assert ready(roster)


def test_the_end_of_a_waiting_entry_frees_no_pages_for_others(roster):
    admitted(roster, 0)
    roster.preempt(admitted(roster, 1))
    waiting = queued(roster, 2)
    roster.finish(waiting)
    assert not ready(roster)


def test_nobody_is_ready_without_a_free_slot(roster):
    for i in range(4):
        admitted(roster, i)
    queued(roster, 4)
    assert not ready(roster)


def test_the_preempted_wait_by_arrival(roster):
    entries = [admitted(roster, i) for i in range(3)]
    queued(roster, 3)
    roster.preempt(entries[2])
    roster.preempt(entries[1])
    assert [entry.entry_id for entry in roster.waiting] == [1, 2, 3]
