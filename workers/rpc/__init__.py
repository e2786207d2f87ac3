"""The worker's gRPC face: one multiplexed token stream per gateway, and control calls."""
