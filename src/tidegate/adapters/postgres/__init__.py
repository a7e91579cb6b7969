"""The ledger on PostgreSQL, and the connection to it."""
