"""The life of a job: workers are chosen, tokens arrive, and failed or migrated sequences continue on other workers."""
