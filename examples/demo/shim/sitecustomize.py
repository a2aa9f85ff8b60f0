"""For two vLLMs on one small machine; not for production. On PYTHONPATH, Python loads it.

NIXL's Python wrapper makes every agent's progress thread spin on a whole core, even when
idle; DEMO_NIXL_DELAY_US makes it sleep that many microseconds between polls. vLLM's NIXL
worker pins its process to the last core, so that two workers fight for one core;
DEMO_NO_PINNING leaves them where the kernel puts them.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_DELAY_US = int(os.environ.get("DEMO_NIXL_DELAY_US", "0"))


def _slow_down(bindings: ModuleType) -> None:
    original: Any = bindings.nixlAgentConfig

    class AgentConfig(original):  # type: ignore[misc]
        """The original, but its progress thread always sleeps a little."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, max(value, _DELAY_US) if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = AgentConfig  # type: ignore[attr-defined]


class _Finder(importlib.abc.MetaPathFinder):
    """Changes NIXL's bindings right after their first import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not (fullname.startswith("nixl_cu") and fullname.endswith("._bindings")):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            _slow_down(module)

        spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec


if _DELAY_US > 0:
    sys.meta_path.insert(0, _Finder())
if os.environ.get("DEMO_NO_PINNING"):
    os.sched_setaffinity = lambda pid, mask: None
