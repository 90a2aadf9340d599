-- Misuse is an SQLSTATE, a refusal is a row. The names are the contract; quota/errors.py maps the codes to classes.

CREATE OR REPLACE FUNCTION quota_internal.sqlstate_of(error text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE error
        WHEN 'unknown_tenant' THEN 'QT001'
        WHEN 'unknown_subject' THEN 'QT002'
        WHEN 'unknown_unit' THEN 'QT003'
        WHEN 'unknown_limit' THEN 'QT004'
        WHEN 'unknown_tier' THEN 'QT005'
        WHEN 'unknown_reservation' THEN 'QT006'
        WHEN 'no_limit' THEN 'QT007'
        WHEN 'unit_missing' THEN 'QT008'
        WHEN 'unit_not_held' THEN 'QT009'
        WHEN 'invalid_costs' THEN 'QT010'
        WHEN 'invalid_amount' THEN 'QT011'
        WHEN 'amount_out_of_range' THEN 'QT012'
        WHEN 'invalid_name' THEN 'QT013'
        WHEN 'invalid_ttl' THEN 'QT014'
        WHEN 'invalid_argument' THEN 'QT015'
        WHEN 'id_conflict' THEN 'QT016'
        WHEN 'already_settled' THEN 'QT017'
        WHEN 'already_released' THEN 'QT018'
        WHEN 'expired' THEN 'QT019'
        WHEN 'total_decreased' THEN 'QT020'
        WHEN 'parent_differs' THEN 'QT021'
        WHEN 'limit_differs' THEN 'QT022'
        WHEN 'cycle' THEN 'QT023'
        WHEN 'too_deep' THEN 'QT024'
        WHEN 'has_open_holds' THEN 'QT025'
        WHEN 'already_exists' THEN 'QT026'
        WHEN 'unknown_key' THEN 'QT027'
        WHEN 'unknown_token' THEN 'QT028'
        WHEN 'revoked' THEN 'QT029'
    END
$$;

CREATE OR REPLACE FUNCTION quota_internal.fail(error text, problem text, remedy text) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RAISE EXCEPTION USING
        ERRCODE = quota_internal.sqlstate_of(error),
        MESSAGE = error || ': ' || problem,
        HINT = remedy;
END
$$;
COMMENT ON FUNCTION quota_internal.fail(text, text, text) IS
    'Raises one of the contract''s errors: what was wrong with which value, and what to do.';
