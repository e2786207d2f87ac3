"""What an operator asks a gateway, as JSON under /admin. A module adds its routes; `routes` mounts them all."""
