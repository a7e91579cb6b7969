"""The server: translates HTTP into decisions and decisions into HTTP.

Four packages: `http1` moves bytes, `catalog` holds keys, namespaces and overrides, `api` checks calls and writes
answers, `process` assembles and runs them. `messages` is what they exchange; `asgi` serves the API in another server.

The laws of this folder: counting, converging and judging happen in the limiter. A warm request is answered inside the
protocol callback, without a task, a lock, a file or a database. What a client can send is bounded before it is read. No
secret reaches a log, an error or a metric.
"""
