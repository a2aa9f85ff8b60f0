"""One world: replicas, workers, users, faults; run to the end, then looked at for leaks."""

import asyncio
import gc
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from kvplane.api.lease.v1 import lease_pb2
from kvplane.api.routing.v1 import routing_pb2
from kvplane.kernel.context import Caller, set_caller
from kvplane.kernel.errors import KvplaneError
from kvplane.lease.domain import LeaseConfig, LeaseState, OwnershipState
from kvplane.lease.values import Refusal
from kvplane.routing.domain import RoutingConfig
from kvplane.session.domain import SessionConfig
from kvplane.worker.agent import AgentConfig

from simulation.checker import Checker
from simulation.database import Store
from simulation.fabric import Contents, Fabric
from simulation.loop import Process, SimClock, Stuck, VirtualLoop
from simulation.network import Network, Weather
from simulation.plane import Replica
from simulation.scenario import MESSAGE_FAULTS, Fault, Scenario
from simulation.traffic import Talk
from simulation.worker import Worker

_MARGIN_S = 1.5
_HOLD_MARGIN_S = 1.0
_BEFORE_S = 1.5
_LONGEST_S = 240.0
_WORLDS_A_COLLECTION = 10


@dataclass
class Outcome:
    """What a run has shown."""

    seed: int
    violations: list[str] = field(default_factory=list)
    steps: int = 0
    faults: int = 0
    reads_checked: int = 0
    reads_dropped: int = 0
    wrong_but_dropped: int = 0
    wrong_reads: int = 0
    turns: int = 0
    transactions: int = 0
    virtual_s: float = 0.0
    # How leases and ownerships ended, and which faults struck.
    kinds: Counter[str] = field(default_factory=Counter)
    log: list[str] = field(default_factory=list)


class World:
    """See the module. `plain`: the same without kvplane."""

    def __init__(self, scenario: Scenario, *, plain: bool = False, trace: bool = False) -> None:
        self.scenario, self.plain = scenario, plain
        seed = scenario.seed
        random.seed(f"jitter {seed}")
        self.loop = VirtualLoop(random.Random(f"order {seed}"))
        self.checker = Checker(self.loop, _MARGIN_S, scenario.ttl_s, trace)
        self.network = Network(self.loop, random.Random(f"network {seed}"))
        self.network.watch = self.checker.answered
        self.turns = self.requests = self.faults = 0
        self._broken = 0  # faults in force
        self._calm_since = 0.0
        self.replicas: list[Replica] = []
        self.store: Store | None = None
        if not plain:
            self._build_plane()
        fabric_rng = random.Random(f"fabric {seed}")
        self.fabric = Fabric(self.loop, fabric_rng)
        self.fabric.slow_chance, self.fabric.slow_s = scenario.slow_chance, scenario.slow_s
        contents = Contents()
        agent = AgentConfig(
            routing="r:1", lease="l:1", lease_ttl_seconds=scenario.ttl_s,
            hold_margin_seconds=_HOLD_MARGIN_S, read_limit_seconds=20.0,
            max_held_share=scenario.held_share, begin_wait_seconds=scenario.begin_wait_s,
        )  # fmt: skip
        self.workers = [
            Worker(
                self.loop, random.Random(f"worker {seed} {index}"), self.checker, contents,
                self.fabric, None if plain else self.network, agent,
                index=index, role=role, kind=kind, num_blocks=scenario.num_blocks,
                hold_s=scenario.hold_s, block_read_s=scenario.block_read_s,
                rate=scenario.worker_rates[index],
            )
            for index, (role, kind) in enumerate(scenario.workers)
        ]  # fmt: skip
        self.talks = [Talk(self, i, plan) for i, plan in enumerate(scenario.conversations)]
        self._operator = Process("operator")

    def _build_plane(self) -> None:
        scenario = self.scenario
        self.store = Store(SimClock(self.loop, 0.0), random.Random(f"store {scenario.seed}"))
        self.store.watch = self.checker.committed
        self.checker.store = self.store
        lease = LeaseConfig(
            ttl_s=scenario.ttl_s, min_ttl_s=0.5, margin_s=_MARGIN_S,
            sweep_interval_s=scenario.sweep_s,
            restart_grace_s=scenario.ttl_s, tick_interval_s=1.5, poll_interval_s=0.8,
            handover_s=2.0,
        )  # fmt: skip
        routing = RoutingConfig(
            heartbeat_interval_s=2.0, worker_timeout_s=4.5, sweep_interval_s=1.0
        )
        session = SessionConfig(sweep_interval_s=1.5, free_retry_s=3.0)
        self.replicas = [
            Replica(
                self.loop, self.network, self.store, index, lease, routing, session,
                scenario.quotas,
            )
            for index in range(scenario.replicas)
        ]  # fmt: skip

    def run(self) -> Outcome:
        """Run it all."""
        loop, scenario = self.loop, self.scenario
        for replica, offset in zip(self.replicas, scenario.clocks, strict=False):
            self._start(replica, offset)
        for worker in self.workers:
            worker.start()
        tasks = [
            loop.post_at(_BEFORE_S, talk.process, self._begin_talk, talk) for talk in self.talks
        ]
        assert len(tasks) == len(self.talks)
        for fault in scenario.faults:
            loop.post_at(_BEFORE_S + fault.at, self._operator, self._strike, fault)
        try:
            self._run_until_quiet()
        except Stuck as stuck:
            self.checker.violated(7, str(stuck))
        except Exception as error:
            self.checker.violated(0, f"crashed: {error!r}")
            raise
        finally:
            loop.close()
        for text in loop.errors + self.network.unexpected:
            self.checker.violated(0, text)
        return self._outcome()

    def _begin_talk(self, talk: Talk) -> None:
        talk.task = self.loop.spawn(talk.process, talk.run())

    def _run_until_quiet(self) -> None:
        scenario = self.scenario
        now = _BEFORE_S
        end = _BEFORE_S + max((f.at + f.lasts for f in scenario.faults), default=0.0)
        while now < _LONGEST_S:
            now += 1.0
            self._run_to(now)
            if self.checker.violations:
                return
            if now >= end and all(
                talk.task is not None and talk.task.done() for talk in self.talks
            ):
                break
        for talk in self.talks:
            if talk.task is not None and not talk.task.done():
                self.checker.violated(7, f"{talk.process} never ended")
            elif talk.task is not None and talk.task.exception() is not None:
                raise AssertionError("a user crashed") from talk.task.exception()
        self._drain(now)

    def _run_to(self, now: float) -> None:
        self.loop.run_to(now)
        if not self._broken:
            self.checker.check_pins(self._calm_since)

    def _drain(self, now: float) -> None:
        """Traffic has ended and all is healed: nothing may stay held."""
        deadline = now + 45.0
        while now < deadline:
            now += 1.0
            self._run_to(now)
            if self.checker.violations:
                return
            if not self._held():
                return
        self.checker.violated(7, f"still held: {self._held()}")

    def _held(self) -> str:
        held = []
        for worker in self.workers:
            engine = worker.engine
            assert engine is not None
            busy = engine.num_blocks - engine.idle_blocks
            if busy or engine.pins or engine.running or engine.waiting:
                held.append(f"{busy} blocks at {worker.worker_id}")
            if not self.plain:
                agent = engine.agent
                if len(agent._holdings) or agent._reading._entries or agent._reading._digests:
                    held.append(f"records in {worker.worker_id}'s agent")
        if self.store is not None:
            if rows := self.store.select("SELECT request_id FROM ownerships WHERE state <= 2"):
                held.append(f"ownerships {rows}")
            if rows := self.store.select("SELECT lease_id FROM leases WHERE state<=2 OR draining"):
                held.append(f"leases {rows}")
        return ", ".join(held)

    def _outcome(self) -> Outcome:
        checker = self.checker
        return Outcome(
            seed=self.scenario.seed,
            violations=checker.violations,
            steps=self.loop.steps,
            faults=self.faults + self.network.faults + self.fabric.faults,
            reads_checked=checker.reads_checked,
            reads_dropped=checker.reads_dropped,
            wrong_but_dropped=checker.wrong_but_dropped,
            wrong_reads=checker.wrong_reads,
            turns=self.turns,
            transactions=self.store.transactions if self.store else 0,
            virtual_s=self.loop.time(),
            kinds=self._kinds(),
            log=list(checker.log),
        )

    def _kinds(self) -> Counter[str]:
        kinds = Counter(f"fault {fault.kind}" for fault in self.scenario.faults)
        if self.store is not None:
            for table, states in (("leases", LeaseState), ("ownerships", OwnershipState)):
                query = f"SELECT state, count(*) FROM {table} GROUP BY state"
                for state, count in self.store.select(query):
                    kinds[f"{table} {states(state).name}"] = count
            refused = (
                "SELECT refusal, count(*) FROM lease_requests WHERE refusal > 0 GROUP BY refusal"
            )
            for reason, count in self.store.select(refused):
                kinds[f"refused {Refusal(reason).name}"] = count
        kinds["freed by the keeper"] = sum(replica.freed for replica in self.replicas)
        return kinds

    # -- faults -------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        """Let it begin, and see to its end."""
        self.checker.event("FAULT", fault)
        end = self.loop.time() + fault.lasts
        undo = self._begin_fault(fault)
        if undo is not None:
            self._broken += 1
            if fault.kind not in MESSAGE_FAULTS:
                self.faults += 1

            def healed() -> None:
                self.checker.event("HEALED", f"f{fault.index}")
                self._broken -= 1
                self._calm_since = self.loop.time()
                undo()

            self.loop.post_at(end, self._operator, healed)

    def _begin_fault(self, fault: Fault) -> Any:
        args, kind, fabric = fault.args, fault.kind, self.fabric
        if kind == "slow_reads":
            fabric.slow_chance, fabric.slow_s = args["chance"], args["read_s"]
            return self._usual_reads
        if kind == "lost_notifications":
            fabric.lose_notifications = args["chance"]
            return lambda: setattr(fabric, "lose_notifications", 0.0)
        if kind in ("kill_worker", "freeze_worker"):
            worker = self.workers[args["worker"]]
            if not worker.up:
                return None
            if kind == "kill_worker":
                worker.kill()
                return lambda: None if worker.up else worker.start()
            worker.freeze()
            return worker.thaw
        if self.plain:
            return None
        if kind in MESSAGE_FAULTS:
            rng = random.Random(f"weather {self.scenario.seed} {fault.index}")
            weather = Weather(kind, args["chance"], args["of"], args.get("most_s", 0.0), rng)
            self.network.weather.append(weather)
            return lambda: self.network.weather.remove(weather)
        return self._plane_fault(fault)

    def _plane_fault(self, fault: Fault) -> Any:
        args, store = fault.args, self.store
        assert store is not None
        match fault.kind:
            case "db_away":
                store.away = True
                return lambda: setattr(store, "away", False)
            case "db_slow":
                store.slow_s = args["most_s"]
                return lambda: setattr(store, "slow_s", 0.0)
            case "db_in_doubt":
                store.in_doubt = args["chance"]
                return lambda: setattr(store, "in_doubt", 0.0)
            case "revoke":
                end = self.loop.time() + fault.lasts
                self.loop.spawn(self._operator, self._revoke(end))
                return lambda: None
            case "drain":
                worker_id = self.workers[args["worker"]].worker_id
                self.loop.spawn(self._operator, self._take_out(worker_id, undo=False))
                return lambda: self.loop.spawn(self._operator, self._take_out(worker_id, undo=True))
        replica = self.replicas[args["replica"]]
        match fault.kind:
            case "cut":
                replica.cut_streams()
                return lambda: None
            case "mute":
                assert replica.server is not None
                muted = sorted(replica.server.inside, key=lambda s: s._method.process.name)
                for stream in muted:
                    stream.mute(up=args["up"], down=args["down"])
                return lambda: [stream.cut() for stream in muted]
            case "clock":
                replica.clock.wall_offset_s += args["offset_s"]
                return lambda: None
            case "freeze_replica":
                process = replica.process
                self.loop.freeze(process)
                return lambda: self.loop.thaw(process)
            case "kill_replica":
                if not replica.process.alive:
                    return None
                replica.kill()
                return lambda: self._restart(replica)
        raise AssertionError(fault.kind)

    def _start(self, replica: Replica, wrong_s: float) -> None:
        rate = self.scenario.replica_rates[replica.index]
        replica.start(SimClock(self.loop, random.uniform(0, 1e5), wrong_s, rate))

    def _restart(self, replica: Replica) -> None:
        if not replica.process.alive:
            self._start(replica, random.uniform(-5, 5))

    def _usual_reads(self) -> None:
        self.fabric.slow_chance = self.scenario.slow_chance
        self.fabric.slow_s = self.scenario.slow_s

    async def _revoke(self, end: float) -> None:
        """Take leases away, one now and then, until `end`."""
        assert self.store is not None
        rng = random.Random(f"revoke {self.scenario.seed} {end}")
        leases = self.network.client(
            self._operator, SimClock(self.loop, 0.0), lease_pb2, "LeaseService", 3.0
        )
        while self.loop.time() < end:
            rows = self.store.select(
                "SELECT lease_id, tenant_id FROM leases WHERE state <= 2 ORDER BY lease_id"
            )
            if rows:
                lease_id, tenant = rng.choice(rows)
                set_caller(Caller(tenant_id=tenant))
                try:
                    await leases.RevokeLease(lease_pb2.RevokeLeaseRequest(lease_id=lease_id))
                except KvplaneError as error:
                    self.checker.event("not revoked", lease_id, error)
            await asyncio.sleep(rng.random() * 0.5)

    async def _take_out(self, worker_id: str, *, undo: bool) -> None:
        workers = self.network.client(
            self._operator, SimClock(self.loop, 0.0), routing_pb2, "WorkerService", 3.0
        )
        request = routing_pb2.DrainWorkerRequest(worker_id=worker_id, undo=undo)
        try:
            await workers.DrainWorker(request)
        except KvplaneError as error:
            self.checker.event("not drained", worker_id, error)


_worlds = 0


def run(scenario: Scenario, *, plain: bool = False, trace: bool = False) -> Outcome:
    """Run a scenario. What killed processes leave behind is thrown away unfinished.

    A collection in the middle would end their tasks, each time at another step.
    """
    global _worlds  # noqa: PLW0603
    gc.disable()
    try:
        return World(scenario, plain=plain, trace=trace).run()
    finally:
        _worlds += 1
        if _worlds % _WORLDS_A_COLLECTION == 0:
            gc.collect()
            if _worlds == _WORLDS_A_COLLECTION:
                gc.freeze()  # modules
