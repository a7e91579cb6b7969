-- An override in shadow mode is counted and reported, and denies nothing. A node of an older version does not look at
-- this column and enforces it: update all nodes before using it.
ALTER TABLE ratelimit_overrides ADD COLUMN shadow INTEGER NOT NULL DEFAULT 0;
