"""Redis and Valkey as a region's origin: one server, Sentinel or Cluster.

    settings   what a URL says                      wire       one connection: RESP over asyncio, replies in order
    layout     keys, commands and their answers     link       one server: connects, keeps time limits, heals
    sentinel   finds the master                     cluster    finds the master of a command
    refusals   what an error reply means            network    where commands go, if there is one master
    origin     the port, put together from these

The driver is hiredis alone: it packs commands and parses replies in C. A client library around it costs half as much
processor time again for each round trip, and closes a connection for every call that is cancelled or gives up.
"""
