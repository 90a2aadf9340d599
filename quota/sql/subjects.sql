-- Subjects: births, moves, retirements, freezes. The tree is what charges climb.

-- A new subject below its parent; false if it is there already. The parent's row is shared with other births and kept from moving.
CREATE OR REPLACE FUNCTION quota_internal.add_subject(tenant text, name text, parent text, rate_tier text) RETURNS boolean
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    kind text := quota_internal.require_subject_name(name);
    above text[] := '{}';
BEGIN
    PERFORM quota_internal.require_tenant(tenant);
    IF parent = name THEN
        PERFORM quota_internal.fail('cycle', format('"%s" cannot be its own parent', name), 'Name another parent, or none.');
    END IF;
    IF parent IS NOT NULL THEN
        SELECT s.lineage INTO above FROM quota_internal.subjects s
        WHERE s.tenant = add_subject.tenant AND s.name = add_subject.parent AND NOT s.retired
        FOR SHARE;
        IF NOT FOUND THEN
            PERFORM quota_internal.require_subjects(tenant, ARRAY[parent]);
        END IF;
        PERFORM quota_internal.require_depth(name, cardinality(above) + 1);
    END IF;
    INSERT INTO quota_internal.subjects (tenant, name, kind, parent, lineage, rate_tier, created_at)
    VALUES (add_subject.tenant, add_subject.name, kind, add_subject.parent, add_subject.name || above, add_subject.rate_tier,
        quota_internal.clock())
    ON CONFLICT (tenant, name) DO NOTHING;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM quota_internal.bind(tenant, ARRAY[name]);
    RETURN true;
END
$$;

CREATE OR REPLACE FUNCTION quota_internal.require_depth(name text, depth integer) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF depth > 8 THEN
        PERFORM quota_internal.fail('too_deep', format('the lineage of "%s" would have %s subjects', name, depth),
            'A lineage has at most 8 subjects, itself included.');
    END IF;
END
$$;

CREATE OR REPLACE FUNCTION quota.ensure_subject(
    name text, parent text DEFAULT NULL, tenant text DEFAULT 'default', OUT created boolean
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    known quota_internal.subjects;
BEGIN
    PERFORM quota_internal.require_tenant(tenant);
    created := false;
    SELECT * INTO known FROM quota_internal.subjects s WHERE s.tenant = ensure_subject.tenant AND s.name = ensure_subject.name;
    IF NOT FOUND THEN
        created := quota_internal.add_subject(tenant, name, parent, 'basic');
        SELECT * INTO known FROM quota_internal.subjects s
        WHERE s.tenant = ensure_subject.tenant AND s.name = ensure_subject.name;
    END IF;
    IF known.retired THEN
        PERFORM quota_internal.require_subjects(tenant, ARRAY[name]);
    END IF;
    -- No parent named: nothing is claimed about it.
    IF parent IS NOT NULL AND known.parent IS DISTINCT FROM ensure_subject.parent THEN
        PERFORM quota_internal.fail('parent_differs',
            format('"%s" has %s, not "%s"', name, coalesce('the parent "' || known.parent || '"', 'no parent'), parent),
            'Move it with quota.move_subject if that is meant.');
    END IF;
END
$$;
COMMENT ON FUNCTION quota.ensure_subject(text, text, text) IS
    'First contact of an id that a gateway has authenticated: creates the subject if it is not there. Never moves it.';

CREATE OR REPLACE FUNCTION quota.create_subject(
    name text, parent text DEFAULT NULL, rate_tier text DEFAULT NULL, tenant text DEFAULT 'default'
) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM quota_internal.require_tenant(tenant);
    PERFORM quota_internal.require_subject_name(name);
    IF rate_tier IS NOT NULL THEN
        PERFORM quota_internal.require_kind_with_tier(name);
        PERFORM quota_internal.require_tier(tenant, rate_tier);
    END IF;
    IF NOT quota_internal.add_subject(tenant, name, parent, coalesce(rate_tier, 'basic')) THEN
        PERFORM quota_internal.already_exists('subject', name);
    END IF;
    PERFORM quota_internal.log(tenant, 'create_subject', name, NULL,
        jsonb_build_object('parent', parent, 'rate_tier', rate_tier), NULL);
END
$$;

-- The subject and everything below it, locked by name against births, moves and retirements.
CREATE OR REPLACE FUNCTION quota_internal.lock_tree(tenant text, root text) RETURNS text[]
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    tree text[];
BEGIN
    PERFORM quota_internal.require_subjects(tenant, ARRAY[root]);
    LOOP
        WITH RECURSIVE below AS (
            SELECT lock_tree.root COLLATE "C" AS name
            UNION
            SELECT s.name FROM quota_internal.subjects s JOIN below b ON s.parent = b.name WHERE s.tenant = lock_tree.tenant
        )
        SELECT array_agg(b.name) INTO tree FROM below b;
        PERFORM FROM quota_internal.subjects s
        WHERE s.tenant = lock_tree.tenant AND s.name = ANY (tree)
        ORDER BY s.name FOR UPDATE;
        -- A child born before its parent was locked belongs to the tree too.
        EXIT WHEN NOT EXISTS (
            SELECT FROM quota_internal.subjects s
            WHERE s.tenant = lock_tree.tenant AND s.parent = ANY (tree) AND s.name <> ALL (tree));
    END LOOP;
    RETURN tree;
END
$$;

-- Refused while holds are open on the tree or name it; holds whose time has passed are closed on the way. The accounts of the
-- tree and above it are locked, so that a reserve in flight has either committed or will see the change.
CREATE OR REPLACE FUNCTION quota_internal.require_no_open_holds(tenant text, tree text[]) RETURNS void
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    touched bigint[];
    at timestamptz := quota_internal.clock();
    due uuid[];
    open uuid;
BEGIN
    touched := ARRAY(
        SELECT a.id FROM quota_internal.accounts a
        WHERE a.tenant = require_no_open_holds.tenant AND a.subject = ANY (
            ARRAY(SELECT l.name FROM quota_internal.subjects s CROSS JOIN unnest(s.lineage) l(name)
                  WHERE s.tenant = require_no_open_holds.tenant AND s.name = ANY (tree))));
    due := ARRAY(
        SELECT r.id FROM quota_internal.reservations r
        WHERE r.tenant = require_no_open_holds.tenant AND r.state = 'held' AND r.expires_at <= at
            AND (r.subject = ANY (tree) OR r.also && tree));
    IF due <> '{}' THEN
        PERFORM quota_internal.expire(tenant, due, touched);
    ELSE
        PERFORM quota_internal.lock_accounts(tenant, touched);
    END IF;
    SELECT r.id INTO open FROM quota_internal.reservations r
    WHERE r.tenant = require_no_open_holds.tenant AND r.state = 'held' AND (r.subject = ANY (tree) OR r.also && tree)
    LIMIT 1;
    IF FOUND THEN
        PERFORM quota_internal.fail('has_open_holds', format('reservation %s is open on "%s" or below', open, tree[1]),
            'Freeze the subject, wait until its holds are settled or expire, and try again.');
    END IF;
END
$$;

CREATE OR REPLACE FUNCTION quota.move_subject(name text, parent text, tenant text DEFAULT 'default') RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    tree text[];
    old quota_internal.subjects;
    above text[] := '{}';
BEGIN
    PERFORM quota_internal.change_config(tenant);
    tree := quota_internal.lock_tree(tenant, name);
    IF parent = ANY (tree) THEN
        PERFORM quota_internal.fail('cycle', format('"%s" is "%s" or lies below it', parent, name), 'Name a parent outside of its own tree.');
    END IF;
    IF parent IS NOT NULL THEN
        PERFORM quota_internal.require_subjects(tenant, ARRAY[parent]);
        above := (SELECT s.lineage FROM quota_internal.subjects s
                  WHERE s.tenant = move_subject.tenant AND s.name = move_subject.parent FOR SHARE);
    END IF;
    SELECT * INTO old FROM quota_internal.subjects s WHERE s.tenant = move_subject.tenant AND s.name = move_subject.name;
    PERFORM quota_internal.require_depth(name, (
        SELECT max(array_position(s.lineage, move_subject.name)) FROM quota_internal.subjects s
        WHERE s.tenant = move_subject.tenant AND s.name = ANY (tree)) + cardinality(above));
    PERFORM quota_internal.require_no_open_holds(tenant, tree);
    UPDATE quota_internal.subjects s
    SET parent = CASE WHEN s.name = move_subject.name THEN move_subject.parent ELSE s.parent END,
        lineage = s.lineage[: array_position(s.lineage, move_subject.name)] || above
    WHERE s.tenant = move_subject.tenant AND s.name = ANY (tree);
    PERFORM quota_internal.log(tenant, 'move_subject', name,
        jsonb_build_object('parent', old.parent), jsonb_build_object('parent', move_subject.parent), NULL);
END
$$;

CREATE OR REPLACE FUNCTION quota.retire_subject(name text, tenant text DEFAULT 'default') RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    tree text[];
BEGIN
    PERFORM quota_internal.change_config(tenant);
    tree := quota_internal.lock_tree(tenant, name);
    PERFORM quota_internal.require_no_open_holds(tenant, tree);
    UPDATE quota_internal.subjects s SET retired = true WHERE s.tenant = retire_subject.tenant AND s.name = ANY (tree);
    PERFORM quota_internal.log(tenant, 'retire_subject', name, NULL, jsonb_build_object('retired', to_jsonb(tree)), NULL);
END
$$;
COMMENT ON FUNCTION quota.retire_subject(text, text) IS
    'Ends a subject and all below it: unknown to every reserve from then on. Its ledger stays, its name is never used again.';

CREATE OR REPLACE FUNCTION quota_internal.set_frozen(tenant text, name text, reason text, action text) RETURNS void
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    old text;
BEGIN
    PERFORM quota_internal.change_config(tenant);
    PERFORM quota_internal.require_subjects(tenant, ARRAY[name]);
    SELECT s.frozen INTO old FROM quota_internal.subjects s
    WHERE s.tenant = set_frozen.tenant AND s.name = set_frozen.name FOR NO KEY UPDATE;
    UPDATE quota_internal.subjects s SET frozen = set_frozen.reason
    WHERE s.tenant = set_frozen.tenant AND s.name = set_frozen.name;
    PERFORM quota_internal.log(tenant, action, name, jsonb_build_object('frozen', old), jsonb_build_object('frozen', reason), reason);
END
$$;

CREATE OR REPLACE FUNCTION quota.freeze(name text, reason text, tenant text DEFAULT 'default') RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM quota_internal.require_reason(reason);
    PERFORM quota_internal.set_frozen(tenant, name, reason, 'freeze');
END
$$;
COMMENT ON FUNCTION quota.freeze(text, text, text) IS
    'No new holds on the subject or below it, from the next decision on; what is open may settle and release.';

CREATE OR REPLACE FUNCTION quota.unfreeze(name text, tenant text DEFAULT 'default') RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM quota_internal.set_frozen(tenant, name, NULL, 'unfreeze');
END
$$;
