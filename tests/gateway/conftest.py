import pytest
from gateway.bench import Bench


@pytest.fixture
async def bench():
    bench = Bench()
    yield bench
    await bench.stop()
