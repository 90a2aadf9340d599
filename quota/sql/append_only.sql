-- The ledger and the admin log only grow.

-- No line of the ledger is changed or deleted, whoever asks; only the owner's retention passes.
CREATE OR REPLACE FUNCTION quota_internal.refuse_change() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' AND current_setting('quota.retaining', true) = 'on' THEN
        RETURN OLD;
    END IF;
    RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
        MESSAGE = format('%s of %s is refused: it is append-only', TG_OP, TG_TABLE_NAME),
        HINT = 'Correct with a further entry: quota.credit or quota.record.';
END
$$;
CREATE OR REPLACE TRIGGER entries_are_append_only BEFORE UPDATE OR DELETE ON quota_internal.entries
    FOR EACH ROW EXECUTE FUNCTION quota_internal.refuse_change();
CREATE OR REPLACE TRIGGER entries_are_not_truncated BEFORE TRUNCATE ON quota_internal.entries
    FOR EACH STATEMENT EXECUTE FUNCTION quota_internal.refuse_change();
CREATE OR REPLACE TRIGGER admin_log_is_append_only BEFORE UPDATE OR DELETE ON quota_internal.admin_log
    FOR EACH ROW EXECUTE FUNCTION quota_internal.refuse_change();
CREATE OR REPLACE TRIGGER admin_log_is_not_truncated BEFORE TRUNCATE ON quota_internal.admin_log
    FOR EACH STATEMENT EXECUTE FUNCTION quota_internal.refuse_change();
