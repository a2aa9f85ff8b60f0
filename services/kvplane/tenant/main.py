"""Tenants, put together."""

from kvplane.db.database import Database
from kvplane.kernel.clock import Clock
from kvplane.kernel.ids import Ids, RandomIds
from kvplane.tenant.service import TenantService
from kvplane.tenant.servicer import TenantServicer
from kvplane.tenant.store_sql import SqlTenantStore


class TenantPart:
    """The servicer of tenants."""

    def __init__(self, service: TenantService) -> None:
        self.service = service
        self.servicer = TenantServicer(service)

    async def start(self) -> None:
        """Make the default tenant."""
        await self.service.prepare()

    async def stop(self) -> None:
        """Nothing runs beside the calls."""


# Holds no state.
_RANDOM_IDS = RandomIds()


def build(database: Database, clock: Clock, ids: Ids = _RANDOM_IDS) -> TenantPart:
    """Put tenants together over a migrated database, whose clock is theirs."""
    return TenantPart(TenantService(SqlTenantStore(database), ids))
