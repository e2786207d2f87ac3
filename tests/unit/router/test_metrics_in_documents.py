"""Every series that a gateway exposes is in the documents, and every series in the documents is exposed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from router.auth.auth import AccessControl
from router.batches.batch_runner import BatchMetrics
from router.build_router import build_router
from router.prefix.feed import Feed
from router.prefix.memory_index import MemoryPrefixIndex
from router.request_metrics import RequestMetrics
from router.router_config import RouterConfig

DOCS = Path(__file__).resolve().parents[3] / "docs"
OF_THE_CLUSTER = {  # registered in cluster/gateway
    "baton_discovery_current", "baton_certificate_expiry_timestamp_seconds", "baton_traces_total",
    "baton_ledger_rows_total", "baton_desired_workers",
}  # fmt: skip


def named(row: str) -> Iterator[set[str]]:
    """Each name with its possible meanings: `_waiting` after `baton_pool_running` continues a prefix."""
    first = ""
    for name in re.findall(r"`(baton_\w+\*?|_\w+)(?:\{[^`]*)?`", row):
        if name.startswith("baton_"):
            first = name
            yield {name}
        elif first:
            yield {first[: place.start()] + name for place in re.finditer("_", first)}


async def exposed() -> set[str]:
    metrics = RequestMetrics()
    AccessControl(None, registry=metrics.registry)
    BatchMetrics(metrics.registry)
    config = RouterConfig(model_path=Path("model"), model_name="model", shadow_policy="prefix_aware")
    router = build_router(config, feed=Feed(MemoryPrefixIndex(), gateway_id="gateway"), registry=metrics.registry)
    families = list(metrics.registry.collect())
    await router.close()
    return {f"{family.name}_total" if family.type == "counter" else family.name for family in families} | OF_THE_CLUSTER


async def test_the_documents_name_every_series_and_no_other() -> None:
    series, documented = await exposed(), set[str]()
    for page in sorted(DOCS.glob("*.md")):
        for line in page.read_text().splitlines():
            for meanings in named(line):
                groups = {name[:-1] for name in meanings if name.endswith("*")}
                assert all(any(sample.startswith(group) for sample in series) for group in groups), (
                    f"{page.name}: {line}"
                )
                if not groups:  # a group of series, as `baton_pool_*`, describes none of them
                    assert meanings & series, f"{page.name}: no series is {' or '.join(sorted(meanings))}: {line}"
                    documented |= meanings & series
    assert series == documented, f"no page of docs/ has {sorted(series - documented)}"
