"""What every HTTP face shares: how JSON is read (`bodies`) and written (`values`), and the one shape of an error."""
