-- The price book: what a model's tokens cost, per provider, model and variant, each version for a time. History is never
-- rewritten: a version may be ended, and the next one begins. Prices of the tenant '' are everybody's; a tenant's own go first.

-- One number of a price, refused by name.
CREATE OR REPLACE FUNCTION quota_internal.require_price(part text, value jsonb, places integer) RETURNS numeric
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    exact numeric := quota_internal.amount(part, value);
BEGIN
    IF min_scale(exact) > places OR exact >= 1000000 THEN
        PERFORM quota_internal.fail('invalid_argument', format('%s is %s', part, exact),
            format('A price of that unit is below 1000000 dollars and has at most %s decimals.', places));
    END IF;
    RETURN exact;
END
$$;

-- A rate is a number, or {"base": number, "steps": [{"above": tokens, "price": number}, …]}. True when it costs anything at any size.
CREATE OR REPLACE FUNCTION quota_internal.require_rate(part text, value jsonb) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    costs boolean;
    above numeric := 0;
    step jsonb;
BEGIN
    IF jsonb_typeof(value) <> 'object' THEN
        RETURN quota_internal.require_price(part, value, 6) > 0;
    END IF;
    IF value - '{base,steps}'::text[] <> '{}' OR NOT value ? 'base' OR jsonb_typeof(coalesce(value -> 'steps', '[]')) <> 'array' THEN
        PERFORM quota_internal.fail('invalid_argument', format('%s is %s', part, left(value::text, 100)),
            'A rate is a price, or an object with "base" and "steps".');
    END IF;
    costs := quota_internal.require_price(part || '.base', value -> 'base', 6) > 0;
    FOR step IN SELECT s FROM jsonb_array_elements(coalesce(value -> 'steps', '[]')) s LOOP
        IF jsonb_typeof(step) <> 'object' OR step - '{above,price}'::text[] <> '{}' OR NOT step ?& '{above,price}'
            OR jsonb_typeof(step -> 'above') <> 'number' OR (step ->> 'above')::numeric <= above
            OR (step ->> 'above')::numeric > 1000000000 OR (step ->> 'above')::numeric % 1 <> 0
        THEN
            PERFORM quota_internal.fail('invalid_argument', format('a step of %s is %s', part, left(step::text, 100)),
                'Steps are objects with "above", a rising whole number of tokens, and "price".');
        END IF;
        above := (step ->> 'above')::numeric;
        costs := quota_internal.require_price(part || ' above ' || above, step -> 'price', 6) > 0 OR costs;
    END LOOP;
    RETURN costs;
END
$$;

CREATE OR REPLACE FUNCTION quota_internal.require_rates(rates jsonb, free boolean) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    costs boolean := false;
    one record;
    use record;
BEGIN
    IF rates IS NULL OR jsonb_typeof(rates) <> 'object' OR NOT rates ?& '{input,output}' THEN
        PERFORM quota_internal.fail('invalid_argument', format('rates %s name no input and output', coalesce(left(rates::text, 100), 'null')),
            'Send an object such as {"input": "3", "output": "15"}, in dollars per million tokens.');
    END IF;
    FOR one IN SELECT r.key, r.value FROM jsonb_each(rates) r LOOP
        CASE
            WHEN one.key IN ('input', 'cached_input', 'cache_write_5m', 'cache_write_1h', 'output', 'input_audio', 'output_audio') THEN
                costs := quota_internal.require_rate(one.key, one.value) OR costs;
            WHEN one.key = 'request' THEN
                costs := quota_internal.require_price(one.key, one.value, 12) > 0 OR costs;
            WHEN one.key = 'uses' AND jsonb_typeof(one.value) = 'object' THEN
                FOR use IN SELECT u.key, u.value FROM jsonb_each(one.value) u LOOP
                    PERFORM quota_internal.require_price(use.key, use.value, 12);
                END LOOP;
            ELSE
                PERFORM quota_internal.fail('invalid_argument', format('"%s" is no part of a price', left(one.key, 60)),
                    'The parts are input, cached_input, cache_write_5m, cache_write_1h, output, input_audio, output_audio, request, uses.');
        END CASE;
    END LOOP;
    IF costs = coalesce(free, false) THEN
        PERFORM quota_internal.fail('invalid_argument',
            CASE WHEN costs THEN 'the price is declared free, and is not zero' ELSE 'the price is zero, and not declared free' END,
            'Pass free => true for a model that costs nothing, and only for one.');
    END IF;
END
$$;

-- Whose prices a login may change: a tenant's, or, unless it is bound to one, everybody's. One change of the book at a time.
CREATE OR REPLACE FUNCTION quota_internal.change_prices(tenant text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF tenant IS NULL THEN
        PERFORM quota_internal.require_unbound_login();
    ELSE
        PERFORM quota_internal.require_tenant(tenant);
    END IF;
    LOCK TABLE quota_internal.prices IN SHARE ROW EXCLUSIVE MODE;
END
$$;

CREATE OR REPLACE FUNCTION quota.set_price(
    provider text,
    model text,
    rates jsonb,
    variant text DEFAULT '',
    effective_from timestamptz DEFAULT NULL,
    effective_until timestamptz DEFAULT NULL,
    output_max bigint DEFAULT NULL,
    input_max bigint DEFAULT NULL,
    free boolean DEFAULT false,
    source text DEFAULT NULL,
    tenant text DEFAULT NULL,
    OUT version bigint,
    OUT replayed boolean
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    own quota_internal.prices;
    same quota_internal.prices;
    clash quota_internal.prices;
BEGIN
    PERFORM quota_internal.require_name('provider', provider);
    PERFORM quota_internal.require_name('model', model);
    PERFORM quota_internal.require_rates(rates, free);
    IF variant IS NULL OR variant !~ '^[a-z0-9_.-]{0,60}$' OR provider <> lower(provider) OR model <> lower(model)
        OR output_max < 1 OR input_max < 1 OR effective_until <= coalesce(effective_from, quota_internal.clock())
    THEN
        PERFORM quota_internal.fail('invalid_argument',
            format('provider "%s", model "%s", variant "%s", output_max %s, input_max %s, from %s until %s', left(provider, 60),
                left(model, 100), coalesce(left(variant, 60), 'null'), output_max, input_max, effective_from, effective_until),
            'Names are lower case, a variant is a-z, 0-9, _, . and -, maxima are above 0, and a price ends after it begins.');
    END IF;
    PERFORM quota_internal.change_prices(tenant);
    own := ROW(coalesce(tenant, ''), NULL, provider, model, variant, rates, coalesce(free, false),
        coalesce(effective_from, quota_internal.clock()), coalesce(effective_until, 'infinity'), output_max, input_max, source,
        quota_internal.clock())::quota_internal.prices;
    -- The same price once more, however long it lasts: nothing to do but, perhaps, to end it.
    SELECT * INTO same FROM quota_internal.prices p
    WHERE (p.tenant, p.provider, p.model, p.variant) = (own.tenant, own.provider, own.model, own.variant)
        AND p.rates = own.rates AND p.free = own.free AND p.output_max IS NOT DISTINCT FROM own.output_max
        AND p.input_max IS NOT DISTINCT FROM own.input_max
        AND (p.effective_from = own.effective_from
            OR set_price.effective_from IS NULL AND p.effective_from <= own.effective_from AND p.effective_until > own.effective_from);
    IF FOUND AND (set_price.effective_until IS NULL OR same.effective_until IN (own.effective_until, 'infinity')) THEN
        IF own.effective_until < same.effective_until AND same.effective_until = 'infinity' THEN
            PERFORM quota.end_price(same.id, own.effective_until, set_price.tenant);
        END IF;
        version := same.id;
        replayed := true;
        RETURN;
    END IF;
    -- A price that was to last for ever ends where a later one begins.
    UPDATE quota_internal.prices p SET effective_until = own.effective_from
    WHERE (p.tenant, p.provider, p.model, p.variant) = (own.tenant, own.provider, own.model, own.variant)
        AND p.effective_until = 'infinity' AND p.effective_from < own.effective_from;
    SELECT * INTO clash FROM quota_internal.prices p
    WHERE (p.tenant, p.provider, p.model, p.variant) = (own.tenant, own.provider, own.model, own.variant)
        AND p.effective_from < own.effective_until AND own.effective_from < p.effective_until
    LIMIT 1;
    IF FOUND THEN
        PERFORM quota_internal.fail('prices_overlap',
            format('version %s of "%s" of "%s" is in force from %s until %s', clash.id, model, provider, clash.effective_from,
                clash.effective_until),
            'End it with quota.end_price before the new one begins, or let the new one begin later.');
    END IF;
    INSERT INTO quota_internal.prices
        (tenant, provider, model, variant, rates, free, effective_from, effective_until, output_max, input_max, source, created_at)
    VALUES (own.tenant, own.provider, own.model, own.variant, own.rates, own.free, own.effective_from, own.effective_until,
        own.output_max, own.input_max, own.source, own.created_at)
    RETURNING id INTO version;
    replayed := false;
    PERFORM quota_internal.log(set_price.tenant, 'set_price', provider || ' ' || model, NULL,
        to_jsonb(own) - '{tenant,id,created_at}'::text[] || jsonb_build_object('version', version), NULL);
END
$$;
COMMENT ON FUNCTION quota.set_price(text, text, jsonb, text, timestamptz, timestamptz, bigint, bigint, boolean, text, text) IS
    'Sets what a model costs from a time on, in dollars per million tokens; the price in force ends there. Tenant null: for all.';

CREATE OR REPLACE FUNCTION quota.end_price(version bigint, at timestamptz DEFAULT NULL, tenant text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    old quota_internal.prices;
    until timestamptz := coalesce(at, quota_internal.clock());
BEGIN
    PERFORM quota_internal.change_prices(tenant);
    SELECT * INTO old FROM quota_internal.prices p
    WHERE p.tenant = coalesce(end_price.tenant, '') AND p.id = end_price.version FOR UPDATE;
    IF NOT FOUND OR until <= old.effective_from OR until > old.effective_until THEN
        PERFORM quota_internal.fail('invalid_argument',
            format('version %s of a price cannot end at %s', coalesce(version::text, 'null'), until),
            'Name a version of the view quota.prices with its tenant, and a time after it began and not after it ends.');
    END IF;
    UPDATE quota_internal.prices p SET effective_until = until WHERE p.tenant = old.tenant AND p.id = end_price.version;
    PERFORM quota_internal.log(end_price.tenant, 'end_price', old.provider || ' ' || old.model,
        jsonb_build_object('version', version, 'effective_until', old.effective_until),
        jsonb_build_object('version', version, 'effective_until', until), NULL);
END
$$;
COMMENT ON FUNCTION quota.end_price(bigint, timestamptz, text) IS
    'Ends a price: from then on, the default being now, the model has the next one, or none.';

CREATE OR REPLACE FUNCTION quota_internal.price_row(p quota_internal.prices) RETURNS quota.price_row
LANGUAGE sql IMMUTABLE AS $$
    SELECT p.id, nullif(p.tenant, ''), p.provider, p.model, p.variant, p.rates, p.free,
        CASE WHEN p.effective_from > '-infinity' THEN p.effective_from END,
        CASE WHEN p.effective_until < 'infinity' THEN p.effective_until END,
        p.output_max, p.input_max, p.source
$$;

CREATE OR REPLACE FUNCTION quota.price(
    provider text, model text, variant text DEFAULT '', at timestamptz DEFAULT NULL, tenant text DEFAULT 'default'
) RETURNS quota.price_row
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    found_price quota_internal.prices;
    instant timestamptz := coalesce(at, quota_internal.clock());
BEGIN
    PERFORM quota_internal.require_tenant(tenant);
    SELECT * INTO found_price FROM quota_internal.prices p
    WHERE p.provider = price.provider AND p.model = price.model AND p.variant = price.variant AND p.tenant IN (price.tenant, '')
        AND p.effective_from <= instant AND instant < p.effective_until
    ORDER BY p.tenant DESC LIMIT 1;
    IF NOT FOUND THEN
        PERFORM quota_internal.fail('unpriced_model',
            format('the price book has no price for "%s" of "%s", variant "%s", at %s', left(model, 200), left(provider, 200), variant, instant),
            'Set one with quota.set_price; a model that costs nothing is declared free.');
    END IF;
    RETURN quota_internal.price_row(found_price);
END
$$;
COMMENT ON FUNCTION quota.price(text, text, text, timestamptz, text) IS
    'The price of a model that is in force, the tenant''s own before everybody''s; an error when there is none. Names are matched as they stand.';

CREATE OR REPLACE FUNCTION quota.price_book(tenant text DEFAULT 'default') RETURNS SETOF quota.price_row
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    PERFORM quota_internal.require_tenant(tenant);
    RETURN QUERY
    SELECT r.* FROM quota_internal.prices p CROSS JOIN quota_internal.price_row(p) r
    WHERE p.tenant IN (price_book.tenant, '') AND p.effective_until > quota_internal.clock()
    ORDER BY p.provider, p.model, p.variant, p.tenant, p.effective_from;
END
$$;
COMMENT ON FUNCTION quota.price_book(text) IS 'Every price that a tenant can meet now or later; what clients keep a copy of.';

CREATE OR REPLACE VIEW quota.prices AS
SELECT p.id AS version, nullif(p.tenant, '') AS tenant, p.provider, p.model, p.variant, p.rates, p.free,
    CASE WHEN p.effective_from > '-infinity' THEN p.effective_from END AS effective_from,
    CASE WHEN p.effective_until < 'infinity' THEN p.effective_until END AS effective_until,
    p.output_max, p.input_max, p.source, p.created_at
FROM quota_internal.prices p
WHERE p.tenant = '' OR EXISTS (SELECT FROM quota_internal.visible_tenants v WHERE v.tenant = p.tenant);
COMMENT ON VIEW quota.prices IS 'The price book with its history; tenant null is everybody''s.';
