ALTER TABLE quota_internal.reservations ADD COLUMN partial JSONB;
