"""The server: translates HTTP into decisions and decisions into HTTP, and nothing else.

The laws of this folder: counting, converging and judging happen in the limiter. A warm request is answered inside
the protocol callback, without a task, a lock, a file or a database. What a client can send is bounded before it is
looked at. No secret reaches a log, an error or a metric.
"""
