-- What operators do over HTTP: changes that say who made them, answers that are given once, and acts on others' reservations.

-- What a write over HTTP does first: says who acts, and takes the tenant's row, so that what it reads before it writes is true
-- until it commits.
CREATE OR REPLACE FUNCTION quota.begin_change(actor text, request_id text, reason text, tenant text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM set_config('quota.actor', coalesce(actor, ''), true);
    PERFORM set_config('quota.request_id', coalesce(request_id, ''), true);
    PERFORM set_config('quota.reason', coalesce(reason, ''), true);
    IF tenant IS NULL THEN
        PERFORM quota_internal.require_unbound_login();
        LOCK TABLE quota_internal.tenants IN SHARE ROW EXCLUSIVE MODE;
    ELSE
        PERFORM quota_internal.require_tenant(tenant);
        PERFORM FROM quota_internal.tenants t WHERE t.name = begin_change.tenant FOR NO KEY UPDATE;
    END IF;
END
$$;
COMMENT ON FUNCTION quota.begin_change(text, text, text, text) IS
    'For the rest of this transaction: who acts, in which request and why; and no other admin change of the tenant meanwhile.';

-- The first with a key does the work and stores its answer in the same transaction; whoever comes meanwhile waits, then finds it.
CREATE OR REPLACE FUNCTION quota.begin_request(
    token text, key text, fingerprint bytea, tenant text, OUT fresh boolean, OUT same boolean, OUT status integer, OUT answer text
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    at timestamptz := quota_internal.clock();
    horizon timestamptz := at - interval '24 hours';
BEGIN
    PERFORM quota_internal.require_token_scope(begin_request.tenant);
    -- Bounded, so that no request pays for a long pause.
    DELETE FROM quota_internal.api_requests r
    WHERE r.ctid = ANY (ARRAY(
        SELECT o.ctid FROM quota_internal.api_requests o
        WHERE o.tenant = coalesce(begin_request.tenant, '') AND o.at < horizon
        ORDER BY o.at LIMIT 20 FOR UPDATE SKIP LOCKED));
    INSERT INTO quota_internal.api_requests (tenant, token, key, fingerprint, at)
    VALUES (coalesce(begin_request.tenant, ''), begin_request.token, begin_request.key, begin_request.fingerprint, at)
    ON CONFLICT ON CONSTRAINT api_requests_pkey DO NOTHING;
    fresh := FOUND;
    same := true;
    IF NOT fresh THEN
        SELECT r.fingerprint = begin_request.fingerprint, r.status, r.answer INTO same, status, answer
        FROM quota_internal.api_requests r
        WHERE r.tenant = coalesce(begin_request.tenant, '') AND r.token = begin_request.token AND r.key = begin_request.key;
    END IF;
END
$$;
COMMENT ON FUNCTION quota.begin_request(text, text, bytea, text) IS
    'Claims an Idempotency-Key for this transaction: fresh, or the stored answer, and whether it was the same request.';

CREATE OR REPLACE FUNCTION quota.end_request(token text, key text, status integer, answer_text text, tenant text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    PERFORM quota_internal.require_token_scope(end_request.tenant);
    UPDATE quota_internal.api_requests r SET status = end_request.status, answer = end_request.answer_text
    WHERE r.tenant = coalesce(end_request.tenant, '') AND r.token = end_request.token AND r.key = end_request.key;
END
$$;
COMMENT ON FUNCTION quota.end_request(text, text, integer, text, text) IS
    'Stores the answer of the request that begin_request has claimed.';

CREATE OR REPLACE FUNCTION quota.operator_settle(
    id uuid, costs jsonb, reason text, tenant text DEFAULT 'default',
    OUT state text, OUT late boolean, OUT replayed boolean, OUT overage jsonb
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM quota_internal.require_reason(reason);
    SELECT s.state, s.late, s.replayed, s.overage
    INTO operator_settle.state, operator_settle.late, operator_settle.replayed, operator_settle.overage
    FROM quota.settle(operator_settle.id, operator_settle.costs, tenant => operator_settle.tenant) s;
    IF NOT replayed THEN
        PERFORM quota_internal.log(tenant, 'operator_settle', id::text, NULL, jsonb_build_object('costs', costs), reason);
    END IF;
END
$$;
COMMENT ON FUNCTION quota.operator_settle(uuid, jsonb, text, text) IS
    'quota.settle for a reservation of somebody else, with a reason for the log. Costs null: the whole hold.';

CREATE OR REPLACE FUNCTION quota.operator_release(
    id uuid, reason text, tenant text DEFAULT 'default', OUT state text, OUT replayed boolean
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM quota_internal.require_reason(reason);
    SELECT r.state, r.replayed INTO operator_release.state, operator_release.replayed
    FROM quota.release(operator_release.id, tenant => operator_release.tenant) r;
    IF NOT replayed THEN
        PERFORM quota_internal.log(tenant, 'operator_release', id::text, NULL, NULL, reason);
    END IF;
END
$$;
COMMENT ON FUNCTION quota.operator_release(uuid, text, text) IS
    'quota.release for a reservation of somebody else, with a reason for the log.';

CREATE OR REPLACE FUNCTION quota.logged_check(tenant text DEFAULT NULL) RETURNS SETOF quota.violation
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    found quota.violation[];
BEGIN
    found := ARRAY(SELECT c FROM quota."check"(logged_check.tenant) c);
    PERFORM quota_internal.log(tenant, 'check', NULL, NULL, jsonb_build_object('violations', cardinality(found)), NULL);
    RETURN QUERY SELECT v.* FROM unnest(found) v;
END
$$;
COMMENT ON FUNCTION quota.logged_check(text) IS
    'quota.check, and a row of the log with the number of violations, so that others can see when the books were last proven.';
