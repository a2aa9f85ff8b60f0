"""Requests that are no messages: gRPC would answer UNKNOWN, and show the exception."""

from collections.abc import AsyncIterator, Callable
from functools import cache
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from kvplane.kernel.errors import InvalidField

_STRING: Final = FieldDescriptor.TYPE_STRING

Parse = Callable[[bytes], Any]


def read(parse: Parse, raw: bytes, method: str) -> Any:
    """Return the message of `method` that `raw` is. Raises InvalidField.

    After the caller is known: a message may take a hundred times its bytes in memory.
    """
    try:
        return parse(raw)
    except DecodeError:
        raise _complaint(raw, method) from None


async def read_all(parse: Parse, requests: AsyncIterator[bytes], method: str) -> AsyncIterator[Any]:
    """Yield the messages of a stream of `method`. Raises InvalidField at an unreadable one."""
    async for raw in requests:
        yield read(parse, raw, method)


def _complaint(raw: bytes, method: str) -> InvalidField:
    """Return what is wrong: a text that is not UTF-8, or else the whole request.

    `method` is ``/package.Service/Method``.
    """
    name = method.lstrip("/").replace("/", ".")
    wanted = descriptor_pool.Default().FindMethodByName(name).input_type
    twin = _with_bytes_for_texts(wanted)()
    try:
        twin.ParseFromString(raw)
    except DecodeError:
        return InvalidField("request", f"is not a {wanted.name} message; use the stubs of protos/")
    field = _not_text(twin, wanted)
    if field is None:
        return InvalidField("request", f"is not a {wanted.name} message; use the stubs of protos/")
    return InvalidField(field, "must be UTF-8 text")


@cache
def _with_bytes_for_texts(wanted: Descriptor) -> type[Message]:
    """Return the same message with bytes in place of texts, so that it takes any."""
    pool = descriptor_pool.DescriptorPool()
    added: set[str] = set()

    def add(file: FileDescriptor) -> None:
        if file.name in added:
            return
        added.add(file.name)
        for dependency in file.dependencies:
            add(dependency)
        proto = descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(proto)
        for message in proto.message_type:
            _change(message)
        pool.Add(proto)

    add(wanted.file)
    return GetMessageClass(pool.FindMessageTypeByName(wanted.full_name))


def _change(message: descriptor_pb2.DescriptorProto) -> None:
    if message.options.map_entry:  # a key cannot be bytes; no request has a map
        return
    for field in message.field:
        if field.type == descriptor_pb2.FieldDescriptorProto.TYPE_STRING:
            field.type = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
    for nested in message.nested_type:
        _change(nested)


def _not_text(twin: Message, wanted: Descriptor) -> str | None:
    """Return the path of the first text that is not UTF-8."""
    for field, value in twin.ListFields():
        original = wanted.fields_by_name[field.name]
        repeated = original.is_repeated
        for index, item in enumerate(value if repeated else [value]):
            path = f"{field.name}[{index}]" if repeated else field.name
            if original.type == _STRING:
                try:
                    item.decode()
                except UnicodeDecodeError:
                    return path
            elif original.message_type is not None:
                inner = _not_text(item, original.message_type)
                if inner is not None:
                    return f"{path}.{inner}"
    return None
