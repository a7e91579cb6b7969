"""The ledger on MySQL and MariaDB, and the connection that speaks to them."""
