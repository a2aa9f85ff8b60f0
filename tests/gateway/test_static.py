"""Two gateways with the same engines without our connector."""

from contextlib import asynccontextmanager

from gateway.bench import eventually
from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.gateway.config import GatewayConfig, StaticWorker
from kvplane.gateway.static import StaticWorkers
from kvplane.kernel.clock import SystemClock
from kvplane.kernel.errors import NotFound

WORKER = StaticWorker(
    worker_id="d",
    url="http://127.0.0.1:1/",
    role="decode",
    model="m",
    served_models=("m",),
    max_model_len=100,
    engine_version="1",
    kv_host="127.0.0.1",
    kv_port=5,
)


class Engine:
    """An engine that does not say when its process started."""

    healthy = True

    async def get(self, url, _seconds):
        return (200 if self.healthy else 503), b""


class Registry:
    """Epochs as the worker registry has them."""

    def __init__(self):
        self.worker = None
        self.instance = ""
        self.registered = 0

    async def RegisterWorker(self, request):
        self.registered += 1
        epoch = self.worker.epoch if self.worker is not None else 0
        lost = self.worker is not None and self.worker.state == routing.WORKER_STATE_LOST
        if request.instance_id != self.instance or lost:
            epoch += 1
        self.instance = request.instance_id
        self.worker = routing.Worker()
        self.worker.CopyFrom(request.worker)
        self.worker.epoch, self.worker.state = epoch, routing.WORKER_STATE_READY
        return routing.RegisterWorkerResponse(worker=self.worker)

    async def GetWorker(self, _request):
        if self.worker is None:
            raise NotFound("worker", "d")
        return routing.GetWorkerResponse(worker=self.worker)

    async def Heartbeat(self, request):
        [beat] = request.beats
        known = (
            self.worker is not None
            and beat.epoch == self.worker.epoch
            and self.worker.state == routing.WORKER_STATE_READY
        )
        self.beaten = beat.epoch if known else 0
        return routing.HeartbeatResponse(results=[routing.BeatResult(worker_id="d", known=known)])


@asynccontextmanager
async def gateway(registry, engine):
    config = GatewayConfig(static_workers=(WORKER,), health_interval_s=0.01)
    one = StaticWorkers(registry, engine, SystemClock(), config)
    await one.start()
    try:
        yield
    finally:
        await one.stop()


async def test_they_agree_on_its_epoch_although_nobody_knows_its_start():
    registry, engine = Registry(), Engine()
    async with gateway(registry, engine):
        await eventually(lambda: registry.registered == 1)
        async with gateway(registry, engine):
            await eventually(lambda: registry.registered == 2)
            await SystemClock().sleep(0.3)
    assert registry.registered == 2
    assert registry.worker.epoch == 2


async def test_one_that_was_given_up_or_is_another_is_registered_again():
    registry, engine = Registry(), Engine()
    async with gateway(registry, engine):
        await eventually(lambda: registry.registered == 1)
        registry.worker.state = routing.WORKER_STATE_LOST
        registry.worker.epoch = 7
        await eventually(lambda: registry.registered == 2)
        assert registry.worker.epoch == 8
        registry.worker.epoch, registry.worker.url = 9, "http://127.0.0.1:2"
        await eventually(lambda: registry.registered == 3)
        registry.worker = None
        await eventually(lambda: registry.registered == 4)
        registry.worker.epoch = 20
        await eventually(lambda: registry.beaten == 20)
        assert registry.registered == 4
