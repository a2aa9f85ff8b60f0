"""One cluster on real vLLM for all of these tests: starting it costs most of a minute."""

from collections.abc import Iterator

import pytest
from e2e.chat import Chat
from e2e.cluster import Cluster, Postgres, default_logs


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    """A PostgreSQL server of the cluster's own."""
    server = Postgres(tmp_path_factory.mktemp("e2e") / "pg")
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
def chat(cluster: Cluster, request: pytest.FixtureRequest) -> Chat:
    """A conversation that nobody else has."""
    return Chat(cluster, session=request.node.name)
