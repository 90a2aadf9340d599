-- balance: where every limit on a subject's lineage stands. Reads only; an overdue hold counts as its expiry will book it.

-- The lineage of a subject that is there; otherwise says what is missing.
CREATE OR REPLACE FUNCTION quota_internal.lineage_of(tenant text, subject text) RETURNS text[]
LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
    lineage text[];
BEGIN
    SELECT s.lineage INTO lineage
    FROM quota_internal.subjects s
    WHERE s.tenant = lineage_of.tenant AND s.name = lineage_of.subject AND NOT s.retired
        AND NOT EXISTS (SELECT FROM quota_internal.logins g WHERE g.role = session_user AND g.tenant <> lineage_of.tenant);
    IF NOT FOUND THEN
        PERFORM quota_internal.require_subjects(tenant, ARRAY[subject]);
    END IF;
    RETURN lineage;
END
$$;

-- Accounts of these subjects as they read at an instant, with the numbers in force; a limit that nobody has touched reads fresh.
-- Resolving which limits are in force costs more than all the rest, and where all accounts carry what is, they say it themselves.
CREATE OR REPLACE FUNCTION quota_internal.read_accounts(tenant text, subjects text[], at timestamptz)
RETURNS TABLE (
    subject text, limit_name text, unit text, kind text, capacity numeric, refill_per_s numeric, spent numeric, reserved numeric,
    level numeric, level_at timestamptz, window_start timestamptz, window_end timestamptz
)
LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
    stored quota_internal.accounts[];
BEGIN
    SELECT coalesce(array_agg(a), '{}') INTO stored
    FROM quota_internal.accounts a
    WHERE a.tenant = read_accounts.tenant AND a.subject = ANY (read_accounts.subjects);
    IF NOT EXISTS (
        SELECT FROM quota_internal.subjects s
        JOIN quota_internal.tenants t ON t.name = s.tenant
        WHERE s.tenant = read_accounts.tenant AND s.name = ANY (read_accounts.subjects) AND s.binding_version <> t.binding_version)
    THEN
        RETURN QUERY
        SELECT a.subject, a.limit_name, a.unit, a.kind, a.capacity, a.refill_per_s,
            CASE WHEN a.kind <> 'bucket' THEN quota_internal.in_window(a.spent, a.window_end, at) END,
            quota_internal.in_window(a.reserved, a.window_end, at),
            CASE WHEN a.kind = 'bucket' THEN
                quota_internal.refilled(a.level, a.level_at, a.capacity, a.refill_per_s, at) END,
            a.level_at,
            CASE WHEN a.window_end > at THEN a.window_start END,
            CASE WHEN a.window_end > at THEN a.window_end END
        FROM unnest(quota_internal.discount(stored, at)) a
        WHERE a.in_force;
        RETURN;
    END IF;
    -- What overdue holds return to a bucket is cut by the numbers that the account carries, and a tier may have changed since.
    stored := quota_internal.with_present_numbers(stored, read_accounts.tenant);
    RETURN QUERY
    SELECT f.subject, f.limit_name, f.unit, f.kind, f.capacity, f.refill_per_s,
        CASE WHEN f.kind <> 'bucket' THEN coalesce(quota_internal.in_window(a.spent, a.window_end, at), 0) END,
        coalesce(quota_internal.in_window(a.reserved, a.window_end, at), 0),
        CASE WHEN f.kind = 'bucket' THEN
            coalesce(quota_internal.refilled(a.level, a.level_at, f.capacity, f.refill_per_s, at), f.capacity) END,
        a.level_at,
        CASE WHEN a.window_end > at THEN a.window_start END,
        CASE WHEN a.window_end > at THEN a.window_end END
    FROM quota_internal.limits_in_force f
    LEFT JOIN unnest(quota_internal.discount(stored, at)) a
        ON a.subject = f.subject AND a.limit_name = f.limit_name
    WHERE f.tenant = read_accounts.tenant AND f.subject = ANY (read_accounts.subjects);
END
$$;

CREATE OR REPLACE FUNCTION quota.balance(subject text, tenant text DEFAULT 'default') RETURNS SETOF quota.balance_row
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    lineage text[] := quota_internal.lineage_of(balance.tenant, balance.subject);
    at timestamptz := quota_internal.clock();
BEGIN
    RETURN QUERY
    SELECT b.subject, b.limit_name, b.unit, b.kind, trim_scale(b.capacity), trim_scale(b.spent), trim_scale(b.reserved),
        trim_scale(b.level),
        trim_scale(quota_internal.available(b.kind, b.capacity, b.spent, b.reserved, b.level)),
        b.window_start, b.window_end,
        -- A clock that stepped back refills nothing until it has caught up.
        CASE WHEN b.level >= b.capacity THEN 0 ELSE quota_internal.refill_time_s(b.capacity - b.level, b.refill_per_s)
            + greatest(0, CASE WHEN b.level_at > at THEN extract(epoch FROM (b.level_at - at)) END) END
    FROM quota_internal.read_accounts(balance.tenant, lineage, at) b
    ORDER BY array_position(lineage, b.subject), b.limit_name;
END
$$;
COMMENT ON FUNCTION quota.balance(text, text) IS
    'A row per limit on the lineage of a subject, itself first. full_after_s: seconds until a bucket is full, null if it never is.';
