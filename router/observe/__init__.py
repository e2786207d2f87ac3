"""Whatever watches requests: the seam for observers, traces for OpenTelemetry, the planner's samples, the last hour."""
