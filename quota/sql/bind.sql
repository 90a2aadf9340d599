-- Which definition of a limit is in force for which subject, and the accounts that carry it.
-- Definitions stand on a subject, in a tier or on a kind; they are resolved here and nowhere else, when they change and not when
-- somebody pays: bind() copies the one in force into the account, and every hot path reads accounts only.

-- Own before tier before kind, by limit name. An unknown, missing or retired tier acts as basic.
CREATE OR REPLACE VIEW quota_internal.limits_in_force AS
SELECT DISTINCT ON (s.tenant, s.name, l.name)
    s.tenant, s.name AS subject, l.name AS limit_name, l.unit, l.kind, l.capacity, l.refill_per_s, l.period, l.time_zone,
    l.on_expiry, l.required
FROM quota_internal.subjects s
CROSS JOIN LATERAL (
    SELECT 1 AS precedence, o.name, o.unit, o.kind, o.capacity, o.refill_per_s, o.period, o.time_zone, o.on_expiry, o.required
    FROM quota_internal.limits o
    WHERE o.tenant = s.tenant AND o.owner = s.name AND NOT o.removed
    UNION ALL
    SELECT CASE t.tenant WHEN '' THEN 3 ELSE 2 END, t.name, t.unit, t.kind, t.capacity, t.refill_per_s, t.period, t.time_zone,
        'release', false
    FROM quota_internal.tier_limits t
    JOIN quota_internal.tiers i ON i.tenant = t.tenant AND i.name = t.tier AND NOT i.retired
    WHERE s.kind IN ('key', 'oauth') AND t.tenant IN (s.tenant, '') AND t.tier = coalesce(
        (SELECT n.name FROM quota_internal.tiers n
         WHERE s.kind = 'key' AND n.name = s.rate_tier AND n.tenant IN (s.tenant, '') AND NOT n.retired
         LIMIT 1),
        'basic')
    UNION ALL
    SELECT 4, k.name, k.unit, k.kind, k.capacity, k.refill_per_s, k.period, k.time_zone, k.on_expiry, k.required
    FROM quota_internal.limits k
    WHERE k.tenant = s.tenant AND k.owner = s.kind || ':*' AND NOT k.removed
) l
ORDER BY s.tenant, s.name, l.name, l.precedence;

-- Makes the accounts of these subjects carry what is in force. Locks in the order of everything else: the subjects' rows by
-- name, then all their accounts by (subject, limit); a missing account is created in that order too.
CREATE OR REPLACE FUNCTION quota_internal.bind(tenant text, subjects text[]) RETURNS void
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    version bigint;
    definitions quota_internal.limits_in_force[];
BEGIN
    PERFORM FROM quota_internal.subjects s
    WHERE s.tenant = bind.tenant AND s.name = ANY (bind.subjects)
    ORDER BY s.name FOR NO KEY UPDATE;
    -- Read before the definitions: should they change meanwhile, this number is the old one and the next caller binds anew.
    SELECT t.binding_version INTO version FROM quota_internal.tenants t WHERE t.name = bind.tenant;
    definitions := ARRAY(
        SELECT f FROM quota_internal.limits_in_force f
        WHERE f.tenant = bind.tenant AND f.subject = ANY (bind.subjects)
        ORDER BY f.subject, f.limit_name);
    INSERT INTO quota_internal.accounts
        (tenant, subject, limit_name, unit, kind, capacity, refill_per_s, period, time_zone, on_expiry, required, in_force,
         binding_version, level, level_at)
    SELECT f.tenant, f.subject, f.limit_name, f.unit, f.kind, f.capacity, f.refill_per_s, f.period, f.time_zone, f.on_expiry,
        f.required, true, version,
        CASE f.kind WHEN 'bucket' THEN f.capacity END, CASE f.kind WHEN 'bucket' THEN '-infinity'::timestamptz END
    FROM unnest(definitions) f
    ORDER BY f.subject, f.limit_name
    ON CONFLICT (tenant, subject, limit_name) DO NOTHING;
    PERFORM FROM quota_internal.accounts a
    WHERE a.tenant = bind.tenant AND a.subject = ANY (bind.subjects)
    ORDER BY a.subject, a.limit_name FOR NO KEY UPDATE;
    UPDATE quota_internal.accounts a
    SET capacity = f.capacity,
        refill_per_s = coalesce(f.refill_per_s, a.refill_per_s),
        on_expiry = f.on_expiry,
        required = f.required,
        in_force = true,
        binding_version = version
    FROM unnest(definitions) f
    WHERE a.tenant = bind.tenant AND a.subject = f.subject AND a.limit_name = f.limit_name;
    UPDATE quota_internal.accounts a
    SET in_force = false,
        binding_version = version
    WHERE a.tenant = bind.tenant AND a.subject = ANY (bind.subjects)
        AND (a.subject, a.limit_name) NOT IN (SELECT f.subject, f.limit_name FROM unnest(definitions) f);
    UPDATE quota_internal.subjects s
    SET binding_version = version
    WHERE s.tenant = bind.tenant AND s.name = ANY (bind.subjects);
END
$$;

-- An account with the numbers in force now. They are its own unless a kind or a tier has changed since it was bound.
CREATE OR REPLACE FUNCTION quota_internal.numbers_in_force(
    a quota_internal.accounts, OUT capacity numeric, OUT refill_per_s numeric
)
LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
BEGIN
    SELECT f.capacity, f.refill_per_s INTO numbers_in_force.capacity, numbers_in_force.refill_per_s
    FROM quota_internal.limits_in_force f
    WHERE f.tenant = a.tenant AND f.subject = a.subject AND f.limit_name = a.limit_name;
    IF NOT FOUND THEN
        capacity := a.capacity;
        refill_per_s := a.refill_per_s;
    END IF;
END
$$;

-- Accounts with the numbers in force now, should a kind or a tier have changed since they were bound.
CREATE OR REPLACE FUNCTION quota_internal.with_present_numbers(accounts quota_internal.accounts[], tenant text)
RETURNS quota_internal.accounts[]
LANGUAGE plpgsql STABLE AS $$
DECLARE
    version bigint := (SELECT t.binding_version FROM quota_internal.tenants t WHERE t.name = with_present_numbers.tenant);
    n record;
BEGIN
    FOR i IN 1 .. cardinality(accounts) LOOP
        IF (accounts[i]).binding_version <> version THEN
            n := quota_internal.numbers_in_force(accounts[i]);
            accounts[i].capacity := n.capacity;
            accounts[i].refill_per_s := n.refill_per_s;
        END IF;
    END LOOP;
    RETURN accounts;
END
$$;

-- All definitions of one name that can reach the same subject share unit, kind, period and zone: they share its account.
CREATE OR REPLACE FUNCTION quota_internal.require_same_shape(tenant text, owner text, d quota_internal.definition) RETURNS void
LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
    other record;
BEGIN
    SELECT l.owner, l.unit, l.kind, l.period, l.time_zone INTO other
    FROM quota_internal.limits l
    WHERE l.tenant = require_same_shape.tenant AND l.name = d.name
        AND (l.owner = require_same_shape.owner
            OR l.owner = split_part(require_same_shape.owner, ':', 1) || ':*'
            OR require_same_shape.owner LIKE '%:*' AND split_part(l.owner, ':', 1) || ':*' = require_same_shape.owner)
        AND (l.unit, l.kind, l.period, l.time_zone) IS DISTINCT FROM (d.unit, d.kind, d.period, d.time_zone)
    LIMIT 1;
    IF NOT FOUND AND (owner LIKE 'key:%' OR owner LIKE 'oauth:%') THEN
        SELECT 'tier ' || l.tier AS owner, l.unit, l.kind, l.period, l.time_zone INTO other
        FROM quota_internal.tier_limits l
        WHERE l.name = d.name AND l.tenant IN (require_same_shape.tenant, '')
            AND (l.unit, l.kind, l.period, l.time_zone) IS DISTINCT FROM (d.unit, d.kind, d.period, d.time_zone)
        LIMIT 1;
    END IF;
    IF FOUND THEN
        PERFORM quota_internal.shape_differs(d, other.owner, other.unit, other.kind, other.period, other.time_zone);
    END IF;
END
$$;

CREATE OR REPLACE FUNCTION quota_internal.shape_differs(
    d quota_internal.definition, owner text, unit text, kind text, period text, time_zone text
) RETURNS void
LANGUAGE plpgsql STABLE AS $$
BEGIN
    PERFORM quota_internal.fail('limit_differs',
        format('limit "%s" is a %s of "%s" (period %s, zone %s) on %s, not a %s of "%s" (period %s, zone %s)', d.name,
            kind, unit, coalesce(period, 'none'), time_zone, owner,
            d.kind, d.unit, coalesce(d.period, 'none'), d.time_zone),
        'A limit keeps its unit, kind, period and zone: remove it and give the new one another name.');
END
$$;
