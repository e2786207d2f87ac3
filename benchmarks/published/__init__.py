"""A published chat model (`make sdks`): its rounding, its right answers and its drafts."""
