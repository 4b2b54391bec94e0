"""How a run ends that does not simply finish: failures of ranks, hangs, signals, values that are not finite."""
