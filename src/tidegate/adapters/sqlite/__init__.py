"""SQLite: the origin of several processes of one machine, and the embedded ledger. One file, no server."""
