"""A simulated worker: the real engine on a modelled device."""
