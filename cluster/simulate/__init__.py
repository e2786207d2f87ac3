"""The production code under a virtual clock: device, network and the outside world are models, all else is real."""
