"""Alerts fire when they should and at no other time; dashboards can be imported, and name series that gateways have."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.observability.__main__ import COMPONENT, written
from deploy.observability.alerts import AlertObjectives, alerts, rule_groups
from deploy.observability.dashboards import dashboards, grafana
from protos.errors import Misconfigured
from tests.deploy.rendering import ROOT
from tests.unit.router.test_metrics_in_documents import exposed

OBJECTIVES = AlertObjectives()
LABELS = 'model="m", endpoint="chat.completions"'
SERVED = f'baton_requests_total{{{LABELS}, outcome="ok"}}'
POOL = 'baton_pool_workers{pool="decode", state="%s"}'

# Series by minute, as promtool's tests write them: every alert fires after seven hours, or none.
FIRING: dict[str, str] = {
    SERVED: "0+98x500",
    f'baton_requests_total{{{LABELS}, outcome="worker_lost"}}': "0+2x500",
    f'baton_ttft_seconds_bucket{{{LABELS}, le="2.5"}}': "0+80x500",
    f"baton_ttft_seconds_count{{{LABELS}}}": "0+100x500",
    f'baton_tpot_seconds_bucket{{{LABELS}, le="0.1"}}': "0+80x500",
    f"baton_tpot_seconds_count{{{LABELS}}}": "0+100x500",
    POOL % "ready": "0x500",
    POOL % "lost": "1x500",
    'baton_desired_workers{pool="decode"}': "2x500",
    'baton_pool_losses_total{pool="decode"}': "0+1x500",
    'baton_pool_pauses_total{pool="decode"}': "0+1x500",
    'baton_admission_refused_total{reason="queue_full"}': "0+10x500",
    'baton_pool_kv_blocks_used{pool="decode"}': "99x500",
    'baton_pool_kv_blocks{pool="decode"}': "100x500",
    'baton_pool_lanes{pool="decode", transport="gloo", reason="no shared memory"}': "1x500",
    'baton_pool_lanes_corrupt_total{pool="decode", transport="shm", reason=""}': "0+1x500",
    'baton_canary_total{outcome="same"}': "0+90x500",
    'baton_canary_total{outcome="different"}': "0+10x500",
    "baton_index_shared": "0x500",
    "baton_discovery_current": "0x500",
    'baton_certificate_expiry_timestamp_seconds{use="clients"}': "800000x500",
    "baton_tenants_file_errors_total": "0+1x500",
}
QUIET: dict[str, str] = {
    "baton_build_info": "1x500",
    SERVED: "0+100x500",
    f'baton_requests_total{{{LABELS}, outcome="invalid_request"}}': "0+50x500",
    f'baton_requests_total{{{LABELS}, outcome="worker_lost"}}': "0x500",
    f'baton_ttft_seconds_bucket{{{LABELS}, le="2.5"}}': "0+1000x500",
    f"baton_ttft_seconds_count{{{LABELS}}}": "0+1005x500",
    f'baton_tpot_seconds_bucket{{{LABELS}, le="0.1"}}': "0+1000x500",
    f"baton_tpot_seconds_count{{{LABELS}}}": "0+1005x500",
    POOL % "ready": "2x500",
    'baton_desired_workers{pool="decode"}': "2x500",
    'baton_desired_workers{pool="prefill"}': "0x500",
    'baton_pool_workers{pool="colocated", state="ready"}': "0x500",
    'baton_pool_losses_total{pool="decode"}': "1x500",
    'baton_pool_pauses_total{pool="decode"}': "1x500",
    'baton_admission_refused_total{reason="queue_full"}': "0+1x500",
    'baton_pool_kv_blocks_used{pool="decode"}': "80x500",
    'baton_pool_kv_blocks{pool="decode"}': "100x500",
    'baton_pool_lanes{pool="decode", transport="shm", reason=""}': "3x500",
    'baton_pool_lanes{pool="decode", transport="gloo", reason="no memory in common: No such file"}': "3x500",
    'baton_pool_lanes_corrupt_total{pool="decode", transport="shm", reason=""}': "0x500",
    'baton_canary_total{outcome="same"}': "0+100x500",
    'baton_canary_total{outcome="different"}': "0+1x500",
    "baton_index_shared": "1x500",
    "baton_discovery_current": "1x500",
    'baton_certificate_expiry_timestamp_seconds{use="clients"}': "8000000x500",
    "baton_tenants_file_errors_total": "3x500",
}
# Two models behind one gateway: nothing is wrong with `a`, and `b` serves nothing.
TWO_MODELS: dict[str, str] = {
    "baton_build_info": "1x500",
    'baton_pool_workers{model="a", pool="decode", state="ready"}': "2x500",
    'baton_pool_workers{model="b", pool="decode", state="ready"}': "0x500",
    'baton_pool_workers{model="b", pool="decode", state="lost"}': "1x500",
    'baton_desired_workers{model="a", pool="decode"}': "2x500",
    'baton_desired_workers{model="b", pool="decode"}': "1x500",
    'baton_pool_kv_blocks_used{model="a", pool="decode"}': "99x500",
    'baton_pool_kv_blocks{model="a", pool="decode"}': "1000x500",
    'baton_pool_kv_blocks_used{model="b", pool="decode"}': "99x500",
    'baton_pool_kv_blocks{model="b", pool="decode"}': "100x500",
    'baton_pool_losses_total{model="a", pool="decode"}': "1x500",
    'baton_pool_losses_total{model="b", pool="decode"}': "0+1x500",
}
# No requests at all: a cluster that idles over the weekend.
IDLE = {name: re.sub(r"^\d+\+\d+x", "7x", values) for name, values in QUIET.items()}


def promtool(*arguments: str | Path) -> str:
    program = shutil.which("promtool")
    if program is None:
        pytest.fail("promtool is not installed: `make test` installs it as root on Debian, elsewhere it is yours to do")
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def case(series: dict[str, str], firing: set[str], labels: str = "") -> dict[str, Any]:
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f'count by (alertname{", model" * bool(labels)}) (ALERTS{{alertstate="firing"}})',
                "eval_time": "7h30m",
                "exp_samples": [{"labels": f'{{alertname="{name}"{labels}}}', "value": 1} for name in sorted(firing)],
            }
        ],
    }


def test_alerts_fire_for_their_causes_and_at_no_other_time(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": rule_groups(OBJECTIVES)}))
    names = {alert.name for alert in alerts(OBJECTIVES)}
    of_b = {"BatonPoolEmpty", "BatonWorkersMissing", "BatonKvFull", "BatonWorkersLost"}
    two = case(TWO_MODELS, of_b, ', model="b"') | {"name": "two models"}
    cases = [case(QUIET, set()), case(IDLE, set()), case(FIRING, names), two]
    tests = {"rule_files": ["rules.yaml"], "evaluation_interval": "5m", "tests": cases}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(tests))
    assert not (why := promtool("test", "rules", tmp_path / "test.yaml")), why


async def test_rules_and_dashboards_name_series_that_gateways_have(tmp_path: Path) -> None:
    rules = [rule for group in rule_groups(OBJECTIVES) for rule in group["rules"]]
    queries = [query for dashboard in dashboards() for panel in dashboard.panels for query, _ in panel.queries]
    recorded = {rule["record"] for rule in rules if "record" in rule}
    series = await exposed()
    for query in [rule["expr"] for rule in rules] + queries:
        for name in re.findall(r"\bbaton_\w+", query):
            names = {name, re.sub(r"_(bucket|count|sum)$", "", name)}
            assert names & series, f"no gateway has {name}: {query}"
        assert set(re.findall(r"\bbaton:[\w:]+", query)) <= recorded, query
    parsed = [
        {"record": f"panel:{place}", "expr": query.replace("$__rate_interval", "5m").replace("$model", ".*")}
        for place, query in enumerate(queries)
    ]
    (tmp_path / "panels.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": parsed}]}))
    assert not (why := promtool("check", "rules", tmp_path / "panels.yaml")), why


def test_dashboards_can_be_imported_anywhere() -> None:
    for dashboard in dashboards():
        made = grafana(dashboard)
        assert made["id"] is None
        assert "uid" not in made, "a second cluster's dashboards would replace these"
        text = json.dumps(made)
        assert set(re.findall(r'"uid": "([^"]*)"', text)) == {"${datasource}"}
        places = [tuple(panel["gridPos"].values()) for panel in made["panels"]]
        assert len(places) == len(set(places))


def test_a_chart_of_pools_or_workers_shows_every_model() -> None:
    panels = [panel for dashboard in dashboards() for panel in dashboard.panels]
    per_pool = [(query, legend) for panel in panels for query, legend in panel.queries if "max by (" in query]
    assert per_pool
    for query, legend in per_pool:
        assert query.count("max by (") == query.count("max by (model, "), query
        assert "{{model}}" in legend or query.startswith("sum("), legend


def test_alerts_have_a_section_in_the_documents() -> None:
    headings = re.findall(r"^## (\w+)$", (ROOT / "docs" / "alerts.md").read_text(), re.MULTILINE)
    for group in rule_groups(OBJECTIVES):
        for rule in group["rules"]:
            if "alert" in rule:
                page, _, anchor = rule["annotations"]["runbook"].partition("#")
                assert page == "docs/alerts.md"
                assert anchor in [heading.lower() for heading in headings]


def test_a_runbook_is_a_link_where_its_page_has_a_url() -> None:
    for group in rule_groups(OBJECTIVES, "https://docs.example/alerts"):
        for rule in group["rules"]:
            if "alert" in rule:
                assert rule["annotations"]["runbook_url"].startswith("https://docs.example/alerts#baton")


def test_files_are_those_that_the_tables_make() -> None:
    for path, text in written(OBJECTIVES).items():
        assert (ROOT / path).read_text() == text, f"{path} is old: run python -m deploy.observability"
    listed = yaml.safe_load((ROOT / COMPONENT / "kustomization.yaml").read_text())["configMapGenerator"][0]["files"]
    assert set(listed) == {f"dashboards/baton-{dashboard.key}.json" for dashboard in dashboards()}


def test_an_objective_between_two_buckets_is_refused() -> None:
    with pytest.raises(Misconfigured, match=r"ttft_s is 3\.0: .*2\.5, 5\.0"):
        AlertObjectives(ttft_s=3.0)
    with pytest.raises(Misconfigured, match=r"good is 99\.0: give a share between 0 and 1"):
        AlertObjectives(good=99.0)
