"""An independent reference model of the quota contract, and the tests that hold the engine against it."""
