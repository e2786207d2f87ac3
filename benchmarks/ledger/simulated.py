"""The ledger's costs beside the simulator's, for one simulated load.

    python -m benchmarks.ledger.simulated --rates 2,8,16

The ledger estimates each request's device seconds from the speeds that workers report; the simulator knows how long
each device computed. Each gateway of the simulation has a ledger, as one of `baton serve` has.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks.output import write_figures
from cluster.bench.bench_load import Lengths
from cluster.config.cluster_config import PoolsConfig
from cluster.simulate.run.deployment import SimulatedDeployment, SimulatedGateway
from cluster.simulate.run.simulation import SimulationOutcome, simulate
from cluster.simulate.run.simulation_config import SimulationConfig, hardware_spec, simulated_router
from cluster.simulate.world.simulated_load import GeneratedLoad, generated
from protos.event_loop import loop_time
from router.jobs import Job, TokenDelta
from router.observe.ledger.ledger_report import sums
from router.observe.ledger.ledger_store import LedgerStore
from router.observe.ledger.ledger_tables import ledger_database
from router.observe.ledger.prices import PriceList
from router.observe.ledger.request_ledger import LOOK_S, RequestLedger
from router.observe.request_observer import EndedRequest, ObservedRequest
from router.text.sampling_request import TextRequest
from router.text.text_stream import Usage, UsageCounter

START_S = 0
END_S = 10 * 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class CostComparison:
    """Device seconds of one load. `busy`: share of the devices' time in which they computed."""

    rate: float
    busy: float
    ledger_prefill_s: float
    ledger_decode_s: float
    simulated_prefill_s: float
    simulated_decode_s: float

    @property
    def ratio(self) -> float:
        ledger_s = self.ledger_prefill_s + self.ledger_decode_s
        return ledger_s / (self.simulated_prefill_s + self.simulated_decode_s)


class LedgerBeside:
    """Keeps a ledger for the gateways of a simulation, by `steer`."""

    def __init__(self, path: Path) -> None:
        self._store = LedgerStore(ledger_database(path))

    async def steer(self, deployment: SimulatedDeployment) -> None:
        """Runs until it is cancelled, at the end of the load."""
        ledgers, admissions = [], [gateway.admission for gateway in deployment.gateways]
        for gateway in deployment.gateways:
            ledger = RequestLedger(self._store, PriceList(), gateway.fleet, model="simulated", clock=loop_time)
            gateway.admission = Counted(gateway, ledger)  # type: ignore[assignment]
            ledgers.append(ledger)
        try:
            while True:
                for ledger in ledgers:
                    ledger.look()
                await asyncio.sleep(LOOK_S)
        finally:
            for gateway, admission in zip(deployment.gateways, admissions, strict=True):
                gateway.admission = admission

    def close(self) -> None:
        self._store.close()


class Counted:
    """A gateway's admission, with a row in the ledger for each job that ends."""

    def __init__(self, gateway: SimulatedGateway, ledger: RequestLedger) -> None:
        self._admission = gateway.admission
        self._records = gateway.records
        self._ledger = ledger

    @property
    def num_waiting(self) -> int:
        return self._admission.num_waiting

    async def __call__(self, job: Job) -> AsyncGenerator[TokenDelta, None]:
        num_tokens, num_cached, error = 0, 0, None
        try:
            async with aclosing(self._admission(job)) as deltas:
                async for delta in deltas:
                    if not num_tokens:
                        num_cached = delta.num_cached_tokens
                    num_tokens += len(delta.token_ids)
                    yield delta
        except BaseException as raised:
            error = raised
            raise
        finally:
            usage = Usage(prompt_tokens=len(job.prompt_ids), completion_tokens=num_tokens, cached_tokens=num_cached)
            ask = TextRequest(request_id=job.request_id, jobs=(job,), n=1)
            records = self._records.find(job.request_id)
            request = ObservedRequest(ask, records, UsageCounter(ask), "completions", "", "demo")
            self._ledger.ended(EndedRequest(request, usage, error))


def compared(config: SimulationConfig, load: GeneratedLoad) -> CostComparison:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.db"
        beside = LedgerBeside(path)
        try:
            outcome = simulate(config, generated("poisson", load), steer=beside.steer)
        finally:
            beside.close()
        with closing(ledger_database(path)) as database:
            [found] = sums(database, since_s=START_S, until_s=END_S)
    assert found.requests == load.num_requests, f"{found.requests} rows for {load.num_requests} requests"
    return CostComparison(
        rate=load.rate,
        busy=_busy(outcome),
        ledger_prefill_s=found.prefill_device_s,
        ledger_decode_s=found.decode_device_s,
        simulated_prefill_s=sum(life.work.prompt_s for life in outcome.served),
        simulated_decode_s=sum(life.work.answer_s for life in outcome.served),
    )


def _busy(outcome: SimulationOutcome) -> float:
    return sum(life.work.busy_s for life in outcome.served) / sum(life.lived_s for life in outcome.served)


def show(found: Sequence[CostComparison]) -> None:
    for one in found:
        print(
            f"{one.rate:5.1f} requests/s, {one.busy:4.0%} busy: ledger {one.ledger_prefill_s:6.1f} + "
            f"{one.ledger_decode_s:6.1f} device seconds (prompts + answers), simulator {one.simulated_prefill_s:6.1f} "
            f"+ {one.simulated_decode_s:6.1f}; ledger / simulator {one.ratio:.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1, help="Without prefill workers: that do both.")
    parser.add_argument("--rates", default="2,8,16", help="Requests a second, one load each.")
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    pools = (
        PoolsConfig(prefill=args.prefill, decode=args.decode) if args.prefill else PoolsConfig(colocated=args.decode)
    )
    config = SimulationConfig(
        pools=pools,
        spec=hardware_spec(gpu="h100", model=args.model, tp=1, leaping=True),
        router=simulated_router("slo"),
        seed=args.seed,
    )
    found = [
        compared(
            config,
            GeneratedLoad(
                num_requests=args.requests, rate=float(rate), prompts=Lengths(low=500, high=4000),
                outputs=Lengths(low=50, high=400), seed=args.seed,
            ),
        )
        for rate in args.rates.split(",")
    ]  # fmt: skip
    show(found)
    write_figures(args.json, figures=[{"ratio": one.ratio, **_fields(one)} for one in found])


def _fields(one: CostComparison) -> dict[str, float]:
    return {name: getattr(one, name) for name in CostComparison.__slots__}


if __name__ == "__main__":
    main()
