"""All RPCs, from the protos themselves, and paths into their messages."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from kvplane.api.audit.v1 import audit_pb2
from kvplane.api.lease.v1 import lease_pb2
from kvplane.api.routing.v1 import routing_pb2
from kvplane.api.session.v1 import session_pb2
from kvplane.api.tenant.v1 import tenant_pb2


@dataclass(frozen=True)
class Method:
    """One RPC."""

    service: str
    name: str
    descriptor: MethodDescriptor

    @property
    def short(self) -> str:
        """``LeaseService/GetLease``."""
        return f"{self.service}/{self.name}"

    @property
    def path(self) -> str:
        """As it is on the wire."""
        return f"/{self.descriptor.containing_service.full_name}/{self.name}"

    @property
    def request(self) -> type[Message]:
        return GetMessageClass(self.descriptor.input_type)

    @property
    def response(self) -> type[Message]:
        return GetMessageClass(self.descriptor.output_type)

    @property
    def streams(self) -> bool:
        return self.descriptor.client_streaming or self.descriptor.server_streaming


METHODS: Final = {
    method.short: method
    for module in (audit_pb2, lease_pb2, routing_pb2, session_pb2, tenant_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for descriptor in service.methods
    for method in [Method(service.name, descriptor.name, descriptor)]
}

_STEP: Final = re.compile(r"(\w+)(?:\[(\d+)\])?")


def steps(path: str) -> Iterator[tuple[str, int | None]]:
    """``a.b[1].c`` as ("a", None), ("b", 1), ("c", None)."""
    for part in path.split("."):
        match = _STEP.fullmatch(part)
        assert match is not None, path
        yield match[1], int(match[2]) if match[2] else None


def is_field(descriptor: Descriptor, path: str) -> bool:
    """Tell whether the path is spelt as in the proto; the last step may be a oneof's name."""
    parts = list(steps(path))
    for number, (name, index) in enumerate(parts):
        field: FieldDescriptor | None = descriptor.fields_by_name.get(name)
        last = number == len(parts) - 1
        if field is None:
            return last and index is None and name in descriptor.oneofs_by_name
        if index is not None and not field.is_repeated:
            return False
        if not last:
            if field.message_type is None:
                return False
            descriptor = field.message_type
    return True


def put(message: Message, path: str, value: Any) -> None:
    """Set the field at the path; None clears it."""
    *way, (name, index) = steps(path)
    target: Any = message
    for step, at in way:
        target = getattr(target, step)
        if at is not None:
            target = target[at]
    if value is None:
        target.ClearField(name)
    elif index is not None:
        items = list(getattr(target, name))
        items[index : index + 1] = [value]
        target.ClearField(name)
        getattr(target, name).extend(items)
    elif isinstance(value, list):
        target.ClearField(name)
        getattr(target, name).extend(value)
    elif isinstance(value, Message):
        getattr(target, name).CopyFrom(value)
    else:
        setattr(target, name, value)
