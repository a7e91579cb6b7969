"""The ledger on PostgreSQL, and the connection that speaks to it."""
