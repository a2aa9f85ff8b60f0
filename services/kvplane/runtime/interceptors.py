"""What surrounds every call: who calls, a deadline, one log line, metrics, errors.

One interceptor does it all: in Python each further layer costs every call.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final

import grpc
import structlog

from kvplane.kernel.clock import Clock
from kvplane.kernel.context import Caller, Identity, caller, set_caller
from kvplane.kernel.errors import Internal, KvplaneError, Unavailable
from kvplane.runtime.auth import Authenticator
from kvplane.runtime.logs import CallLog
from kvplane.runtime.metrics import MethodMetrics, RpcMetrics
from kvplane.runtime.permissions import check_role, check_worker
from kvplane.runtime.places import NOBODY, Places, owner
from kvplane.runtime.status import CODES, DETAILS_KEY, to_status
from kvplane.runtime.tls import peer_identity
from kvplane.runtime.unreadable import Parse, read, read_all

_OURS: Final = "/kvplane."

Gate = Callable[[], KvplaneError | None]


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handlers of our services; ends all streams when the server drains."""

    def __init__(
        self,
        authenticator: Authenticator,
        metrics: RpcMetrics,
        clock: Clock,
        *,
        default_deadline: float,
        gate: Gate = lambda: None,
    ) -> None:
        """`default_deadline` (seconds) is for unary calls whose client set none.

        `gate` returns the error that every call gets while the process cannot serve at
        all, such as under a wrong schema. Configure logging first.
        """
        self._authenticator = authenticator
        self._metrics = metrics
        self._clock = clock
        self._default_deadline = default_deadline
        self._gate = gate
        self._log = structlog.get_logger().bind()
        self._call_log = CallLog()
        self._handlers: dict[str, Any] = {}
        self._streams: set[asyncio.Task[Any]] = set()
        self._places = Places()
        self._draining = False

    def end_streams(self) -> None:
        """End all streams with Unavailable, now and from now on: clients connect elsewhere."""
        self._draining = True
        for task in self._streams:
            task.cancel()

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[Any]],
        handler_call_details: Any,
    ) -> Any:
        """Return the wrapped handler of the method; see grpc.aio."""
        method = handler_call_details.method
        wrapped = self._handlers.get(method)
        if wrapped is None:
            handler = await continuation(handler_call_details)
            if handler is None:  # no such method: gRPC answers
                return None
            wrapped = self._handlers[method] = self._wrap(method, handler)
        return wrapped

    def _wrap(self, method: str, handler: Any) -> Any:
        parse = handler.request_deserializer
        if handler.response_streaming:
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
            behaviour = self._stream(
                method,
                handler.stream_stream or handler.unary_stream,
                parse,
                many=handler.request_streaming,
            )
        elif method.startswith(_OURS):
            make = grpc.unary_unary_rpc_method_handler
            behaviour = self._unary(method, handler.unary_unary, parse)
        else:
            return handler
        # Ours are read when we know who calls.
        early = None if method.startswith(_OURS) else parse
        return make(behaviour, early, handler.response_serializer)

    def _unary(self, method: str, behaviour: Callable[..., Awaitable[Any]], parse: Parse) -> Any:
        name = _short_name(method)
        metrics = self._metrics.method(name, streaming=False)

        async def call(raw: bytes, context: Any) -> Any:
            started = self._clock.monotonic()
            metrics.begin()
            code = "CANCELLED"
            try:
                try:
                    who = await self._enter(method, context)
                    request = read(parse, raw, method)
                    check_worker(who, method, request)
                    if context.time_remaining() is not None:  # gRPC cancels us at its end
                        answer = await behaviour(request, context)
                    else:
                        answer = await self._bounded(behaviour, request, context)
                    code = "OK"
                    return answer
                except Exception as error:  # noqa: BLE001 - the last line before the wire
                    failure = self._explain(error, method)
                    code = failure.code
                await _abort(context, failure)
            finally:
                self._note(name, code, started, metrics)

        return call

    async def _bounded(
        self, behaviour: Callable[..., Awaitable[Any]], request: Any, context: Any
    ) -> Any:
        try:
            async with asyncio.timeout(self._default_deadline) as timer:
                return await behaviour(request, context)
        except TimeoutError:
            if timer.expired():
                raise _Late(f"no answer within {self._default_deadline:g} s") from None
            raise

    def _stream(
        self, method: str, behaviour: Callable[..., Any], parse: Parse, *, many: bool
    ) -> Any:
        ours = method.startswith(_OURS)
        name = _short_name(method)
        metrics = self._metrics.method(name, streaming=True)

        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            started = self._clock.monotonic()
            metrics.begin()
            code = "CANCELLED"
            task = asyncio.current_task()
            assert task is not None
            self._streams.add(task)
            watch = _Watch(task)
            place: str | None = None
            failure: KvplaneError
            try:
                try:
                    if self._draining:
                        raise _draining()
                    if not ours:
                        place = self._places.take(NOBODY)
                    else:
                        who = await self._enter(method, context)
                        place = self._places.take(owner(who))
                        if many:
                            request = _checked(read_all(parse, request, method), method, who)
                        else:
                            request = read(parse, request, method)
                            check_worker(who, method, request)
                        if self._authenticator.again_s:
                            watch.begin(self._until_refused(method, context))
                    answers = behaviour(request, context)
                    if asyncio.iscoroutine(answers):  # gRPC's own health writes by itself
                        await answers
                    else:
                        async with contextlib.aclosing(answers):
                            async for answer in answers:
                                yield answer
                    code = "OK"
                    return
                except asyncio.CancelledError:
                    refusal = watch.refusal or (_draining() if self._draining else None)
                    if refusal is None or context.cancelled():
                        raise
                    task.uncancel()
                    failure = refusal
                except Exception as error:  # noqa: BLE001 - the last line before the wire
                    failure = self._explain(error, method)
                code = failure.code
                await _abort(context, failure)
            finally:
                self._streams.discard(task)
                if place is not None:
                    self._places.give_back(place)
                watch.end()
                self._note(name, code, started, metrics)

        return call

    async def _enter(self, method: str, context: Any) -> Caller:
        """Say for whom everything below is done. Raises what the caller is told."""
        refusal = self._gate()
        if refusal is not None:
            raise refusal
        who = await self._authenticator.caller(*_credentials(context))
        set_caller(who)
        check_role(who, method)
        return who

    async def _until_refused(self, method: str, context: Any) -> KvplaneError:
        """Look at a stream's credentials again and again; return why they are no longer good."""
        try:
            while True:
                await self._clock.sleep(self._authenticator.again_s)
                check_role(await self._authenticator.caller(*_credentials(context)), method)
        except Exception as error:  # noqa: BLE001 - a stream that is no longer looked at must end
            return self._explain(error, method)

    def _explain(self, error: Exception, method: str) -> KvplaneError:
        """Return what the caller is told; what it is not told goes to the log."""
        if isinstance(error, KvplaneError):
            return error
        self._log.error("call failed", method=_short_name(method), exc_info=error)
        if isinstance(error, TimeoutError):
            return Unavailable("another part took too long", retry_after=0.5)
        return Internal("internal error; the server's log has the details under the request id")

    def _note(self, name: str, code: str, started: float, metrics: MethodMetrics) -> None:
        seconds = self._clock.monotonic() - started
        metrics.end(code, seconds)
        self._call_log.write(name, code, seconds * 1000)


class _Watch:
    """Ends a stream when its credentials end."""

    def __init__(self, stream: "asyncio.Task[Any]") -> None:
        self._stream = stream
        self._task: asyncio.Task[KvplaneError] | None = None
        self.refusal: KvplaneError | None = None

    def begin(self, until_refused: Coroutine[Any, Any, KvplaneError]) -> None:
        self._task = asyncio.create_task(until_refused)
        self._task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[KvplaneError]") -> None:
        if not task.cancelled():
            self.refusal = task.result()
            self._stream.cancel()

    def end(self) -> None:
        if self._task is not None:
            self._task.remove_done_callback(self._done)
            self._task.cancel()


class _Late(KvplaneError):
    """The default deadline has passed."""

    code = "DEADLINE_EXCEEDED"
    reason = "UNAVAILABLE"


async def _abort(context: Any, error: KvplaneError) -> None:
    """End the call with the error. Always raises."""
    status = to_status(error, caller().request_id)
    await context.abort(
        CODES[error.code], status.message, ((DETAILS_KEY, status.SerializeToString()),)
    )


def _credentials(context: Any) -> tuple[Mapping[str, str], Identity | None]:
    """Return a call's metadata, and what its connection's certificate says."""
    return dict(context.invocation_metadata()), peer_identity(context)


async def _checked(requests: AsyncIterator[Any], method: str, who: Caller) -> AsyncIterator[Any]:
    """Yield a stream's messages. Raises PermissionDenied at one for another's worker."""
    async for request in requests:
        check_worker(who, method, request)
        yield request


def _draining() -> KvplaneError:
    return Unavailable("the server is shutting down; connect again", retry_after=0.1)


def _short_name(method: str) -> str:
    """``/kvplane.api.lease.v1.LeaseService/GetLease`` -> ``LeaseService/GetLease``."""
    service, _, rpc = method.rpartition("/")
    return f"{service.rpartition('.')[2]}/{rpc}"
