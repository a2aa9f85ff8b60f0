"""A reference engine that reports what it holds, but not for how long."""

from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.engine.__main__ import main
from kvplane.worker.holdings import Holdings

_reports = Holdings.reports


def _without(self: Holdings, epoch: int, *, again: bool) -> list[lease.Ownership]:
    messages = _reports(self, epoch, again=again)
    for message in messages:
        message.ClearField("hold")
    return messages


Holdings.reports = _without  # type: ignore[method-assign]

if __name__ == "__main__":
    main()
