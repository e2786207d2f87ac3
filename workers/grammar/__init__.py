"""What a constrained answer may say next: grammars compiled beside the engine, masks of tokens for its sampler."""
