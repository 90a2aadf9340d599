-- Retention: what is closed and old goes, and the counters it explains are carried first.

CREATE OR REPLACE FUNCTION quota.retain(
    max integer DEFAULT 10000, tenant text DEFAULT 'default', OUT reservations bigint, OUT entries bigint, OUT carried bigint
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    before timestamptz;
    gone uuid[];
    old_entries bigint[];
    accounts bigint[];
BEGIN
    PERFORM quota_internal.require_tenant(retain.tenant);
    IF retain.max IS NULL OR retain.max < 1 THEN
        PERFORM quota_internal.fail('invalid_argument', format('max %s is not at least 1', coalesce(retain.max::text, 'null')),
            'Pass how many reservations one call may delete, such as 10000.');
    END IF;
    before := quota_internal.clock() - (SELECT t.keep FROM quota_internal.tenants t WHERE t.name = retain.tenant);
    SELECT coalesce(array_agg(x.id), '{}') INTO gone
    FROM (
        SELECT r.id FROM quota_internal.reservations r
        WHERE r.tenant = retain.tenant AND r.state <> 'held' AND r.closed_at < before
        ORDER BY r.closed_at
        LIMIT retain.max
        FOR UPDATE SKIP LOCKED
    ) x;
    SELECT coalesce(array_agg(e.id), '{}') INTO old_entries
    FROM quota_internal.entries e
    WHERE e.tenant = retain.tenant AND e.reservation = ANY (gone);
    SELECT coalesce(array_agg(DISTINCT l.account), '{}') INTO accounts
    FROM quota_internal.entries e CROSS JOIN unnest(e.line_accounts) l(account)
    WHERE e.tenant = retain.tenant AND e.id = ANY (old_entries);
    PERFORM quota_internal.lock_accounts(retain.tenant, accounts);

    -- A window that still counts keeps its sum: one carried line per account and current window.
    INSERT INTO quota_internal.entries (tenant, at, kind, subject, line_accounts, line_windows, line_amounts)
    SELECT retain.tenant, quota_internal.clock(), 'carried', a.subject, ARRAY[a.id], ARRAY[a.window_start], ARRAY[s.amount]
    FROM (
        SELECT l.account, l.window_start, sum(l.amount * quota_internal.sign_of(e.kind)) AS amount
        FROM quota_internal.entries e
        CROSS JOIN unnest(e.line_accounts, e.line_windows, e.line_amounts) l(account, window_start, amount)
        WHERE e.tenant = retain.tenant AND e.id = ANY (old_entries)
        GROUP BY l.account, l.window_start
    ) s
    JOIN quota_internal.accounts a ON a.tenant = retain.tenant AND a.id = s.account AND a.kind = 'budget'
        AND a.window_start IS NOT DISTINCT FROM s.window_start
    WHERE s.amount > 0
    ORDER BY a.subject, a.limit_name;
    GET DIAGNOSTICS carried = ROW_COUNT;

    PERFORM set_config('quota.retaining', 'on', true);
    DELETE FROM quota_internal.entries e WHERE e.tenant = retain.tenant AND e.id = ANY (old_entries);
    GET DIAGNOSTICS entries = ROW_COUNT;
    DELETE FROM quota_internal.reservations r WHERE r.tenant = retain.tenant AND r.id = ANY (gone);
    GET DIAGNOSTICS reservations = ROW_COUNT;
    PERFORM set_config('quota.retaining', 'off', true);
END
$$;
COMMENT ON FUNCTION quota.retain(integer, text) IS
    'Deletes at most max reservations that closed longer than the tenant''s keep ago, with their entries, and carries what still counts.';
