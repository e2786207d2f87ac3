"""The life of a job: workers are chosen, tokens come, and what fails or moves goes on elsewhere."""
