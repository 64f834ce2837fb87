"""The protocol of groups as state machines: their methods return effects, do no I/O and read no clock.

Three drivers run the same code: ZeroMQ in production, a simulator with a virtual clock and network, and an exhaustive
explorer of small groups (`remuda.rpc.explorer`).
"""
