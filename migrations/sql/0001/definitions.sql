-- set_limit and remove_limit: the definitions of limits, on a subject or as the default of a kind.

CREATE OR REPLACE FUNCTION quota_internal.valid_definition(d quota_internal.definition) RETURNS quota_internal.definition
LANGUAGE plpgsql STABLE AS $$
DECLARE
    problem text;
BEGIN
    PERFORM quota_internal.require_name('limit', d.name);
    PERFORM quota_internal.require_unit(d.unit);
    problem := CASE
        WHEN d.kind IS NULL OR d.kind NOT IN ('budget', 'bucket', 'concurrency') THEN
            format('kind "%s" is not budget, bucket or concurrency', coalesce(left(d.kind, 50), 'null'))
        WHEN d.capacity IS NULL AND d.kind <> 'budget' THEN format('a %s cannot be unlimited (capacity null)', d.kind)
        WHEN d.kind = 'bucket' AND d.refill_per_s IS NULL THEN 'a bucket needs refill_per_s; 0 is a one-off allowance'
        WHEN d.kind <> 'bucket' AND d.refill_per_s IS NOT NULL THEN format('a %s has no refill_per_s', d.kind)
        WHEN d.kind <> 'budget' AND d.period IS NOT NULL THEN format('a %s has no period', d.kind)
        WHEN d.kind = 'concurrency' AND d.capacity <> trunc(d.capacity) THEN format('%s is not a whole number of slots', d.capacity)
        WHEN d.time_zone IS NULL OR d.time_zone <> 'UTC'
            AND NOT EXISTS (SELECT FROM pg_timezone_names z WHERE z.name = d.time_zone) THEN
            format('"%s" is not an IANA time zone', coalesce(left(d.time_zone, 60), 'null'))
    END;
    IF problem IS NOT NULL THEN
        PERFORM quota_internal.fail('invalid_argument', problem, 'See the kinds of limits in the documentation.');
    END IF;
    IF d.capacity IS NOT NULL THEN
        PERFORM quota_internal.require_amount('capacity', d.capacity);
    END IF;
    IF d.refill_per_s IS NOT NULL THEN
        PERFORM quota_internal.require_amount('refill_per_s', d.refill_per_s);
    END IF;
    d.period := quota_internal.valid_period(d.period);
    RETURN d;
END
$$;

-- day, week, month, or an interval in its one spelling.
CREATE OR REPLACE FUNCTION quota_internal.valid_period(period text) RETURNS text
LANGUAGE plpgsql STABLE SET intervalstyle = 'postgres' AS $$
DECLARE
    length interval;
    whole boolean := false;
BEGIN
    IF period IS NULL OR period IN ('day', 'week', 'month') THEN
        RETURN period;
    END IF;
    BEGIN
        length := period::interval;
        -- No negative part: every window must end after it starts, wherever it opens. Bounded before its parts are looked at.
        whole := length > '0' AND length <= interval '100 years' AND extract(month FROM length) >= 0
            AND extract(year FROM length) >= 0 AND extract(day FROM length) >= 0
            AND length - date_trunc('day', length) >= '0';
    EXCEPTION WHEN data_exception THEN
        whole := false;
    END;
    IF whole THEN
        RETURN length::text;
    END IF;
    PERFORM quota_internal.fail('invalid_argument', format('"%s" is no period', left(period, 60)),
        'Pass day, week, month, an interval above 0 such as ''1 hour'', or null for a lifetime.');
END
$$;

CREATE OR REPLACE FUNCTION quota.set_limit(
    subject text,
    name text,
    unit text,
    kind text,
    capacity numeric,
    refill_per_s numeric DEFAULT NULL,
    period text DEFAULT NULL,
    time_zone text DEFAULT 'UTC',
    on_expiry text DEFAULT 'release',
    required boolean DEFAULT false,
    tenant text DEFAULT 'default'
) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    d quota_internal.definition := quota_internal.valid_definition(
        ROW(name, unit, kind, capacity, refill_per_s, period, time_zone)::quota_internal.definition);
    on_kind boolean := quota_internal.is_kind(subject);
    old jsonb;
    new jsonb;
BEGIN
    IF on_expiry IS NULL OR on_expiry NOT IN ('release', 'charge') OR required IS NULL THEN
        PERFORM quota_internal.fail('invalid_argument',
            format('on_expiry "%s", required %s', coalesce(left(on_expiry, 50), 'null'), coalesce(required::text, 'null')),
            'on_expiry is release or charge, required is true or false.');
    END IF;
    PERFORM quota_internal.change_config(tenant, on_kind);
    IF NOT on_kind THEN
        PERFORM quota_internal.require_subjects(tenant, ARRAY[subject]);
    END IF;
    PERFORM quota_internal.require_same_shape(tenant, subject, d);
    SELECT to_jsonb(l) INTO old FROM quota_internal.limits l
    WHERE l.tenant = set_limit.tenant AND l.owner = set_limit.subject AND l.name = set_limit.name;
    INSERT INTO quota_internal.limits AS l
        (tenant, owner, name, unit, kind, capacity, refill_per_s, period, time_zone, on_expiry, required)
    VALUES (set_limit.tenant, set_limit.subject, d.name, d.unit, d.kind, d.capacity, d.refill_per_s, d.period, d.time_zone,
        set_limit.on_expiry, set_limit.required)
    ON CONFLICT (tenant, owner, name) DO UPDATE
    SET capacity = EXCLUDED.capacity, refill_per_s = EXCLUDED.refill_per_s, on_expiry = EXCLUDED.on_expiry,
        required = EXCLUDED.required, removed = false
    RETURNING to_jsonb(l) INTO new;
    IF NOT on_kind THEN
        PERFORM quota_internal.bind(tenant, ARRAY[subject]);
    END IF;
    PERFORM quota_internal.log(tenant, 'set_limit', subject || ' ' || name, old, new, NULL);
END
$$;
COMMENT ON FUNCTION quota.set_limit(text, text, text, text, numeric, numeric, text, text, text, boolean, text) IS
    'Sets a limit on a subject, or on a kind (user:*) as the default for every subject of it. Usage is kept when numbers change.';

-- 'user:*' -> true, 'user:7' -> false; anything else is no owner of a limit.
CREATE OR REPLACE FUNCTION quota_internal.is_kind(owner text) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF owner ~ '^[a-z][a-z0-9_-]*:\*$' AND length(owner) <= 200 THEN
        RETURN true;
    END IF;
    PERFORM quota_internal.require_subject_name(owner);
    RETURN false;
END
$$;

CREATE OR REPLACE FUNCTION quota.remove_limit(subject text, name text, tenant text DEFAULT 'default') RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    on_kind boolean := quota_internal.is_kind(subject);
    old jsonb;
BEGIN
    PERFORM quota_internal.change_config(tenant, on_kind);
    IF NOT on_kind THEN
        PERFORM quota_internal.require_subjects(tenant, ARRAY[subject]);
    END IF;
    UPDATE quota_internal.limits l SET removed = true
    WHERE l.tenant = remove_limit.tenant AND l.owner = remove_limit.subject AND l.name = remove_limit.name AND NOT l.removed
    RETURNING to_jsonb(l) INTO old;
    IF NOT FOUND THEN
        PERFORM quota_internal.fail('unknown_limit', format('"%s" has no limit "%s" of its own', subject, left(name, 220)),
            'A limit is removed where it was set: on the subject, on the kind (user:*), or in the tier.');
    END IF;
    IF NOT on_kind THEN
        PERFORM quota_internal.bind(tenant, ARRAY[subject]);
    END IF;
    PERFORM quota_internal.log(tenant, 'remove_limit', subject || ' ' || name, old - 'removed', NULL, NULL);
END
$$;
COMMENT ON FUNCTION quota.remove_limit(text, text, text) IS
    'Takes a limit out of force. Open holds on it live on; set again with the same shape, it has its counters back.';
