"""The engine inside every GPU process: model, paged KV cache, scheduler and the worker's gRPC service."""
