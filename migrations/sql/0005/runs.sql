-- Runs: subjects that live for a while and spend slices of their parents. A slice is a limit on the child, not a hold on the
-- parent: every call below charges both, once, by lineage. What live children may still spend is promised to them.

-- Children whose time has passed spend no more: they are frozen, so that what was promised to them can be promised anew. Taken
-- before any account is locked, as every change of a tenant's configuration is.
CREATE OR REPLACE FUNCTION quota_internal.end_runs(tenant text, names text[], at timestamptz) RETURNS void
LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    PERFORM quota_internal.change_config(tenant);
    PERFORM FROM quota_internal.subjects s
    WHERE s.tenant = end_runs.tenant AND s.name = ANY (names) ORDER BY s.name FOR NO KEY UPDATE;
    UPDATE quota_internal.subjects s SET frozen = 'the run has ended'
    WHERE s.tenant = end_runs.tenant AND s.name = ANY (names) AND s.frozen IS NULL;
    UPDATE quota_internal.runs r SET ended_at = least(at, r.expires_at)
    WHERE r.tenant = end_runs.tenant AND r.name = ANY (names) AND r.ended_at IS NULL;
END
$$;

-- The runs that a new one would hang below, nearest first, with their depth above it.
CREATE OR REPLACE FUNCTION quota_internal.runs_above(tenant text, lineage text[])
RETURNS TABLE (name text, depth bigint, max_width integer, max_depth integer, max_tokens bigint, expires_at timestamptz)
LANGUAGE sql STABLE AS $$
    SELECT r.name, l.depth, r.max_width, r.max_depth, r.max_tokens, r.expires_at
    FROM unnest(lineage) WITH ORDINALITY l(name, depth)
    JOIN quota_internal.runs r ON r.tenant = runs_above.tenant AND r.name = l.name
    ORDER BY l.depth
$$;

-- The first budget of the parent that has no room for the slice: reason null when all have.
CREATE OR REPLACE FUNCTION quota_internal.judge_slices(
    tenant text, parent text, asked quota_internal.costs, at timestamptz
) RETURNS quota.run_decision
LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
    answer quota.run_decision;
    one record;
BEGIN
    FOR one IN
        SELECT b.subject, b.limit_name, b.unit, b.capacity, b.spent, b.reserved, x.amount, b.window_end,
            coalesce((
                SELECT sum(greatest(0, c.capacity - c.spent - c.reserved))
                FROM quota_internal.read_accounts(judge_slices.tenant, ARRAY(
                    SELECT r.name FROM quota_internal.runs r
                    WHERE r.tenant = judge_slices.tenant AND r.parent = judge_slices.parent
                        AND r.ended_at IS NULL AND r.expires_at > at), at) c
                WHERE c.kind = 'budget' AND c.unit = b.unit AND c.limit_name = 'slice ' || b.unit
            ), 0) AS promised
        FROM quota_internal.read_accounts(judge_slices.tenant, ARRAY[judge_slices.parent], at) b
        JOIN unnest(asked.units, asked.amounts) x(unit, amount) ON x.unit = b.unit
        WHERE b.kind = 'budget' AND b.capacity IS NOT NULL
        ORDER BY b.limit_name
    LOOP
        IF one.spent + one.reserved + one.promised + one.amount > one.capacity THEN
            answer.reason := CASE
                WHEN one.amount > one.capacity THEN 'too_large'
                WHEN one.spent + one.amount > one.capacity THEN 'exhausted'
                ELSE 'held'
            END;
            answer.limit_subject := one.subject;
            answer.limit_name := one.limit_name;
            answer.unit := one.unit;
            answer.capacity := trim_scale(one.capacity);
            answer.available := trim_scale(greatest(0, one.capacity - one.spent - one.reserved));
            answer.promised := trim_scale(one.promised);
            answer.requested := trim_scale(one.amount);
            answer.retry_after_s := CASE answer.reason
                WHEN 'held' THEN (SELECT t.polling_hint_s FROM quota_internal.tenants t WHERE t.name = judge_slices.tenant)
                WHEN 'exhausted' THEN extract(epoch FROM (one.window_end - at))
            END;
            RETURN answer;
        END IF;
    END LOOP;
    RETURN answer;
END
$$;

CREATE OR REPLACE FUNCTION quota.create_run(
    name text,
    parent text,
    budget jsonb,
    ttl interval DEFAULT '1 hour',
    max_width integer DEFAULT NULL,
    max_depth integer DEFAULT NULL,
    max_tokens bigint DEFAULT NULL,
    stagger_s numeric DEFAULT 0,
    tenant text DEFAULT 'default'
) RETURNS quota.run_decision
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    asked quota_internal.costs := quota_internal.parse_costs(budget);
    answer quota.run_decision;
    at timestamptz := quota_internal.clock();
    above quota_internal.subjects;
    known quota_internal.runs;
    dead text[];
    width bigint;
    starts timestamptz;
    one record;
BEGIN
    IF quota_internal.require_subject_name(name) <> 'run' OR parent IS NULL OR NOT coalesce(max_width >= 0, true)
        OR NOT coalesce(max_depth >= 0, true) OR NOT coalesce(max_tokens >= 1, true)
        OR stagger_s IS NULL OR stagger_s < 0 OR stagger_s > 3600 OR ttl IS NULL OR ttl <= '0' OR ttl > interval '31 days'
    THEN
        PERFORM quota_internal.fail('invalid_argument',
            format('run "%s" below "%s": ttl %s, max_width %s, max_depth %s, max_tokens %s, stagger_s %s', left(name, 100),
                coalesce(left(parent, 100), 'null'), ttl, max_width, max_depth, max_tokens, stagger_s),
            'A run is run:id with a parent, a ttl up to 31 days, bounds that are not negative, a stagger up to 3600 s.');
    END IF;
    FOR one IN SELECT u FROM unnest(asked.units) u LOOP
        PERFORM quota_internal.require_unit(one.u);
        PERFORM quota_internal.require_same_shape(tenant, create_run.name,
            ROW('slice ' || one.u, one.u, 'budget', NULL, NULL, NULL, 'UTC')::quota_internal.definition);
    END LOOP;
    PERFORM quota_internal.require_subjects(tenant, ARRAY[parent]);
    dead := ARRAY(
        SELECT r.name FROM quota_internal.runs r
        WHERE r.tenant = create_run.tenant AND r.parent = create_run.parent AND r.ended_at IS NULL AND r.expires_at <= at);
    IF dead <> '{}' THEN
        PERFORM quota_internal.end_runs(tenant, dead, at);
    END IF;
    -- Births below one parent come one after another; then its accounts, so that no call below it slips in between.
    SELECT * INTO above FROM quota_internal.subjects s
    WHERE s.tenant = create_run.tenant AND s.name = create_run.parent FOR NO KEY UPDATE;
    PERFORM quota_internal.lock_accounts(tenant, ARRAY(
        SELECT a.id FROM quota_internal.accounts a WHERE a.tenant = create_run.tenant AND a.subject = create_run.parent));
    answer.run := name;
    SELECT * INTO known FROM quota_internal.runs r WHERE r.tenant = create_run.tenant AND r.name = create_run.name;
    IF FOUND THEN
        IF known.parent <> parent OR known.budget <> asked.by_value THEN
            PERFORM quota_internal.fail('id_conflict', format('run "%s" is another one', name), 'Give each run a name of its own.');
        END IF;
        answer.granted := known.ended_at IS NULL AND known.expires_at > at;
        answer.replayed := true;
        answer.expires_at := known.expires_at;
        answer.max_tokens := known.max_tokens;
        answer.start_after_s := 0;
        answer.reason := CASE WHEN NOT answer.granted THEN 'closed' END;
        RETURN answer;
    END IF;
    at := quota_internal.clock();
    SELECT count(*) INTO width FROM quota_internal.runs r
    WHERE r.tenant = create_run.tenant AND r.parent = create_run.parent AND r.ended_at IS NULL AND r.expires_at > at;
    SELECT x.name INTO answer.limit_subject FROM quota_internal.subjects x
    WHERE x.tenant = create_run.tenant AND x.name = ANY (above.lineage) AND x.frozen IS NOT NULL LIMIT 1;
    IF FOUND THEN
        answer.reason := 'frozen';
    END IF;
    FOR one IN SELECT * FROM quota_internal.runs_above(tenant, above.lineage) LOOP
        max_tokens := least(max_tokens, one.max_tokens);
        IF answer.reason IS NULL AND one.expires_at <= at THEN
            answer.reason := 'closed';
            answer.limit_subject := one.name;
        ELSIF answer.reason IS NULL AND one.depth > one.max_depth THEN
            answer.reason := 'depth';
            answer.limit_subject := one.name;
            answer.capacity := one.max_depth;
            answer.requested := one.depth;
        ELSIF answer.reason IS NULL AND one.depth = 1 AND width >= one.max_width THEN
            answer.reason := 'width';
            answer.limit_subject := one.name;
            answer.capacity := one.max_width;
            answer.requested := width + 1;
            answer.retry_after_s := (SELECT t.polling_hint_s FROM quota_internal.tenants t WHERE t.name = create_run.tenant);
        END IF;
    END LOOP;
    IF answer.reason IS NULL THEN
        answer := quota_internal.judge_slices(tenant, parent, asked, at);
        answer.run := name;
    END IF;
    answer.replayed := false;
    IF answer.reason IS NOT NULL THEN
        answer.granted := false;
        RETURN answer;
    END IF;
    -- The limits first: the subject is born bound to them, and nobody can have met it before.
    INSERT INTO quota_internal.limits (tenant, owner, name, unit, kind, capacity, on_expiry)
    SELECT create_run.tenant, create_run.name, 'slice ' || x.unit, x.unit, 'budget', x.amount,
        CASE WHEN u.money THEN 'charge' ELSE 'release' END
    FROM unnest(asked.units, asked.amounts) x(unit, amount) JOIN quota_internal.units u ON u.name = x.unit;
    IF NOT quota_internal.add_subject(tenant, name, parent, 'basic') THEN
        PERFORM quota_internal.already_exists('subject', name);
    END IF;
    -- Starts of one parent's children keep their distance.
    UPDATE quota_internal.runs r SET next_start = greatest(r.next_start, at) + r.stagger_s * interval '1 second'
    WHERE r.tenant = create_run.tenant AND r.name = create_run.parent
    RETURNING r.next_start - r.stagger_s * interval '1 second' INTO starts;
    INSERT INTO quota_internal.runs
        (tenant, name, parent, budget, started_at, expires_at, max_width, max_depth, max_tokens, stagger_s, next_start)
    VALUES (create_run.tenant, create_run.name, create_run.parent, asked.by_value, at, quota_internal.later(at, ttl),
        create_run.max_width, create_run.max_depth, max_tokens, create_run.stagger_s, at);
    answer.granted := true;
    answer.expires_at := quota_internal.later(at, ttl);
    answer.max_tokens := max_tokens;
    answer.start_after_s := trim_scale(coalesce(extract(epoch FROM (starts - at)), 0));
    RETURN answer;
END
$$;
COMMENT ON FUNCTION quota.create_run(text, text, jsonb, interval, integer, integer, bigint, numeric, text) IS
    'Starts a run below a parent with a slice of its budget, or refuses: when what is available and not promised to live runs is less.';

CREATE OR REPLACE FUNCTION quota.end_run(name text, tenant text DEFAULT 'default', OUT ended boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    tree text[];
BEGIN
    PERFORM quota_internal.require_subjects(tenant, ARRAY[name]);
    tree := ARRAY(
        SELECT r.name FROM quota_internal.runs r
        JOIN quota_internal.subjects s ON s.tenant = r.tenant AND s.name = r.name
        WHERE r.tenant = end_run.tenant AND end_run.name = ANY (s.lineage) AND r.ended_at IS NULL);
    ended := end_run.name = ANY (tree);
    IF tree <> '{}' THEN
        PERFORM quota_internal.end_runs(tenant, tree, quota_internal.clock());
    END IF;
END
$$;
COMMENT ON FUNCTION quota.end_run(text, text) IS
    'Ends a run and the runs below it: no new holds, open ones may settle. What was promised to it is its parent''s again.';

CREATE OR REPLACE VIEW quota.runs AS
SELECT r.tenant, r.name AS run, r.parent, CASE WHEN r.ended_at IS NOT NULL THEN 'ended'
    WHEN r.expires_at <= clock_timestamp() THEN 'expired' ELSE 'live' END AS state,
    r.budget, r.started_at, r.expires_at, r.ended_at, r.max_width, r.max_depth, r.max_tokens
FROM quota_internal.runs r
JOIN quota_internal.visible_tenants v ON v.tenant = r.tenant;
COMMENT ON VIEW quota.runs IS 'Runs: what they may spend, and for how long.';
