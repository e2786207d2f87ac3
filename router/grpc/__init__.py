"""The gRPC face."""
