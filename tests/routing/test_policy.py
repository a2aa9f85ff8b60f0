"""The choice of workers, as pure functions."""

import dataclasses
from collections import Counter

from kvplane.routing.domain import Role, State, Worker
from kvplane.routing.inflight import InFlight
from kvplane.routing.policy import Choice, Reason, Turn, choose, make_pool, obstacle
from routing.values import SAME, worker

GAP = 8


class Chooser:
    """Remembers what was chosen when, as the router does."""

    def __init__(self, *workers: Worker) -> None:
        self.workers = workers
        self.flight = InFlight()
        self.flight.refresh(workers)
        self.decode = dict.fromkeys(self.flight.loads, 0)
        self.prefill = dict.fromkeys(self.flight.loads, 0)
        self.number = 0

    def __call__(
        self, last: str = "", exclude: tuple[str, ...] = (), model: str = "m"
    ) -> Choice | None:
        choice = choose(
            make_pool(self.workers, model, exclude),
            self.flight.loads,
            self.decode,
            self.prefill,
            last_decode=last,
            gap=GAP,
        )
        self.number += 1
        if choice is not None:
            self.decode[choice.decode.worker_id] = self.number
            if choice.prefill is not None:
                self.prefill[choice.prefill.worker_id] = self.number
        return choice

    def names(self, *args, **kwargs) -> tuple[str, str] | None:
        choice = self(*args, **kwargs)
        if choice is None:
            return None
        prefill = choice.prefill.worker_id if choice.prefill is not None else ""
        return choice.decode.worker_id, prefill


def decodes(count: int) -> list[Worker]:
    return [worker(f"d{i}") for i in range(count)]


def test_one_at_a_time_traffic_spreads_over_idle_workers():
    chooser = Chooser(*decodes(4), worker("p0", Role.PREFILL), worker("p1", Role.PREFILL))
    chosen = [chooser.names() for _ in range(200)]
    assert set(Counter(decode for decode, _ in chosen).values()) == {50}
    assert set(Counter(prefill for _, prefill in chosen).values()) == {100}


def test_traffic_at_once_spreads_too():
    chooser = Chooser(*decodes(4), worker("p", Role.PREFILL))
    chosen: Counter[str] = Counter()
    for i in range(200):
        decode, _ = chooser.names()
        chosen[decode] += 1
        chooser.flight.add(("t", "s", i), (decode,), now_us=1)
        if i >= 32:
            chooser.flight.remove(("t", "s", i - 32))
    assert max(chosen.values()) <= 80


def test_ties_spread_when_the_tied_set_changes():
    idle = Chooser(*decodes(3), worker("p", Role.PREFILL))
    chosen: Counter[str] = Counter()
    for i in range(300):
        # Every second time one of them is busy, in step with the choices.
        busy = ("t", "busy", 0)
        if i % 2:
            idle.flight.add(busy, ("d0",), now_us=1)
        chosen[idle.names()[0]] += 1
        idle.flight.remove(busy)
    assert min(chosen.values()) >= 75


def test_the_least_loaded_is_chosen():
    chooser = Chooser(
        worker("d0", running=3),
        worker("d1", running=1),
        worker("p0", Role.PREFILL, running=1),
        worker("p1", Role.PREFILL, running=2),
    )
    assert chooser.names() == ("d1", "p0")
    assert chooser.names() == ("d1", "p0")


def test_a_session_stays_until_the_gap_is_passed():
    others = [worker("d1"), worker("p", Role.PREFILL)]
    stays = Chooser(worker("d0", running=GAP), *others)("d0")
    assert (stays.decode.worker_id, stays.owner_overloaded) == ("d0", False)
    moves = Chooser(worker("d0", running=GAP + 1), *others)("d0")
    assert (moves.decode.worker_id, moves.owner_overloaded) == ("d1", True)


def test_nothing_new_goes_to_a_draining_or_lost_or_excluded_worker():
    prefill = worker("p", Role.PREFILL)
    for state in (State.DRAINING, State.LOST):
        chooser = Chooser(worker("d0", state=state), worker("d1"), prefill)
        assert chooser.names("d0") == ("d1", "p")
    chooser = Chooser(worker("d0"), worker("d1"), prefill)
    assert chooser.names("d0", exclude=("d0",)) == ("d1", "p")


def test_any_served_name_will_do_and_no_other():
    chooser = Chooser(worker("d", models=("main", "alias")), worker("p", Role.PREFILL, models=()))
    assert chooser.names(model="alias") == ("d", "")
    assert chooser.names(model="m") is None


def test_ranks_of_one_engine_are_workers_of_their_own():
    ranks = [worker(f"d/{rank}", data_parallel_rank=rank) for rank in range(2)]
    chooser = Chooser(*ranks, worker("p", Role.PREFILL))
    assert {chooser.names()[0] for _ in range(2)} == {"d/0", "d/1"}
    assert chooser.names("d/1")[0] == "d/1"


def test_a_prefill_of_another_kind_is_never_paired():
    for name, value in (
        ("model", "x"),
        ("revision", "x"),
        ("block_size", 32),
        ("kv_layout", "HND"),
        ("kv_dtype", "bfloat16"),
        ("engine_version", "2"),
    ):
        other = dataclasses.replace(SAME, **{name: value})
        chooser = Chooser(worker("d"), worker("p", Role.PREFILL, compatibility=other))
        assert chooser.names() == ("d", ""), name


def test_a_decode_that_has_a_partner_is_preferred():
    new = dataclasses.replace(SAME, engine_version="2")
    chooser = Chooser(
        worker("d-new", compatibility=new), worker("d-old"), worker("p", Role.PREFILL)
    )
    assert {chooser.names() for _ in range(4)} == {("d-old", "p")}
    # A conversation stays where its KV is, even so.
    assert chooser.names("d-new") == ("d-new", "")


def test_one_role_alone_does_the_whole_request():
    assert Chooser(worker("d")).names() == ("d", "")
    assert Chooser(worker("p", Role.PREFILL)).names() == ("p", "")
    assert Chooser(worker("p", Role.PREFILL), worker("q", Role.PREFILL)).names("q") == ("q", "")
    assert Chooser(worker("b", Role.BOTH)).names() == ("b", "")
    assert Chooser().names() is None
    assert Chooser(worker("d")).names(exclude=("d",)) is None


def test_workers_of_both_roles_do_either_but_not_for_themselves():
    chooser = Chooser(worker("b0", Role.BOTH), worker("b1", Role.BOTH))
    pairs = Counter(chooser.names() for _ in range(10))
    assert pairs == {("b0", "b1"): 5, ("b1", "b0"): 5}
    assert Chooser(worker("b", Role.BOTH), worker("p", Role.PREFILL)).names() == ("b", "p")
    assert Chooser(worker("b", Role.BOTH, running=5), worker("d")).names() == ("d", "b")


TURN = Turn("s", 2, "d", previous_completed=True)
OWNER = worker("d")
READER = worker("p", Role.PREFILL)


def why(
    choice: Choice | None = None,
    turn: Turn | None = TURN,
    owner: Worker | None = OWNER,
    **more,
) -> Reason | None:
    return obstacle(choice or Choice(OWNER, READER, False), turn, owner, **more)


def test_reuse_is_tried_when_nothing_is_in_the_way():
    assert why() is None
    assert why(owner=dataclasses.replace(OWNER, state=State.DRAINING)) is None
    # Nobody is known to have decoded: the lease service may know better.
    assert why(turn=dataclasses.replace(TURN, last_decode=""), owner=None) is None


def test_each_obstacle_has_its_reason():
    other = dataclasses.replace(SAME, kv_layout="HND")
    plain = worker("p", Role.PREFILL, bidirectional=False)
    assert why(turn=None) is Reason.SESSION_SERVICE_UNAVAILABLE
    assert why(Choice(OWNER, None, False)) is Reason.SINGLE_WORKER
    assert why(turn=dataclasses.replace(TURN, turn=1)) is Reason.FIRST_TURN
    assert why(force_recompute=True) is Reason.FORCED
    assert why(owner=None) is Reason.OWNER_LOST
    assert why(exclude=("d",)) is Reason.OWNER_LOST
    assert why(Choice(OWNER, READER, True)) is Reason.OWNER_OVERLOADED
    assert why(Choice(OWNER, plain, False)) is Reason.NOT_BIDIRECTIONAL
    assert why(owner=worker("d", bidirectional=False)) is Reason.NOT_BIDIRECTIONAL
    assert why(owner=worker("d", compatibility=other)) is Reason.INCOMPATIBLE
    assert why(Choice(worker("d1"), worker("d", Role.BOTH), False)) is Reason.NOTHING_HELD
