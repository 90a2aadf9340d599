-- adjust and extend: an open hold changes its size or its time.

-- What a hold that still may change must not be.
CREATE OR REPLACE FUNCTION quota_internal.require_open(r quota_internal.reservations) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF r.state = 'settled' THEN
        PERFORM quota_internal.fail('already_settled', format('reservation %s was settled at %s', r.id, r.closed_at),
            'Reserve anew under a new id.');
    ELSIF r.state = 'released' THEN
        PERFORM quota_internal.fail('already_released', format('reservation %s was released at %s', r.id, r.closed_at),
            'Reserve anew under a new id.');
    ELSIF r.state = 'expired' THEN
        PERFORM quota_internal.fail('expired', format('reservation %s expired at %s', r.id, r.expires_at),
            'Settle what was used, which is accepted late, and reserve anew under a new id.');
    END IF;
END
$$;

-- Where the accounts stand that a raise asks for more, and whether each has it.
CREATE OR REPLACE FUNCTION quota_internal.judge_raises(
    r quota_internal.reservations, accounts quota_internal.accounts[], raises quota_internal.costs, at timestamptz,
    polling_hint_s numeric
) RETURNS quota_internal.standing[]
LANGUAGE plpgsql STABLE AS $$
DECLARE
    a quota_internal.accounts;
    standings quota_internal.standing[] := '{}';
BEGIN
    FOREACH a IN ARRAY accounts LOOP
        CONTINUE WHEN a.unit <> ALL (raises.units);
        IF NOT a.in_force THEN
            -- Counted, not tested: the limit was removed after the hold was taken.
            a.capacity := NULL;
        END IF;
        standings := standings || quota_internal.stand(
            a, quota_internal.requested(a, raises), r.headroom, at, polling_hint_s);
    END LOOP;
    RETURN standings;
END
$$;

CREATE OR REPLACE FUNCTION quota_internal.refuses(standings quota_internal.standing[]) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    s quota_internal.standing;
BEGIN
    FOREACH s IN ARRAY standings LOOP
        IF s.reason IS NOT NULL THEN
            RETURN true;
        END IF;
    END LOOP;
    RETURN false;
END
$$;

CREATE OR REPLACE FUNCTION quota.adjust(id uuid, costs jsonb, tenant text DEFAULT 'default') RETURNS quota.decision
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    given quota_internal.costs;
    raises quota_internal.costs := ROW('{}', '{}', '{}');
    r quota_internal.reservations;
    d quota.decision;
    lineage quota_internal.resolution;
    accounts quota_internal.accounts[];
    standings quota_internal.standing[];
    swept boolean := false;
    at timestamptz;
    held numeric;
BEGIN
    given := quota_internal.parse_costs(adjust.costs);
    r := quota_internal.lock_reservation(adjust.tenant, adjust.id);
    PERFORM quota_internal.require_units_held(r, given.by_value);
    FOR i IN 1 .. cardinality(given.units) LOOP
        PERFORM quota_internal.require_whole_slots(r, given.units[i], given.amounts[i]);
    END LOOP;
    PERFORM quota_internal.require_open(r);
    PERFORM quota_internal.require_not_decreased(r, r.held || r.booked || given.by_value);
    FOR i IN 1 .. cardinality(given.units) LOOP
        held := greatest((r.held -> given.units[i])::numeric, (r.booked -> given.units[i])::numeric);
        IF given.amounts[i] > held THEN
            raises.units := raises.units || given.units[i];
            raises.amounts := raises.amounts || given.amounts[i] - held;
        END IF;
    END LOOP;
    d.reservation := r.id;
    d.state := r.state;
    d.expires_at := r.expires_at;
    d.granted := true;
    d.replayed := r.held || given.by_value = r.held;
    IF d.replayed THEN
        RETURN quota_internal.conclude(d, quota_internal.standings_of(r));
    END IF;

    FOR attempt IN 1 .. 100 LOOP
        IF quota_internal.snapshot_is_old() THEN
            PERFORM FROM quota_internal.tenants t WHERE t.name = r.tenant FOR SHARE;
        END IF;
        lineage := quota_internal.resolve(r.tenant, r.subject || r.also, NULL);
        -- A block that can be left: its locks go with it, so that deciding anew holds no account.
        BEGIN
            IF swept THEN
                -- Rows that others have locked are left alone: this call has one already.
                PERFORM quota_internal.close_overdue_in_the_way(
                    r.tenant, standings, r.line_accounts, at, wait_for_rows => false);
            END IF;
            PERFORM quota_internal.lock_accounts(r.tenant, r.line_accounts);
            PERFORM quota_internal.require_unchanged(r.tenant, lineage.config_version);
            IF raises.units <> '{}' AND lineage.frozen THEN
                d := quota_internal.frozen_answer(r.tenant, r.subject || r.also);
                d.reservation := r.id;
                d.state := r.state;
                d.expires_at := r.expires_at;
                RETURN d;
            END IF;
            at := quota_internal.clock();
            accounts := quota_internal.accounts_of(r);
            standings := quota_internal.judge_raises(r, accounts, raises, at, lineage.polling_hint_s);
            IF quota_internal.refuses(standings) AND NOT swept THEN
                -- Overdue holds may be in the way: begin anew and close them before any account is locked.
                swept := true;
                RAISE EXCEPTION USING ERRCODE = 'QT099';
            END IF;
            IF swept THEN
                standings := quota_internal.judge_raises(
                    r, quota_internal.discount(accounts, at, false), raises, at, lineage.polling_hint_s);
                IF quota_internal.refuses(standings) THEN
                    d.granted := false;
                    RETURN quota_internal.conclude(d, quota_internal.judge_raises(
                        r, quota_internal.discount(accounts, at), raises, at, lineage.polling_hint_s));
                END IF;
            END IF;
            r := quota_internal.resize(r, given.by_value, standings, at);
            d.replayed := true;
            d := quota_internal.conclude(d, quota_internal.standings_of(r));
            d.replayed := false;
            RETURN d;
        EXCEPTION WHEN SQLSTATE 'QT099' THEN
            NULL;
        END;
    END LOOP;
    RAISE EXCEPTION USING ERRCODE = 'serialization_failure',
        MESSAGE = format('the limits of tenant "%s" keep changing; no decision after 100 attempts', adjust.tenant),
        HINT = 'Retry the same totals.';
END
$$;
COMMENT ON FUNCTION quota.adjust(uuid, jsonb, text) IS
    'Sets the totals of an open hold. Raising is decided like a reserve, all or nothing; lowering is never refused.';

-- Writes new totals of an open hold: what was judged to fit is taken in the present windows, what is given up goes back from the
-- last line of each account first, each amount in the window it was taken in.
CREATE OR REPLACE FUNCTION quota_internal.resize(
    r quota_internal.reservations, totals jsonb, standings quota_internal.standing[], at timestamptz
) RETURNS quota_internal.reservations
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    s quota_internal.standing;
    a quota_internal.accounts;
    last integer;
    i integer;
    part numeric;
    surplus numeric;
    returned numeric;
    returned_now numeric;
BEGIN
    FOREACH s IN ARRAY standings LOOP
        last := (SELECT max(x.n) FROM unnest(r.line_accounts) WITH ORDINALITY x(account, n) WHERE x.account = s.account);
        IF r.line_windows[last] IS NOT DISTINCT FROM s.window_start THEN
            r.line_held[last] := greatest(r.line_held[last], r.line_booked[last]) + s.requested;
        ELSE
            r.line_accounts := r.line_accounts || s.account;
            r.line_windows := r.line_windows || s.window_start;
            r.line_held := r.line_held || s.requested;
            r.line_booked := r.line_booked || 0::numeric;
            r.line_charged := r.line_charged || r.line_charged[last];
        END IF;
    END LOOP;
    PERFORM quota_internal.take(r.tenant, standings, at, r.expires_at, '-infinity');

    FOREACH a IN ARRAY quota_internal.accounts_of(r) LOOP
        surplus := (r.held -> a.unit)::numeric - (totals -> a.unit)::numeric;
        CONTINUE WHEN surplus IS NULL OR surplus <= 0;
        returned := 0;
        returned_now := 0;
        FOR i IN REVERSE cardinality(r.line_accounts) .. 1 LOOP
            CONTINUE WHEN r.line_accounts[i] <> a.id;
            part := least(surplus - returned, greatest(r.line_held[i] - r.line_booked[i], 0));
            r.line_held[i] := r.line_held[i] - part;
            returned := returned + part;
            IF r.line_windows[i] IS NOT DISTINCT FROM a.window_start THEN
                returned_now := returned_now + part;
            END IF;
        END LOOP;
        UPDATE quota_internal.accounts b
        SET reserved = b.reserved - returned_now,
            level = CASE WHEN b.kind = 'bucket' THEN quota_internal.clamp(
                quota_internal.refilled(b.level, b.level_at, b.capacity, b.refill_per_s, resize.at) + returned, b.capacity) END,
            level_at = CASE WHEN b.kind = 'bucket' THEN greatest(b.level_at, resize.at) END
        WHERE b.tenant = r.tenant AND b.id = a.id;
    END LOOP;

    r.held := r.held || totals;
    UPDATE quota_internal.reservations x
    SET held = r.held,
        line_accounts = r.line_accounts,
        line_windows = r.line_windows,
        line_held = r.line_held,
        line_booked = r.line_booked,
        line_charged = r.line_charged
    WHERE x.tenant = r.tenant AND x.id = r.id;
    RETURN r;
END
$$;

CREATE OR REPLACE FUNCTION quota.extend(id uuid, ttl interval, tenant text DEFAULT 'default', OUT expires_at timestamptz)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    r quota_internal.reservations;
BEGIN
    PERFORM quota_internal.require_hold_arguments(extend.ttl, 0, NULL, '{}');
    r := quota_internal.lock_reservation(extend.tenant, extend.id);
    PERFORM quota_internal.require_ttl(extend.ttl, (
        SELECT t.ttl_maximum FROM quota_internal.tenants t WHERE t.name = extend.tenant));
    PERFORM quota_internal.require_open(r);
    expires_at := greatest(r.expires_at, quota_internal.later(quota_internal.clock(), extend.ttl));
    IF expires_at > r.expires_at THEN
        UPDATE quota_internal.reservations x
        SET expires_at = extend.expires_at
        WHERE x.tenant = r.tenant AND x.id = r.id;
    END IF;
END
$$;
COMMENT ON FUNCTION quota.extend(uuid, interval, text) IS
    'Keeps an open hold until now + ttl, never shorter than before: what a worker calls while the work goes on.';
