CREATE SCHEMA quota;
CREATE SCHEMA quota_internal;

CREATE TABLE quota_internal.admin_log (
    id BIGINT GENERATED ALWAYS AS IDENTITY,
    at TIMESTAMP WITH TIME ZONE NOT NULL,
    actor TEXT COLLATE "C" NOT NULL,
    on_behalf_of TEXT,
    action TEXT COLLATE "C" NOT NULL,
    tenant TEXT COLLATE "C",
    target TEXT COLLATE "C",
    reason TEXT,
    before JSONB,
    after JSONB,
    CONSTRAINT admin_log_pkey PRIMARY KEY (id)
);

CREATE INDEX admin_log_by_tenant ON quota_internal.admin_log (tenant, at);

COMMENT ON TABLE quota_internal.admin_log IS 'Who changed what: one row per admin change, written in its transaction.';

CREATE TABLE quota_internal.entries (
    tenant TEXT COLLATE "C" NOT NULL,
    id BIGINT GENERATED ALWAYS AS IDENTITY,
    at TIMESTAMP WITH TIME ZONE NOT NULL,
    kind TEXT COLLATE "C" NOT NULL,
    reservation UUID,
    subject TEXT COLLATE "C" NOT NULL,
    line_accounts BIGINT[] NOT NULL,
    line_windows TIMESTAMP WITH TIME ZONE[] NOT NULL,
    line_amounts NUMERIC[] NOT NULL,
    request UUID,
    details JSONB,
    CONSTRAINT entries_pkey PRIMARY KEY (tenant, id)
);

CREATE INDEX entries_by_reservation ON quota_internal.entries (tenant, reservation) WHERE reservation IS NOT NULL;

CREATE UNIQUE INDEX entries_request_is_unique ON quota_internal.entries (tenant, request) WHERE request IS NOT NULL;

COMMENT ON TABLE quota_internal.entries IS 'The append-only ledger: one row per booking, its lines in arrays; the view quota.entries shows a line each.';

CREATE TABLE quota_internal.reservations (
    tenant TEXT COLLATE "C" NOT NULL,
    id UUID NOT NULL,
    subject TEXT COLLATE "C" NOT NULL,
    also TEXT[] COLLATE "C" NOT NULL,
    costs JSONB NOT NULL,
    held JSONB NOT NULL,
    booked JSONB DEFAULT '{}'::jsonb NOT NULL,
    state TEXT COLLATE "C" DEFAULT 'held'::text NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE NOT NULL,
    expires_at TIMESTAMP WITH TIME ZONE NOT NULL,
    closed_at TIMESTAMP WITH TIME ZONE,
    headroom NUMERIC DEFAULT 0 NOT NULL,
    line_accounts BIGINT[] NOT NULL,
    line_windows TIMESTAMP WITH TIME ZONE[] NOT NULL,
    line_held NUMERIC[] NOT NULL,
    line_booked NUMERIC[] NOT NULL,
    line_charged BOOLEAN[] NOT NULL,
    outcome TEXT COLLATE "C",
    late BOOLEAN DEFAULT false NOT NULL,
    details JSONB DEFAULT '{}'::jsonb NOT NULL,
    CONSTRAINT reservations_pkey PRIMARY KEY (tenant, id)
);

CREATE INDEX reservations_open_by_expiry ON quota_internal.reservations (tenant, expires_at) WHERE state = 'held'::text;

COMMENT ON TABLE quota_internal.reservations IS 'One row per reservation; an open one is a hold.';

CREATE TABLE quota_internal.tenants (
    name TEXT COLLATE "C" NOT NULL,
    config_version BIGINT DEFAULT 1 NOT NULL,
    binding_version BIGINT DEFAULT 1 NOT NULL,
    ttl_maximum INTERVAL DEFAULT '24:00:00'::interval NOT NULL,
    polling_hint_s NUMERIC DEFAULT 1 NOT NULL,
    keep INTERVAL DEFAULT '30 days'::interval NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE NOT NULL,
    CONSTRAINT tenants_pkey PRIMARY KEY (name),
    CONSTRAINT tenants_ttl_maximum_is_positive CHECK (ttl_maximum > '00:00:00'::interval),
    CONSTRAINT tenants_polling_hint_is_positive CHECK (polling_hint_s > 0 AND polling_hint_s < 'Infinity'::numeric)
)
 WITH (fillfactor = 20);

COMMENT ON TABLE quota_internal.tenants IS 'The outer boundary: nothing of one tenant touches another''s.';

CREATE TABLE quota_internal.units (
    name TEXT COLLATE "C" NOT NULL,
    money BOOLEAN DEFAULT false NOT NULL,
    CONSTRAINT units_pkey PRIMARY KEY (name)
);

COMMENT ON TABLE quota_internal.units IS 'What is counted; an amount of an unregistered unit is an error.';

CREATE TABLE quota_internal.limits (
    tenant TEXT COLLATE "C" NOT NULL,
    owner TEXT COLLATE "C" NOT NULL,
    name TEXT COLLATE "C" NOT NULL,
    unit TEXT COLLATE "C" NOT NULL,
    kind TEXT COLLATE "C" NOT NULL,
    capacity NUMERIC,
    refill_per_s NUMERIC,
    period TEXT COLLATE "C",
    time_zone TEXT COLLATE "C" DEFAULT 'UTC'::text NOT NULL,
    on_expiry TEXT COLLATE "C" DEFAULT 'release'::text NOT NULL,
    required BOOLEAN DEFAULT false NOT NULL,
    removed BOOLEAN DEFAULT false NOT NULL,
    CONSTRAINT limits_pkey PRIMARY KEY (tenant, owner, name),
    CONSTRAINT limits_belong_to_a_tenant FOREIGN KEY(tenant) REFERENCES quota_internal.tenants (name),
    CONSTRAINT limits_count_a_unit FOREIGN KEY(unit) REFERENCES quota_internal.units (name),
    CONSTRAINT limits_kind_is_known CHECK (kind IN ('budget', 'bucket', 'concurrency')),
    CONSTRAINT limits_only_budgets_are_unlimited CHECK (capacity IS NOT NULL OR kind = 'budget'),
    CONSTRAINT limits_capacity_is_an_amount CHECK ((capacity >= 0 AND capacity < 'Infinity'::numeric)),
    CONSTRAINT limits_buckets_and_only_buckets_refill CHECK ((refill_per_s IS NOT NULL) = (kind = 'bucket') AND (refill_per_s IS NULL OR (refill_per_s >= 0 AND refill_per_s < 'Infinity'::numeric))),
    CONSTRAINT limits_only_budgets_have_a_period CHECK (period IS NULL OR kind = 'budget'),
    CONSTRAINT limits_on_expiry_is_known CHECK (on_expiry IN ('release', 'charge'))
);

CREATE INDEX limits_by_name ON quota_internal.limits (tenant, name);

COMMENT ON TABLE quota_internal.limits IS 'Named rules on subjects and on kinds.';

CREATE TABLE quota_internal.logins (
    role TEXT COLLATE "C" NOT NULL,
    tenant TEXT COLLATE "C" NOT NULL,
    CONSTRAINT logins_pkey PRIMARY KEY (role),
    CONSTRAINT logins_name_a_tenant FOREIGN KEY(tenant) REFERENCES quota_internal.tenants (name)
);

COMMENT ON TABLE quota_internal.logins IS 'Database logins that see one tenant only (bind_login).';

CREATE TABLE quota_internal.subjects (
    tenant TEXT COLLATE "C" NOT NULL,
    name TEXT COLLATE "C" NOT NULL,
    kind TEXT COLLATE "C" NOT NULL,
    parent TEXT COLLATE "C",
    lineage TEXT[] COLLATE "C" NOT NULL,
    frozen TEXT,
    retired BOOLEAN DEFAULT false NOT NULL,
    binding_version BIGINT DEFAULT 0 NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE NOT NULL,
    CONSTRAINT subjects_pkey PRIMARY KEY (tenant, name),
    CONSTRAINT subjects_belong_to_a_tenant FOREIGN KEY(tenant) REFERENCES quota_internal.tenants (name),
    CONSTRAINT subjects_parent_is_a_subject FOREIGN KEY(tenant, parent) REFERENCES quota_internal.subjects (tenant, name),
    CONSTRAINT subjects_lineage_has_at_most_8 CHECK (cardinality(lineage) BETWEEN 1 AND 8)
);

CREATE INDEX subjects_by_parent ON quota_internal.subjects (tenant, parent);

COMMENT ON TABLE quota_internal.subjects IS 'Who spends. frozen holds the reason while frozen.';

CREATE TABLE quota_internal.accounts (
    tenant TEXT COLLATE "C" NOT NULL,
    id BIGINT GENERATED ALWAYS AS IDENTITY,
    subject TEXT COLLATE "C" NOT NULL,
    limit_name TEXT COLLATE "C" NOT NULL,
    unit TEXT COLLATE "C" NOT NULL,
    kind TEXT COLLATE "C" NOT NULL,
    capacity NUMERIC,
    refill_per_s NUMERIC,
    period TEXT COLLATE "C",
    time_zone TEXT COLLATE "C" DEFAULT 'UTC'::text NOT NULL,
    on_expiry TEXT COLLATE "C" NOT NULL,
    required BOOLEAN NOT NULL,
    in_force BOOLEAN NOT NULL,
    binding_version BIGINT NOT NULL,
    spent NUMERIC DEFAULT 0 NOT NULL,
    reserved NUMERIC DEFAULT 0 NOT NULL,
    level NUMERIC,
    level_at TIMESTAMP WITH TIME ZONE,
    window_start TIMESTAMP WITH TIME ZONE,
    window_end TIMESTAMP WITH TIME ZONE,
    earliest_expiry TIMESTAMP WITH TIME ZONE DEFAULT 'infinity'::timestamptz NOT NULL,
    CONSTRAINT accounts_pkey PRIMARY KEY (tenant, id),
    CONSTRAINT accounts_one_per_limit_of_a_subject UNIQUE (tenant, subject, limit_name),
    CONSTRAINT accounts_belong_to_a_subject FOREIGN KEY(tenant, subject) REFERENCES quota_internal.subjects (tenant, name)
)
 WITH (fillfactor = 50);

COMMENT ON TABLE quota_internal.accounts IS 'The live counters of one limit of one subject: the row that the conditional UPDATE guards.';
