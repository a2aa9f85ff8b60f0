"""One cluster on real vLLM for all of these tests: starting it costs most of a minute."""

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from e2e.chat import Chat
from e2e.cluster import Cluster, Postgres, default_logs
from e2e.leftovers import end_sessions, errors, nothing_is_left


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL server of the cluster's own, which the tests may stop."""
    # Not below pytest's own directory, which every pytest closes to the server's user.
    server = Postgres(Path(tempfile.mkdtemp(prefix="kvplane-e2e-")))
    yield server
    server.close()


@pytest.fixture(scope="session")
def cluster(postgres: Postgres) -> Iterator[Cluster]:
    """Everything, started."""
    whole = Cluster(postgres.url, default_logs())
    try:
        whole.start()
        yield whole
    finally:
        whole.stop()


@pytest.fixture
def patience() -> float:
    """Seconds from a test's end until nothing of it may be left."""
    return 10.0


@pytest.fixture
def engines_may_complain() -> bool:
    """Whether a test does what an engine logs an error for."""
    return False


@pytest.fixture(autouse=True)
async def _nothing_is_left(
    request: pytest.FixtureRequest, patience: float, engines_may_complain: bool
) -> AsyncIterator[None]:
    """Whatever a test did: once its sessions have ended, no engine holds anything."""
    if "cluster" not in request.fixturenames:
        yield
        return
    cluster: Cluster = request.getfixturevalue("cluster")
    logs = {one.log_path: one.log_path.stat().st_size for one in (cluster.prefill, cluster.decode)}
    yield
    await end_sessions(cluster)
    await nothing_is_left(cluster, patience)
    if not engines_may_complain:
        assert [line for log, begin in logs.items() for line in errors(log, begin)] == []


@pytest.fixture
def chat(cluster: Cluster, request: pytest.FixtureRequest) -> Chat:
    """A conversation that nobody else has."""
    return Chat(cluster, session=request.node.name)
