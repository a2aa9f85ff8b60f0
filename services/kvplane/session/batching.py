"""Calls that arrive while one is under way share the next one."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from kvplane.kernel.errors import KvplaneError
from kvplane.kernel.gathering import gathered

Item = TypeVar("Item")
Answer = TypeVar("Answer")
MAX_BATCH = 256


class Batches(Generic[Item, Answer]):
    """Collects the items of each tenant for a function that handles many at once."""

    def __init__(
        self, handle: Callable[[str, list[Item]], Awaitable[list[Answer | KvplaneError]]]
    ) -> None:
        self._handle = handle
        self._queues: dict[str, list[tuple[Item, asyncio.Future[Answer]]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def submit(self, tenant_id: str, item: Item) -> Answer:
        """Return the item's own answer, or raise it when it is an error."""
        done: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        queue = self._queues.get(tenant_id)
        if queue is None:
            self._queues[tenant_id] = [(item, done)]
            task = asyncio.create_task(self._drain(tenant_id))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            queue.append((item, done))
        return await done

    async def _drain(self, tenant_id: str) -> None:
        queue = self._queues[tenant_id]
        while queue:
            await gathered(queue, MAX_BATCH)
            batch = queue[:MAX_BATCH]
            del queue[:MAX_BATCH]
            try:
                answers = await self._handle(tenant_id, [item for item, _ in batch])
            except Exception as error:  # noqa: BLE001 - every caller must hear of it
                answers = [error] * len(batch)  # type: ignore[list-item]
            for (_, done), answer in zip(batch, answers, strict=True):
                if done.done():  # the caller has gone
                    continue
                if isinstance(answer, Exception):
                    done.set_exception(answer)
                else:
                    done.set_result(answer)
        # Nothing has been awaited since the queue was found empty.
        del self._queues[tenant_id]
