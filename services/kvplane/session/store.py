"""What storage must do for the session registry."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvplane.kernel.errors import KvplaneError
from kvplane.kernel.limits import Quotas
from kvplane.session.domain import (
    BeginTurn,
    Begun,
    CompleteTurn,
    Session,
    SessionFilter,
    SessionRef,
)
from kvplane.session.quota import OverQuota
from kvplane.session.usage import Completed, Usage


@dataclass(frozen=True, slots=True)
class NewTurn:
    """A request, and the id of the session to be made if it finds none."""

    request: BeginTurn
    new_session_id: str


@dataclass(frozen=True, slots=True)
class FreeTask:
    """A session whose blocks are to be freed; `due_us` proves who may clear it."""

    tenant_id: str
    session_id: str
    due_us: int


class SessionStore(Protocol):
    """Each method is one atomic transition; any of them raises Unavailable.

    Sessions of other tenants do not exist for any of them.
    """

    async def begin_turns(
        self, tenant_id: str, turns: Sequence[NewTurn], quotas: Quotas
    ) -> list[Begun | OverQuota | KvplaneError]:
        """Find or make the session of each request and open its next turn, in order.

        Beyond a soft limit a turn gets no session, beyond a hard one it is QuotaExceeded
        and leaves nothing behind. Limits are the tenant's in all replicas together.

        A request_id seen before gets its first answer, or InvalidField when it was used
        for another key or model. Two turns of one session never get the same number,
        whichever replicas open them.
        """
        ...

    async def complete_turns(
        self, tenant_id: str, reports: Sequence[CompleteTurn], quotas: Quotas
    ) -> list[Completed | KvplaneError]:
        """Close turns, in order. A closed one stays as it is. NotFound for unknown ones.

        What a turn used is added to the tenant's usage with it, once.
        """
        ...

    async def usage(self, tenant_id: str) -> tuple[Usage, int]:
        """Return what the completed turns used, and how many sessions are active."""
        ...

    async def create(
        self, tenant_id: str, name: str, model: str, session_id: str, quotas: Quotas
    ) -> tuple[Session, bool]:
        """Return the active session of that name and whether it was made now, with that id.

        One that is made counts as a request without tokens. Raises QuotaExceeded beyond a
        hard limit; soft ones do not matter.
        """
        ...

    async def get(self, tenant_id: str, ref: SessionRef) -> Session:
        """Return a session; by name, the active one, else the one that ended last.

        Raises NotFound.
        """
        ...

    async def end(self, tenant_id: str, ref: SessionRef) -> tuple[Session, bool]:
        """End it if it is active, and return whether it was.

        It can no longer be found by name or history. `free_due_us` is set as long as its
        blocks are not known to be free. Raises NotFound.
        """
        ...

    async def freed(self, task: FreeTask) -> None:
        """Note that the blocks are free, unless a later attempt is due by now."""
        ...

    async def list_sessions(
        self,
        tenant_id: str,
        which: SessionFilter,
        after: tuple[int, str] | None,
        limit: int,
    ) -> list[Session]:
        """Return sessions, newest first, after the one of (create_us, session_id)."""
        ...

    async def changes(self, tenant_id: str, after: tuple[int, str], limit: int) -> list[Session]:
        """Return sessions by (version, session_id) after the given one."""
        ...

    async def now_us(self) -> int:
        """Return the time that versions are taken from."""
        ...

    async def expire_idle(self, limit: int) -> list[Session]:
        """Expire active sessions whose time has come, of all tenants."""
        ...

    async def claim_frees(self, limit: int) -> list[FreeTask]:
        """Return sessions whose blocks are due to be freed, of all tenants.

        Each is due again after `free_retry_s` unless `freed` is called, so that replicas
        share the work and a lost attempt is made again.
        """
        ...

    async def forget_ended(self, limit: int) -> int:
        """Delete sessions that ended long ago, with their turns; return how many."""
        ...
