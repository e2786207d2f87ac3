"""Alerts and dashboards, made from tables: `python -m deploy.observability` writes the component `observability` of
`deploy/k8s` and `docs/alerts.md`."""
