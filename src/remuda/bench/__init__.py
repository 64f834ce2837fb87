"""Side-by-side measurements: contenders that take turns, because a shared machine's speed drifts."""
