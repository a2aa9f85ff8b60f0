"""Logs: one JSON object a line, or readable text on a terminal; always to stderr.

Every line carries the tenant and the request id of the running call. Lines of other
libraries (standard logging) take the same form.
"""

import json
import logging
import sys
from collections.abc import Callable, MutableMapping
from datetime import UTC, datetime
from typing import Any, Final, Literal, TextIO

import structlog

from kvplane.kernel.clock import SystemClock
from kvplane.kernel.context import caller

Format = Literal["auto", "json", "console"]
Level = Literal["debug", "info", "warning", "error"]

# Without local variables: they hold keys and prompts.
_TRACEBACKS: Final = structlog.processors.ExceptionRenderer(
    structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
)

_clock = SystemClock()
_quoted = json.encoder.encode_basestring_ascii
_json_out: TextIO | None = None


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
        ending = [
            structlog.dev.ConsoleRenderer(
                colors=out.isatty(), exception_formatter=structlog.dev.plain_traceback
            )
        ]
    else:
        ending = [
            _TRACEBACKS,
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
    global _json_out  # noqa: PLW0603 - logging is the process's, like the root logger
    _json_out = None if readable else out
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    for noisy in ("alembic", "asyncio", "aiohttp.access", "grpc"):
        logging.getLogger(noisy).setLevel(max(number, logging.WARNING))


class CallLog:
    """One line for each call, in the form that `configure` was told before.

    In JSON it is put together by hand, for a fifth of the time: it is most of all lines.
    """

    def __init__(self) -> None:
        self._log = structlog.get_logger().bind()
        self._enabled = logging.getLogger().isEnabledFor(logging.INFO)
        self._out = _json_out

    def write(self, method: str, code: str, ms: float) -> None:
        """Log one call of the running caller."""
        if not self._enabled:
            return
        if self._out is None:
            self._log.info("call", method=method, code=code, ms=ms)
            return
        who = caller()
        now = datetime.fromtimestamp(_clock.now_us() / 1e6, UTC).isoformat(timespec="microseconds")
        self._out.write(
            f'{{"timestamp":"{now[:26]}Z","level":"info","message":"call","method":"{method}",'
            f'"code":"{code}","ms":{ms:.2f},"tenant":{_quoted(who.tenant_id)},'
            f'"request_id":{_quoted(who.request_id)}}}\n'
        )
        self._out.flush()


def _add_level(_logger: Any, method: str, event: MutableMapping[str, Any]) -> Any:
    event["level"] = method
    return event


def _add_caller(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> Any:
    who = caller()
    if who.request_id:
        event.setdefault("tenant", who.tenant_id)
        event.setdefault("request_id", who.request_id)
    return event


def _dumps(event: Any, default: Callable[[Any], Any]) -> str:
    # Those that search or read logs see the time and the message first.
    first = {key: event.pop(key) for key in ("timestamp", "level", "message") if key in event}
    return json.dumps({**first, **event}, separators=(",", ":"), default=default)
