"""Agents against a control plane of one page, over real gRPC."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kvplane.worker.agent import AgentConfig, WorkerAgent
from worker.plane import Plane, PlaneThread
from worker.support import identity, until


@pytest.fixture
def plane() -> Iterator[PlaneThread]:
    thread = PlaneThread(Plane()).start()
    yield thread
    thread.stop()


@pytest.fixture
def make_agent(plane: PlaneThread) -> Iterator[Callable[..., WorkerAgent]]:
    agents: list[WorkerAgent] = []

    def make(worker_id: str, *, wait: bool = True, **config: Any) -> WorkerAgent:
        more = config.pop("identity", {})
        settings = AgentConfig(routing=plane.address, lease=plane.address, **config)
        agent = WorkerAgent(identity(worker_id, **more), settings)
        agents.append(agent)
        agent.start()
        if wait:
            until(lambda: agent.away is None)
        return agent

    yield make
    for agent in agents:
        agent.close()
