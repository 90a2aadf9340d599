ALTER TABLE quota_internal.subjects ADD COLUMN rate_tier text COLLATE "C" NOT NULL DEFAULT 'basic';

CREATE TABLE quota_internal.tiers (
    tenant TEXT COLLATE "C" DEFAULT ''::text NOT NULL,
    name TEXT COLLATE "C" NOT NULL,
    retired BOOLEAN DEFAULT false NOT NULL,
    CONSTRAINT tiers_pkey PRIMARY KEY (tenant, name)
);

COMMENT ON TABLE quota_internal.tiers IS 'Named sets of limits for keys; a reference table on a distributed engine.';

CREATE TABLE quota_internal.tier_limits (
    tenant TEXT COLLATE "C" DEFAULT ''::text NOT NULL,
    tier TEXT COLLATE "C" NOT NULL,
    name TEXT COLLATE "C" NOT NULL,
    unit TEXT COLLATE "C" NOT NULL,
    kind TEXT COLLATE "C" NOT NULL,
    capacity NUMERIC,
    refill_per_s NUMERIC,
    period TEXT COLLATE "C",
    time_zone TEXT COLLATE "C" DEFAULT 'UTC'::text NOT NULL,
    CONSTRAINT tier_limits_pkey PRIMARY KEY (tenant, tier, name),
    CONSTRAINT tier_limits_belong_to_a_tier FOREIGN KEY(tenant, tier) REFERENCES quota_internal.tiers (tenant, name),
    CONSTRAINT tier_limits_count_a_unit FOREIGN KEY(unit) REFERENCES quota_internal.units (name),
    CONSTRAINT tier_limits_kind_is_known CHECK (kind IN ('budget', 'bucket', 'concurrency')),
    CONSTRAINT tier_limits_only_budgets_are_unlimited CHECK (capacity IS NOT NULL OR kind = 'budget'),
    CONSTRAINT tier_limits_capacity_is_an_amount CHECK ((capacity >= 0 AND capacity < 'Infinity'::numeric)),
    CONSTRAINT tier_limits_buckets_and_only_buckets_refill CHECK ((refill_per_s IS NOT NULL) = (kind = 'bucket') AND (refill_per_s IS NULL OR (refill_per_s >= 0 AND refill_per_s < 'Infinity'::numeric))),
    CONSTRAINT tier_limits_only_budgets_have_a_period CHECK (period IS NULL OR kind = 'budget')
);

COMMENT ON TABLE quota_internal.tier_limits IS 'The numbers of the tiers.';

INSERT INTO quota_internal.tiers (name) VALUES ('basic'), ('extended'), ('bulk');
INSERT INTO quota_internal.tier_limits (tier, name, unit, kind, capacity, refill_per_s, period) VALUES
    ('basic', 'bucket', 'cost', 'bucket', 1000000, 3000, NULL),
    ('basic', 'hourly', 'cost', 'budget', 2000000, NULL, '01:00:00'),
    ('extended', 'bucket', 'cost', 'bucket', 5000000, 15000, NULL),
    ('extended', 'hourly', 'cost', 'budget', 10000000, NULL, '01:00:00'),
    ('bulk', 'bucket', 'cost', 'bucket', 20000000, 60000, NULL),
    ('bulk', 'hourly', 'cost', 'budget', 40000000, NULL, '01:00:00');
