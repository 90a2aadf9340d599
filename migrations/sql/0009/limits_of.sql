-- limits_of: what stands on a subject's lineage, for those who tell it: each limit's terms and where it stands. Reads only.

-- The owner is whoever the limit stands on: the subject itself or an ancestor. Times that matter to a caller are spans, so that
-- nobody compares the database's clock with another.
CREATE OR REPLACE FUNCTION quota.limits_of(subject text, tenant text DEFAULT 'default') RETURNS TABLE (
    owner text, limit_name text, unit text, money boolean, kind text, capacity numeric, refill_per_s numeric, period text,
    window_s numeric, spent numeric, reserved numeric, level numeric, available numeric, window_start timestamptz,
    window_end timestamptz, resets_in_s numeric, full_after_s numeric
)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    lineage text[] := quota_internal.lineage_of(limits_of.tenant, limits_of.subject);
    at timestamptz := quota_internal.clock();
BEGIN
    RETURN QUERY
    SELECT b.subject, b.limit_name, b.unit, u.money, b.kind, trim_scale(b.capacity), trim_scale(b.refill_per_s), p.period,
        trim_scale(quota_internal.nominal_s(p.period)), trim_scale(b.spent), trim_scale(b.reserved), trim_scale(b.level),
        trim_scale(quota_internal.available(b.kind, b.capacity, b.spent, b.reserved, b.level)),
        b.window_start, b.window_end, extract(epoch FROM (b.window_end - at)),
        CASE WHEN b.level >= b.capacity THEN 0 ELSE quota_internal.refill_time_s(b.capacity - b.level, b.refill_per_s)
            + greatest(0, CASE WHEN b.level_at > at THEN extract(epoch FROM (b.level_at - at)) END) END
    FROM quota_internal.read_accounts(limits_of.tenant, lineage, at) b
    JOIN quota_internal.units u ON u.name = b.unit
    LEFT JOIN quota_internal.accounts a ON a.tenant = limits_of.tenant AND a.subject = b.subject AND a.limit_name = b.limit_name
    -- All definitions of one name share their period, so an account's is good.
    CROSS JOIN LATERAL (
        SELECT CASE
            WHEN a.id IS NOT NULL THEN a.period
            ELSE quota_internal.period_in_force(limits_of.tenant, b.subject, b.limit_name)
        END AS period
        OFFSET 0
    ) p
    ORDER BY array_position(lineage, b.subject), b.limit_name;
END
$$;
COMMENT ON FUNCTION quota.limits_of(text, text) IS
    'A row per limit on the lineage of a subject, itself first: its terms and where it stands. window_s: nominal length of its window.';

-- The period of a limit that has no account yet. (In PL/pgSQL, which stays out of the plan of those who do not call it: setting up
-- the resolution of what is in force costs more than all of limits_of.)
CREATE OR REPLACE FUNCTION quota_internal.period_in_force(tenant text, subject text, limit_name text) RETURNS text
LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
BEGIN
    RETURN (
        SELECT f.period FROM quota_internal.limits_in_force f
        WHERE f.tenant = period_in_force.tenant AND f.subject = period_in_force.subject
            AND f.limit_name = period_in_force.limit_name);
END
$$;

-- The length that a window is told by: a day of 24 hours, a month of 31 days, whatever the calendar makes of the present one.
CREATE OR REPLACE FUNCTION quota_internal.nominal_s(period text) RETURNS numeric
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT extract(epoch FROM CASE period WHEN 'month' THEN interval '31 days' WHEN 'week' THEN interval '7 days'
        WHEN 'day' THEN interval '24 hours' ELSE period::interval END)
$$;
