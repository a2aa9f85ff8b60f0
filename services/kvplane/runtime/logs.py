"""Logs: one JSON object a line, or readable text on a terminal; always to stderr.

Every line carries the tenant and the request id of the running call. Lines of other
libraries (standard logging) take the same form.
"""

import json
import logging
import sys
from collections.abc import MutableMapping
from typing import Any, Literal, TextIO

import structlog

from kvplane.kernel.context import caller

Format = Literal["auto", "json", "console"]
Level = Literal["debug", "info", "warning", "error"]


def configure(level: Level = "info", form: Format = "auto", stream: TextIO | None = None) -> None:
    """Set up logging for the process. ``auto`` is text on a terminal and JSON elsewhere."""
    out = stream or sys.stderr
    readable = form == "console" or (form == "auto" and out.isatty())
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level if readable else _add_level,
        _add_caller,
        structlog.processors.TimeStamper(
            fmt="%H:%M:%S.%f" if readable else "iso", utc=not readable
        ),
    ]
    ending: list[structlog.typing.Processor]
    if readable:
        ending = [structlog.dev.ConsoleRenderer(colors=out.isatty())]
    else:
        ending = [
            structlog.processors.dict_tracebacks,
            structlog.processors.EventRenamer("message"),
            structlog.processors.JSONRenderer(serializer=_dumps),
        ]
    structlog.configure(
        processors=[*shared, *ending],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(out),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *ending],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    for noisy in ("alembic", "asyncio", "aiohttp.access", "grpc"):
        logging.getLogger(noisy).setLevel(max(number, logging.WARNING))


def _add_level(_logger: Any, method: str, event: MutableMapping[str, Any]) -> Any:
    event["level"] = method
    return event


def _add_caller(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> Any:
    who = caller()
    if who.request_id:
        event.setdefault("tenant", who.tenant_id)
        event.setdefault("request_id", who.request_id)
    return event


def _dumps(event: Any, **options: Any) -> str:
    return json.dumps(event, separators=(",", ":"), **options)
