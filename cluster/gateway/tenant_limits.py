"""Tenants' limits shared by gateway processes without Redis: their supervisor enforces them for all.

A tenant without limits costs no message. The running requests of a process that died are released immediately.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

from cluster.gateway.messages import EnterTenant, RequestEnded, TenantEntered, TokensSpent
from cluster.process.channel import MessageChannel
from protos.errors import RateLimited
from protos.wire import error_info, raised
from router.auth.limits import LocalLimits
from router.auth.tenants import Tenant


class KeptLimits:
    """`TenantLimits` of one gateway process: sends requests for admission to its supervisor."""

    trouble = ""

    def __init__(self, control: MessageChannel) -> None:
        self._control = control
        self._numbers = count()
        self._asked: dict[int, asyncio.Future[TenantEntered]] = {}

    async def enter(self, tenant: Tenant, request_id: str, num_tokens: int, now: float) -> None:
        if not _is_limited(tenant):
            return
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._control.send(EnterTenant(number=number, tenant=tenant, request_id=request_id, num_tokens=num_tokens))
        try:
            entered = await answer
        except asyncio.CancelledError:
            self.leave(tenant, request_id)  # it may have been admitted meanwhile
            raise
        finally:
            del self._asked[number]
        if entered.refusal is not None:
            raise raised(entered.refusal)

    def answered(self, entered: TenantEntered) -> None:
        """Delivers the supervisor's decision."""
        answer = self._asked.get(entered.number)
        if answer is not None and not answer.done():
            answer.set_result(entered)

    def spend(self, tenant: Tenant, num_tokens: int, now: float) -> None:
        if tenant.tokens_per_min is not None:
            self._control.send(TokensSpent(tenant=tenant, num_tokens=num_tokens))

    def leave(self, tenant: Tenant, request_id: str) -> None:
        if _is_limited(tenant):
            self._control.send(RequestEnded(tenant=tenant, request_id=request_id))

    async def close(self) -> None:
        """Admits all waiting requests: the process ends, and no supervisor decides any more."""
        for number, answer in self._asked.items():
            if not answer.done():
                answer.set_result(TenantEntered(number=number, refusal=None))


class Keeper:
    """In the supervisor: the limits, and the running requests of each process."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._limits = LocalLimits()
        self._clock = clock
        self._running: dict[int, dict[tuple[str, str], Tenant]] = {}

    async def decide(self, process: int, request: EnterTenant) -> TenantEntered:
        try:
            await self._limits.enter(request.tenant, request.request_id, request.num_tokens, self._clock())
        except RateLimited as refused:
            return TenantEntered(number=request.number, refusal=error_info(refused))
        self._running.setdefault(process, {})[request.tenant.name, request.request_id] = request.tenant
        return TenantEntered(number=request.number, refusal=None)

    def spent(self, spent: TokensSpent) -> None:
        self._limits.spend(spent.tenant, spent.num_tokens, self._clock())

    def gone(self, process: int, gone: RequestEnded) -> None:
        self._running.get(process, {}).pop((gone.tenant.name, gone.request_id), None)
        self._limits.leave(gone.tenant, gone.request_id)

    def lost(self, process: int) -> None:
        """Releases the requests of a process that has ended."""
        for (_, request_id), tenant in self._running.pop(process, {}).items():
            self._limits.leave(tenant, request_id)


def _is_limited(tenant: Tenant) -> bool:
    return (tenant.requests_per_min, tenant.tokens_per_min, tenant.max_concurrent) != (None, None, None)
