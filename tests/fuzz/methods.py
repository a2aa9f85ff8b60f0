"""All RPCs of all our protos, and all that a message holds."""

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any, Final

import kvplane.api
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from wire.methods import Method


def _modules() -> Iterator[Any]:
    for found in pkgutil.walk_packages(kvplane.api.__path__, "kvplane.api."):
        if found.name.endswith("_pb2"):
            yield importlib.import_module(found.name)


METHODS: Final = {
    method.short: method
    for module in _modules()
    for service in module.DESCRIPTOR.services_by_name.values()
    for descriptor in service.methods
    for method in [Method(service.name, descriptor.name, descriptor)]
}


def is_map(field: FieldDescriptor) -> bool:
    """It is a map, which Python shows as a dict."""
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def leaves(message: Message) -> Iterator[tuple[str, Any]]:
    """Yield every value in a message with the name of its field; an empty one is not there."""
    for field, value in message.ListFields():
        if is_map(field):
            for key, item in value.items():
                yield field.name, key
                if isinstance(item, Message):
                    yield from leaves(item)
                else:
                    yield field.name, item
        else:
            for item in value if field.is_repeated else (value,):
                if isinstance(item, Message):
                    yield from leaves(item)
                else:
                    yield field.name, item


def fields(descriptor: Descriptor) -> list[FieldDescriptor]:
    """Return a message's fields by number."""
    return sorted(descriptor.fields, key=lambda field: field.number)
