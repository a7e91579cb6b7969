-- One row: the highest catalog version of a row that has been purged. A reader that had not seen that version
-- cannot know what it has missed, and reads everything again.
CREATE TABLE IF NOT EXISTS ratelimit_catalog_purged (
    id      INT    NOT NULL,
    version BIGINT NOT NULL,
    PRIMARY KEY (id)
) ENGINE = InnoDB;

INSERT IGNORE INTO ratelimit_catalog_purged (id, version) VALUES (1, 0);
