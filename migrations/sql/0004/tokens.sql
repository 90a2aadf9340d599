-- Tokens of the HTTP API: who may call it, as what, for which tenant. Tenant null: for all tenants, stored as ''.

CREATE OR REPLACE FUNCTION quota_internal.require_token_scope(tenant text) RETURNS void
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF tenant IS NULL THEN
        PERFORM quota_internal.require_unbound_login();
    ELSE
        PERFORM quota_internal.require_tenant(tenant);
    END IF;
END
$$;

CREATE OR REPLACE FUNCTION quota.create_token(
    id text,
    name text,
    role text,
    secret_hash bytea,
    expires_at timestamptz DEFAULT NULL,
    tenant text DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    PERFORM quota_internal.require_public_id('token', id);
    PERFORM quota_internal.require_name('token', name);
    PERFORM quota_internal.require_secret_hash(secret_hash);
    IF role IS NULL OR role NOT IN ('worker', 'viewer', 'operator', 'owner') THEN
        PERFORM quota_internal.fail('invalid_argument', format('"%s" is no role', coalesce(left(role, 50), 'null')),
            'A token is a worker, viewer, operator or owner.');
    END IF;
    PERFORM quota_internal.require_token_scope(tenant);
    IF EXISTS (SELECT FROM quota_internal.api_tokens t WHERE t.id = create_token.id) THEN
        PERFORM quota_internal.already_exists('token', id);
    END IF;
    INSERT INTO quota_internal.api_tokens (tenant, id, name, role, secret_hash, created_at, expires_at)
    VALUES (coalesce(create_token.tenant, ''), create_token.id, create_token.name, create_token.role, create_token.secret_hash,
        quota_internal.clock(), create_token.expires_at)
    ON CONFLICT ON CONSTRAINT api_tokens_pkey DO NOTHING;
    IF NOT FOUND THEN
        PERFORM quota_internal.already_exists('token', id);
    END IF;
    PERFORM quota_internal.log(tenant, 'create_token', id, NULL,
        jsonb_build_object('name', name, 'role', role, 'expires_at', expires_at), NULL);
END
$$;
COMMENT ON FUNCTION quota.create_token(text, text, text, bytea, timestamptz, text) IS
    'Makes a token of the HTTP API. Tenant null: it may act for every tenant.';

CREATE OR REPLACE FUNCTION quota.revoke_token(id text, reason text, tenant text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    old timestamptz;
BEGIN
    PERFORM quota_internal.require_reason(reason);
    PERFORM quota_internal.require_token_scope(tenant);
    SELECT t.revoked_at INTO old FROM quota_internal.api_tokens t
    WHERE t.tenant = coalesce(revoke_token.tenant, '') AND t.id = revoke_token.id FOR UPDATE;
    IF NOT FOUND THEN
        PERFORM quota_internal.fail('unknown_token', format('there is no token "%s"', left(id, 100)),
            'Pass the public id of a token and its tenant, as quota.tokens lists them.');
    END IF;
    IF old IS NOT NULL THEN
        RETURN;
    END IF;
    UPDATE quota_internal.api_tokens t SET revoked_at = quota_internal.clock()
    WHERE t.tenant = coalesce(revoke_token.tenant, '') AND t.id = revoke_token.id;
    PERFORM quota_internal.log(tenant, 'revoke_token', id, NULL, NULL, reason);
END
$$;

CREATE OR REPLACE FUNCTION quota.verify_token(
    id text, secret_hash bytea, OUT tenant text, OUT role text, OUT expires_at timestamptz
) RETURNS SETOF record
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT nullif(t.tenant, ''), t.role, t.expires_at
    FROM quota_internal.api_tokens t
    WHERE t.id = verify_token.id AND quota_internal.same_secret(t.secret_hash, verify_token.secret_hash)
        AND t.revoked_at IS NULL AND coalesce(t.expires_at > quota_internal.clock(), true)
        AND (t.tenant = '' OR EXISTS (SELECT FROM quota_internal.visible_tenants v WHERE v.tenant = t.tenant));
END
$$;
COMMENT ON FUNCTION quota.verify_token(text, bytea) IS
    'What a token may do; no row for one that is unknown, wrong, expired or revoked. Tenant null: every tenant.';
