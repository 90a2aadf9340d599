-- Tenants, units and logins: what stands above subjects. Every admin change bumps its tenant's version, so that no reserve that takes
-- its locks afterwards decides by the old state, and writes one row of the admin log in its own transaction.

CREATE OR REPLACE FUNCTION quota_internal.log(tenant text, action text, target text, before jsonb, after jsonb, reason text) RETURNS void
LANGUAGE sql AS $$
    -- An application that acts for its own users says so with SET LOCAL quota.actor and quota.reason.
    INSERT INTO quota_internal.admin_log (at, actor, on_behalf_of, action, tenant, target, reason, before, after, request_id)
    SELECT quota_internal.clock(), session_user, nullif(current_setting('quota.actor', true), ''), log.action, log.tenant,
        log.target, coalesce(log.reason, nullif(current_setting('quota.reason', true), '')), log.before, log.after,
        nullif(current_setting('quota.request_id', true), '')
$$;

-- Takes the tenant's row, so that the admin changes of one tenant come one after another, and moves its versions on.
CREATE OR REPLACE FUNCTION quota_internal.change_config(tenant text, rebind boolean DEFAULT false) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM quota_internal.require_tenant(tenant);
    UPDATE quota_internal.tenants t
    SET config_version = t.config_version + 1,
        binding_version = t.binding_version + CASE WHEN rebind THEN 1 ELSE 0 END
    WHERE t.name = change_config.tenant;
END
$$;

-- What every tenant shares is not for a login that is bound to one of them.
CREATE OR REPLACE FUNCTION quota_internal.require_unbound_login() RETURNS void
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF EXISTS (SELECT FROM quota_internal.logins g WHERE g.role = session_user) THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = format('login "%s" is bound to one tenant and may not change what all tenants share', session_user),
            HINT = 'Use a login that is not bound.';
    END IF;
END
$$;

CREATE OR REPLACE FUNCTION quota_internal.already_exists(what text, name text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM quota_internal.fail('already_exists', format('%s "%s" exists', what, name), 'Names are never reused; choose another.');
END
$$;

CREATE OR REPLACE FUNCTION quota.create_tenant(name text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM quota_internal.require_unbound_login();
    PERFORM quota_internal.require_name('tenant', name);
    INSERT INTO quota_internal.tenants (name, created_at)
    VALUES (create_tenant.name, quota_internal.clock()) ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        PERFORM quota_internal.already_exists('tenant', name);
    END IF;
    PERFORM quota_internal.log(name, 'create_tenant', name, NULL, NULL, NULL);
END
$$;

CREATE OR REPLACE FUNCTION quota.configure_tenant(
    tenant text, ttl_maximum interval DEFAULT NULL, polling_hint_s numeric DEFAULT NULL, keep interval DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    old quota_internal.tenants;
    new quota_internal.tenants;
BEGIN
    IF ttl_maximum <= '0' OR keep < '0' OR NOT coalesce(polling_hint_s > 0 AND polling_hint_s < 1000000, true) THEN
        PERFORM quota_internal.fail('invalid_argument',
            format('ttl_maximum %s, polling_hint_s %s, keep %s: not all are above 0', ttl_maximum, polling_hint_s, keep),
            'Pass null for what should stay as it is.');
    END IF;
    PERFORM quota_internal.change_config(configure_tenant.tenant);
    SELECT * INTO old FROM quota_internal.tenants t WHERE t.name = configure_tenant.tenant;
    UPDATE quota_internal.tenants t
    SET ttl_maximum = coalesce(configure_tenant.ttl_maximum, t.ttl_maximum),
        polling_hint_s = coalesce(configure_tenant.polling_hint_s, t.polling_hint_s),
        keep = coalesce(configure_tenant.keep, t.keep)
    WHERE t.name = configure_tenant.tenant
    RETURNING * INTO new;
    PERFORM quota_internal.log(tenant, 'configure_tenant', tenant,
        to_jsonb(old) - '{config_version,binding_version,created_at}'::text[],
        to_jsonb(new) - '{config_version,binding_version,created_at}'::text[], NULL);
END
$$;
COMMENT ON FUNCTION quota.configure_tenant(text, interval, numeric, interval) IS
    'Sets a tenant''s longest TTL, the wait that held and concurrency refusals suggest, and how long closed reservations are kept.';

CREATE OR REPLACE FUNCTION quota.create_unit(name text, money boolean DEFAULT false) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM quota_internal.require_unbound_login();
    PERFORM quota_internal.require_name('unit', name);
    IF money IS NULL THEN
        PERFORM quota_internal.fail('invalid_argument', 'money is null', 'Pass true or false.');
    END IF;
    INSERT INTO quota_internal.units (name, money) VALUES (create_unit.name, create_unit.money) ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        PERFORM quota_internal.already_exists('unit', name);
    END IF;
    PERFORM quota_internal.log(NULL, 'create_unit', name, NULL, jsonb_build_object('money', money), NULL);
END
$$;

CREATE OR REPLACE FUNCTION quota.bind_login(role name, tenant text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    concerned text := tenant;
BEGIN
    PERFORM quota_internal.require_unbound_login();
    IF NOT EXISTS (SELECT FROM pg_roles r WHERE r.rolname = bind_login.role) THEN
        PERFORM quota_internal.fail('invalid_argument', format('there is no database role "%s"', role), 'Create the login first.');
    END IF;
    IF tenant IS NULL THEN
        -- News of the tenant that it was bound to: a row of the log without a tenant can be read by the others.
        DELETE FROM quota_internal.logins g WHERE g.role = bind_login.role::text RETURNING g.tenant INTO concerned;
    ELSE
        PERFORM quota_internal.require_tenant(tenant);
        INSERT INTO quota_internal.logins (role, tenant) VALUES (bind_login.role::text, bind_login.tenant)
        ON CONFLICT (role) DO UPDATE SET tenant = EXCLUDED.tenant;
    END IF;
    PERFORM quota_internal.log(concerned, 'bind_login', role::text, NULL, jsonb_build_object('tenant', tenant), NULL);
END
$$;
COMMENT ON FUNCTION quota.bind_login(name, text) IS
    'Confines a database login to one tenant: the others do not exist for it. A null tenant lifts the bond.';
