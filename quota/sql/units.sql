-- What callers send: amounts, costs, names. Everything that is not exactly right is refused here, never rounded or altered.

-- One amount of a cost map: a JSON number, or a string of decimal digits. Finite, >= 0, < 10^18, at most 12 fractional digits.
CREATE OR REPLACE FUNCTION quota_internal.amount(unit text, value jsonb) RETURNS numeric
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
DECLARE
    written text;
    exact numeric;
BEGIN
    IF jsonb_typeof(value) = 'number' THEN
        exact := value::numeric;
    ELSE
        written := value #>> '{}';
        IF jsonb_typeof(value) <> 'string' OR length(written) > 100 OR written !~ '^[0-9]+(\.[0-9]+)?$' THEN
            PERFORM quota_internal.fail('invalid_amount', format('%s is no amount of "%s"', left(value::text, 100), unit),
                'Send a JSON number or a string of decimal digits such as "0.25".');
        END IF;
        exact := written::numeric;
    END IF;
    IF exact >= 0 AND exact < 1000000000000000000 AND scale(exact) <= 12 THEN
        RETURN exact;
    END IF;
    PERFORM quota_internal.require_amount(unit, exact);
    RETURN exact;
END
$$;

CREATE OR REPLACE FUNCTION quota_internal.is_amount(exact numeric) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT exact >= 0 AND exact < 1000000000000000000 AND min_scale(exact) <= 12
$$;

CREATE OR REPLACE FUNCTION quota_internal.require_amount(what text, exact numeric) RETURNS void
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
BEGIN
    IF quota_internal.is_amount(exact) THEN
        RETURN;
    END IF;
    IF exact >= 1000000000000000000 AND exact <> 'NaN' AND exact <> 'Infinity' THEN
        PERFORM quota_internal.fail('amount_out_of_range', format('%s of "%s" is not below 10^18', left(exact::text, 60), what),
            'Amounts are below 10^18: count in a larger unit.');
    END IF;
    PERFORM quota_internal.fail('invalid_amount', format('%s is no amount of "%s"', left(exact::text, 60), what),
        'Amounts are finite, at least 0, and have at most 12 fractional digits.');
END
$$;

-- Takes a cost map apart. (jsonb_path_query_array instead of jsonb_each: a function call costs less than a statement.)
CREATE OR REPLACE FUNCTION quota_internal.parse_costs(costs jsonb) RETURNS quota_internal.costs
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
DECLARE
    pairs jsonb;
    pair jsonb;
    value jsonb;
    exact numeric;
    parsed quota_internal.costs;
BEGIN
    IF jsonb_typeof(costs) IS DISTINCT FROM 'object' OR costs = '{}' THEN
        PERFORM quota_internal.fail('invalid_costs', format('%s is no cost map', coalesce(left(costs::text, 100), 'null')),
            'Send an object of unit and amount, such as {"usd": "0.25"}.');
    END IF;
    pairs := jsonb_path_query_array(costs, '$.keyvalue()');
    parsed := ROW('{}', '{}', costs);
    FOR i IN 0 .. jsonb_array_length(pairs) - 1 LOOP
        pair := pairs -> i;
        value := pair -> 'value';
        exact := quota_internal.amount(pair ->> 'key', value);
        parsed.units := parsed.units || (pair ->> 'key');
        parsed.amounts := parsed.amounts || exact;
        IF jsonb_typeof(value) = 'string' THEN
            parsed.by_value := parsed.by_value || jsonb_build_object(pair ->> 'key', exact);
        END IF;
    END LOOP;
    RETURN parsed;
END
$$;

CREATE OR REPLACE FUNCTION quota_internal.require_name(what text, name text) RETURNS void
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
BEGIN
    -- Cc and Cf, spelled out: the character classes of regular expressions follow the database's locale.
    IF name IS NULL OR length(name) NOT BETWEEN 1 AND 200 OR name IS NOT NFC NORMALIZED
        OR name ~ ('[' || U&'\0001-\001F\007F-\009F\00AD\0600-\0605\061C\06DD\070F\0890\0891\08E2\180E\200B-\200F'
            || U&'\202A-\202E\2060-\2064\2066-\206F\FEFF\FFF9-\FFFB' || U&'\+0110BD\+0110CD\+013430-\+01343F'
            || U&'\+01BCA0-\+01BCA3\+01D173-\+01D17A\+0E0001\+0E0020-\+0E007F' || ']')
        OR name ~ ('^' || quota_internal.white_space()) OR name ~ (quota_internal.white_space() || '$')
    THEN
        PERFORM quota_internal.fail('invalid_name', format('%L is no name of a %s', left(name, 220), what),
            'Names have 1 to 200 printable characters in NFC, no control or format characters, no white space at the ends.');
    END IF;
END
$$;

CREATE OR REPLACE FUNCTION quota_internal.white_space() RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT '[' || U&'\0009-\000D\0020\0085\00A0\1680\2000-\200A\2028\2029\202F\205F\3000' || ']'
$$;

-- 'key:42' -> 'key'. A subject's name has exactly one kind before the first colon, and something behind it.
CREATE OR REPLACE FUNCTION quota_internal.require_subject_name(name text) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
DECLARE
    kind text := substring(name FROM '^([a-z][a-z0-9_-]*):');
BEGIN
    PERFORM quota_internal.require_name('subject', name);
    IF kind IS NULL OR name = kind || ':' OR name = kind || ':*' THEN
        PERFORM quota_internal.fail('invalid_name', format('%L is no name of a subject', name),
            'Subjects are written kind:id, such as key:42; a kind is a-z, then a-z, 0-9, _ or -.');
    END IF;
    RETURN kind;
END
$$;

-- A login that is bound to one tenant sees no other: for it they do not exist.
CREATE OR REPLACE FUNCTION quota_internal.require_tenant(tenant text) RETURNS void
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM quota_internal.tenants t WHERE t.name = require_tenant.tenant)
        OR EXISTS (SELECT FROM quota_internal.logins g WHERE g.role = session_user AND g.tenant <> require_tenant.tenant)
    THEN
        PERFORM quota_internal.fail('unknown_tenant', format('there is no tenant "%s"', tenant),
            'Create it with quota.create_tenant, or pass the tenant that this login is bound to.');
    END IF;
END
$$;

CREATE OR REPLACE FUNCTION quota_internal.require_unit(unit text) RETURNS void
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM quota_internal.units u WHERE u.name = require_unit.unit) THEN
        PERFORM quota_internal.fail('unknown_unit', format('there is no unit "%s"', unit),
            'Register it with quota.create_unit, or correct the spelling.');
    END IF;
END
$$;
