"""Requests as OpenTelemetry traces, sent to a collector. Off without `router.telemetry.endpoint`."""
