"""Counting what was sent and is not in a worker's own report yet."""

import dataclasses

from kvplane.routing.domain import Load
from kvplane.routing.inflight import InFlight
from routing.values import worker


def at(worker_id: str, beat_us: int, running: int = 0, waiting: int = 0):
    return dataclasses.replace(
        worker(worker_id), last_beat_us=beat_us, load=Load(running=running, waiting=waiting)
    )


def test_load_is_what_was_reported_and_what_was_sent_since():
    flight = InFlight()
    flight.refresh([at("d", 100, running=2, waiting=1), at("p", 100)])
    flight.add(("t", "s", 1), ("d", "p"), now_us=110)
    assert flight.loads == {"d": 4, "p": 1}
    # The next beat includes what was sent before it.
    flight.refresh([at("d", 120, running=4), at("p", 105)])
    assert flight.loads == {"d": 4, "p": 1}


def test_a_completed_turn_is_taken_away_once():
    flight = InFlight()
    flight.refresh([at("d", 100)])
    flight.add(("t", "s", 1), ("d",), now_us=110)
    flight.add(("t", "s", 2), ("d",), now_us=110)
    for _ in range(2):
        flight.remove(("t", "s", 1))
    assert flight.loads == {"d": 1}


def test_a_turn_that_is_sent_again_counts_at_its_new_place_only():
    flight = InFlight()
    flight.refresh([at("d0", 100), at("d1", 100)])
    flight.add(("t", "s", 1), ("d0",), now_us=110)
    flight.add(("t", "s", 1), ("d1",), now_us=111)
    assert flight.loads == {"d0": 0, "d1": 1}


def test_other_tenants_turns_are_other_turns():
    flight = InFlight()
    flight.refresh([at("d", 100)])
    flight.add(("t", "s", 1), ("d",), now_us=110)
    flight.remove(("u", "s", 1))
    assert flight.loads == {"d": 1}


def test_a_lost_worker_is_forgotten():
    flight = InFlight()
    flight.refresh([at("d", 100)])
    flight.add(("t", "s", 1), ("d",), now_us=110)
    flight.refresh([])
    flight.remove(("t", "s", 1))
    assert flight.loads == {}
    flight.refresh([at("d", 100)])
    assert flight.loads == {"d": 0}
