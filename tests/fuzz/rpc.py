"""Sequences of calls of all RPCs, and the judgement of each."""

import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Final

from google.protobuf import text_format
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from kvplane.api.error.v1 import error_pb2
from kvplane.kernel.context import Role
from kvplane.runtime.permissions import ROLES
from wire.methods import Method

from fuzz.calls import TIMEOUT_S, Talk, Told, unary
from fuzz.drawing import Drawing
from fuzz.findings import INSIDE, Counts, Finding
from fuzz.garden import Credential, Garden, copied
from fuzz.markers import new_ids
from fuzz.methods import METHODS
from fuzz.raw import spoilt
from fuzz.world import Metadata, World

# What workers say and ask about the blocks of all tenants: their answers are no tenant's.
OF_NO_TENANT: Final = frozenset(
    f"LeaseService/{name}"
    for name in (
        "ReportOwnership", "WithdrawOwnership", "BeginRead", "RenewLeases", "ReleaseLeases",
        "EndWorkerEpoch", "Connect",
    )
)  # fmt: skip
_OPERATORS: Final = ("TenantService", "WorkerService", "AuditService")
_REASONS: Final = {
    value.name.removeprefix("ERROR_REASON_") for value in error_pb2.ErrorReason.DESCRIPTOR.values
}
_DETAILS: Final = "grpc-status-details-bin"
_CALLS: Final = 40
# Each call has its own.
_REQUEST_IDS: Final = re.compile(rb"req-[0-9a-f]{32}")
_SHOWN: Final = 3000
# What a call may say beside who it is.
_ODD_METADATA: Final[tuple[Metadata, ...]] = (
    (("x-kvplane-tenant", ""),), (("x-kvplane-tenant", "a b"),), (("x-kvplane-tenant", "x" * 65),),
    (("x-kvplane-tenant", "$OTHER"),), (("x-kvplane-actor", "key:forged"),),
    (("x-kvplane-actor", "x" * 5000),), (("x-request-id", "x" * 3000),), (("x-request-id", " "),),
    (("authorization", "Bearer kvp_other"),), (("x-odd-bin", b"\0\xff"),),
    (("traceparent", "00-x"),),
)  # fmt: skip


class Example:
    """One sequence of calls against one copy of the garden."""

    def __init__(
        self, world: World, garden: Garden, drawing: Drawing, methods: Sequence[str], counts: Counts
    ) -> None:
        self._world, self._garden, self._drawing = world, garden, drawing
        self._methods, self._counts = methods, counts
        self._markers = {name: markers.copy() for name, markers in garden.markers.items()}
        # What each tenant has been told or has said itself, or others in its name.
        self._said = dict.fromkeys(garden.seeds, b"")
        self._twins = {
            marker: _twin(marker) for one in garden.markers.values() for marker in one.texts
        }
        self._log: list[str] = []
        self._tables: dict[str, str] = {}

    async def run(self) -> None:
        """Make the calls. Raises Finding."""
        self._tables = await self._world.watch.tables()
        drawing = self._drawing
        for _ in range(1 + drawing.below(_CALLS)):
            if drawing.rarely(8):
                seconds = drawing.one_of((1, 7, 12, 65, 700, 90_000))
                self._log.append(f"-- {seconds} s pass")
                await self._world.advance(seconds)
                await self._check_invariants("time passed")
                self._tables = await self._world.watch.tables()
            await self._one_call()

    # -- one call -----------------------------------------------------------------

    async def _one_call(self) -> None:
        drawing = self._drawing
        credential = self._credential()
        method = self._method(credential)
        metadata = credential.metadata
        if drawing.rarely(12):
            other = self._garden.seeds["ours"].tenant
            metadata += tuple(
                (key, other if value == "$OTHER" else value)
                for key, value in drawing.one_of(_ODD_METADATA)
            )
        if method.descriptor.client_streaming:
            await self._talk(method, credential, metadata)
            return
        raw = self._request(credential, method)
        twin = self._twin_of(credential, method, raw)
        if twin is None:
            await self._made(credential, method, raw, metadata)
            return
        expected, before = await self._made(credential, method, twin, metadata)
        told, changed = await self._made(credential, method, raw, metadata)
        self._compare(told, expected, changed=before or changed)

    async def _made(
        self, who: Credential, method: Method, raw: bytes, metadata: Metadata
    ) -> tuple[Told, bool]:
        """Make a call and judge it; return what was told, and whether anything is stored."""
        self._note(who, method, raw)
        told = await unary(self._world, method, raw, metadata)
        return told, await self._judge(who, method, raw, told)

    def _credential(self) -> Credential:
        """Draw one; half of all calls may get somewhere."""
        drawing, known = self._drawing, self._garden.credentials
        usual = ("theirs: token", "ours: token", "theirs: key", "ours: key")
        if drawing.below(5) < 4:
            wanted = drawing.one_of(usual)
            return next(one for one in known if one.name == wanted)
        return drawing.one_of(known)

    def _method(self, who: Credential) -> Method:
        """Draw one; mostly of those that the credential is good for."""
        drawing = self._drawing
        roles = {Role.TENANT} if who.name.endswith(": key") else {Role.SERVICE, Role.OPERATOR}
        allowed = [name for name in self._methods if roles & ROLES.get(METHODS[name].path, roles)]
        if allowed and drawing.below(8):
            return METHODS[drawing.one_of(allowed)]
        return METHODS[drawing.one_of(self._methods)]

    def _request(self, who: Credential, method: Method) -> bytes:
        drawing = self._drawing
        right = self._garden.right.get(method.short, {})
        if right and drawing.below(3):
            name = who.name.partition(":")[0]
            if name not in right or drawing.rarely(3):
                name = drawing.one_of(list(right))
            message = drawing.changed(right[name])
        else:
            message = drawing.message(method.descriptor.input_type)
        raw = message.SerializeToString()
        return spoilt(raw, drawing) if drawing.rarely(8) else raw

    async def _talk(self, method: Method, credential: Credential, metadata: Metadata) -> None:
        drawing = self._drawing
        messages = []
        for number in range(1 + drawing.below(5)):
            right = list(self._garden.right.get(method.short, {}).values())
            if number == 0 and right and drawing.below(4):
                messages.append(drawing.one_of(right).SerializeToString())
            else:
                messages.append(self._request(credential, method))
        talk = Talk(self._world, method, metadata)
        for raw in messages:
            self._note(credential, method, raw)
            await self._judge(credential, method, raw, await talk.say(raw))
            if talk.over:
                break
        await talk.leave()

    # -- judgement ----------------------------------------------------------------

    async def _judge(self, who: Credential, method: Method, raw: bytes, told: Told) -> bool:
        """Look at all that came of a call; return whether anything is stored. Raises Finding."""
        self._counts.inputs["rpc"] += 1
        self._counts.codes[told.code] += 1
        if not told.refused:
            self._counts.accepted[method.short] += 1
        self._log.append(f"   -> {told.code} {told.message[:300]}")
        self._check_code(told)
        self._remember(who, method, raw, told)
        self._check_secrets(who, method, raw, told)
        tables = await self._world.watch.tables()
        before, self._tables = self._tables, tables
        changed = sorted(name for name in tables if tables[name] != before.get(name))
        if changed and told.refused and not told.moved:
            self._found("half_stored", f"refused, and yet changed: {', '.join(changed)}")
        if changed:
            await self._check_invariants(f"accepted {method.short}")
        return bool(changed)

    def _check_code(self, told: Told) -> None:
        if told.code in {"INTERNAL", "UNKNOWN", "DATA_LOSS", "UNIMPLEMENTED"}:
            self._found("internal_errors", f"{told.code}: {told.message}")
        if told.code == "DEADLINE_EXCEEDED" or told.seconds > TIMEOUT_S:
            self._found("internal_errors", f"no answer after {told.seconds:.1f} s")
        if not told.refused:
            return
        inside = INSIDE.search(told.message)
        if inside is not None:
            self._found("internal_errors", f"of the inside: {inside[0]!r} in {told.message!r}")
        reason = _reason(told)
        # gRPC itself refuses what is too large, without a reason.
        if reason not in _REASONS and told.code not in {"RESOURCE_EXHAUSTED", "CANCELLED"}:
            self._found("internal_errors", f"no reason that a client could read: {reason!r}")

    def _remember(self, who: Credential, method: Method, raw: bytes, told: Told) -> None:
        """Note what tenants may know from now on, and what new secrets there are."""
        for name in self._said:
            if who.name != f"{_other(name)}: key":
                self._said[name] += b"\0" + raw
            if who.name in (f"{name}: key", f"{name}: token") and _scoped(method, raw):
                for answer in told.answers:
                    message = _read(method, answer)
                    if message is not None:
                        for marker in new_ids(message):
                            self._markers[name].add(marker)

    def _check_secrets(self, who: Credential, method: Method, raw: bytes, told: Told) -> None:
        foreign = who.foreign
        if who.name.endswith(": token") and _scoped(method, raw):
            foreign = (_other(who.name.partition(":")[0]),)
        for name in foreign:
            said = self._said[_other(name)]
            shown = self._markers[name].shown(told.everything(), said)
            numbers: list[int] = []
            for answer in told.answers:
                message = _read(method, answer)
                if message is not None:
                    numbers += self._markers[name].numbers_shown(message, set())
            numbers = [one for one in numbers if _varint(one) not in said]
            if shown or numbers:
                self._found("leaks", f"{name}' secrets: {shown} {numbers}")

    async def _check_invariants(self, after: str) -> None:
        broken = await self._world.watch.broken()
        if broken:
            self._found("half_stored", f"after {after}: {'; '.join(broken)}")

    # -- foreign and unknown are the same -----------------------------------------

    def _twin_of(self, who: Credential, method: Method, raw: bytes) -> bytes | None:
        """Return the same request about things that nobody has, if it names foreign ones."""
        if not who.name.endswith(": key") or not _scoped(method, raw):
            return None
        whose = _other(who.name.partition(":")[0])
        own = self._said[_other(whose)]
        unsaid = [one for one in self._garden.markers[whose].texts if one not in own]
        twin = replaced(raw, {marker: self._twins[marker] for marker in unsaid})
        return twin if twin != raw else None

    def _compare(self, told: Told, expected: Told, *, changed: bool) -> None:
        if told.silent or expected.silent:
            return
        if told.code != expected.code:
            self._found("leaks", f"foreign {told.code}, unknown {expected.code}")
        if changed:  # two of them were made, each with an id of its own
            return
        one, other = (self._neutral(which.everything()) for which in (told, expected))
        if one != other:
            self._found("leaks", f"foreign and unknown differ: {told} and {expected}")

    def _neutral(self, raw: bytes) -> bytes:
        raw = replaced(raw, {twin: marker for marker, twin in self._twins.items()})
        return _REQUEST_IDS.sub(b"req-", raw)

    # -- what is shown ------------------------------------------------------------

    def _note(self, who: Credential, method: Method, raw: bytes) -> None:
        message = _parsed(method.request, raw)
        if message is None or len(raw) > _SHOWN:
            text = f"{len(raw)} bytes {raw[:_SHOWN].hex()}"
        else:
            text = text_format.MessageToString(message, as_one_line=True)
            if message.SerializeToString() != raw:
                text += f" ({raw.hex()})"
        self._log.append(f"{who.name}: {method.short} {text}")

    def _found(self, kind: Any, what: str) -> None:
        tenants = ", ".join(f"{name}: {seed.tenant}" for name, seed in self._garden.seeds.items())
        raise Finding(kind, "\n".join([what, tenants, *self._log]))


def _twin(marker: bytes) -> bytes:
    """Return something of the same form and length that nobody has."""
    alphabet = b"0123456789abcdef"
    hexadecimal = set(alphabet)
    dash = marker.rfind(b"-")
    head, tail = marker[: dash + 1], marker[dash + 1 :]
    if tail and set(tail) <= hexadecimal:
        return head + bytes(secrets.choice(alphabet) for _ in tail)
    if all(32 <= byte < 127 for byte in marker):
        return marker[:-6] + bytes(secrets.choice(alphabet) for _ in marker[-6:])
    return secrets.token_bytes(len(marker))


def replaced(raw: bytes, others: dict[bytes, bytes]) -> bytes:
    """Return the bytes with each key of `others` replaced, the longest where several fit."""
    if not others:
        return raw
    longest = sorted(others, key=len, reverse=True)
    return re.sub(b"|".join(map(re.escape, longest)), lambda found: others[found[0]], raw)


def _other(name: str) -> str:
    return "theirs" if name == "ours" else "ours"


def _scoped(method: Method, raw: bytes) -> bool:
    """What is answered is one tenant's."""
    if method.short == "LeaseService/GrantLease":
        # A worker that names what an engine holds names no tenant.
        asked = _parsed(method.request, raw)
        return asked is None or not asked.HasField("handle")
    return method.service not in _OPERATORS and method.short not in OF_NO_TENANT


def _parsed(kind: type[Message], raw: bytes) -> Message | None:
    try:
        return kind.FromString(raw)
    except DecodeError:
        return None


def _read(method: Method, answer: bytes) -> Message | None:
    return _parsed(method.response, answer)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def _reason(told: Told) -> str:
    status, info = status_pb2.Status(), error_details_pb2.ErrorInfo()
    for key, value in told.metadata:
        if key == _DETAILS:
            status.MergeFromString(value)
    for detail in status.details:
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
    return info.reason


async def example(
    garden: Garden,
    draw: Callable[[Any], Any],
    counts: Counts,
    methods: Sequence[str] | None = None,
) -> None:
    """Run one sequence on a fresh copy. Raises Finding."""
    async with copied(garden) as world:
        drawing = Drawing(draw, garden.pool)
        await Example(world, garden, drawing, methods or list(METHODS), counts).run()
