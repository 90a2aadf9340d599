-- Who may call what. Roles belong to the whole server: they may be there already.

DO $$
DECLARE
    role text;
BEGIN
    FOREACH role IN ARRAY ARRAY['quota_worker', 'quota_reader', 'quota_admin', 'quota_reaper', 'quota_api'] LOOP
        IF NOT EXISTS (SELECT FROM pg_roles r WHERE r.rolname = role) THEN
            BEGIN
                EXECUTE format('CREATE ROLE %I NOLOGIN', role);
            EXCEPTION WHEN duplicate_object OR unique_violation THEN
                NULL;
            END;
        END IF;
    END LOOP;
END
$$;

REVOKE ALL ON SCHEMA quota_internal FROM PUBLIC;
REVOKE ALL ON SCHEMA quota FROM PUBLIC;
REVOKE ALL ON ALL TABLES IN SCHEMA quota_internal FROM PUBLIC;
REVOKE ALL ON ALL TABLES IN SCHEMA quota FROM PUBLIC;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA quota_internal FROM PUBLIC;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA quota FROM PUBLIC;

GRANT USAGE ON SCHEMA quota TO quota_worker, quota_reader, quota_admin, quota_reaper, quota_api;

GRANT EXECUTE ON FUNCTION
    quota.reserve(text, jsonb, interval, uuid, text[], numeric, text, jsonb, text),
    quota.settle(uuid, jsonb, boolean, text, jsonb, text),
    quota.release(uuid, jsonb, text),
    quota.adjust(uuid, jsonb, text),
    quota.extend(uuid, interval, text),
    quota.record(text, jsonb, uuid, text[], jsonb, text),
    quota.ensure_subject(text, text, text),
    quota.reserve_in_turn(text, jsonb, uuid, interval, interval, text[], numeric, text, jsonb, text),
    quota.reserve_many(text[], jsonb[], uuid[], interval[], jsonb[], numeric[], text[], jsonb[], boolean, text),
    quota.settle_many(uuid[], jsonb[], boolean[], text[], jsonb[], boolean, text),
    quota.release_many(uuid[], jsonb[], boolean, text)
TO quota_worker, quota_admin, quota_api;

GRANT EXECUTE ON FUNCTION
    quota.create_run(text, text, jsonb, interval, integer, integer, bigint, numeric, text),
    quota.end_run(text, text)
TO quota_worker, quota_admin, quota_api;

GRANT EXECUTE ON FUNCTION quota.balance(text, text), quota.limits_of(text, text) TO quota_worker, quota_reader, quota_admin, quota_api;
GRANT EXECUTE ON FUNCTION quota.verify_key(text, bytea) TO quota_worker, quota_admin, quota_api;
GRANT EXECUTE ON FUNCTION
    quota.price(text, text, text, timestamptz, text),
    quota.price_book(text)
TO quota_worker, quota_reader, quota_admin, quota_api;

GRANT SELECT ON ALL TABLES IN SCHEMA quota TO quota_reader, quota_admin, quota_api;
GRANT EXECUTE ON FUNCTION quota."check"(text) TO quota_reader, quota_admin, quota_api;
GRANT EXECUTE ON FUNCTION
    quota.report_models(timestamptz, timestamptz, text),
    quota.report_pools(timestamptz, timestamptz, text),
    quota.report_calibration(timestamptz, timestamptz, text)
TO quota_reader, quota_admin, quota_api;

GRANT EXECUTE ON FUNCTION quota.reap(integer, text) TO quota_reaper, quota_admin;

GRANT EXECUTE ON FUNCTION
    quota.retain(integer, text),
    quota.bind_login(name, text)
TO quota_admin;

-- What the HTTP API does for its operators. Retention and database logins stay with quota_admin.
GRANT EXECUTE ON FUNCTION
    quota.create_tenant(text),
    quota.configure_tenant(text, interval, numeric, interval),
    quota.create_unit(text, boolean),
    quota.create_subject(text, text, text, text),
    quota.move_subject(text, text, text),
    quota.retire_subject(text, text),
    quota.freeze(text, text, text),
    quota.unfreeze(text, text),
    quota.set_limit(text, text, text, text, numeric, numeric, text, text, text, boolean, text),
    quota.remove_limit(text, text, text),
    quota.set_rate_tier(text, text, text),
    quota.set_rate_tiers(text[], text, text),
    quota.set_tier_limit(text, text, text, text, numeric, numeric, text, text),
    quota.retire_tier(text, text),
    quota.set_price(text, text, jsonb, text, timestamptz, timestamptz, bigint, bigint, boolean, text, text),
    quota.end_price(bigint, timestamptz, text),
    quota.credit(uuid, jsonb, text, uuid, text),
    quota.repair(text),
    quota.create_key(text, text, bytea, text, text, timestamptz, text),
    quota.rename_key(text, text, text),
    quota.set_key_expiry(text, timestamptz, text),
    quota.rotate_key(text, bytea, interval, text),
    quota.revoke_key(text, text, text),
    quota.create_token(text, text, text, bytea, timestamptz, text),
    quota.revoke_token(text, text, text),
    quota.operator_settle(uuid, jsonb, text, text),
    quota.operator_release(uuid, text, text),
    quota.logged_check(text)
TO quota_admin, quota_api;

-- The API's own: nobody else speaks for a token.
GRANT EXECUTE ON FUNCTION
    quota.verify_token(text, bytea),
    quota.begin_change(text, text, text, text),
    quota.begin_request(text, text, bytea, text),
    quota.end_request(text, text, integer, text, text)
TO quota_api;
