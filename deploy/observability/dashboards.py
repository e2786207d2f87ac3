"""Grafana dashboards from the table `dashboards.toml`. Any Grafana can import them: the datasource is a variable, and
they have no id of their own."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SCHEMA_VERSION = 39
_MODEL = 'model=~"$model"'
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS = 24
_WIDTH, _HEIGHT = 12, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A chart of `queries`: (PromQL, legend). `unit` is Grafana's name of one."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    key: str
    title: str
    panels: tuple[Panel, ...]


def dashboards() -> tuple[Dashboard, ...]:
    found = tomllib.loads((Path(__file__).parent / "dashboards.toml").read_text())
    return tuple(
        Dashboard(key=key, title=table["title"], panels=tuple(map(_panel, table["panels"])))
        for key, table in found.items()
    )


def _panel(row: dict[str, Any]) -> Panel:
    queries = row.pop("queries", ()) or _quantiles(row.pop("quantiles"))
    written = [
        (query.replace("[r]", "[$__rate_interval]").replace("{m", "{" + _MODEL), legend) for query, legend in queries
    ]
    return Panel(queries=tuple(written), **row)


def _quantiles(metric: str) -> list[tuple[str, str]]:
    rate = f"sum by (le) (rate(baton_{metric}_bucket{{m}}[r]))"
    return [(f"histogram_quantile({share}, {rate})", f"p{round(share * 100)}") for share in (0.5, 0.95, 0.99)]


def grafana(dashboard: Dashboard) -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    return {
        "id": None,
        "title": dashboard.title,
        "tags": ["baton"],
        "timezone": "browser",
        "schemaVersion": _SCHEMA_VERSION,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": _variables(dashboard)},
        "panels": _placed(dashboard.panels),
    }


def _variables(dashboard: Dashboard) -> list[dict[str, Any]]:
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Datasource"}
    if not any(_MODEL in query for panel in dashboard.panels for query, _ in panel.queries):
        return [source]
    model = {
        "name": "model", "label": "Model", "type": "query", "datasource": _SOURCE, "includeAll": True, "multi": True,
        "allValue": ".*", "current": {"text": "All", "value": "$__all"}, "refresh": 2,
        "query": {"query": "label_values(baton_build_info, model)", "refId": "model"},
    }  # fmt: skip
    return [source, model]


def _placed(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    across = _COLUMNS // _WIDTH
    return [
        _drawn(panel, number)
        | {"gridPos": {"x": number % across * _WIDTH, "y": number // across * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}}
        for number, panel in enumerate(panels)
    ]


def _drawn(panel: Panel, number: int) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + place), "datasource": _SOURCE, "expr": query, "legendFormat": legend}
        for place, (query, legend) in enumerate(panel.queries)
    ]
    return {
        "id": number + 1,
        "type": panel.kind,
        "title": panel.title,
        "datasource": _SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
    }
