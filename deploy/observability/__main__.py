"""Writes rules, dashboards and docs/alerts.md: `python -m deploy.observability [--ttft S] [--tpot S] [--good SHARE]
[--served SHARE] [--runbooks URL]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import orjson
import yaml

from deploy.observability.alerts import RUNBOOKS, AlertObjectives, page, rule_groups
from deploy.observability.dashboards import dashboards, grafana
from protos.errors import Misconfigured

ROOT = Path(__file__).resolve().parent.parent.parent
COMPONENT = Path("deploy/k8s/components/observability")


def written(objectives: AlertObjectives, runbooks: str = RUNBOOKS) -> dict[Path, str]:
    """Every file, by its path below the root of the repository."""
    groups = rule_groups(objectives, runbooks)
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "baton", "labels": {"app.kubernetes.io/part-of": "baton"}},
        "spec": {"groups": groups},
    }
    head = "# Made by `python -m deploy.observability`, whose flags set the objectives.\n"
    files = {
        Path("docs/alerts.md"): page(objectives),
        COMPONENT / "rules.yaml": head + _yaml(rule),
        Path("deploy/observability/rules.yaml"): head + _yaml({"groups": groups}),
    }
    for one in dashboards():
        text = orjson.dumps(grafana(one), option=orjson.OPT_INDENT_2).decode()
        files[COMPONENT / "dashboards" / f"baton-{one.key}.json"] = text + "\n"
    return files


def _yaml(content: dict[str, Any]) -> str:
    return yaml.safe_dump(content, sort_keys=False, width=10_000)


def main() -> None:
    default = AlertObjectives()
    parser = argparse.ArgumentParser(prog="python -m deploy.observability", description=__doc__)
    parser.add_argument("--ttft", type=float, default=default.ttft_s, help="seconds to the first token")
    parser.add_argument("--tpot", type=float, default=default.tpot_s, help="seconds between an answer's tokens")
    parser.add_argument("--good", type=float, default=default.good, help="share of requests within these bounds")
    parser.add_argument("--served", type=float, default=default.served, help="share of requests that do not fail")
    parser.add_argument("--runbooks", default=RUNBOOKS, help="URL of docs/alerts.md, as you publish it")
    given = parser.parse_args()
    try:
        objectives = AlertObjectives(ttft_s=given.ttft, tpot_s=given.tpot, good=given.good, served=given.served)
    except Misconfigured as error:
        sys.exit(f"error: {error.message}")
    for path, text in written(objectives, given.runbooks).items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text)
        print(path)


if __name__ == "__main__":
    main()
