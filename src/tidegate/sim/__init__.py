"""The deterministic simulator: scenario files, seeded simulations with an auditor, accuracy and capacity.

Rules of this package:

1. The code under test is the real code: `AsyncLimiter`, its loops and its engine. Only what is outside a process is
   virtual: the time of the event loop, the network, the origins, the ledger and the clocks of the nodes.
2. The arguments determine everything. The same seed gives the same trace on any machine, compiled or interpreted, with
   any hash seed.
3. Nothing sleeps: virtual time jumps to the next event.
"""
