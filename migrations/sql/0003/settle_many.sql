-- settle_many and release_many: many reservations of one tenant closed in one transaction, each as settle or release would.

CREATE OR REPLACE FUNCTION quota_internal.settle_one(
    place integer, id uuid, costs jsonb, final boolean, outcome text, details jsonb, tenant text
) RETURNS quota.batch_settlement
LANGUAGE plpgsql AS $$
DECLARE
    s record;
    answer quota.batch_settlement;
BEGIN
    answer.position := place;
    answer.reservation := id;
    BEGIN
        s := quota.settle(id, costs, final, outcome, details, tenant);
        answer.state := s.state;
        answer.late := s.late;
        answer.replayed := s.replayed;
        answer.overage := s.overage;
    EXCEPTION WHEN OTHERS THEN
        IF SQLSTATE NOT LIKE 'QT0%' THEN
            RAISE;
        END IF;
        answer.error := split_part(SQLERRM, ':', 1);
        answer.error_code := SQLSTATE;
        answer.error_message := SQLERRM;
        GET STACKED DIAGNOSTICS answer.error_remedy = PG_EXCEPTION_HINT;
    END;
    RETURN answer;
END
$$;

CREATE OR REPLACE FUNCTION quota.settle_many(
    ids uuid[],
    costs jsonb[] DEFAULT NULL,
    finals boolean[] DEFAULT NULL,
    outcomes text[] DEFAULT NULL,
    details jsonb[] DEFAULT NULL,
    atomic boolean DEFAULT false,
    tenant text DEFAULT 'default'
) RETURNS SETOF quota.batch_settlement
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    FOR i IN 1 .. coalesce(cardinality(ids), 0) LOOP
        RETURN NEXT quota_internal.settle_one(i, ids[i], costs[i], coalesce(finals[i], true), coalesce(outcomes[i], 'ok'),
            coalesce(details[i], '{}'), tenant);
    END LOOP;
END
$$;

CREATE OR REPLACE FUNCTION quota_internal.release_one(place integer, id uuid, details jsonb, tenant text)
RETURNS quota.batch_release
LANGUAGE plpgsql AS $$
DECLARE
    r record;
    answer quota.batch_release;
BEGIN
    answer.position := place;
    answer.reservation := id;
    BEGIN
        r := quota.release(id, details, tenant);
        answer.state := r.state;
        answer.replayed := r.replayed;
    EXCEPTION WHEN OTHERS THEN
        IF SQLSTATE NOT LIKE 'QT0%' THEN
            RAISE;
        END IF;
        answer.error := split_part(SQLERRM, ':', 1);
        answer.error_code := SQLSTATE;
        answer.error_message := SQLERRM;
        GET STACKED DIAGNOSTICS answer.error_remedy = PG_EXCEPTION_HINT;
    END;
    RETURN answer;
END
$$;

CREATE OR REPLACE FUNCTION quota.release_many(
    ids uuid[],
    details jsonb[] DEFAULT NULL,
    atomic boolean DEFAULT false,
    tenant text DEFAULT 'default'
) RETURNS SETOF quota.batch_release
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    FOR i IN 1 .. coalesce(cardinality(ids), 0) LOOP
        RETURN NEXT quota_internal.release_one(i, ids[i], coalesce(details[i], '{}'), tenant);
    END LOOP;
END
$$;
