"""How a fault is put into the product: small patches of one decision."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch

Plant = Callable[[], AbstractContextManager[Any]]


@contextlib.contextmanager
def everywhere(old: Any, new: Any) -> Iterator[None]:
    """Replace a function of the product in all of its modules."""
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("kvplane.") and not name.startswith("kvplane.api"):
                for key, value in list(vars(module).items()):
                    if value is old:
                        stack.enter_context(patch.object(module, key, new))
        yield


@contextlib.contextmanager
def all_of(*patches: AbstractContextManager[Any]) -> Iterator[None]:
    """Put several patches in."""
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        yield
