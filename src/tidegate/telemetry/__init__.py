"""What a running limiter tells the people who operate it: metrics, logs, traces.

Optional and lazy: nothing below this package imports it, and importing it costs nothing until it is used. It reads
the `statistics()` of the parts and never touches a decision.
"""
