CREATE UNLOGGED TABLE quota_internal.waiters (
    tenant TEXT COLLATE "C" NOT NULL,
    id UUID NOT NULL,
    account BIGINT NOT NULL,
    amount NUMERIC NOT NULL,
    headroom NUMERIC NOT NULL,
    since TIMESTAMP WITH TIME ZONE NOT NULL,
    ahead BIGINT NOT NULL,
    expires_at TIMESTAMP WITH TIME ZONE NOT NULL,
    CONSTRAINT waiters_pkey PRIMARY KEY (tenant, id)
);

CREATE INDEX waiters_by_account ON quota_internal.waiters (tenant, account);

COMMENT ON TABLE quota_internal.waiters IS 'Who waits for room, in which order: places in a queue, worth nothing after a crash.';
