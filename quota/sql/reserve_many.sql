-- reserve_many: many holds of one tenant in one transaction, each decided as reserve would decide it, in order.

-- What all batch functions demand of their arrays: the same length, at most 10,000, no null where there must be a value. The error
-- names the position.
CREATE OR REPLACE FUNCTION quota_internal.require_batch(what text, size integer, members integer, missing integer) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF size IS NULL OR size > 10000 THEN
        PERFORM quota_internal.fail('invalid_argument',
            CASE WHEN size IS NULL THEN format('%s is null', what)
                ELSE format('a batch of %s is above the maximum of 10000', size) END,
            'Pass an array of at most 10000 members; send a longer batch in parts.');
    ELSIF members <> size THEN
        PERFORM quota_internal.fail('invalid_argument',
            format('%s has %s members, the batch has %s: position %s has no counterpart', what, members, size,
                least(members, size) + 1),
            'Pass one member a request in every array, or null for the whole array.');
    ELSIF missing IS NOT NULL THEN
        PERFORM quota_internal.fail('invalid_argument', format('%s is null at position %s', what, missing),
            'Positions count from 1; every request needs a value here.');
    END IF;
END
$$;

CREATE OR REPLACE FUNCTION quota_internal.reserve_one(
    place integer, subject text, costs jsonb, ttl interval, id uuid, also text[], headroom numeric, on_expiry text, details jsonb,
    tenant text
) RETURNS quota.batch_decision
LANGUAGE plpgsql AS $$
DECLARE
    d quota.decision;
    answer quota.batch_decision;
BEGIN
    BEGIN
        d := quota.reserve(subject, costs, ttl, id, also, headroom, on_expiry, details, tenant);
    EXCEPTION WHEN OTHERS THEN
        IF SQLSTATE NOT LIKE 'QT0%' THEN
            RAISE;
        END IF;
        answer.position := place;
        answer.reservation := id;
        answer.error := split_part(SQLERRM, ':', 1);
        answer.error_code := SQLSTATE;
        answer.error_message := SQLERRM;
        GET STACKED DIAGNOSTICS answer.error_remedy = PG_EXCEPTION_HINT;
        RETURN answer;
    END;
    RETURN ROW(place, d.granted, d.reservation, d.state, d.expires_at, d.replayed, d.reason, d.limit_subject, d.limit_name, d.unit,
        d.capacity, d.spent, d.reserved, d.requested, d.retry_after_s, d.remaining, d.violations, NULL, NULL, NULL, NULL
        )::quota.batch_decision;
END
$$;

CREATE OR REPLACE FUNCTION quota.reserve_many(
    subjects text[],
    costs jsonb[],
    ids uuid[] DEFAULT NULL,
    ttls interval[] DEFAULT NULL,
    also jsonb[] DEFAULT NULL,
    headrooms numeric[] DEFAULT NULL,
    on_expiries text[] DEFAULT NULL,
    details jsonb[] DEFAULT NULL,
    atomic boolean DEFAULT false,
    tenant text DEFAULT 'default'
) RETURNS SETOF quota.batch_decision
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    size integer := coalesce(cardinality(reserve_many.subjects), 0);
    i integer;
BEGIN
    FOR i IN 1 .. size LOOP
        RETURN NEXT quota_internal.reserve_one(i, subjects[i], costs[i], coalesce(ttls[i], '10 minutes'), ids[i],
            CASE WHEN also[i] IS NULL THEN '{}' ELSE ARRAY(SELECT jsonb_array_elements_text(also[i])) END,
            coalesce(headrooms[i], 0), on_expiries[i], coalesce(details[i], '{}'), tenant);
    END LOOP;
END
$$;
