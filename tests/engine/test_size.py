"""Ten engines fit on a small machine and read from one another."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from engine.harness import CLOCK, COLD, tokens
from kvplane.kernel.clock import sleep_blocking

pytestmark = pytest.mark.processes


def resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_ten_engines_stay_small_idle_quietly_and_read_from_one_another(start):
    # Nobody answers there: the agent, its thread and gRPC are running all the same.
    plane = ("--control-plane", "127.0.0.1:1")
    with ThreadPoolExecutor(4) as starting:
        engines = list(
            starting.map(lambda number: start(*(plane if number % 2 else ())), range(10))
        )
    reader, *owners = engines[::2]
    prompt, handle = tokens("ten", 200), {}
    for turn, owner in enumerate(owners):
        first = reader.complete(prompt, {**handle, **COLD}, 1)
        assert (first.cached > 0) == (turn > 0)
        second = owner.complete(prompt, first.params)
        assert second.ids == reader.complete(prompt).ids
        prompt, handle = prompt + second.ids + tokens("more", 50), second.params
    pids = [engine.process.pid for engine in engines]
    sizes = [resident_mb(pid) for pid in pids]
    assert max(sizes) < 120, sizes
    sleep_blocking(2.1)  # What was read last is served eagerly for 2 s.
    before, began = [cpu_seconds(pid) for pid in pids], CLOCK.monotonic()
    sleep_blocking(2)
    used = sum(cpu_seconds(pid) - then for pid, then in zip(pids, before, strict=True))
    assert used / (CLOCK.monotonic() - began) < 0.2, "ten idle engines, cores"
