"""The deterministic world: scenario files, seeded worlds with an auditor, accuracy and capacity as numbers.

Laws of this folder:

1. The code under test is the real one: `AsyncLimiter`, its loops, its engine. Only what lies outside a process is
   virtual: the event loop's time, the network, the origins, the ledger, the clocks of the nodes.
2. Everything that happens follows from the arguments. The same seed gives the same trace, on any machine, compiled
   or interpreted, whatever the hash seed.
3. Nothing sleeps: virtual time jumps to the next event.
"""
