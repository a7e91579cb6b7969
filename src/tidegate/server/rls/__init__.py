"""Envoy's rate limit service (RLS v3), and the yes/no check for other gateways, from one set of rules.

`rules` and `rules_file` say which limit applies to which descriptor, `messages` reads and writes the protobuf messages,
`service` decides, `check` translates plain HTTP requests, `serve` puts them on a port. None of it decides or counts by
itself: that is the limiter's work.
"""
