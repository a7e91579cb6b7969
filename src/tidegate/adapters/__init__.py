"""Origins and ledgers: each module is for one kind of store and keeps the contract of `tidegate.ports`.

Nothing here decides anything. An adapter translates values to a store and back, keeps time limits, and turns the
failures of a driver into the errors of `tidegate.errors`. `tidegate.adapters.urls` finds the adapter for a URL and
imports its driver only then.
"""
