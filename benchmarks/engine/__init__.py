"""The engine on a CPU."""

from workers.cores import spin_briefly

spin_briefly()  # before torch, as a worker's ranks do
