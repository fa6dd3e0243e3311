"""One step: what goes in, what comes out, how long it takes, and the loop of all."""
