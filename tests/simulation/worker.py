"""A worker: a model engine with the product's agent, in processes that die and freeze together."""

import random
from typing import Any

from kvplane.api.lease.v1 import lease_pb2
from kvplane.api.routing.v1 import routing_pb2
from kvplane.worker.agent import AgentConfig, WorkerAgent, WorkerIdentity

from simulation.checker import Checker
from simulation.engine import Engine
from simulation.fabric import BLOCK, Contents, Fabric, PlainAgent
from simulation.loop import Process, SimClock, VirtualLoop
from simulation.network import Network
from simulation.plane import SimIds


class SimAgent(WorkerAgent):
    """The product's agent on the simulation's loop instead of a thread of its own."""

    plain = False

    def __init__(
        self,
        loop: VirtualLoop,
        process: Process,
        network: Network,
        clock: SimClock,
        identity: WorkerIdentity,
        config: AgentConfig,
        ids: SimIds,
    ) -> None:
        super().__init__(identity, config, clock, ids)
        self._sim, self._process = loop, process
        timeout = config.call_timeout_seconds
        leases = network.client(process, clock, lease_pb2, "LeaseService", timeout)
        workers = network.client(process, clock, routing_pb2, "WorkerService", timeout)
        loop.spawn(process, self._serve(leases, workers))

    def _post(self, call: Any, *args: Any) -> None:
        self._sim.post(self._process, call, *args)


class Worker:
    """One worker through its lives."""

    def __init__(
        self,
        loop: VirtualLoop,
        rng: random.Random,
        checker: Checker,
        contents: Contents,
        fabric: Fabric,
        network: Network | None,
        agent_config: AgentConfig,
        *,
        index: int,
        role: str,
        kind: str,
        num_blocks: int,
        hold_s: float,
        block_read_s: float,
        rate: float,
    ) -> None:
        self._rate = rate
        self._loop, self._rng, self._checker, self._contents = loop, rng, checker, contents
        self._fabric, self._network, self._config = fabric, network, agent_config
        self.worker_id, self.role, self.kind = f"w{index}", role, kind
        self._shape = (num_blocks, hold_s, block_read_s)
        self._lives = 0
        self.engine: Engine | None = None
        self._processes: list[Process] = []
        checker.kinds[self.worker_id] = kind

    @property
    def address(self) -> str:
        return f"{self.worker_id}.host"

    def start(self) -> None:
        """Begin a life: memory, holds and leases of the one before are gone."""
        self._lives += 1
        name = f"{self.worker_id}.{self._lives}"
        engine_id = f"engine-{name}"
        began, wrong_s = self._rng.random() * 1e5, self._rng.uniform(-5, 5)
        clock = SimClock(self._loop, began, wrong_s, self._rate)
        body, mind, nic = Process(name), Process(f"{name}.agent"), Process(f"{name}.nic")
        self._processes = [body, mind, nic]
        identity = WorkerIdentity(
            worker_id=self.worker_id,
            role=self.role,
            url=f"http://{self.address}:8000",
            kv_host=self.address,
            kv_port=5600,
            engine_id=engine_id,
            model="m",
            block_size=BLOCK,
            engine_version=self.kind,
            recompute_threshold=BLOCK,
            num_blocks=self._shape[0] if self._config.max_held_share else 0,
        )
        agent: Any = PlainAgent()
        if self._network is not None:
            agent = SimAgent(
                self._loop, mind, self._network, clock, identity, self._config, SimIds(name)
            )
        num_blocks, hold_s, block_read_s = self._shape
        self.engine = Engine(
            self._loop, clock, body, agent, self._checker, self._contents,
            random.Random(self._rng.random()), self._fabric,
            engine_id=engine_id, address=self.address, kind=self.kind,
            num_blocks=num_blocks, hold_s=hold_s, block_read_s=block_read_s,
        )  # fmt: skip
        self._checker.engines[engine_id] = self.engine
        self._fabric.engines[self.address] = self.engine
        self._fabric.nics[engine_id] = nic
        self._loop.spawn(body, self.engine.run())

    @property
    def up(self) -> bool:
        return self.engine is not None and self.engine.up

    def kill(self) -> None:
        """End it at whatever it awaits."""
        if self.engine is None or not self.engine.up:
            return
        self.engine.up = False
        for process in self._processes:
            self._loop.kill(process)
        if self._network is not None:
            for server in self._network.servers:
                for stream in list(server.inside):
                    if stream._method.process is self._processes[1]:
                        stream.cut()
        for request in [*self.engine.waiting, *self.engine.running]:
            if not request.answer.done():
                request.answer.set_exception(ConnectionResetError("killed"))

    def freeze(self) -> None:
        """Stop it; what its network card does goes on."""
        for process in self._processes[:2]:
            self._loop.freeze(process)

    def thaw(self) -> None:
        """Let it go on."""
        for process in self._processes[:2]:
            self._loop.thaw(process)
