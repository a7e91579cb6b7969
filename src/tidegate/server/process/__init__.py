"""The process around the server: configuration, first start, signals, workers, request log.

Laws: this package alone assembles the others, and what it starts it stops. It judges no request.
"""
