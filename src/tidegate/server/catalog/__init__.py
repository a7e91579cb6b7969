"""Workspaces, root keys, namespaces and overrides, in memory, kept up to date with the database.

Laws: a look-up reads memory only. `sync` alone talks to the database. Nothing here knows HTTP, the wire API or the
limiter: what is missing or not permitted is returned or raised in the catalog's own terms.
"""
