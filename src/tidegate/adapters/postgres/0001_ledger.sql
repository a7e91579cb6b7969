-- One region's published count for one cell. Names are bytes (UTF-8), so that what a collation or an encoding would
-- refuse or fold (NUL, lone surrogates) stays as it is; the key is a digest of them, so that no length matters.
CREATE TABLE IF NOT EXISTS ratelimit_window_counts (
    subject      BYTEA  NOT NULL CHECK (octet_length(subject) = 16),
    sequence     BIGINT NOT NULL,
    region       BYTEA  NOT NULL CHECK (octet_length(region) <= 255),
    workspace_id BYTEA  NOT NULL CHECK (octet_length(workspace_id) <= 2048),
    namespace    BYTEA  NOT NULL CHECK (octet_length(namespace) <= 2048),
    identifier   BYTEA  NOT NULL CHECK (octet_length(identifier) <= 2048),
    duration_ms  BIGINT NOT NULL,
    count        BIGINT NOT NULL CHECK (count >= 0),
    expires_at   BIGINT NOT NULL,
    updated_at   BIGINT NOT NULL,
    PRIMARY KEY (subject, sequence, region)
);

-- For the import: the changes of a region in the order of its publishes.
CREATE INDEX IF NOT EXISTS ratelimit_window_counts_by_change
    ON ratelimit_window_counts (region, updated_at, subject, sequence);

-- For the full read, which touches live rows only, and for the cleanup.
CREATE INDEX IF NOT EXISTS ratelimit_window_counts_by_expiry
    ON ratelimit_window_counts (expires_at, subject, sequence, region);

-- Hot rows change several times a second, and updated_at is indexed: clean up before the table has doubled.
ALTER TABLE ratelimit_window_counts SET (autovacuum_vacuum_scale_factor = 0.05);

-- The latest publish of each region: Unix ms by the database's clock, made to rise with every publish. A publisher
-- holds its region's row until it commits, so that the rows of a region become visible in the order of updated_at.
CREATE TABLE IF NOT EXISTS ratelimit_publishes (
    region       BYTEA  NOT NULL PRIMARY KEY CHECK (octet_length(region) <= 255),
    published_at BIGINT NOT NULL
) WITH (fillfactor = 50);

-- Heartbeats: how many regions are alive. Apart from the publishes, so that neither waits for the other.
CREATE TABLE IF NOT EXISTS ratelimit_regions (
    region  BYTEA  NOT NULL PRIMARY KEY CHECK (octet_length(region) <= 255),
    beat_at BIGINT NOT NULL
) WITH (fillfactor = 50);
