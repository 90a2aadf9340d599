ALTER TABLE quota_internal.admin_log ADD COLUMN request_id text;
CREATE INDEX admin_log_checks ON quota_internal.admin_log (at) WHERE action = 'check'::text;

CREATE TABLE quota_internal.api_keys (
    tenant text COLLATE "C" NOT NULL,
    id text COLLATE "C" NOT NULL,
    subject text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    secret_hash bytea NOT NULL,
    old_secret_hash bytea,
    old_secret_until timestamptz,
    created_at timestamptz NOT NULL,
    expires_at timestamptz,
    revoked_at timestamptz,
    changed_at timestamptz NOT NULL,
    CONSTRAINT api_keys_pkey PRIMARY KEY (tenant, id),
    CONSTRAINT api_keys_authenticate_a_subject FOREIGN KEY(tenant, subject) REFERENCES quota_internal.subjects (tenant, name),
    CONSTRAINT api_keys_subject_is_the_id CHECK (subject = 'key:' || id),
    CONSTRAINT api_keys_secret_hash_is_a_sha256 CHECK (octet_length(secret_hash) = 32),
    CONSTRAINT api_keys_old_secret_hash_is_a_sha256 CHECK (octet_length(old_secret_hash) = 32),
    CONSTRAINT api_keys_old_secret_has_an_end CHECK ((old_secret_hash IS NULL) = (old_secret_until IS NULL))
);

CREATE INDEX api_keys_by_id ON quota_internal.api_keys (id);
CREATE INDEX api_keys_by_name ON quota_internal.api_keys (tenant, name, id);

COMMENT ON TABLE quota_internal.api_keys IS 'Keys that authenticate a subject key:<id>; their secrets are not stored.';

CREATE TABLE quota_internal.api_tokens (
    tenant text COLLATE "C" DEFAULT ''::text NOT NULL,
    id text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    role text COLLATE "C" NOT NULL,
    secret_hash bytea NOT NULL,
    created_at timestamptz NOT NULL,
    expires_at timestamptz,
    revoked_at timestamptz,
    CONSTRAINT api_tokens_pkey PRIMARY KEY (tenant, id),
    CONSTRAINT api_tokens_role_is_known CHECK (role IN ('worker', 'viewer', 'operator', 'owner')),
    CONSTRAINT api_tokens_secret_hash_is_a_sha256 CHECK (octet_length(secret_hash) = 32)
);

CREATE INDEX api_tokens_by_id ON quota_internal.api_tokens (id);

COMMENT ON TABLE quota_internal.api_tokens IS 'Who may call the HTTP API, and as what; their secrets are not stored.';

CREATE TABLE quota_internal.api_requests (
    tenant text COLLATE "C" DEFAULT ''::text NOT NULL,
    token text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    fingerprint bytea NOT NULL,
    at timestamptz NOT NULL,
    status integer,
    answer text,
    CONSTRAINT api_requests_pkey PRIMARY KEY (tenant, token, key)
);

CREATE INDEX api_requests_by_age ON quota_internal.api_requests (tenant, at);

COMMENT ON TABLE quota_internal.api_requests IS 'Answers of writes over HTTP, by Idempotency-Key; kept for a day.';

-- Failed logins to the HTTP API are counted by the ledger itself: a bucket for every address, in a tenant of its own.
INSERT INTO quota_internal.tenants (name, created_at) VALUES ('quota-api', quota_internal.clock())
ON CONFLICT DO NOTHING;
INSERT INTO quota_internal.limits (tenant, owner, name, unit, kind, capacity, refill_per_s)
VALUES ('quota-api', 'address:*', 'failed logins', 'requests', 'bucket', 20, 0.2)
ON CONFLICT DO NOTHING;
