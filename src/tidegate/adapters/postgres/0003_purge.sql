-- One row: the highest catalog version of a row that has been purged. A reader that had not seen that version
-- cannot know what it has missed, and reads everything again.
CREATE TABLE IF NOT EXISTS ratelimit_catalog_purged (
    id      INTEGER NOT NULL PRIMARY KEY CHECK (id = 1),
    version BIGINT  NOT NULL
);

INSERT INTO ratelimit_catalog_purged (id, version) VALUES (1, 0) ON CONFLICT (id) DO NOTHING;
