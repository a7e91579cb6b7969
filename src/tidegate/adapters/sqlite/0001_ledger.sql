-- One region's published count for one cell. Names are bytes (UTF-8), so that NUL and lone surrogates stay as they
-- are; the key is a digest of them, so that no length matters.
CREATE TABLE IF NOT EXISTS ratelimit_window_counts (
    subject      BLOB    NOT NULL CHECK (length(subject) = 16),
    sequence     INTEGER NOT NULL CHECK (typeof(sequence) = 'integer'),
    region       BLOB    NOT NULL CHECK (length(region) <= 255),
    workspace_id BLOB    NOT NULL CHECK (length(workspace_id) <= 2048),
    namespace    BLOB    NOT NULL CHECK (length(namespace) <= 2048),
    identifier   BLOB    NOT NULL CHECK (length(identifier) <= 2048),
    duration_ms  INTEGER NOT NULL CHECK (typeof(duration_ms) = 'integer'),
    count        INTEGER NOT NULL CHECK (typeof(count) = 'integer' AND count >= 0),
    expires_at   INTEGER NOT NULL CHECK (typeof(expires_at) = 'integer'),
    updated_at   INTEGER NOT NULL,
    PRIMARY KEY (subject, sequence, region)
) WITHOUT ROWID;

-- For the import: the changes of a region in the order of its publishes.
CREATE INDEX IF NOT EXISTS ratelimit_window_counts_by_change
    ON ratelimit_window_counts (region, updated_at, subject, sequence);

-- For the full read, which touches live rows only, and for the cleanup.
CREATE INDEX IF NOT EXISTS ratelimit_window_counts_by_expiry
    ON ratelimit_window_counts (expires_at, subject, sequence, region);

-- The latest publish of each region: Unix ms, made to rise with every publish.
CREATE TABLE IF NOT EXISTS ratelimit_publishes (
    region       BLOB    NOT NULL PRIMARY KEY CHECK (length(region) <= 255),
    published_at INTEGER NOT NULL
) WITHOUT ROWID;

-- Heartbeats: how many regions are alive.
CREATE TABLE IF NOT EXISTS ratelimit_regions (
    region  BLOB    NOT NULL PRIMARY KEY CHECK (length(region) <= 255),
    beat_at INTEGER NOT NULL
) WITHOUT ROWID;
