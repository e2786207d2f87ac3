"""The API for operators: JSON under /admin. A module adds its routes; `routes` mounts them all."""
