"""The pure core of Tidegate. The laws of this folder:

1. Nothing here reads a clock, draws a random number, touches a socket, a file or a log, starts a thread or
   awaits. Time is an argument (`now_ms`); what must be done outside is a return value.
2. Nothing here waits for anything. Every call does a bounded amount of work; what could be long is offered in
   slices, and no call visits all subjects.
3. Within a cell counts and deadlines only rise. There is no "reset": a new window is a new cell.
4. The same source runs compiled (mypyc) and interpreted, with the same answers.
5. Callers bring mutual exclusion. One engine is used by one thread at a time; the drivers in `runtime` ensure it.
"""
