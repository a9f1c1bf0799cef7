"""The `colocated` placement: each trainer rank hosts an engine, and one sleeps while the other works.

    paceline train                          starts the other ranks on this machine
    torchrun ... -m paceline train          or torchrun has started them all

      rank 0                                the orchestrator, a trainer rank, an engine
      rank 1, 2, ...                        a trainer rank and an engine, which do as rank 0 says

Ranks meet in a process group. Over it rank 0 hands out a port and a token, and every other rank opens three connections
to it: one for the trainer, one for the engine, and one on which nothing is said, so that no rank outlives rank 0. All
that goes over them is msgpack.

    a step      engines sleep and give their KV pages back; every rank trains its share
    publish     each weight is gathered on all ranks, copied into the engine there, and let go; engines wake
    a death     a rank that is lost ends the run with a sentence; --resume latest goes on
"""
