"""Where a request goes: policies choose its workers, by seconds that the predictor has learned. All of it is pure."""
