"""The production code under a virtual clock: device, network and clients are models, everything else is the real
code."""
