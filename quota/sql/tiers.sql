-- Rate tiers: named sets of limits for keys. A key stores the tier's name; the numbers stand here, so that one change reaches all
-- its keys. Built-in tiers have the tenant ''; a tenant's own tier of the same name overrides them limit by limit.

CREATE OR REPLACE FUNCTION quota_internal.require_tier(tenant text, tier text) RETURNS void
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF NOT EXISTS (
        SELECT FROM quota_internal.tiers t
        WHERE t.tenant IN (require_tier.tenant, '') AND t.name = require_tier.tier AND NOT t.retired)
    THEN
        PERFORM quota_internal.fail('unknown_tier', format('there is no tier "%s"', coalesce(left(tier, 220), 'null')),
            'Choose one of the view quota.tiers, or create it with quota.set_tier_limit.');
    END IF;
END
$$;

-- Moves keys to a tier, all or none, however many they are: one change of the tenant, one binding, a line of the log each.
CREATE OR REPLACE FUNCTION quota.set_rate_tiers(subjects text[], tier text, tenant text DEFAULT 'default') RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    one text;
    old record;
    ordered text[];
BEGIN
    IF coalesce(cardinality(subjects), 0) NOT BETWEEN 1 AND 1000 THEN
        PERFORM quota_internal.fail('invalid_argument', format('%s subjects', coalesce(cardinality(subjects), 0)),
            'Pass 1 to 1000 keys in one call.');
    END IF;
    PERFORM quota_internal.change_config(tenant);
    PERFORM quota_internal.require_subjects(tenant, subjects);
    FOREACH one IN ARRAY subjects LOOP
        PERFORM quota_internal.require_kind_with_tier(one);
    END LOOP;
    PERFORM quota_internal.require_tier(tenant, tier);
    FOR old IN
        SELECT s.name, s.rate_tier FROM quota_internal.subjects s
        WHERE s.tenant = set_rate_tiers.tenant AND s.name = ANY (set_rate_tiers.subjects)
        ORDER BY s.name FOR NO KEY UPDATE
    LOOP
        PERFORM quota_internal.log(tenant, 'set_rate_tier', old.name,
            jsonb_build_object('rate_tier', old.rate_tier), jsonb_build_object('rate_tier', tier), NULL);
    END LOOP;
    UPDATE quota_internal.subjects s SET rate_tier = set_rate_tiers.tier
    WHERE s.tenant = set_rate_tiers.tenant AND s.name = ANY (set_rate_tiers.subjects);
    -- In parts: on a tenant without statistics the plan for all at once compares each with each. All their rows are locked by
    -- now, so that the accounts come in the order of everything else.
    ordered := ARRAY(SELECT DISTINCT s.name COLLATE "C" FROM unnest(subjects) s(name) ORDER BY 1);
    FOR i IN 1 .. cardinality(ordered) BY 25 LOOP
        PERFORM quota_internal.bind(tenant, ordered[i : i + 24]);
    END LOOP;
END
$$;
COMMENT ON FUNCTION quota.set_rate_tiers(text[], text, text) IS
    'Moves up to 1000 keys to a tier, all or none, from their next reservations on; as quota.set_rate_tier.';

CREATE OR REPLACE FUNCTION quota.set_rate_tier(subject text, tier text, tenant text DEFAULT 'default') RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM quota.set_rate_tiers(ARRAY[subject], tier, tenant);
END
$$;
COMMENT ON FUNCTION quota.set_rate_tier(text, text, text) IS
    'Moves a key to another tier from the next reservation on: usage stays, the bucket is cut to the new capacity.';

CREATE OR REPLACE FUNCTION quota_internal.require_kind_with_tier(subject text) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF subject NOT LIKE 'key:%' THEN
        PERFORM quota_internal.fail('invalid_argument', format('"%s" has no tier of its own', left(subject, 220)),
            'Only keys have one; an OAuth connection is always basic, other kinds take their limits from set_limit.');
    END IF;
END
$$;

CREATE OR REPLACE FUNCTION quota.set_tier_limit(
    tier text,
    name text,
    unit text,
    kind text,
    capacity numeric,
    refill_per_s numeric DEFAULT NULL,
    period text DEFAULT NULL,
    tenant text DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    owner text := coalesce(tenant, '');
    d quota_internal.definition := quota_internal.valid_definition(
        ROW(name, unit, kind, capacity, refill_per_s, period, 'UTC')::quota_internal.definition);
    old jsonb;
    new jsonb;
BEGIN
    PERFORM quota_internal.require_name('tier', tier);
    PERFORM quota_internal.change_tiers(tenant);
    PERFORM quota_internal.require_same_tier_shape(owner, d);
    INSERT INTO quota_internal.tiers (tenant, name) VALUES (owner, tier)
    ON CONFLICT ON CONSTRAINT tiers_pkey DO UPDATE SET retired = false;
    SELECT to_jsonb(l) INTO old FROM quota_internal.tier_limits l
    WHERE l.tenant = owner AND l.tier = set_tier_limit.tier AND l.name = set_tier_limit.name;
    INSERT INTO quota_internal.tier_limits AS l (tenant, tier, name, unit, kind, capacity, refill_per_s, period, time_zone)
    VALUES (owner, set_tier_limit.tier, d.name, d.unit, d.kind, d.capacity, d.refill_per_s, d.period, d.time_zone)
    ON CONFLICT ON CONSTRAINT tier_limits_pkey DO UPDATE
    SET capacity = EXCLUDED.capacity, refill_per_s = EXCLUDED.refill_per_s
    RETURNING to_jsonb(l) INTO new;
    PERFORM quota_internal.log(tenant, 'set_tier_limit', tier || ' ' || name, old, new, NULL);
END
$$;
COMMENT ON FUNCTION quota.set_tier_limit(text, text, text, text, numeric, numeric, text, text) IS
    'Sets a limit of a tier, and with its first limit creates the tier. Tenant null: the built-in one that all tenants see.';

CREATE OR REPLACE FUNCTION quota.retire_tier(tier text, tenant text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    IF tier = 'basic' AND tenant IS NULL THEN
        PERFORM quota_internal.fail('invalid_argument', 'the tier "basic" cannot be retired',
            'Every key without a tier of its own acts as basic; change its numbers instead.');
    END IF;
    PERFORM quota_internal.change_tiers(tenant);
    UPDATE quota_internal.tiers t SET retired = true
    WHERE t.tenant = coalesce(retire_tier.tenant, '') AND t.name = retire_tier.tier AND NOT t.retired;
    IF NOT FOUND THEN
        PERFORM quota_internal.fail('unknown_tier',
            format('%s has no tier "%s"', coalesce('tenant "' || tenant || '"', 'the built-in set'), coalesce(left(tier, 220), 'null')),
            'A tier is retired where it was set: pass its tenant, or null for a built-in one.');
    END IF;
    PERFORM quota_internal.log(tenant, 'retire_tier', tier, NULL, jsonb_build_object('retired', true), NULL);
END
$$;
COMMENT ON FUNCTION quota.retire_tier(text, text) IS 'Ends a tier: its keys act as basic, with their usage kept.';

-- Takes the rows of all tenants that see the tier, in order, and has their subjects bind anew.
CREATE OR REPLACE FUNCTION quota_internal.change_tiers(tenant text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    one text;
BEGIN
    IF tenant IS NOT NULL THEN
        PERFORM quota_internal.change_config(tenant, true);
        RETURN;
    END IF;
    PERFORM quota_internal.require_unbound_login();
    -- No tenant may be born in between: it would miss the new version.
    LOCK TABLE quota_internal.tenants IN SHARE ROW EXCLUSIVE MODE;
    FOR one IN SELECT t.name FROM quota_internal.tenants t ORDER BY t.name LOOP
        PERFORM quota_internal.change_config(one, true);
    END LOOP;
END
$$;

-- Tiers share one shape per limit name, with each other and with what is set on keys and connections themselves.
CREATE OR REPLACE FUNCTION quota_internal.require_same_tier_shape(owner text, d quota_internal.definition) RETURNS void
LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
    other record;
BEGIN
    SELECT x.owner, x.unit, x.kind, x.period, x.time_zone INTO other
    FROM (
        SELECT 'tier ' || l.tier AS owner, l.unit, l.kind, l.period, l.time_zone
        FROM quota_internal.tier_limits l
        WHERE l.name = d.name AND (require_same_tier_shape.owner = '' OR l.tenant IN (require_same_tier_shape.owner, ''))
        UNION ALL
        SELECT l.owner, l.unit, l.kind, l.period, l.time_zone
        FROM quota_internal.limits l
        WHERE l.name = d.name AND (require_same_tier_shape.owner = '' OR l.tenant = require_same_tier_shape.owner)
            AND (l.owner LIKE 'key:%' OR l.owner LIKE 'oauth:%')
    ) x
    WHERE (x.unit, x.kind, x.period, x.time_zone) IS DISTINCT FROM (d.unit, d.kind, d.period, d.time_zone)
    LIMIT 1;
    IF FOUND THEN
        PERFORM quota_internal.shape_differs(d, other.owner, other.unit, other.kind, other.period, other.time_zone);
    END IF;
END
$$;
