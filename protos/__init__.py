"""The contracts every package shares: gRPC messages, value types and typed errors."""
