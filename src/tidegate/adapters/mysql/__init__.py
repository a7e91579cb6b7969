"""The ledger on MySQL and MariaDB, and the connection to them."""
