"""The engine: policy and loop on a fake runner, then the whole thing on tiny real models."""
