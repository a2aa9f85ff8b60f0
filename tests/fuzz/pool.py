"""What is there: values by the names of their fields, as requests and answers show them."""

from typing import Final

from google.protobuf.message import Message

from fuzz.methods import leaves

# So that a field of which nothing is known has something ordinary.
_UNKNOWN_ID: Final = "unknown-0123456789abcdef"


class Pool:
    """Collects values; their order is that of the calls, the same in every run."""

    def __init__(self) -> None:
        self._texts: dict[str, dict[str, None]] = {}
        self._raws: dict[str, dict[bytes, None]] = {}
        self._numbers: dict[str, dict[int, None]] = {}
        self.all_texts: list[str] = [_UNKNOWN_ID]

    def add(self, message: Message) -> None:
        """Take all that the message holds."""
        for name, value in leaves(message):
            if isinstance(value, str):
                if value not in self._texts.setdefault(name, {}):
                    self.all_texts.append(value)
                self._texts[name][value] = None
            elif isinstance(value, bytes):
                self._raws.setdefault(name, {})[value] = None
            elif type(value) is int:
                self._numbers.setdefault(name, {})[value] = None

    def copy(self) -> "Pool":
        """Return one that can grow by itself."""
        made = Pool()
        made._texts = {name: dict(values) for name, values in self._texts.items()}
        made._raws = {name: dict(values) for name, values in self._raws.items()}
        made._numbers = {name: dict(values) for name, values in self._numbers.items()}
        made.all_texts = list(self.all_texts)
        return made

    def texts(self, name: str) -> list[str]:
        """Return texts for a field of that name."""
        return [*self._texts.get(name, ()), _UNKNOWN_ID]

    def raws(self, name: str) -> list[bytes]:
        """Return bytes for a field of that name."""
        return [*self._raws.get(name, ()), b"x" * 16]

    def numbers(self, name: str) -> list[int]:
        """Return numbers for a field of that name."""
        return [*self._numbers.get(name, ()), 1]
