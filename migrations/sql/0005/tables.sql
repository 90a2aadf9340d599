CREATE TABLE quota_internal.prices (
    tenant TEXT COLLATE "C" DEFAULT ''::text NOT NULL,
    id BIGINT GENERATED ALWAYS AS IDENTITY,
    provider TEXT COLLATE "C" NOT NULL,
    model TEXT COLLATE "C" NOT NULL,
    variant TEXT COLLATE "C" DEFAULT ''::text NOT NULL,
    rates JSONB NOT NULL,
    free BOOLEAN DEFAULT false NOT NULL,
    effective_from TIMESTAMP WITH TIME ZONE NOT NULL,
    effective_until TIMESTAMP WITH TIME ZONE DEFAULT 'infinity'::timestamptz NOT NULL,
    output_max BIGINT,
    input_max BIGINT,
    source TEXT,
    created_at TIMESTAMP WITH TIME ZONE NOT NULL,
    CONSTRAINT prices_pkey PRIMARY KEY (tenant, id),
    CONSTRAINT prices_begin_once UNIQUE (tenant, provider, model, variant, effective_from),
    CONSTRAINT prices_end_after_they_begin CHECK (effective_from < effective_until),
    CONSTRAINT prices_are_objects CHECK (jsonb_typeof(rates) = 'object')
);

CREATE INDEX prices_by_version ON quota_internal.prices (id);

COMMENT ON TABLE quota_internal.prices IS 'What models cost: one row per version, in force for a time. Changed only to end one.';

CREATE TABLE quota_internal.runs (
    tenant TEXT COLLATE "C" NOT NULL,
    name TEXT COLLATE "C" NOT NULL,
    parent TEXT COLLATE "C" NOT NULL,
    budget JSONB NOT NULL,
    started_at TIMESTAMP WITH TIME ZONE NOT NULL,
    expires_at TIMESTAMP WITH TIME ZONE NOT NULL,
    ended_at TIMESTAMP WITH TIME ZONE,
    max_width INTEGER,
    max_depth INTEGER,
    max_tokens BIGINT,
    stagger_s NUMERIC DEFAULT 0 NOT NULL,
    next_start TIMESTAMP WITH TIME ZONE NOT NULL,
    CONSTRAINT runs_pkey PRIMARY KEY (tenant, name),
    CONSTRAINT runs_are_subjects FOREIGN KEY(tenant, name) REFERENCES quota_internal.subjects (tenant, name)
);

CREATE INDEX runs_live_by_parent ON quota_internal.runs (tenant, parent) WHERE ended_at IS NULL;

COMMENT ON TABLE quota_internal.runs IS 'Subjects that live for a while and spend slices of their parents.';

INSERT INTO quota_internal.units (name) VALUES ('quota_tokens'), ('quota_input_tokens'), ('quota_output_tokens')
ON CONFLICT DO NOTHING;
