"""Calls of the owner of the desired fleet by processes that it does not live in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum

from protos.errors import BatonError, Internal
from protos.values import ErrorInfo
from protos.wire import error_info, raised
from router.fleet_owner import CapacityOwner, FleetChange, FleetOrder, FleetReport
from router.planning import CapacityNews, GatewaySight, SeenSight


class CallKind(StrEnum):
    VIEW = "view"
    ORDER = "order"
    REPORT = "report"
    SIGHTS = "sights"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetCall:
    """A call of the owner of the desired fleet, with the `order` or the report (`sight`) of its kind. Answered by the
    FleetReply with the same number."""

    number: int
    kind: CallKind = CallKind.VIEW
    order: FleetOrder | None = None
    sight: GatewaySight | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetReply:
    """What a call of one kind returns, in the field of that kind; else the `error`."""

    number: int
    change: FleetChange | None = None
    view: FleetReport | None = None
    news: CapacityNews | None = None
    sights: tuple[SeenSight, ...] | None = None
    error: ErrorInfo | None = None


class CalledFleetOwner(ABC):
    """A `CapacityOwner` in another process."""

    @abstractmethod
    async def _call(self, call: FleetCall) -> FleetReply:
        """Sends the call under a number of its own. Raises Unavailable without a reply."""

    async def view(self) -> FleetReport:
        reply = await self._answer(FleetCall(number=0))
        assert reply.view is not None, "a call for the view is answered with it"
        return reply.view

    async def order(self, order: FleetOrder) -> FleetChange:
        reply = await self._answer(FleetCall(number=0, kind=CallKind.ORDER, order=order))
        assert reply.change is not None, "an order is answered with its change"
        return reply.change

    async def report(self, sight: GatewaySight | None) -> CapacityNews:
        reply = await self._answer(FleetCall(number=0, kind=CallKind.REPORT, sight=sight))
        assert reply.news is not None, "a report is answered with what is wanted next"
        return reply.news

    async def sights(self) -> tuple[SeenSight, ...]:
        reply = await self._answer(FleetCall(number=0, kind=CallKind.SIGHTS))
        assert reply.sights is not None, "a call for the reports is answered with them"
        return reply.sights

    async def _answer(self, call: FleetCall) -> FleetReply:
        reply = await self._call(call)
        if reply.error is not None:
            raise raised(reply.error)
        return reply


async def reply_to(call: FleetCall, owner: CapacityOwner) -> FleetReply:
    """Calls the owner for a gateway process. Never fails."""
    number = call.number
    try:
        match call:
            case FleetCall(kind=CallKind.ORDER, order=FleetOrder() as order):
                return FleetReply(number=number, change=await owner.order(order))
            case FleetCall(kind=CallKind.REPORT):
                return FleetReply(number=number, news=await owner.report(call.sight))
            case FleetCall(kind=CallKind.SIGHTS):
                return FleetReply(number=number, sights=await owner.sights())
        return FleetReply(number=number, view=await owner.view())
    except BatonError as error:
        return FleetReply(number=number, error=error_info(error))
    except Exception as error:  # the gateway process must get an answer
        return FleetReply(number=number, error=error_info(Internal(f"{type(error).__name__}: {error}")))
