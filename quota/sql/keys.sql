-- API keys: who authenticates as key:<id>. A key is a secret that names its id; what it may spend stands on its subject. Secrets
-- never come here: their SHA-256 does.

CREATE OR REPLACE FUNCTION quota_internal.require_secret_hash(secret_hash bytea) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF secret_hash IS NULL OR octet_length(secret_hash) <> 32 THEN
        PERFORM quota_internal.fail('invalid_argument', 'secret_hash has not the 32 bytes of a SHA-256',
            'Draw 256 random bits, give them to the holder, and pass sha256 of the secret as it is written.');
    END IF;
END
$$;

-- Ids are public and stand in the secret in front of an underscore.
CREATE OR REPLACE FUNCTION quota_internal.require_public_id(what text, id text) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF id IS NULL OR id !~ '^[a-z0-9][a-z0-9-]{0,62}$' THEN
        PERFORM quota_internal.fail('invalid_name', format('%L is no id of a %s', left(id, 100), what),
            'Ids have 1 to 63 of a-z, 0-9 and -, and do not begin with -.');
    END IF;
END
$$;

-- Equal or not, in a time that does not tell how much of them agrees: what is compared is their hash with a fresh salt.
CREATE OR REPLACE FUNCTION quota_internal.same_secret(known bytea, given bytea) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    salt bytea := uuid_send(gen_random_uuid());
BEGIN
    RETURN coalesce(sha256(salt || known) = sha256(salt || given), false);
END
$$;

-- The tenant's row first, as every admin change takes it, then the key.
CREATE OR REPLACE FUNCTION quota_internal.lock_key(tenant text, id text) RETURNS quota_internal.api_keys
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    found_key quota_internal.api_keys;
BEGIN
    PERFORM quota_internal.require_tenant(tenant);
    PERFORM FROM quota_internal.tenants t WHERE t.name = lock_key.tenant FOR NO KEY UPDATE;
    SELECT * INTO found_key FROM quota_internal.api_keys k
    WHERE k.tenant = lock_key.tenant AND k.id = lock_key.id FOR UPDATE;
    IF NOT FOUND THEN
        PERFORM quota_internal.fail('unknown_key', format('there is no key "%s" in tenant "%s"', left(id, 100), tenant),
            'Pass the public id of a key, as quota.keys lists it.');
    END IF;
    RETURN found_key;
END
$$;

CREATE OR REPLACE FUNCTION quota_internal.require_not_revoked(what text, id text, revoked_at timestamptz) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF revoked_at IS NOT NULL THEN
        PERFORM quota_internal.fail('revoked', format('%s "%s" is revoked', what, id), 'That is final; create another one.');
    END IF;
END
$$;

CREATE OR REPLACE FUNCTION quota.create_key(
    id text,
    name text,
    secret_hash bytea,
    parent text DEFAULT NULL,
    rate_tier text DEFAULT NULL,
    expires_at timestamptz DEFAULT NULL,
    tenant text DEFAULT 'default'
) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    subject text := 'key:' || create_key.id;
    known quota_internal.subjects;
    now timestamptz;
BEGIN
    PERFORM quota_internal.require_public_id('key', id);
    PERFORM quota_internal.require_name('key', name);
    PERFORM quota_internal.require_secret_hash(secret_hash);
    PERFORM quota_internal.require_tenant(tenant);
    PERFORM FROM quota_internal.tenants t WHERE t.name = create_key.tenant FOR NO KEY UPDATE;
    IF rate_tier IS NOT NULL THEN
        PERFORM quota_internal.require_tier(tenant, rate_tier);
    END IF;
    -- A subject that workers know already gets a key of its own; its parent and its tier are not moved by that.
    IF NOT quota_internal.add_subject(tenant, subject, parent, coalesce(rate_tier, 'basic')) THEN
        SELECT * INTO known FROM quota_internal.subjects s WHERE s.tenant = create_key.tenant AND s.name = subject;
        IF known.retired THEN
            PERFORM quota_internal.already_exists('subject', subject);
        END IF;
        IF parent IS NOT NULL AND known.parent IS DISTINCT FROM create_key.parent THEN
            PERFORM quota_internal.fail('parent_differs',
                format('"%s" has %s, not "%s"', subject, coalesce('the parent "' || known.parent || '"', 'no parent'), parent),
                'Leave the parent out, or move the subject first.');
        END IF;
        IF rate_tier IS NOT NULL AND known.rate_tier <> create_key.rate_tier THEN
            PERFORM quota.set_rate_tier(subject, rate_tier, tenant);
        END IF;
    END IF;
    now := quota_internal.clock();
    INSERT INTO quota_internal.api_keys (tenant, id, subject, name, secret_hash, created_at, expires_at, changed_at)
    VALUES (create_key.tenant, create_key.id, subject, create_key.name, create_key.secret_hash, now, create_key.expires_at, now)
    ON CONFLICT ON CONSTRAINT api_keys_pkey DO NOTHING;
    IF NOT FOUND THEN
        PERFORM quota_internal.already_exists('key', id);
    END IF;
    PERFORM quota_internal.log(tenant, 'create_key', subject, NULL,
        jsonb_build_object('name', name, 'parent', parent, 'rate_tier', rate_tier, 'expires_at', expires_at), NULL);
END
$$;
COMMENT ON FUNCTION quota.create_key(text, text, bytea, text, text, timestamptz, text) IS
    'Makes a key that authenticates the subject key:<id>, and the subject if it is not there. secret_hash is the SHA-256 of the secret.';

CREATE OR REPLACE FUNCTION quota.rename_key(id text, name text, tenant text DEFAULT 'default') RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    old quota_internal.api_keys;
BEGIN
    PERFORM quota_internal.require_name('key', name);
    old := quota_internal.lock_key(tenant, id);
    UPDATE quota_internal.api_keys k SET name = rename_key.name, changed_at = quota_internal.clock()
    WHERE k.tenant = rename_key.tenant AND k.id = rename_key.id;
    PERFORM quota_internal.log(tenant, 'rename_key', 'key:' || id,
        jsonb_build_object('name', old.name), jsonb_build_object('name', name), NULL);
END
$$;

CREATE OR REPLACE FUNCTION quota.set_key_expiry(id text, expires_at timestamptz, tenant text DEFAULT 'default') RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    old quota_internal.api_keys := quota_internal.lock_key(tenant, id);
BEGIN
    PERFORM quota_internal.require_not_revoked('key', id, old.revoked_at);
    UPDATE quota_internal.api_keys k SET expires_at = set_key_expiry.expires_at, changed_at = quota_internal.clock()
    WHERE k.tenant = set_key_expiry.tenant AND k.id = set_key_expiry.id;
    PERFORM quota_internal.log(tenant, 'set_key_expiry', 'key:' || id,
        jsonb_build_object('expires_at', old.expires_at), jsonb_build_object('expires_at', expires_at), NULL);
END
$$;
COMMENT ON FUNCTION quota.set_key_expiry(text, timestamptz, text) IS
    'From that instant on the key authenticates nobody; null: it does not expire. Its subject and its holds are not touched.';

CREATE OR REPLACE FUNCTION quota.rotate_key(
    id text, secret_hash bytea, overlap interval DEFAULT '0', tenant text DEFAULT 'default', OUT old_secret_until timestamptz
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    old quota_internal.api_keys;
    now timestamptz;
BEGIN
    PERFORM quota_internal.require_secret_hash(secret_hash);
    IF overlap IS NULL OR overlap < '0' OR overlap > '30 days' THEN
        PERFORM quota_internal.fail('invalid_argument', format('overlap %s is not 0 to 30 days', coalesce(overlap::text, 'null')),
            'Pass how long the secret before stays good.');
    END IF;
    old := quota_internal.lock_key(tenant, id);
    PERFORM quota_internal.require_not_revoked('key', id, old.revoked_at);
    now := quota_internal.clock();
    old_secret_until := quota_internal.later(now, overlap);
    -- A second rotation ends an overlap that still runs: at most two secrets are good at a time.
    UPDATE quota_internal.api_keys k
    SET secret_hash = rotate_key.secret_hash, old_secret_hash = old.secret_hash, old_secret_until = rotate_key.old_secret_until,
        changed_at = now
    WHERE k.tenant = rotate_key.tenant AND k.id = rotate_key.id;
    PERFORM quota_internal.log(tenant, 'rotate_key', 'key:' || id,
        NULL, jsonb_build_object('old_secret_until', old_secret_until), NULL);
END
$$;
COMMENT ON FUNCTION quota.rotate_key(text, bytea, interval, text) IS
    'Gives a key a new secret; the one before stays good for the overlap. Answers until when.';

CREATE OR REPLACE FUNCTION quota.revoke_key(id text, reason text, tenant text DEFAULT 'default') RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    old quota_internal.api_keys;
BEGIN
    PERFORM quota_internal.require_reason(reason);
    old := quota_internal.lock_key(tenant, id);
    IF old.revoked_at IS NOT NULL THEN
        RETURN;
    END IF;
    UPDATE quota_internal.api_keys k
    SET revoked_at = quota_internal.clock(), changed_at = quota_internal.clock(), old_secret_hash = NULL, old_secret_until = NULL
    WHERE k.tenant = revoke_key.tenant AND k.id = revoke_key.id;
    -- Whoever authenticated the key a moment ago gets no hold any more, however long they remember it.
    IF EXISTS (SELECT FROM quota_internal.subjects s
               WHERE s.tenant = revoke_key.tenant AND s.name = 'key:' || revoke_key.id AND NOT s.retired) THEN
        PERFORM quota_internal.set_frozen(tenant, 'key:' || id, reason, 'freeze');
    END IF;
    PERFORM quota_internal.log(tenant, 'revoke_key', 'key:' || id, NULL, NULL, reason);
END
$$;
COMMENT ON FUNCTION quota.revoke_key(text, text, text) IS
    'Ends a key for ever, and freezes its subject. Open holds may still settle.';

CREATE OR REPLACE FUNCTION quota.verify_key(
    id text, secret_hash bytea,
    OUT tenant text, OUT subject text, OUT name text, OUT parent text, OUT rate_tier text, OUT state text, OUT frozen text,
    OUT expires_at timestamptz
) RETURNS SETOF record
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    at timestamptz := quota_internal.clock();
BEGIN
    RETURN QUERY
    SELECT k.tenant, s.name, k.name, s.parent, s.rate_tier,
        CASE WHEN k.revoked_at IS NOT NULL THEN 'revoked'
            WHEN s.retired THEN 'retired'
            WHEN k.expires_at <= at THEN 'expired'
            ELSE 'active' END,
        s.frozen, least(k.expires_at, CASE WHEN NOT current_secret THEN k.old_secret_until END)
    FROM quota_internal.api_keys k
    JOIN quota_internal.visible_tenants v ON v.tenant = k.tenant
    JOIN quota_internal.subjects s ON s.tenant = k.tenant AND s.name = k.subject
    CROSS JOIN LATERAL (SELECT quota_internal.same_secret(k.secret_hash, verify_key.secret_hash) AS current_secret) c
    WHERE k.id = verify_key.id
        AND (current_secret
            OR k.old_secret_until > at AND quota_internal.same_secret(k.old_secret_hash, verify_key.secret_hash));
END
$$;
COMMENT ON FUNCTION quota.verify_key(text, bytea) IS
    'Whose secret this is, and in which state; no row when it is nobody''s. expires_at: when this secret stops being good.';
